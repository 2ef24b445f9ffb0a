"""What has a slot of an engine: an answer under way, with its sampler, or texts to embed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import BillfishError
from billfish.llm.decoder_base import PENDING, PendingStep
from billfish.llm.drafting.drafter import Controller, Drafter
from billfish.llm.grammar import Matcher
from billfish.llm.kv_cache import NO_ADAPTER
from billfish.llm.model import Model
from billfish.llm.sampler import NextToken, RequestSampler, Scored, with_best
from billfish.serving.engine.kv_slots import Cuts, Slot, cuts_for
from billfish.serving.engine.prefix_index import block_hashes
from billfish.serving.engine.requests import Chosen, Drafts, Progress, Request, Ticket, Times

OnToken = Callable[[Chosen], object]
TOGETHER = 1024  # tokens of texts that an encoder reads at once


class Job(ABC):
    """Reads a prompt. `slot` is there while it runs, `finished` has a word at the end.

    number: of its arrival, which the engine sets. text: the prompt, and behind it what was answered so far. The cache
    holds a beginning of it.
    """

    slot: Slot
    number = -1
    adapter = NO_ADAPTER  # of the decoder, which the cache is for
    started = False  # before, so that it goes on after a preemption

    def __init__(self, prompt: list[int], cuts: Cuts) -> None:
        self.prompt, self.text = prompt, prompt
        self.finished = ""
        self._cuts = cuts

    @property
    def position(self) -> int:
        """How many tokens of the text the cache holds."""
        return len(self.slot.cache.tokens)

    @property
    def left(self) -> int:
        """Tokens of the text that the cache does not hold. When all are fed, the next token can be chosen."""
        return len(self.text) - self.position

    @property
    def decodes(self) -> bool:
        """Whether only the last token of an answer is not in the cache."""
        return False

    def part(self, share: int) -> int:
        """How many tokens are fed next, if about `share` are this prompt's share."""
        return self._cuts.part(self.position, len(self.prompt), share)

    def tokens(self, count: int) -> list[int]:
        """The tokens that are fed next."""
        start = self.position
        return self.text[start : start + count]

    def was_fed(self) -> None:
        """What the slot holds has been read as a prompt is, up to the answer."""
        self.slot.read = min(self.position, self._cuts.body(len(self.prompt)))

    def restart(self) -> None:  # noqa: B027  # an answer has all that it needs in its text
        """The cache was taken away: the text is read again from its beginning."""

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits for it any more."""

    @abstractmethod
    def end(self, reason: str, error: str = "") -> None:
        """It is over, for one of `requests.REASONS`. What is over stays as it is."""

    @abstractmethod
    def tell_end(self) -> None:
        """Whoever waits gets the end. The slot was given back before, so that another request may come at once."""


class Answer(Job):
    """A request's answer."""

    def __init__(
        self,
        request: Request,
        on_token: OnToken,
        ticket: Ticket,
        ends: Collection[int],
        matcher: Matcher | None,
        cuts: Cuts,
        times: Times,
        *,
        context: int,
        rows_again: int,
        adapter: int,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
    ) -> None:
        """ends: tokens that end answers. times: where those of its tokens go. rows_again: tokens of an answer that are
        fed at once, if it is read again. adapter: its number in the decoder. controller: chooses how many tokens the
        drafter drafts."""
        super().__init__(list(request.prompt), cuts)
        self.text, self.adapter = list(self.prompt), adapter
        self.hashes = block_hashes(self.prompt, cuts.smallest, request.owner)
        self._rows_again = rows_again
        self._times, self._last_time = times, time.perf_counter()
        self._reports, self._prefill_began, self._processed = request.progress, 0.0, 0
        self.ticket, self.tenant = ticket, request.owner
        self.sampler = RequestSampler(request.sampling, request.prompt, matcher, request.logprobs)
        self._on_token, self._ends = on_token, ends
        self._most = min(request.max_tokens, context - len(request.prompt) + 1)
        self.pending: PendingStep | None = None  # the last step that was submitted, if its token was not taken yet
        self.waits_for: tuple[Answer, int] | None = None  # who computes so many tokens of the same prompt
        self.drafter, self._controller = drafter, controller
        self._kind: int | None = None  # of the draft that the next step may have

    @property
    def cancelled(self) -> bool:
        return self.ticket.cancelled

    def begin_prefill(self) -> None:
        """It has its slot for the first time."""
        self.ticket.cached_tokens = self._processed = self.position
        self._prefill_began = time.perf_counter()
        self._report()

    def was_fed(self) -> None:
        super().was_fed()
        if self._processed < self.position < len(self.prompt):  # the first token tells of the rest
            self._processed = self.position
            self._report()

    def _report(self) -> None:
        if self._reports:
            seconds = time.perf_counter() - self._prefill_began
            progress = Progress(len(self.prompt), self.ticket.cached_tokens, self._processed, seconds)
            self._give(Chosen(None, progress=progress))

    def cancel(self) -> None:
        self.ticket.cancelled = True

    @property
    def decodes(self) -> bool:
        """Or whether it can be fed the token of a pending step, as that will not be the last one."""
        if self.pending is not None:
            more = self.ticket.completion_tokens + 1 < self._most
            return self.left == 0 and more
        return len(self.text) > len(self.prompt) and self.left == 1

    def part(self, share: int) -> int:
        """Of the answer itself, too, when it is read again after a preemption."""
        if self.position < len(self.prompt):
            return super().part(share)
        return min(self.left, share, self._rows_again)

    def tokens(self, count: int) -> list[int]:
        return super().tokens(count) if self.left > 0 else [PENDING]

    def draft_length(self, others: int) -> int:
        """How many tokens it pays to draft behind what is known of the answer, in a step with so many other rows."""
        if self.drafter is None or self._controller is None or not self.decodes:
            return 0
        self._kind = self.drafter.kind(self.text)
        return min(self._most - self.ticket.completion_tokens - 1, self._controller.length(self._kind, others))

    def could_not_try(self, drafted: int) -> None:
        """There was no memory for so many drafted tokens, which is as good a reason to draft less as if they were
        wrong."""
        if self._controller is not None:
            self._controller.note(drafted, 0, self._kind)

    def take(self, choices: Sequence[NextToken], drafted: int = 0) -> int:
        """The next tokens of the answer: one, and before it those of so many drafted ones that were right. Returns how
        many were taken, as the answer may end before the last of them."""
        if self._controller is not None:
            self._controller.note(drafted, len(choices) - 1, self._kind)
        taken = list[tuple[NextToken, str]]()
        for choice in choices[:-1] if self.sampler.error else choices:
            taken.append((choice, self._end_behind(choice, self.ticket.completion_tokens + len(taken) + 1)))
            if taken[-1][1]:
                break
        if drafted:
            accepted = len(taken) - (len(taken) == len(choices))
            self.ticket.drafts = Drafts(self.ticket.drafts.drafted + drafted, self.ticket.drafts.accepted + accepted)
        for choice, end in taken:
            self._take(choice, end, self.ticket.drafts if drafted else None)
        if self.sampler.error:
            self.end("refused" if self.sampler.refused else "failed", self.sampler.error)
        return len(taken)

    def _end_behind(self, choice: NextToken, count: int) -> str:
        """Why the answer ends with a token, the `count`-th, or ""."""
        if choice.token in self._ends or choice.complete:
            return "stop"
        return "length" if count == self._most else ""

    def _take(self, choice: NextToken, end: str, drafts: Drafts | None) -> None:
        if self.drafter is not None and self._controller is not None:
            self._controller.watch(self.drafter, self.text, choice.token)
        self.text.append(choice.token)
        now = time.perf_counter()
        histogram = self._times.between_tokens if self.ticket.completion_tokens else self._times.first_token
        histogram.add(now - self._last_time)
        if not self.ticket.completion_tokens:
            self._processed = len(self.prompt)
            self._report()
        self._last_time = now
        self.ticket.completion_tokens += 1
        self.finished = end
        if end:  # which waits for `tell_end`
            self._end = Chosen(choice.token, choice.scored, end, "", self.ticket.cached_tokens, drafts)
        else:
            cached = self.ticket.cached_tokens if self.ticket.completion_tokens == 1 else 0
            self._give(Chosen(choice.token, choice.scored, cached_tokens=cached, drafts=drafts))

    def end(self, reason: str, error: str = "") -> None:
        if not self.finished:
            self.finished = "stop" if reason == "cancelled" and self.ticket.enough else reason
            self._end = Chosen(None, (), self.finished, error, self.ticket.cached_tokens)

    def tell_end(self) -> None:
        self._give(self._end)

    def _give(self, chosen: Chosen) -> None:
        try:
            self._on_token(chosen)
        except Exception:  # whoever does not take its answer has none
            self.ticket.cancelled = True


