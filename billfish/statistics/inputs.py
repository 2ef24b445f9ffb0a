"""Sums over the inputs of one matrix, or of each expert of a stack, and how they are added up.

Every sum has one order, so it has the same bits for any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.checkpoints.safetensors_files import MappedFile
from billfish.core.errors import DataError, failure

CALL = "calibrate"
ROWS = 256  # of x that are added up before they come to the sums
CROSS_ROWS = 1024  # the same of X^T Y, whose product is written to memory of its own first
LARGEST = float(np.finfo(np.float32).max)  # of sums of squares: imatrix files hold float32
SQUARE = 512  # rows of X^T X that are mirrored at a time


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Sums over the inputs x [K] of a matrix, or of each of E experts of a stack.

    squares: of x^2, float64 [K] or [E, K].
    counts: how many x there were, int64 [] or [E].
    outer: of x x^T, float32 [K, K] or [E, K, K]; None where it was not asked for.
    cross: of x y^T, float32 [K, K], with the input y that the float model has where x is of a model whose layers before
    are quantized; None where x is the float model's own.

        >>> from billfish.statistics import InputStatistics
        >>> InputStatistics(np.ones(32), np.array(10)).squares.shape
        (32,)
    """

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]
    outer: NDArray[np.float32] | None = None
    cross: NDArray[np.float32] | None = None

    def check(self, name: str, call: str = CALL) -> None:
        """Raises unless the sums are such as inputs have. `outer` is only looked at where it is used: it is large."""
        *experts, k = self.squares.shape or (0,)
        shapes = [self.counts.shape == tuple(experts), len(experts) <= 1 and k > 0]
        if self.outer is not None:
            shapes.append(self.outer.shape == (*experts, k, k))
        if self.cross is not None:
            shapes.append(self.cross.shape == (k, k) and not experts and self.outer is not None)
        if not all(shapes):
            found = f"{self.squares.shape}, {self.counts.shape} and {getattr(self.outer, 'shape', None)}"
            fix = "Expected [K], [] and [K, K], or the same for E experts."
            raise refused(call, name, f"squares, counts and outer have the shapes {found}", fix)
        if not ((self.squares >= 0) & (self.squares <= LARGEST)).all():  # also of NaN
            raise refused(call, name, "its sums of squares are negative or not finite in float32")
        if (self.counts < 0).any() or not (self.counts > 0).any():
            raise refused(call, name, f"it has seen {int(self.counts.sum())} tokens")

    def importance(self, expert: int | None = None) -> NDArray[np.float32]:
        """The mean square of each input: [K], or [E, K] for all experts. An expert that saw no token gets the mean of
        the others'."""
        return self._mean(self.squares, expert).astype(np.float32)

    def hessian(self, name: str, call: str = CALL, expert: int | None = None) -> NDArray[np.float32]:
        """The mean of x x^T: [K, K] or [E, K, K], of experts as :meth:`importance`. Raises unless there is one."""
        if self.outer is None:
            fix = "Compute it with `billfish calibrate --hessian`, or calibrate(..., hessian=True)."
            raise refused(call, name, "it has no X^T X, only mean squares", fix)
        mean: NDArray[np.float32] = self._mean(self.outer, expert)
        if not np.isfinite(mean).all():
            raise refused(call, name, "its X^T X is not finite")
        return mean

    def mean_cross(self, name: str, call: str = CALL) -> NDArray[np.float32] | None:
        """The mean of x y^T [K, K], or None. Raises unless it is finite."""
        if self.cross is None:
            return None
        mean: NDArray[np.float32] = self._mean(self.cross, None)
        if not np.isfinite(mean).all():
            raise refused(call, name, "its cross matrix is not finite")
        return mean

    def _mean(self, sums: NDArray[Any], expert: int | None) -> NDArray[Any]:
        if self.counts.ndim == 0:
            return sums / sums.dtype.type(self.counts)
        if expert is None:
            return np.stack([self._mean(sums, i) for i in range(len(self.counts))])
        if self.counts[expert]:
            return sums[expert] / sums.dtype.type(self.counts[expert])
        seen = np.flatnonzero(self.counts)
        return sum((self._mean(sums, int(i)) for i in seen), np.zeros_like(sums[0])) / sums.dtype.type(len(seen))


class Recorded(NamedTuple):
    """What a file of statistics holds, see :class:`billfish.statistics.Statistics`."""

    inputs: Mapping[str, InputStatistics]  # by the name of a matrix
    file: MappedFile  # where the arrays are
    window: int
    texts: tuple[str, ...]
    architecture: str = ""
    shapes: Mapping[str, tuple[int, ...]] = {}
    run: str = ""


def refused(call: str, name: str, problem: str, fix: str = "") -> DataError:
    """The error for the statistics of one matrix."""
    return DataError(failure(call, f"statistics of {name}: {problem}", fix))


# ---- adding up ----------------------------------------------------------------------------------------------------


class Sums:
    """What becomes InputStatistics of x [K], or of each expert's x."""

    def __init__(self, shape: Sequence[int], outer: bool, cross: bool = False) -> None:
        """shape: [K], or [E, K] for E experts. Of experts that no rows come for, X^T X takes no memory."""
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self._level = backend.level
        self.counts = np.zeros(tuple(shape[:-1]), np.int64)
        self.squares = np.zeros(tuple(shape), np.float64)
        self.outer = np.zeros((*shape, shape[-1]), np.float32) if outer else None
        self.cross = np.zeros((shape[-1], shape[-1]), np.float32) if cross else None
        self._waiting: dict[int | None, list[NDArray[np.float32]]] = {}  # for X^T X, fewer than ROWS of each expert
        self._pairs: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []  # for X^T Y, fewer than CROSS_ROWS

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

    def add_cross(self, rows: NDArray[np.float32], truth: NDArray[np.float32]) -> None:
        """Inputs [rows, K] and what the float model has in their place."""
        self._pairs.append((np.array(rows), truth))
        if sum(len(x) for x, _ in self._pairs) >= CROSS_ROWS:
            self._add_pairs()

    def _add_pairs(self) -> None:
        assert self.cross is not None
        rows, truth = map(np.concatenate, zip(*self._pairs, strict=True))
        self._pairs.clear()
        self.cross += rows.T @ truth

    def _add_outer(self, expert: int | None) -> None:
        assert self.outer is not None
        rows, outer = np.concatenate(self._waiting.pop(expert)), self.outer[() if expert is None else expert]
        for start in range(0, len(rows), ROWS):
            _cpu.add_outer(self._level, rows[start : start + ROWS], outer)

    def finish(self, name: str) -> InputStatistics:
        """The statistics; raises for inputs that were not finite."""
        for expert in [*self._waiting]:
            self._add_outer(expert)
        if self._pairs:
            self._add_pairs()
        if self.outer is not None:
            k = self.outer.shape[-1]
            for count, outer in zip(self.counts.reshape(-1), self.outer.reshape(-1, k, k), strict=True):
                if count:
                    _mirror(outer)
        known = InputStatistics(self.squares, self.counts, self.outer, self.cross)
        known.check(name)
        return known


def _mirror(outer: NDArray[np.float32]) -> None:
    """What is above the diagonal comes below it."""
    for start in range(0, len(outer), SQUARE):
        stop = min(start + SQUARE, len(outer))
        corner = np.triu(outer[start:stop, start:stop])
        outer[start:stop, start:stop] = corner + np.triu(corner, 1).T
        outer[stop:, start:stop] = outer[start:stop, stop:].T
