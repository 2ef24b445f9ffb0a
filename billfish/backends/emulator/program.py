"""One kernel as C++, compiled in as many ways as launches need, and run: what every drop-in has in common."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from billfish.backends.emulator import runtime
from billfish.backends.emulator.compiler import kernel_library, load
from billfish.backends.emulator.counting import Counted
from billfish.backends.emulator.faults import CompileError, KernelFault
from billfish.backends.emulator.report import describe
from billfish.backends.emulator.run_settings import Launch, current_options, current_recording
from billfish.backends.emulator.sites import Sites
from billfish.core.errors import ShapeError, bad_argument

# Of a threadgroup on every Apple GPU.
MOST_MEMORY = 32768
MOST_THREADS = 1024


class Program:
    """A translated kernel. `source` and `header` are the author's text, which reports quote."""

    def __init__(self, name: str, full_name: str, translated: str, source: str, header: str = "") -> None:
        self.name, self.full_name, self.translated = name, full_name, translated
        self.source, self.header = source, header
        self._libraries: dict[tuple[bool, bool, bool], ctypes.CDLL] = {}

    def _compile(self, *, instrumented: bool, hostile: bool, counted: bool) -> ctypes.CDLL:
        """The library, from the cache if it is there."""
        key = (instrumented, hostile, counted)
        if key not in self._libraries:
            try:
                path = kernel_library(self.translated, instrumented=instrumented, hostile=hostile, counted=counted)
            except CompileError as error:
                raise CompileError(f"metal_kernel: {self.name} does not compile:\n{error}") from None
            self._libraries[key] = load(path)
        return self._libraries[key]

    def threadgroup_memory(self) -> int:
        """Bytes of a threadgroup's memory that its variables take."""
        return runtime.threadgroup_memory(self._compile(instrumented=False, hostile=False, counted=False))

    def run(
        self,
        buffers: Sequence[runtime.KernelBuffer],
        in_device_memory: Sequence[bool],
        grid: tuple[int, ...],
        threadgroup: tuple[int, ...],
    ) -> None:
        """Runs `grid` threads in groups of `threadgroup`, as `options` say; what they write is in `buffers`."""
        # As MLX and Metal have it: a threadgroup is no larger than the grid.
        threadgroup = tuple(map(min, threadgroup, grid))
        if math.prod(threadgroup) > MOST_THREADS:
            raise ShapeError(
                bad_argument("metal_kernel", "threadgroup", threadgroup, f"at most {MOST_THREADS} threads")
            )
        chosen, recording = current_options(), current_recording()
        counted = recording is not None and recording.instructions
        instrumented = chosen.check or recording is not None
        library = self._compile(instrumented=instrumented, hostile=chosen.hostile, counted=counted)
        memory = runtime.threadgroup_memory(library)
        if memory > MOST_MEMORY:
            raise self._too_much_memory(library, memory)
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
        if recording is None:
            return
        threadgroups = math.prod(-(-size // part) for size, part in zip(grid, threadgroup, strict=True))
        launch = Launch.of(
            self.name,
            self.full_name,
            outcome,
            memory,
            library,
            threadgroups,
            math.prod(threadgroup),
            {b.name: b.nbytes for b, is_device in zip(buffers, in_device_memory, strict=True) if is_device},
            None if counters is None else counters.instructions(),
        )
        ran = min(recording.most or threadgroups, threadgroups)
        recording.log.append(launch if ran == threadgroups else launch.scaled(threadgroups / ran))

    def _too_much_memory(self, library: ctypes.CDLL, memory: int) -> KernelFault:
        parts = ", ".join(f"{v.name.decode()} {v.size}" for v in runtime.variables(library))
        return KernelFault(
            f"metal_kernel: {self.name} needs {memory} bytes of threadgroup memory ({parts}). "
            f"The limit is {MOST_MEMORY}.",
            kernel=self.name,
            kind="threadgroup-memory",
        )
