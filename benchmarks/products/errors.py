"""How far a contender's product is from the one in float64: times alone would compare unlike things."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.products.peers.base import Case, Floats, Prepared
from billfish.ops.linear import dequantize

COLUMNS = 64  # of y that are looked at
OUTLIER = 1000.0  # one value among others of size 1. In language models they are hundreds of times as large

Doubles = NDArray[np.float64]


def with_outliers(x: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """A copy of x [M, k] in which one value of each row is OUTLIER, and the columns of these values."""
    columns = np.random.default_rng(2).integers(x.shape[1], size=len(x))
    changed = x.copy()
    changed[np.arange(len(x)), columns] = OUTLIER
    return changed, columns


def errors(case: Case, x: Floats, contender: Prepared) -> tuple[float, float]:
    """Of the contender's last product, which was with x [M, k]; and of one with outliers, which is made here.

    Root mean squares of y - x W^T, divided by those of x W^T. With outliers, they are divided by those of what all
    other values give: it is these that a scale for too many values loses.
    """
    weights = dequantize(case.distinct, backend="reference")[:COLUMNS].astype(np.float64)
    plain = _relative(contender, _product(x, weights), _product(x, weights))
    changed, columns = with_outliers(x)
    others = changed.copy()
    others[np.arange(len(x)), columns] = 0
    contender.bind(changed)()
    return plain, _relative(contender, _product(changed, weights), _product(others, weights))


def _product(x: Floats, weights: Doubles) -> Doubles:
    product: Doubles = x.astype(np.float64) @ weights.T
    return product


def _relative(contender: Prepared, expected: Doubles, size: Doubles) -> float:
    difference = contender.result()[:, : expected.shape[1]] - expected
    return float(np.sqrt(np.square(difference).mean() / np.square(size).mean()))
