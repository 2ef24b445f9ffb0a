"""Which token comes next, from the scores of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from billfish.errors import DataError, complaint


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the best token, always; the other settings then do not matter.

    top_k: only among so many best tokens (0: all). top_p: only among the best whose probabilities add up to it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, takes in (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "a number from 0 on"),
            ("top_k", self.top_k >= 0, "a whole number from 0 on"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("seed", self.seed >= 0, "a whole number from 0 on"),
        ):
            if not good:
                raise DataError(complaint("llm.generate", name, getattr(self, name), takes))

    def sampler(self) -> Sampler:
        """A fresh one: the same settings and scores give the same tokens."""
        return Sampler(self)


class Sampler:
    """Chooses tokens one after another; it has the state of the random numbers."""

    def __init__(self, how: Sampling) -> None:
        self._how = how

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self._how.seed)  # when it is first needed: NumPy takes a while to import that

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next token, from the scores [vocabulary]."""
        how = self._how
        if how.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / how.temperature)
        tokens = self._candidates(weights)
        sums = np.cumsum(weights[tokens])
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return int(tokens[min(drawn, len(tokens) - 1)])

    def _candidates(self, weights: NDArray[np.float64]) -> NDArray[np.intp]:
        """The tokens that top_k and then top_p leave, best first where they were sorted."""
        how, count = self._how, len(weights)
        if how.top_k == 0 and how.top_p == 1:
            return np.arange(count)
        if how.top_k == 0:
            # Sorting a whole vocabulary takes longer than computing it, and the best 1000 are mostly enough.
            best = best_of(weights, min(count, 1000))
            if weights[best].sum() < how.top_p * weights.sum():
                best = best_of(weights, count)
            total = weights.sum()
        else:
            best = best_of(weights, min(count, how.top_k))
            total = weights[best].sum()
        kept = int(np.searchsorted(np.cumsum(weights[best]), how.top_p * total)) + 1
        return best[:kept]


def best_of(weights: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """The tokens of the largest weights, largest first; of equal ones, the first comes first."""
    chosen = np.sort(np.argpartition(-weights, count - 1)[:count])
    return chosen[np.argsort(-weights[chosen], kind="stable")]
