"""Sampling: which token comes next, from the logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, bad_argument, explained
from billfish.llm.grammar import GrammarLimitError, Matcher

Scored = tuple[int, float]  # a token, and the logarithm of its probability


class NextToken(NamedTuple):
    """The next token of an answer. scored: the token and the best ones, where log probabilities were asked for.
    complete: whether a grammar leaves nothing to add."""

    token: int
    scored: Sequence[Scored] = ()
    complete: bool = False


MOST_CHANGE = 1000  # of a logit: far more than logits differ, and far from where float32 ends


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. At temperature 0 decoding is greedy, and random numbers and limits do not matter.

    First the logits change. repetition_penalty: logits of tokens in the prompt or the answer are divided by it where
    positive, else multiplied (1: unchanged). frequency_penalty, presence_penalty: a token that is n times in the
    answer loses n times the one, and once the other. logit_bias: {token: number}, added to the logits.

    Then the temperature makes them probabilities, and tokens are dropped.
    top_k: keep the K likeliest tokens (0: all).
    top_p: nucleus sampling: keep the smallest set of tokens with total probability top_p.
    min_p: drop tokens less than min_p times as likely as the best one.
    seed: of the random numbers. call: the name that errors begin with.

        >>> from billfish.llm.sampler import Sampling
        >>> Sampling(temperature=0.7, top_p=0.9, seed=1).sampler().choose(np.array([0.0, 9.0], np.float32))
        1
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
        """Make a sampler for the answer to a prompt. The same settings and logits give the same tokens."""
        return Sampler(self, prompt)


def _is_number(value: object, least: float, most: float | None, kind: type = Real) -> bool:
    """Whether it is a finite number of that kind, in these bounds. Booleans are not."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    number: float = value  # type: ignore[assignment]  # NumPy's numbers are registered, too
    return least <= number and (most is None or (number <= most and math.isfinite(number)))


# What is done to the logit of a token: times a factor, if it was seen; then less `minus`, and more `plus`.
ADJUSTMENT = np.dtype([("token", "i4"), ("seen", "i4"), ("minus", "f4"), ("plus", "f4")])


