"""`compile_shader`: torch's call (`torch.mps.compile_shader`), answered by the emulator.

A shader is text. Its kernels are functions of the library: `kernel void f(...)`, and templates by the name that an
explicit instantiation gives them, [[host_name("g")]]. Arguments are bound in their order:

    a tensor on mps            its memory from its storage offset on; nobody looks at strides
    a CPU tensor of no axes    its number; float64 becomes float32
    int, float                 int64 and float32 constants, or what `arg_casts` says
    lists of these             the same, one behind the other

`threads` counts threads, not threadgroups, in one to three axes, as `group_size` does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.emulator import runtime
from billfish.backends.emulator.faults import CompileError
from billfish.backends.emulator.program import MOST_THREADS, Program
from billfish.backends.emulator.translate import ANSWERS, entry, rewrite, without_comments
from billfish.core.arrays import bfloat16
from billfish.core.errors import DTypeError, FormatError, ShapeError, bad_argument, failure, type_of

CALL = "compile_shader"
CASTS = {
    "fp16": np.dtype(np.float16),
    "bf16": bfloat16,
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
_KERNEL = re.compile(
    r"(?P<template>\btemplate\s*<[^;{}()]*>\s*)?(?:\bkernel|\[\[\s*kernel\s*\]\])\s+void\s+(?P<name>\w+)\s*\("
)
_HOST_NAME = re.compile(
    r"\btemplate\s*\[\[\s*host_name\(\"(?P<name>[^\"]*)\"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]\s*decltype\(|kernel\s+void\s+)"
    r"(?P<instance>(?P<function>\w+)\s*<[^;()]*>)[^;]*;"
)
_ATTRIBUTE = re.compile(r"\[\[\s*(\w+)\s*(?:\(([^)]*)\))?\s*\]\]")
# A pointer, or a reference, to whatever type the kernel wants there.
_ANY = """
struct emulator_pointer {
  void* at;
  template <typename T> operator T*() const { return (T*)at; }
};
struct emulator_reference {
  void* at;
  template <typename T> operator T&() const { return *(T*)at; }
};
"""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: a buffer, or what it asks about its threads."""

    name: str
    attribute: str  # empty for a buffer
    answer: str  # the argument in C++; for a buffer, what it is made of
    constant: bool = False
    writable: bool = False


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise CompileError(f"{CALL}: a bracket is not closed")


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _parameter(text: str) -> Parameter:
    found = _ATTRIBUTE.search(text)
    attribute = found[1] if found else "buffer"
    declared = _ATTRIBUTE.sub("", text).strip()
    name = re.split(r"\W+", declared)[-1]
    if attribute == "buffer" and ("*" in declared or "&" in declared):
        constant = re.search(r"\bconstant\b", declared) is not None
        kind = "emulator_pointer" if "*" in declared else "emulator_reference"
        return Parameter(name, "", kind, constant, not constant and re.search(r"\bconst\b", declared) is None)
    if attribute not in ANSWERS:
        raise CompileError(f"{CALL}: the emulator does not understand this parameter: {text}")
    answer = ANSWERS[attribute]
    if "uint3" in answer and not re.search(r"\b\w+3\b", declared):  # a position along fewer axes
        answer = f"({answer}).{'xy' if re.search(r'[a-z]2 ', declared) else 'x'}"
    return Parameter(name, attribute, answer)


