"""What is known of the inputs of one matrix, or of each expert of a stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, complaint

CALL = "calibrate"


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Sums over the inputs x [K] of a matrix, or of each of E experts of a stack.

    squares: of x^2, float64 [K] or [E, K].
    counts: how many x there were, int64 [] or [E].
    outer: of x x^T, float32 [K, K] or [E, K, K]; None where it was not asked for.
    """

    squares: NDArray[np.float64]
    counts: NDArray[np.int64]
    outer: NDArray[np.float32] | None = None

    def check(self, name: str, call: str = CALL) -> None:
        """Raises unless the sums are such as inputs have. `outer` is only looked at where it is used: it is large."""
        *experts, k = self.squares.shape or (0,)
        shapes = [self.counts.shape == tuple(experts), len(experts) <= 1 and k > 0]
        if self.outer is not None:
            shapes.append(self.outer.shape == (*experts, k, k))
        if not all(shapes):
            got = (
                f"squares {self.squares.shape}, counts {self.counts.shape}, outer {getattr(self.outer, 'shape', None)}"
            )
            raise refused(call, name, got, "[K], [] and [K, K], or the same for E experts")
        if not np.isfinite(self.squares).all() or (self.squares < 0).any():
            raise refused(call, name, "sums of squares that are negative or not finite", "numbers from 0 on")
        if (self.counts < 0).any() or not (self.counts > 0).any():
            raise refused(call, name, f"{int(self.counts.sum())} tokens", "at least one")

    def importance(self, expert: int | None = None) -> NDArray[np.float32]:
        """The mean square of each input: [K], or [E, K] for all experts. An expert that saw no token gets the mean of
        the others'."""
        return self._mean(self.squares, expert).astype(np.float32)

    def hessian(self, name: str, call: str = CALL, expert: int | None = None) -> NDArray[np.float32]:
        """The mean of x x^T: [K, K] or [E, K, K], of experts as :meth:`importance`. Raises unless there is one."""
        if self.outer is None:
            takes = "statistics with X^T X: `billfish calibrate --hessian`, or calibrate(..., hessian=True)"
            raise refused(call, name, "mean squares alone", takes)
        mean: NDArray[np.float32] = self._mean(self.outer, expert)
        if not np.isfinite(mean).all():
            raise refused(call, name, "X^T X with numbers that are not finite", "finite numbers")
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


def refused(call: str, name: str, got: str, takes: str) -> DataError:
    """The error for statistics that do not fit."""
    return DataError(complaint(call, name, got, takes))
