"""Which token comes next, from the scores of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        self._random = np.random.default_rng(how.seed)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The next token, from the scores [vocabulary]."""
        how = self._how
        if how.temperature == 0:
            return int(logits.argmax())
        count = min(how.top_k, len(logits)) if how.top_k else len(logits)
        # Best first; equal scores in the order of their ids, so that nothing is left to chance but the draw.
        order = np.argsort(-logits, kind="stable")[:count]
        scaled = (logits[order].astype(np.float64) - float(logits[order[0]])) / how.temperature
        weights = np.exp(scaled)
        sums = np.cumsum(weights)
        kept = int(np.searchsorted(sums, how.top_p * sums[-1])) + 1
        sums = sums[:kept]
        return int(
            order[min(int(np.searchsorted(sums, self._random.random() * sums[-1], side="right")), len(sums) - 1)]
        )