class Kernel:
    """A kernel of a shader."""

    max_threads_per_threadgroup, thread_execution_width = MOST_THREADS, 32

    def __init__(self, name: str, instance: str, parameters: Sequence[Parameter], shader: str) -> None:
        self.name, self.parameters = name, tuple(parameters)
        self.buffers = [parameter for parameter in parameters if not parameter.attribute]
        passed, at = [], 0
        for parameter in parameters:
            passed.append(parameter.answer if parameter.attribute else f"{parameter.answer}{{arguments[{at}]}}")
            at += not parameter.attribute
        translated = f'#include <metal_stdlib>\n#line 1 "{name}"\n{rewrite(_HOST_NAME.sub(_lines_of, shader))}'
        self._program = Program(name, name, translated + _ANY + entry(instance, passed), shader)

    @property
    def static_thread_group_memory_length(self) -> int:
        """Bytes, of all kernels in the text."""
        return self._program.threadgroup_memory()

    def __call__(
        self,
        *arguments: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        """Runs it; what it writes is in the tensors."""
        torch = _torch()
        if len(arguments) != len(self.buffers):
            raise ShapeError(bad_argument(CALL, "len(arguments)", len(arguments), f"{len(self.buffers)}"))
        if threads is None:
            threads = next((a.numel() for a in arguments if isinstance(a, torch.Tensor)), None)
        grid, given = _axes("threads", threads), group_size
        group = _axes("group_size", min(grid[0], MOST_THREADS) if given is None and len(grid) == 1 else given)
        if len(grid) != len(group):
            raise ShapeError(bad_argument(CALL, "group_size", group, f"{len(grid)} axes, as threads"))
        if math.prod(group) > MOST_THREADS:
            raise ShapeError(bad_argument(CALL, "group_size", group, f"at most {MOST_THREADS} threads"))
        buffers, written = [], []
        for i, (parameter, value) in enumerate(zip(self.buffers, arguments, strict=True)):
            memory = self._memory(i, value, arg_casts)
            is_tensor = isinstance(value, torch.Tensor)
            buffer = runtime.KernelBuffer.of(
                parameter.name,
                memory.nbytes,
                initialised=True,
                writable=parameter.writable,
                offset=value.storage_offset() * value.itemsize if is_tensor else 0,
            )
            buffer.bytes[:] = memory
            buffers.append(buffer)
            if parameter.writable and is_tensor:
                written.append((memory, buffer))
        in_device_memory = [not parameter.constant for parameter in self.buffers]
        ones = (1,) * (3 - len(grid))
        self._program.run(buffers, in_device_memory, (*grid, *ones), (*group, *ones))
        for memory, buffer in written:
            memory[:] = buffer.bytes

    def _memory(self, i: int, value: Any, casts: str | Mapping[int, str] | None) -> NDArray[np.uint8]:
        """The bytes of an argument; those of a tensor are its own."""
        torch = _torch()
        where = f"argument {i} of {self.name}"
        if isinstance(value, torch.Tensor):
            if value.device.type == "mps":
                return memory_of(value)
            if value.device.type == "cpu" and value.dim() == 0:
                number = value.detach().float() if value.dtype is torch.float64 else value.detach()
                return memory_of(number.clone())
            raise DTypeError(bad_argument(CALL, where, f"a tensor on {value.device}", "a tensor on mps"))
        cast = casts if isinstance(casts, str) else (casts or {}).get(i)
        if cast is not None and cast not in CASTS:
            raise FormatError(bad_argument(CALL, "arg_casts", repr(cast), f"one of {', '.join(CASTS)}"))
        numbers = value if isinstance(value, (list, tuple)) else [value]
        kind = next((kind for kind in (int, float) if numbers and all(isinstance(n, kind) for n in numbers)), None)
        if kind is None:
            found = type_of(value) if numbers else "an empty list"
            raise DTypeError(bad_argument(CALL, where, found, "a tensor, an int, a float, or a list of them"))
        dtype = CASTS[cast] if cast else np.dtype(np.int64 if kind is int else np.float32)
        return np.asarray(numbers).astype(dtype).view(np.uint8)


class Library:
    """The kernels of a shader, as attributes."""

    def __init__(self, shader: str) -> None:
        if not isinstance(shader, str) or not shader.isascii():
            what = "not ASCII" if isinstance(shader, str) else type_of(shader)
            raise FormatError(bad_argument(CALL, "source", what, "ASCII text"))
        blank = without_comments(shader)
        functions = {found["name"]: found for found in _KERNEL.finditer(blank)}
        self._kernels: dict[str, Kernel] = {}
        for name, found in functions.items():
            if not found["template"]:
                self._kernels[name] = Kernel(name, name, _parameters(blank, found), shader)
        for found in _HOST_NAME.finditer(blank):
            if found["function"] not in functions:
                raise CompileError(f"{CALL}: {found['name']} names no kernel: {found[0]}")
            parameters = _parameters(blank, functions[found["function"]])
            self._kernels[found["name"]] = Kernel(found["name"], found["instance"], parameters, shader)

    def __getattr__(self, name: str) -> Kernel:
        try:
            return self.__dict__["_kernels"][name]
        except KeyError:
            known = ", ".join(self.__dict__.get("_kernels", {}))
            raise AttributeError(failure(CALL, f"no kernel {name!r}", f"The kernels are: {known}.")) from None

    def __dir__(self) -> list[str]:
        return list(self._kernels)


compile_shader = Library


def _parameters(text: str, head: re.Match[str]) -> list[Parameter]:
    opening = head.end() - 1
    parameters = [_parameter(part) for part in _split(text[opening + 1 : _closing(text, opening)])]
    positions = re.findall(r"\[\[\s*buffer\((\d+)\)\s*\]\]", text[opening : _closing(text, opening)])
    if positions != [str(i) for i in range(len(positions))]:
        raise CompileError(f"{CALL}: {head['name']}: the buffers are numbered {', '.join(positions)}, not 0, 1, 2, ...")
    return parameters


def _lines_of(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _axes(argument: str, value: int | Sequence[int] | None) -> tuple[int, ...]:
    axes = (value,) if isinstance(value, int) else tuple(value or ())
    if not 1 <= len(axes) <= 3 or min(axes) < 1:
        raise ShapeError(bad_argument(CALL, argument, value, "one to three numbers, each 1 or more"))
    return axes


def memory_of(tensor: Any) -> NDArray[np.uint8]:
    """The bytes from a tensor's first element to its last, the tensor's own."""
    torch = _torch()
    with torch._C.DisableTorchFunction():  # a stand-in for mps has its memory on the CPU, and does not say so
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        count = last + 1 if tensor.numel() else 0
        flat = torch.as_strided(tensor.detach(), (count,), (1,), tensor.storage_offset())
        memory: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        return memory


def _torch() -> Any:
    import torch  # here, because nobody else needs it

    return torch
