"""What an engine is asked, and what it answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from billfish.core.errors import BillfishError, DataError, bad_argument
from billfish.llm.detokenizer import check_text_settings
from billfish.llm.grammar import CompiledGrammar
from billfish.llm.kv_cache import PageCounts
from billfish.llm.sampler import Sampling, Scored
from billfish.llm.thought_limit import ThoughtLimit

CALL = "serving.Request"
# How an answer can end: by the model's own end, its grammar's or a stop text; at max_tokens or the end of the context;
# by `Ticket.cancel`; by an error; because its grammar takes too much.
REASONS = ("stop", "length", "cancelled", "failed", "refused")


class QueueFull(BillfishError, RuntimeError):
    """So many requests wait already that another one is not taken."""


class ServerClosing(BillfishError, RuntimeError):
    """The engine finishes what it has, and takes nothing more."""


@dataclass(frozen=True)
class Request:
    """A text to go on with.

    prompt: token ids. max_tokens: of the answer, at most. stop: texts that end the answer; whoever turns its tokens
    into text looks for them, and then calls `Ticket.cancel`. logprobs: so many alternatives for each token; 0 is the
    chosen one alone, None no probabilities at all. grammar: what the whole answer must be; `Engine.compile` makes it.
    An answer that `max_tokens` cuts may be only the beginning of that. shown: control tokens whose names are part of
    the text. tenant: who asks; only prompts of the same tenant share a KV cache.
    adapter: the name of one that the model has loaded. draft: whether tokens may be drafted, if the engine does so.
    progress: whether the prefill is reported (`Chosen.progress`). thought: the limit of thoughts.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: CompiledGrammar | None = None
    shown: frozenset[int] = frozenset()
    tenant: bytes = b""
    adapter: str | None = None
    draft: bool = True
    progress: bool = False
    thought: ThoughtLimit | None = None

    @property
    def owner(self) -> bytes:
        """Prompts with the same one share a KV cache: whose keys depend on the adapter, too."""
        return self.tenant if self.adapter is None else self.tenant + b"\0adapter " + self.adapter.encode()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DataError(bad_argument(CALL, "max_tokens", repr(self.max_tokens), "1 or more"))
        check_text_settings(CALL, self.stop, self.logprobs)


class Chosen(NamedTuple):
    """The next token of an answer; None where it ends without one.

    scored: the token and the best ones with their log probabilities, if the request asks for them. finished: "" up to
    the end, which has one of `REASONS`. error: a sentence, with "failed" and "refused". cached_tokens: those of the
    ticket, with the first token and at the end. drafts: with the tokens of a step that had a draft: those of the
    ticket. progress: of the prefill, before the first token and without one.
    """

    token: int | None
    scored: Sequence[Scored] = ()
    finished: str = ""
    error: str = ""
    cached_tokens: int = 0
    drafts: Drafts | None = None
    progress: Progress | None = None


class Progress(NamedTuple):
    """How much of a prompt is in the KV cache. total: tokens of the prompt. cached: those that were there before.
    processed: those that are there now. seconds: since the prefill began."""

    total: int
    cached: int
    processed: int
    seconds: float


class Drafts(NamedTuple):
    """Tokens of one answer that were drafted, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0


class Ticket:
    """One answer under way. Its numbers change while the answer runs, and any thread may read them.

    cached_tokens: of the prompt, those that were not computed again. completion_tokens: all that were generated, with
    the model's end and with those of a stop text. drafts: how many were drafted, and were right.
    """

    def __init__(self, prompt_tokens: int, wake: Callable[[], object]) -> None:
        """wake: called after `cancel`."""
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = self.completion_tokens = 0
        self.drafts = Drafts()
        self.cancelled = self.enough = False
        self._wake = wake

    def cancel(self, *, enough: bool = False) -> None:
        """The answer ends with the next step, in any thread, at any time. An answer that has ended stays as it is.
        enough: it ends because all is said that was wanted, as with a stop text; then its end is "stop"."""
        self.enough = self.enough or enough
        self.cancelled = True
        self._wake()


BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Histogram:
    """How often a time was up to each of BOUNDS, or more, and their sum. One thread adds, any may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, int]]:
        """For each bound, the last of which is "+Inf", how many times were up to it."""
        names = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class Times(NamedTuple):
    """Of all answers. first_token: from a request to its first token. between_tokens: from each token to the next."""

    first_token: Histogram
    between_tokens: Histogram


NO_PAGES = PageCounts(0, 0, 0)


@dataclass
class EngineCounts:
    """What an engine has done since it began, and what it does now.

    cache_bytes: KV cache that is held, for answers that run and for prompts to come. cache_bytes_bound: what it never
    exceeds. preemptions: how often a request lost its memory to those before it, and went on later. finished: answers
    by `REASONS`. prefill_tokens: of prompts and answers, those that were read and not generated, again after a
    preemption as well. drafts, drafted_tokens, accepted_tokens: steps of an answer that had a draft, its tokens, and
    those that were right. pages: of the KV cache. captures: CUDA graphs that were captured.
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    cache_bytes: int = 0
    cache_bytes_bound: int = 0
    refused: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    pages: PageCounts = NO_PAGES
    captures: int = 0
    times: Times = field(default_factory=lambda: Times(Histogram(), Histogram()))
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