class Embedding(Job):
    """Texts whose vectors are asked for. It has one place in the engine for all of them: after each text, it gives its
    slot back and waits again (`between_texts`)."""

    def __init__(self, texts: Sequence[list[int]], model: Model) -> None:
        super().__init__(texts[0], cuts_for(model.decoder, model.decoder.exact))
        self.future: Future[list[Any]] = Future()
        self.between_texts = False
        self._texts, self._model = texts, model
        self._vectors, self._parts = list[Any](), list[Any]()

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()

    def cancel(self) -> None:
        self.future.cancel()

    def take(self, hidden: NDArray[np.float32]) -> None:
        """The hidden states [tokens, hidden] of what was fed."""
        self._parts.append(self._part(hidden))
        if not self.left:
            self._vectors.append(self._result(self._parts))
            self._parts = []
            self._go_on()

    def read_together(self) -> None:
        """By an encoder, which reads whole texts: as many as are short enough together."""
        decoder, texts, count = self._model.decoder, list[list[int]](), 0
        for text in self._texts[len(self._vectors) :]:
            count += len(text)
            if texts and count > TOGETHER:
                break
            texts.append(text)
        hidden = decoder.run([(decoder.cache(len(text)), text) for text in texts], decoder.exact)
        ends = np.cumsum([len(text) for text in texts])[:-1]
        self._vectors += [self._result([states]) for states in np.split(hidden, ends)]
        self._go_on()

    def _go_on(self) -> None:
        """To the next text, if there is one."""
        if len(self._vectors) == len(self._texts):
            self.end("stop")
        else:
            self.prompt = self.text = self._texts[len(self._vectors)]
            self.between_texts = True

    def restart(self) -> None:
        self._parts = []

    def _part(self, hidden: NDArray[np.float32]) -> Any:
        """What is kept of the last tokens that were fed."""
        return hidden

    def _result(self, parts: Sequence[Any]) -> Any:
        """What all parts of a text become."""
        return self._model.pool(np.concatenate(parts))

    def end(self, reason: str, error: str = "") -> None:
        self.finished, self._error = self.finished or reason, error

    def tell_end(self) -> None:
        if self.finished == "cancelled":
            self.future.cancel()
        if not self.future.set_running_or_notify_cancel():
            return  # nobody waits
        if self.finished == "failed":
            self.future.set_exception(BillfishError(self._error))
        else:
            self.future.set_result(self._vectors)


class Scoring(Embedding):
    """Prompts whose own log probabilities are asked for: for each token but the first, the token and the best ones."""

    ROWS = 64  # whose logits are computed at once

    def __init__(self, texts: Sequence[list[int]], model: Model, alternatives: int) -> None:
        super().__init__(texts, model)
        self._alternatives = alternatives

    def _part(self, hidden: NDArray[np.float32]) -> list[list[Scored]]:
        """At once: the logits of a whole text would keep all answers waiting for seconds."""
        decoder, found = self._model.decoder, list[list[Scored]]()
        following = self.prompt[self.position - len(hidden) + 1 : self.position + 1]
        for start in range(0, len(following), self.ROWS):
            tokens = following[start : start + self.ROWS]
            logits = decoder.logits(hidden[start : start + len(tokens)], decoder.exact)
            found += [with_best(row, token, self._alternatives) for row, token in zip(logits, tokens, strict=True)]
        return found

    def _result(self, parts: Sequence[list[list[Scored]]]) -> list[list[Scored]]:
        return [scored for part in parts for scored in part]
