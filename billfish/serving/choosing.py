"""How the tokens of a request are chosen: with its grammar, and with probabilities for whoever asks for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import explained
from billfish.llm.sampler import Sampler
from billfish.serving.grammar import Matcher
from billfish.serving.requests import Request

Scored = tuple[int, float]  # a token, and the logarithm of its probability


class RequestSampler(Sampler):
    """The sampler of a request. What goes wrong in its grammar is `error`, so that the requests beside it go on.

    scored: the token that was chosen last, then the best ones, if the request asks for probabilities.
    """

    def __init__(self, request: Request, matcher: Matcher | None) -> None:
        super().__init__(request.sampling, request.prompt)
        self._matcher, self._logprobs = matcher, request.logprobs
        self.scored: list[Scored] = []
        self.error = ""

    @property
    def needs_scores(self) -> bool:
        return self._matcher is not None or self._logprobs is not None or super().needs_scores

    @property
    def complete(self) -> bool:
        """Whether the grammar leaves nothing to add."""
        return self._matcher is not None and self._matcher.complete

    def adjusted(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        scores = super().adjusted(scores)
        return scores if self._matcher is None else np.where(self._matcher.allowed(), scores, np.float32(-np.inf))

    def choose(self, scores: NDArray[np.float32]) -> int:
        try:
            token = super().choose(scores)
            if self._matcher is not None:
                self._matcher.take(token)
        except Exception as error:
            self.error = explained(error)
            return 0  # nobody takes it
        if self._logprobs is not None:
            self.scored = with_best(scores, token, self._logprobs)
        return token


def with_best(scores: NDArray[np.float32], token: int, count: int) -> list[Scored]:
    """A token and the `count` best ones, best first, with the logarithms of their probabilities."""
    exact = scores.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    near = np.sort(np.argpartition(-exact, count - 1)[:count]) if count else np.empty(0, np.intp)
    best = near[np.argsort(-exact[near], kind="stable")]
    return [(int(i), float(exact[i])) for i in (token, *best)]
