"""How kernels are run, and what is recorded of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from billfish.backends.emulator import runtime
from billfish.backends.emulator.counting import Instructions
from billfish.core.errors import FormatError, bad_argument


@dataclass(frozen=True)
class Options:
    """See `options`."""

    check: bool = False
    order: str = "forward"
    seed: int = 0
    hostile: bool = False


@dataclass(frozen=True)
class Launch:
    """What one launch did. Bytes are those that the compiled kernel asked for, cached or not."""

    name: str
    full_name: str  # with the types that MLX appends
    read: dict[str, int]  # device bytes, by buffer
    written: dict[str, int]
    threadgroup_read: dict[str, int]  # bytes of threadgroup memory, by variable
    threadgroup_written: dict[str, int]
    threadgroup_memory: int  # bytes that all variables together take
    threadgroup_variables: dict[str, int]  # the size of each
    threadgroup_barriers: int  # for each threadgroup once
    simdgroup_barriers: int  # for each simdgroup once
    matrix_multiplies: int  # of 8x8 simdgroup matrices, for each simdgroup once
    atomics: int
    loads: dict[str, dict[int, int]]  # of "device" and "threadgroup" memory, by width in bytes
    stores: dict[str, dict[int, int]]
    threadgroups: int
    threads: int  # of a threadgroup
    sizes: dict[str, int]  # bytes of each buffer in device memory
    instructions: Instructions | None  # if asked for

    @classmethod
    def of(
        cls,
        name: str,
        full_name: str,
        outcome: runtime.Outcome,
        memory: int,
        library: ctypes.CDLL,
        threadgroups: int,
        threads: int,
        sizes: dict[str, int],
        instructions: Instructions | None,
    ) -> Launch:
        counters = outcome.counters
        return cls(
            name,
            full_name,
            outcome.read,
            outcome.written,
            outcome.threadgroup_read,
            outcome.threadgroup_written,
            memory,
            runtime.totals((variable.name.decode(), variable.size) for variable in runtime.variables(library)),
            counters.threadgroup_barriers,
            counters.simdgroup_barriers,
            counters.matrix_multiplies,
            counters.atomics,
            outcome.loads,
            outcome.stores,
            threadgroups,
            threads,
            sizes,
            instructions,
        )

    def scaled(self, factor: float) -> Launch:
        """As if `factor` times as many threadgroups had run."""

        def times(counts: dict[str, int]) -> dict[str, int]:
            return {name: round(factor * count) for name, count in counts.items()}

        def each(counts: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
            return {space: {width: round(factor * n) for width, n in by.items()} for space, by in counts.items()}

        return replace(
            self,
            read=times(self.read),
            written=times(self.written),
            threadgroup_read=times(self.threadgroup_read),
            threadgroup_written=times(self.threadgroup_written),
            threadgroup_barriers=round(factor * self.threadgroup_barriers),
            simdgroup_barriers=round(factor * self.simdgroup_barriers),
            matrix_multiplies=round(factor * self.matrix_multiplies),
            atomics=round(factor * self.atomics),
            loads=each(self.loads),
            stores=each(self.stores),
            instructions=None if self.instructions is None else self.instructions.scaled(factor),
        )


@dataclass
class Recording:
    """See `launches`."""

    instructions: bool
    most: int
    log: list[Launch] = field(default_factory=list)


_OPTIONS: ContextVar[Options] = ContextVar("options", default=Options())  # noqa: B039  (it is frozen)
_RECORDING: ContextVar[Recording | None] = ContextVar("recording", default=None)


def current_options() -> Options:
    return _OPTIONS.get()


def current_recording() -> Recording | None:
    return _RECORDING.get()


@contextmanager
def options(
    *, check: bool | None = None, order: str | None = None, seed: int | None = None, hostile: bool | None = None
) -> Iterator[Options]:
    """Sets how kernels run inside the `with` block; what is not named stays as it is.

    check: find races, divergence, accesses out of bounds and uninitialised reads, and raise KernelFault.
    order: in which order threads and threadgroups run: "forward", "reverse" or "random".
    seed: of the random order.
    hostile: what a careless compiler may do: fast mathematics, subnormal numbers flushed to zero.
    """
    if order is not None and order not in runtime.ORDERS:
        raise FormatError(bad_argument("options", "order", repr(order), f"one of {', '.join(runtime.ORDERS)}"))
    given = {"check": check, "order": order, "seed": seed, "hostile": hostile}
    chosen = replace(_OPTIONS.get(), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    token = _OPTIONS.set(chosen)
    try:
        yield chosen
    finally:
        _OPTIONS.reset(token)


@contextmanager
def launches(*, instructions: bool = False, most: int = 0) -> Iterator[list[Launch]]:
    """Records every launch inside the `with` block, with the bytes that it moved.

    instructions: count what lanes execute, too.
    most: run so many threadgroups, spread over the grid, and scale the counts to all of them. The rest of the output is
        not written.
    """
    recording = Recording(instructions, most)
    token = _RECORDING.set(recording)
    try:
        yield recording.log
    finally:
        _RECORDING.reset(token)
