"""Row slices on several cores. NumPy releases the GIL inside its loops, so plain threads are enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from billfish.machine import available_cores

Result = TypeVar("Result")

# Small enough that a slice and its temporaries stay in the second-level cache, large enough that NumPy's and the
# GIL's overhead per call does not show.
SLICE_ELEMENTS = 1 << 16


def map_rows(function: Callable[[int, int], Result], rows: int, row_elements: int) -> list[Result]:
    """Call ``function(start, stop)`` for slices that cover `rows`; the results in order."""
    step = max(1, SLICE_ELEMENTS // max(1, row_elements))
    slices = [(start, min(start + step, rows)) for start in range(0, rows, step)] or [(0, 0)]
    cores = min(available_cores(), len(slices))
    if cores == 1:
        return [function(*piece) for piece in slices]
    from concurrent.futures import ThreadPoolExecutor  # here, because it takes a while to import

    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(lambda piece: function(*piece), slices))
