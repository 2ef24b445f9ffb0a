"""What the machine has: cores, the floating-point mode of threads, and a folder for compiled kernels.

Only native code can tell the first two. The CPU engine's module provides them when it is imported, which the first use
of any name of billfish does: nothing here looks upward.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
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
    """OMP_NUM_THREADS, or the cores that this process may use, by its affinity and its CPU quota. Linux's hyperthreads
    count once."""
    return _threads()


def allowed_cores() -> int:
    """The logical processors that this process may use, by its affinity alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of this machine, or what the container of this process may have of it."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(Path(limit).read_text()))
    return found


def with_known_floats(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator: inside the function this thread, and every thread that it starts, keeps subnormal numbers and rounds
    to nearest, whatever ``torch.set_flush_denormal(True)`` said. Kernels of the CPU engine do so by themselves; this is
    for NumPy."""

    @wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _known_floats():
            return function(*args, **kwargs)

    return wrapped


def cache_folder(backend: str) -> Path:
    """Where a backend keeps compiled kernels: in BILLFISH_CACHE, or in the user's cache folder.

    An empty variable counts as unset, and so does a relative XDG_CACHE_HOME, as its standard says: kernels are code,
    and must not be loaded from whatever folder the process runs in.
    """
    named, base = os.environ.get("BILLFISH_CACHE"), Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named:
        return Path(named).absolute() / backend
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "billfish" / backend


# ---- rows on several cores -------------------------------------------------------------------------------------------


# Small enough that a slice and its temporaries stay in the second-level cache, large enough that NumPy's and the
# GIL's overhead per call does not show.
SLICE_ELEMENTS = 1 << 16
# On a device, so large that the time of a launch does not show, and so small that temporaries take a gigabyte or less.
DEVICE_SLICE_ELEMENTS = 1 << 24


def map_rows(
    function: Callable[[int, int], Result],
    rows: int,
    row_elements: int,
    *,
    on_device: bool = False,
    step: int | None = None,
) -> list[Result]:
    """Call ``function(start, stop)`` for slices that cover `rows`; the results in order.

    on_device: the function computes on a device, which has one slice at a time.
    step: rows of a slice; None takes as many as are fast. It never depends on the number of cores.
    """
    if step is None:
        step = max(1, (DEVICE_SLICE_ELEMENTS if on_device else SLICE_ELEMENTS) // max(1, row_elements))
    slices = [(start, min(start + step, rows)) for start in range(0, rows, step)] or [(0, 0)]
    cores = 1 if on_device else min(available_cores(), len(slices))
    if cores == 1:
        return [function(*piece) for piece in slices]
    from concurrent.futures import ThreadPoolExecutor  # here, because it takes a while to import

    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(lambda piece: function(*piece), slices))
