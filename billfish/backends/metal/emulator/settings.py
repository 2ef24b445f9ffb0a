"""How kernels are run, and what is recorded of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from billfish.backends.metal.emulator import runtime
from billfish.errors import FormatError, complaint


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

    @classmethod
    def of(cls, name: str, full_name: str, outcome: runtime.Outcome, memory: int, library: ctypes.CDLL) -> Launch:
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
        )


_OPTIONS: ContextVar[Options] = ContextVar("options", default=Options())  # noqa: B039  (it is frozen)
_LOG: ContextVar[list[Launch] | None] = ContextVar("log", default=None)


def current_options() -> Options:
    return _OPTIONS.get()


def current_log() -> list[Launch] | None:
    return _LOG.get()


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
        raise FormatError(complaint("options", "order", repr(order), f"one of {', '.join(runtime.ORDERS)}"))
    given = {"check": check, "order": order, "seed": seed, "hostile": hostile}
    chosen = replace(_OPTIONS.get(), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    token = _OPTIONS.set(chosen)
    try:
        yield chosen
    finally:
        _OPTIONS.reset(token)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Records every launch inside the `with` block, with the bytes that it moved."""
    log: list[Launch] = []
    token = _LOG.set(log)
    try:
        yield log
    finally:
        _LOG.reset(token)
