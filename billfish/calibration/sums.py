"""Adding up inputs. Every sum has one order, so it has the same bits for any number of threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS
from billfish.backends.cpu import CpuBackend, _cpu
from billfish.calibration.inputs import InputStatistics

ROWS = 256  # of x that are added up before they come to the sums
SQUARE = 512  # rows of X^T X that are mirrored at a time


class Sums:
    """What becomes InputStatistics of x [K]."""

    def __init__(self, k: int, outer: bool) -> None:
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._level = backend.level
        self.count = 0
        self.squares = np.zeros(k, np.float64)
        self.outer = np.zeros((k, k), np.float32) if outer else None

    def add(self, rows: NDArray[np.float32]) -> None:
        """Inputs [rows, K]."""
        self.count += len(rows)
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            self.squares += np.square(part, dtype=np.float64).sum(axis=0)
            if self.outer is not None:
                _cpu.add_outer(self._level, part, self.outer)

    def finish(self, name: str) -> InputStatistics:
        """The statistics; raises for inputs that were not finite."""
        if self.outer is not None:
            _mirror(self.outer)
        known = InputStatistics(self.squares, np.array(self.count, np.int64), self.outer)
        known.check(name)
        return known


def _mirror(outer: NDArray[np.float32]) -> None:
    """What is above the diagonal comes below it."""
    for start in range(0, len(outer), SQUARE):
        stop = min(start + SQUARE, len(outer))
        corner = np.triu(outer[start:stop, start:stop])
        outer[start:stop, start:stop] = corner + np.triu(corner, 1).T
        outer[stop:, start:stop] = outer[start:stop, stop:].T
