"""Row slices on several cores. NumPy releases the GIL inside its loops, so plain threads are enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from billfish.core.machine import available_cores

Result = TypeVar("Result")

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
