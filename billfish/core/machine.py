"""What the rooms below the backends need of the machine, and only native code can tell or do.

The CPU engine's module provides it when it is imported, which `import billfish` does: nothing here looks upward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_known_floats: Callable[[], AbstractContextManager[object]] = nullcontext
_threads: Callable[[], int] = lambda: os.cpu_count() or 1  # noqa: E731  (until there is a better answer)


def provide(known_floats: Callable[[], AbstractContextManager[object]], threads: Callable[[], int]) -> None:
    """known_floats: a context in which a thread's floating-point mode is ours. threads: the default number of them."""
    global _known_floats, _threads
    _known_floats, _threads = known_floats, threads


def available_cores() -> int:
    """OMP_NUM_THREADS, or the cores that this process may use, by its affinity and its CPU quota."""
    return _threads()


def allowed_cores() -> int:
    """The cores that this process may use, by its affinity alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_known_floats(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator: inside the function this thread, and every thread that it starts, keeps subnormal numbers and rounds
    to nearest, whatever ``torch.set_flush_denormal(True)`` said. Kernels of the CPU engine do so by themselves; this is
    for NumPy."""

    @wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _known_floats():
            return function(*args, **kwargs)

    return wrapped
