"""The text that Metal compiles: header, a signature made from the arguments, the source as its body.

`mx.fast.metal_kernel` writes the same text, character for character; the tests compare the two. That goes for its
habits too: what looks like a name in `source` counts as one, even inside a longer word or a comment. torch writes no
text, so torch gets this one (mps.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from billfish.core.errors import DTypeError, bad_argument

# MLX passes smaller inputs in the constant address space.
SMALLEST_DEVICE_ARRAY = 8

TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "complex64": "complex64_t",
}

# What a kernel may ask about its threads, in MLX's order, and the type of the answer.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


def dtype_name(dtype: Any) -> str:
    """Such as "float16", of a type of NumPy, MLX or torch."""
    if type(dtype).__module__.startswith(("mlx", "torch")):
        return str(dtype).rsplit(".", 1)[-1]
    try:
        return np.dtype(dtype).name
    except TypeError:
        return repr(dtype)  # no type at all; whoever asked says what would be right


def type_name(argument: str, dtype: Any) -> str:
    """The type's name in Metal."""
    name = dtype_name(dtype)
    if name not in TYPES:
        raise DTypeError(bad_argument("metal_kernel", argument, name, f"one of {', '.join(TYPES)}"))
    return TYPES[name]


@dataclass(frozen=True)
class Argument:
    """One buffer of the generated function: what is in it, and how the caller hands it over."""

    name: str
    kind: str  # "input", "shape", "strides", "ndim" or "output"
    index: int  # of the input or output that it belongs to
    type: str
    constant: bool = False
    by_reference: bool = False


@dataclass(frozen=True)
class Signature:
    """The generated text in pieces; `text` is all of it, as MLX prints it."""

    name: str
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]
    instance: str  # the name with its template arguments
    header: str
    opening: str
    source: str
    ending: str

    @property
    def text(self) -> str:
        return self.header + self.opening + self.source + self.ending


def _template_value(value: Any) -> tuple[str, str]:
    """The parameter's kind and the argument as written."""
    if isinstance(value, (bool, np.bool_)):
        return "bool", str(int(value))
    if isinstance(value, (int, np.integer)):
        return "int", str(int(value))
    return "typename", type_name("template", value)


class Shaped(Protocol):
    """As much of an array as its argument depends on."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def _is_small(array: Shaped) -> bool:
    return math.prod(array.shape) < SMALLEST_DEVICE_ARRAY


def _input_arguments(names: Sequence[str], inputs: Sequence[Shaped], source: str) -> list[Argument]:
    arguments = []
    for i, (name, array) in enumerate(zip(names, inputs, strict=True)):
        scalar = len(array.shape) == 0
        arguments.append(Argument(name, "input", i, type_name("inputs", array.dtype), _is_small(array), scalar))
        if scalar:
            continue
        for kind, type_ in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
            if f"{name}_{kind}" in source:
                arguments.append(Argument(f"{name}_{kind}", kind, i, type_, True, kind == "ndim"))
    return arguments


def write(
    name: str,
    input_names: Sequence[str],
    inputs: Sequence[Shaped],
    output_names: Sequence[str],
    output_dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]],
    header: str,
    source: str,
    atomic_outputs: bool,
) -> Signature:
    """The text for these arguments."""
    values = [(parameter, *_template_value(value)) for parameter, value in template]
    given = f"<{', '.join(value for _, _, value in values)}>" if values else ""
    outputs = [type_name("output_dtypes", dtype) for dtype in output_dtypes]

    full_name = f"custom_kernel_{name}"
    if given:
        full_name += "_" + re.sub(r"<|>|, |-", "_", given)[:-1]
    for array in inputs:
        full_name += "_" + type_name("inputs", array.dtype)
        full_name += "s" if len(array.shape) == 0 else "c" if _is_small(array) else ""
    full_name += "".join(f"_{type_}" for type_ in outputs)

    opening = ""
    if values:
        opening += f"template <{', '.join(f'{kind} {parameter}' for parameter, kind, _ in values)}>\n"
    opening += f"[[kernel]] void {full_name}(\n"

    arguments = _input_arguments(input_names, inputs, source)
    for position, argument in enumerate(arguments):
        space = "constant" if argument.constant else "device"
        reference = "&" if argument.by_reference else "*"
        opening += f"  const {space} {argument.type}{reference} {argument.name} [[buffer({position})]],\n"

    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)
    for i, (output, type_) in enumerate(zip(output_names, outputs, strict=True)):
        position = len(arguments)
        written = f"atomic<{type_}>" if atomic_outputs else type_
        opening += f"  device {written}* {output} [[buffer({position})]]"
        # MLX takes the position for the number of arrays so far, which shapes and strides make wrong: without
        # attributes, its text for several outputs is then broken. So is ours.
        more = position < len(inputs) + len(output_names) - 1 or attributes
        opening += ",\n" if more else ") {\n"
        arguments.append(Argument(output, "output", i, written))
    opening += ",\n".join(f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes)
    opening += ") {\n" if attributes else ""

    instance = full_name + given
    ending = "\n}\n"
    if given:
        ending += f'\ntemplate [[host_name("{full_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Signature(full_name, tuple(arguments), attributes, instance, header, opening, source, ending)
