"""How the heads of a layer rotate with the position of their token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rotation:
    """The angle by which each pair of a head rotates from one position to the next, [pairs], and what cosine and sine
    are multiplied with."""

    frequencies: NDArray[np.float64]
    magnitude: float = 1.0


@dataclass(frozen=True)
class Scaling:
    """How rotations reach further than the context of the training.

    "linear" divides every frequency by `factor`. "yarn" divides slow ones, leaves fast ones alone, and goes from one to
    the other along a ramp: a pair that turns more than `fast` times within the `original` context is fast, one that
    turns less than `slow` times is slow. "longrope" has two lists of divisors, one for texts within the `original`
    context and one for longer ones.
    """

    kind: str = "none"
    factor: float = 1.0
    original: int = 0
    fast: float = 32.0
    slow: float = 1.0
    whole_ramp: bool = True  # YaRN's ramp begins and ends at whole numbers of pairs
    magnitude: float = 1.0

    def scaled(self, frequencies: NDArray[np.float64], base: float) -> NDArray[np.float64]:
        """Of a head's pairs [pairs], which `base` gave."""
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind != "yarn":
            return frequencies
        pairs = len(frequencies)
        first, last = (pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)
                       for turns in (self.fast, self.slow))  # fmt: skip
        if self.whole_ramp:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0, 1)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


def plain_frequencies(size: int, base: float) -> NDArray[np.float64]:
    """For heads of which `size` numbers rotate, [size / 2]."""
    frequencies: NDArray[np.float64] = base ** -(np.arange(0, size, 2) / size)
    return frequencies


def yarn_magnitude(factor: float) -> float:
    """What YaRN multiplies cosine and sine with, unless a model says otherwise."""
    return 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
