"""Adding up inputs. Every sum has one order, so it has the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS
from billfish.backends.cpu import CpuBackend, _cpu
from billfish.statistics.inputs import InputStatistics

ROWS = 256  # of x that are added up before they come to the sums
SQUARE = 512  # rows of X^T X that are mirrored at a time


class Sums:
    """What becomes InputStatistics of x [K], or of each expert's x."""

    def __init__(self, shape: Sequence[int], outer: bool) -> None:
        """shape: [K], or [E, K] for E experts. Of experts that no rows come for, X^T X takes no memory."""
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._level = backend.level
        self.counts = np.zeros(tuple(shape[:-1]), np.int64)
        self.squares = np.zeros(tuple(shape), np.float64)
        self.outer = np.zeros((*shape, shape[-1]), np.float32) if outer else None
        self._waiting: dict[int | None, list[NDArray[np.float32]]] = {}  # for X^T X, fewer than ROWS of each expert

    def add(self, rows: NDArray[np.float32], expert: int | None = None) -> None:
        """Inputs [rows, K], of one expert where there are some."""
        at = () if expert is None else expert
        self.counts[at] += len(rows)
        for start in range(0, len(rows), ROWS):
            self.squares[at] += np.square(rows[start : start + ROWS], dtype=np.float64).sum(axis=0)
        if self.outer is not None:  # few rows cost as much of memory's time as many
            waiting = self._waiting.setdefault(expert, [])
            waiting.append(np.array(rows))
            if sum(map(len, waiting)) >= ROWS:
                self._add_outer(expert)

    def _add_outer(self, expert: int | None) -> None:
        assert self.outer is not None
        rows, outer = np.concatenate(self._waiting.pop(expert)), self.outer[() if expert is None else expert]
        for start in range(0, len(rows), ROWS):
            _cpu.add_outer(self._level, rows[start : start + ROWS], outer)

    def finish(self, name: str) -> InputStatistics:
        """The statistics; raises for inputs that were not finite."""
        for expert in [*self._waiting]:
            self._add_outer(expert)
        if self.outer is not None:
            k = self.outer.shape[-1]
            for count, outer in zip(self.counts.reshape(-1), self.outer.reshape(-1, k, k), strict=True):
                if count:
                    _mirror(outer)
        known = InputStatistics(self.squares, self.counts, self.outer)
        known.check(name)
        return known


def _mirror(outer: NDArray[np.float32]) -> None:
    """What is above the diagonal comes below it."""
    for start in range(0, len(outer), SQUARE):
        stop = min(start + SQUARE, len(outer))
        corner = np.triu(outer[start:stop, start:stop])
        outer[start:stop, start:stop] = corner + np.triu(corner, 1).T
        outer[stop:, start:stop] = outer[start:stop, stop:].T
