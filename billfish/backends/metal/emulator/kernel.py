"""`metal_kernel`: MLX's call, answered by the emulator."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import ADAPTERS, MlxArrays, bfloat16
from billfish.backends.metal.emulator import runtime
from billfish.backends.metal.emulator.compiler import kernel_library, load
from billfish.backends.metal.emulator.counting import Counted
from billfish.backends.metal.emulator.faults import CompileError, KernelFault
from billfish.backends.metal.emulator.report import describe
from billfish.backends.metal.emulator.settings import Launch, current_options, current_recording
from billfish.backends.metal.emulator.signature import Signature, dtype_name, write
from billfish.backends.metal.emulator.sites import Sites
from billfish.backends.metal.emulator.translate import translate
from billfish.errors import DTypeError, ShapeError, complaint

# Of a threadgroup on every Apple GPU.
MOST_MEMORY = 32768
MOST_THREADS = 1024

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
    raise DTypeError(complaint("metal_kernel", f"inputs ({name})", f"a {type(value).__name__}", "NumPy or MLX arrays"))


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype_name(dtype)
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def _three(argument: str, value: Sequence[int]) -> tuple[int, int, int]:
    if len(value) != 3 or min(value) < 1:
        raise ShapeError(complaint("metal_kernel", argument, value, "three numbers, each 1 or more"))
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
            raise ShapeError(complaint("metal_kernel", "output_names", "none", "at least one"))
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs
        self._libraries: dict[tuple[str, bool, bool, bool], ctypes.CDLL] = {}

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

    def compile(
        self, text: Signature, *, instrumented: bool, hostile: bool = False, counted: bool = False
    ) -> ctypes.CDLL:
        """The library for a signature, from the cache if it is there."""
        key = (text.text, instrumented, hostile, counted)
        if key not in self._libraries:
            try:
                path = kernel_library(
                    translate(text, self.name), instrumented=instrumented, hostile=hostile, counted=counted
                )
            except CompileError as error:
                raise CompileError(f"[metal_kernel] {self.name} does not compile:\n{error}") from None
            self._libraries[key] = load(path)
        return self._libraries[key]

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
                raise ShapeError(complaint("metal_kernel", argument, f"{len(given)}", f"{len(names)} for {self.name}"))
        grid, threadgroup = _three("grid", grid), _three("threadgroup", threadgroup)
        # As MLX does: a threadgroup is no larger than the grid.
        threadgroup = tuple(map(min, threadgroup, grid))
        if math.prod(threadgroup) > MOST_THREADS:
            raise ShapeError(complaint("metal_kernel", "threadgroup", threadgroup, f"at most {MOST_THREADS} threads"))

        arrays = [_array(name, value) for name, value in zip(self.input_names, inputs, strict=True)]
        text = self.signature(arrays, output_dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{text.text}\n```")
        chosen, recording = current_options(), current_recording()
        instrumented = chosen.check or recording is not None
        counted = recording is not None and recording.instructions
        library = self.compile(text, instrumented=instrumented, hostile=chosen.hostile, counted=counted)
        memory = runtime.threadgroup_memory(library)
        if memory > MOST_MEMORY:
            raise self._too_much_memory(library, memory)

        buffers = self._buffers(text, arrays, output_shapes, output_dtypes, init_value)
        counters = Counted(library) if counted else None
        if counters is not None:
            counters.clear()
        outcome = runtime.launch(
            library,
            buffers,
            grid,
            threadgroup,
            order=chosen.order,
            seed=chosen.seed,
            check=chosen.check,
            hostile=chosen.hostile,
            most=recording.most if recording is not None else 0,
        )
        if outcome.fault is not None:
            raise describe(outcome, self.name, self.source, self.header, Sites(library), grid, threadgroup)
        if recording is not None:
            threadgroups = math.prod(-(-size // part) for size, part in zip(grid, threadgroup, strict=True))
            instructions = None if counters is None else counters.instructions()
            sizes = {b.name: b.nbytes for a, b in zip(text.arguments, buffers, strict=True) if not a.constant}
            launch = Launch.of(
                self.name,
                text.name,
                outcome,
                memory,
                library,
                threadgroups,
                math.prod(threadgroup),
                sizes,
                instructions,
            )
            ran = min(recording.most or threadgroups, threadgroups)
            recording.log.append(launch if ran == threadgroups else launch.scaled(threadgroups / ran))
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
    ) -> list[runtime.Buffer]:
        buffers = []
        for argument in text.arguments:
            if argument.kind == "output":
                dtype = _numpy_dtype(output_dtypes[argument.index])
                nbytes = math.prod(output_shapes[argument.index]) * dtype.itemsize
                buffer = runtime.Buffer.of(argument.name, nbytes, initialised=init_value is not None, writable=True)
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
            buffer = runtime.Buffer.of(argument.name, raw.size, initialised=True, writable=False)
            buffer.bytes[:] = raw
            buffers.append(buffer)
        return buffers

    def _too_much_memory(self, library: ctypes.CDLL, memory: int) -> KernelFault:
        parts = ", ".join(f"{v.name.decode()} {v.size}" for v in runtime.variables(library))
        return KernelFault(
            f"[metal_kernel] {self.name}: {memory} bytes of threadgroup memory ({parts}); "
            f"a threadgroup has {MOST_MEMORY}",
            kernel=self.name,
            kind="threadgroup-memory",
        )


def _span(array: NDArray[Any]) -> NDArray[Any]:
    """The memory that an array's elements lie in, from its first to its last."""
    if array.flags.c_contiguous or array.size == 0:
        return array
    last = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (last // array.itemsize + 1,), (array.itemsize,))