class Adjustments:
    """Penalties and biases of one answer: an ADJUSTMENT for each token that has any.

    above, below: the repetition penalty's factors of logits above 0, and of others.
    backends/cuda/adjust.cu does what `apply` does.
    """

    def __init__(self, how: Sampling, prompt: Collection[int]) -> None:
        self.above, self.below = np.float32(1 / how.repetition_penalty), np.float32(how.repetition_penalty)
        self._how = how
        self._entries, self._places, self._counts = np.zeros(16, ADJUSTMENT), dict[int, int](), Counter[int]()
        if how.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                self._entry(token)["seen"] = 1
        for token, bias in how.logit_bias.items():
            self._entry(token)["plus"] = bias

    @property
    def entries(self) -> NDArray[Any]:
        return self._entries[: len(self._places)]

    def _entry(self, token: int) -> Any:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._entries):
            self._entries = np.concatenate([self._entries, np.zeros(place, ADJUSTMENT)])
        entry = self._entries[place]
        entry["token"] = token
        return entry

    def add(self, token: int) -> None:
        """The answer has the token once more."""
        self._counts[token] += 1
        minus = self._counts[token] * self._how.frequency_penalty + self._how.presence_penalty
        entry = self._entry(token)
        entry["seen"], entry["minus"] = 1, minus

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Adjusted logits, in memory of their own."""
        logits, entries = logits.copy(), self.entries
        before = logits[entries["token"]]
        scaled = before * np.where(before > 0, self.above, self.below)
        logits[entries["token"]] = np.where(entries["seen"], scaled, before) - entries["minus"] + entries["plus"]
        return logits


class Sampler:
    """Chooses the tokens of one answer. It holds the state of the random numbers and of the penalties.

    scored: the token that was chosen last, then the best ones, where log probabilities were asked for.
    error: why it cannot choose any more.
    """

    alternatives: int | None = None  # so many of the best tokens are wanted with their log probabilities

    def __init__(self, how: Sampling, prompt: Sequence[int] = ()) -> None:
        self.scored: Sequence[Scored] = ()
        self.error = ""
        self.how = how
        self._upcoming: list[float] = []  # random numbers that were drawn before their tokens are chosen
        adjusts = how.presence_penalty or how.frequency_penalty or how.repetition_penalty != 1 or len(how.logit_bias)
        self.adjustments = Adjustments(how, prompt) if adjusts else None

    @property
    def needs_scores(self) -> bool:
        """Whether more than logits, temperature, top_k, top_p and min_p decides, or log probabilities are wanted."""
        return self.adjustments is not None

    @property
    def complete(self) -> bool:
        """Whether a grammar leaves nothing to add."""
        return False

    @property
    def takes_best(self) -> bool:
        """Whether decoding is greedy: the token with the largest logit is enough."""
        return self.how.temperature == 0 and not self.needs_scores

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self.how.seed)  # when it is first needed: NumPy takes a while to import that

    def peek(self) -> float:
        """Return the random number of the next token, from 0 to below 1."""
        return self.upcoming(1)[0]

    def upcoming(self, count: int) -> list[float]:
        """Return the random numbers of the next tokens: each has its own, whether it is drafted or not."""
        while len(self._upcoming) < count:
            self._upcoming.append(0.0 if self.how.temperature == 0 else float(self._random.random()))
        return self._upcoming[:count]

    def move_on(self) -> None:
        """Note that the next token was chosen: the one after it has another random number."""
        self.peek()
        del self._upcoming[0]

    def choice(self, token: int) -> NextToken:
        """The token that was chosen last, with what there is to tell of it."""
        return NextToken(token, self.scored, self.complete)

    def accept(self, logits: NDArray[np.float32], draft: Sequence[int]) -> list[NextToken]:
        """Choose the next token, and the tokens behind a draft as long as it is right.

        logits: [1 + tokens of the draft, vocabulary], behind the last token and behind each of the draft.
        """
        chosen = list[NextToken]()
        for row, guess in zip(logits, [*draft, None], strict=True):
            chosen.append(self.choice(self.choose(row)))
            if chosen[-1].token != guess or self.complete or self.error:
                break
        return chosen

    def mask(self) -> NDArray[np.uint8] | None:
        """A bit for each token, the lowest of a byte first, that says whether it may come next. None: all may."""
        return None

    def took(self, token: int, scored: Sequence[Scored] = ()) -> None:
        """Note that the next token was chosen, and its log probabilities, if they are wanted."""
        self.move_on()
        if self.adjustments is not None:
            self.adjustments.add(token)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Choose the next token from the logits [vocabulary]."""
        token = choose_token(self.adjusted(logits), self.how, self.peek())
        self.took(token)
        return token

    def adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits with penalties and biases."""
        return logits if self.adjustments is None else self.adjustments.apply(logits)


class RequestSampler(Sampler):
    """A sampler with a grammar and log probabilities. An error in the grammar is kept in `error`, so that the other
    sequences of the batch go on."""

    def __init__(
        self, how: Sampling, prompt: Sequence[int] = (), matcher: Matcher | None = None, logprobs: int | None = None
    ) -> None:
        """matcher: which tokens a grammar allows. logprobs: how many of the best tokens `scored` has."""
        super().__init__(how, prompt)
        self._matcher, self.alternatives = matcher, logprobs
        self.refused = False  # whether the error is that the grammar takes too much

    @property
    def needs_scores(self) -> bool:
        return self._matcher is not None or self.alternatives is not None or super().needs_scores

    @property
    def complete(self) -> bool:
        """Whether the grammar leaves nothing to add."""
        return self._matcher is not None and not self.error and self._matcher.complete

    def mask(self) -> NDArray[np.uint8] | None:
        with self._keeping_errors():
            if self._matcher is not None and not self.error:
                return self._matcher.bits()
        return None

    def adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = super().adjusted(logits)
        return logits if self._matcher is None else np.where(self._matcher.allowed(), logits, np.float32(-np.inf))

    def took(self, token: int, scored: Sequence[Scored] = ()) -> None:
        super().took(token)
        self.scored = scored
        with self._keeping_errors():
            if self._matcher is not None and not self.error:
                self._matcher.take(token)

    def choose(self, logits: NDArray[np.float32]) -> int:
        token = 0  # nobody takes it, if there is an error
        with self._keeping_errors():
            token = choose_token(self.adjusted(logits), self.how, self.peek())
        self.took(token, () if self.alternatives is None else with_best(logits, token, self.alternatives))
        return token

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = self.error or explained(error)
            self.refused = self.refused or isinstance(error, GrammarLimitError)


def with_best(logits: NDArray[np.float32], token: int, count: int) -> list[Scored]:
    """Return a token and the `count` best ones, best first, with their log probabilities. Of equal ones, the first
    counts: backends/cuda/log_probabilities.cu does the same."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    near = np.flatnonzero(exact >= np.partition(exact, -count)[-count]) if count else np.empty(0, np.intp)
    best = near[np.argsort(-exact[near], kind="stable")][:count]
    return [(int(i), float(exact[i])) for i in (token, *best)]


UNIT = 2.0**40  # probabilities are whole numbers of 1 / UNIT of the best one's, so that no sum depends on its order


def choose_token(logits: NDArray[np.float32], how: Sampling, random: float) -> int:
    """Return the token where the cumulative probability, in the order of tokens, passes `random` of the whole.

    backends/cuda/choose.cu does the same on the GPU.
    """
    if how.temperature == 0:
        return int(logits.argmax())
    powers = np.exp((logits.astype(np.float64) - float(logits.max())) / how.temperature)
    weights = np.floor(powers * UNIT).astype(np.uint64)
    weights[~_kept(weights, how)] = 0
    weights[weights < np.uint64(how.min_p * UNIT)] = 0
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, np.uint64(random * float(sums[-1])), side="right"))


def _kept(weights: NDArray[np.uint64], how: Sampling) -> NDArray[np.bool_]:
    """Which tokens top_k and then top_p leave; of equal ones, the first."""
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
    """Return the tokens of the largest weights, largest first; of equal ones, the first comes first."""
    limit = np.partition(weights, len(weights) - count)[len(weights) - count]
    above, equal = np.flatnonzero(weights > limit), np.flatnonzero(weights == limit)
    above = above[np.argsort(~weights[above], kind="stable")]  # ~ sorts the other way
    return np.concatenate([above, equal[: count - len(above)]])
