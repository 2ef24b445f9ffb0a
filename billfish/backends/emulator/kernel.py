"""`metal_kernel`: MLX's call, answered by the emulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.emulator import runtime
from billfish.backends.emulator.program import Program
from billfish.backends.emulator.translate import translate
from billfish.backends.metal.signature import Signature, dtype_name, write
from billfish.core.arrays import ADAPTERS, MlxArrays, bfloat16
from billfish.core.errors import DTypeError, ShapeError, bad_argument, type_of

_MLX = MlxArrays()


def _array(name: str, value: Any) -> NDArray[Any]:
    """An input as NumPy has it. Python's numbers become what MLX makes of them."""
    for adapter in ADAPTERS:
        if adapter.owns(value) and adapter.kind in ("numpy", "mlx"):
            return adapter.to_numpy(value)
    if isinstance(value, (bool, np.bool_)):
        return np.asarray(value, np.bool_)
    if isinstance(value, int):
        return np.asarray(value, np.int32)
    if isinstance(value, float):
        return np.asarray(value, np.float32)
    if isinstance(value, np.generic):
        return np.asarray(value)
    raise DTypeError(bad_argument("metal_kernel", f"input {name}", type_of(value), "a NumPy or MLX array"))


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype_name(dtype)
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def _three(argument: str, value: Sequence[int]) -> tuple[int, int, int]:
    if len(value) != 3 or min(value) < 1:
        raise ShapeError(bad_argument("metal_kernel", argument, value, "three numbers, each 1 or more"))
    x, y, z = (int(number) for number in value)
    return x, y, z


class metal_kernel:
    """As `mx.fast.metal_kernel`: the same arguments, the same text for Metal, run on this machine's CPU.

    Arrays are NumPy's or MLX's; outputs are MLX's if an input is or an output type is. `compile_options` are read by
    MLX alone: here mathematics is always safe, or hostile if `options` say so.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object | None = None,
    ) -> None:
        if not output_names:
            raise ShapeError(bad_argument("metal_kernel", "output_names", "empty", "at least one name"))
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs
        self._programs: dict[str, Program] = {}

    def signature(
        self, inputs: Sequence[Any], output_dtypes: Sequence[Any], template: Sequence[tuple[str, Any]] | None = None
    ) -> Signature:
        """What MLX would hand to Metal for these arguments; its `text` is the whole."""
        arrays = [_array(name, value) for name, value in zip(self.input_names, inputs, strict=True)]
        return write(
            self.name,
            self.input_names,
            arrays,
            self.output_names,
            output_dtypes,
            template or [],
            self.header,
            self.source,
            self.atomic_outputs,
        )

    def _program(self, text: Signature) -> Program:
        if text.text not in self._programs:
            translated = translate(text, self.name)
            self._programs[text.text] = Program(self.name, text.name, translated, self.source, self.header)
        return self._programs[text.text]

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[Any]:
        """Runs the kernel over `grid` threads in groups of `threadgroup`; returns the outputs."""
        for argument, given, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", output_shapes, self.output_names),
            ("output_dtypes", output_dtypes, self.output_names),
        ):
            if len(given) != len(names):
                raise ShapeError(bad_argument("metal_kernel", f"len({argument})", len(given), f"{len(names)}"))
        grid, threadgroup = _three("grid", grid), _three("threadgroup", threadgroup)

        arrays = [_array(name, value) for name, value in zip(self.input_names, inputs, strict=True)]
        text = self.signature(arrays, output_dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{text.text}\n```")
        buffers = self._buffers(text, arrays, output_shapes, output_dtypes, init_value)
        in_device_memory = [not argument.constant for argument in text.arguments]
        self._program(text).run(buffers, in_device_memory, grid, threadgroup)
        outputs = buffers[-len(self.output_names) :]
        results = [
            buffer.bytes.view(_numpy_dtype(dtype)).reshape(tuple(shape))
            for buffer, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]
        if any(_MLX.owns(value) for value in inputs) or any(type(d).__module__ == "mlx.core" for d in output_dtypes):
            return [_MLX.from_numpy(result) for result in results]
        return [result.copy() for result in results]

    def _buffers(
        self,
        text: Signature,
        arrays: Sequence[NDArray[Any]],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        init_value: float | None,
    ) -> list[runtime.KernelBuffer]:
        buffers = []
        for argument in text.arguments:
            if argument.kind == "output":
                dtype = _numpy_dtype(output_dtypes[argument.index])
                nbytes = math.prod(output_shapes[argument.index]) * dtype.itemsize
                buffer = runtime.KernelBuffer.of(
                    argument.name, nbytes, initialised=init_value is not None, writable=True
                )
                if init_value is None:
                    buffer.bytes.fill(0xFF)  # not a number, in every floating-point type
                else:
                    buffer.bytes.view(dtype)[:] = np.asarray(init_value).astype(dtype)
                buffers.append(buffer)
                continue
            array = arrays[argument.index]
            if self.ensure_row_contiguous or any(stride < 0 for stride in array.strides):
                array = np.ascontiguousarray(array) if array.ndim else array
            if argument.kind == "shape":
                content = np.asarray(array.shape, np.int32)
            elif argument.kind == "strides":
                content = np.asarray([stride // array.itemsize for stride in array.strides], np.int64)
            elif argument.kind == "ndim":
                content = np.asarray([array.ndim], np.int32)
            else:
                content = _span(array)
            raw = np.frombuffer(content.tobytes(), np.uint8)
            buffer = runtime.KernelBuffer.of(argument.name, raw.size, initialised=True, writable=False)
            buffer.bytes[:] = raw
            buffers.append(buffer)
        return buffers


def _span(array: NDArray[Any]) -> NDArray[Any]:
    """The memory that an array's elements lie in, from its first to its last."""
    if array.flags.c_contiguous or array.size == 0:
        return array
    last = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last // array.itemsize + 1,), (array.itemsize,))
