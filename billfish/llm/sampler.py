"""Which token comes next, from the scores of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, bad_argument

MOST_CHANGE = 1000  # of a score: far more than scores differ, and far from where float32 ends


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the best token, always; random numbers and limits then do not matter.

    Scores first get what the text so far and the caller say. repetition_penalty: scores of tokens that are in the
    prompt or in the answer are divided by it where positive, else multiplied (1: as they are). frequency_penalty and
    presence_penalty: a token that is n times in the answer loses n times the one, and once the other. logit_bias: what
    is added to the scores of tokens.

    Then the temperature makes them probabilities. top_k: only among so many best tokens (0: all). top_p: only among the
    best whose probabilities add up to it. min_p: only among those with at least this part of the best one's
    probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    call: InitVar[str] = "llm.generate"  # that errors name

    def __post_init__(self, call: str) -> None:
        whole = "an integer, 0 or more"
        change = f"a number from -{MOST_CHANGE} to {MOST_CHANGE}"
        for name, good, expected in (
            ("temperature", _is_number(self.temperature, 0, math.inf), "0 or more"),
            ("top_k", _is_number(self.top_k, 0, None, Integral), whole),
            ("top_p", _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0, up to 1"),
            ("min_p", _is_number(self.min_p, 0, 1), "a number from 0 to 1"),
            ("seed", _is_number(self.seed, 0, None, Integral), whole),
            ("presence_penalty", _is_number(self.presence_penalty, -MOST_CHANGE, MOST_CHANGE), change),
            ("frequency_penalty", _is_number(self.frequency_penalty, -MOST_CHANGE, MOST_CHANGE), change),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty, 1 / MOST_CHANGE, MOST_CHANGE),
                f"a number from 1/{MOST_CHANGE} to {MOST_CHANGE}",
            ),
            (
                "logit_bias",
                isinstance(self.logit_bias, Mapping)
                and all(_is_number(token, 0, None, Integral) for token in self.logit_bias)
                and all(_is_number(bias, -MOST_CHANGE, MOST_CHANGE) for bias in self.logit_bias.values()),
                f"token ids with numbers from -{MOST_CHANGE} to {MOST_CHANGE}",
            ),
        ):
            if not good:
                raise DataError(bad_argument(call, name, repr(getattr(self, name)), expected))

    def sampler(self, prompt: Sequence[int] = ()) -> Sampler:
        """A fresh one for the answer to a prompt: the same settings and scores give the same tokens."""
        return Sampler(self, prompt)


def _is_number(value: object, least: float, most: float | None, kind: type = Real) -> bool:
    """Whether it is a finite number of that kind, in these bounds. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    number: float = value  # type: ignore[assignment]  # NumPy's numbers are registered, too
    return least <= number and (most is None or (number <= most and math.isfinite(number)))


class Sampler:
    """Chooses the tokens of an answer one after another; it has the state of the random numbers, and remembers what the
    penalties are for."""

    def __init__(self, how: Sampling, prompt: Sequence[int] = ()) -> None:
        self.how = how
        self._next: float | None = None
        self._seen, self._counts = set(prompt), Counter[int]()

    @property
    def needs_scores(self) -> bool:
        """Whether it must see the scores: a GPU knows temperature, top_k and top_p alone."""
        return self.how.min_p > 0 or self._adjusts

    @property
    def takes_best(self) -> bool:
        """Whether it takes the token with the best score, whatever the others have."""
        return self.how.temperature == 0 and not self.needs_scores

    @cached_property
    def _adjusts(self) -> bool:
        how = self.how
        return bool(
            how.presence_penalty or how.frequency_penalty or how.repetition_penalty != 1 or len(how.logit_bias) > 0
        )

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self.how.seed)  # when it is first needed: NumPy takes a while to import that

    def peek(self) -> float:
        """The random number, from 0 to below 1, of the next token."""
        if self._next is None:
            self._next = 0.0 if self.how.temperature == 0 else float(self._random.random())
        return self._next

    def move_on(self) -> None:
        """The next token was chosen: the one after it has another random number."""
        self.peek()
        self._next = None

    def choose(self, scores: NDArray[np.float32]) -> int:
        """The next token, from the scores [vocabulary]."""
        token = choose_token(self.adjusted(scores), self.how, self.peek())
        self.move_on()
        if self._adjusts:
            self._seen.add(token)
            self._counts[token] += 1
        return token

    def adjusted(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scores with penalties and biases."""
        if not self._adjusts:
            return scores
        how, scores = self.how, scores.copy()
        if how.repetition_penalty != 1 and self._seen:
            seen = np.fromiter(self._seen, np.intp)
            factors = np.where(scores[seen] > 0, 1 / how.repetition_penalty, how.repetition_penalty)
            scores[seen] *= factors.astype(np.float32)
        if self._counts:
            there = np.fromiter(self._counts, np.intp)
            counts = np.fromiter(self._counts.values(), np.float64)
            scores[there] -= (counts * how.frequency_penalty + how.presence_penalty).astype(np.float32)
        for token, bias in how.logit_bias.items():
            scores[token] += bias
        return scores


UNIT = 2.0**40  # probabilities are whole numbers of 1 / UNIT of the best one's, so that no sum depends on its order


def choose_token(scores: NDArray[np.float32], how: Sampling, random: float) -> int:
    """The token where the sum of probabilities, in the order of tokens, passes `random` of the whole.

    backends/cuda/choose.cu does the same on the GPU, without min_p.
    """
    if how.temperature == 0:
        return int(scores.argmax())
    powers = np.exp((scores.astype(np.float64) - float(scores.max())) / how.temperature)
    weights = np.floor(powers * UNIT).astype(np.uint64)
    weights[~_kept(weights, how)] = 0
    weights[weights < np.uint64(how.min_p * UNIT)] = 0
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, np.uint64(random * float(sums[-1])), side="right"))


def _kept(weights: NDArray[np.uint64], how: Sampling) -> NDArray[np.bool_]:
    """The tokens that top_k and then top_p leave; of equal ones, the first."""
    count = len(weights)
    if how.top_k == 0 and how.top_p == 1:
        return np.ones(count, np.bool_)
    # Sorting a whole vocabulary takes longer than computing it, and the best 1000 are mostly enough.
    best = best_of(weights, min(count, how.top_k or 1000))
    total = weights[best].sum() if how.top_k else weights.sum()
    least = np.uint64(how.top_p * float(total))
    if how.top_k == 0 and weights[best].sum() < least:
        best = best_of(weights, count)
    enough = int(np.searchsorted(np.cumsum(weights[best]), least)) + 1
    kept = np.zeros(count, np.bool_)
    kept[best[:enough]] = True
    return kept


def best_of(weights: NDArray[np.uint64], count: int) -> NDArray[np.intp]:
    """The tokens of the largest weights, largest first; of equal ones, the first comes first."""
    limit = np.partition(weights, len(weights) - count)[len(weights) - count]
    above, equal = np.flatnonzero(weights > limit), np.flatnonzero(weights == limit)
    above = above[np.argsort(~weights[above], kind="stable")]  # ~ sorts the other way
    return np.concatenate([above, equal[: count - len(above)]])
