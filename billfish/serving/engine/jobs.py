"""What has a slot of an engine: an answer under way (its sampler, its stop texts), or texts to embed."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import BillfishError, explained
from billfish.llm.model import Model
from billfish.llm.sampler import Sampler
from billfish.serving.engine.grammar import Matcher
from billfish.serving.engine.kv_slots import Cuts, Slot, cuts_for
from billfish.serving.engine.requests import Alternative, Piece, Request, Ticket, Token

OnPiece = Callable[[Piece], object]
Scored = tuple[int, float]  # a token, and the logarithm of its probability


class Job(ABC):
    """Reads a prompt. `slot` is there from the first step on, `finished` has a word at the end."""

    slot: Slot

    def __init__(self, prompt: list[int], cuts: Cuts) -> None:
        self.prompt = prompt
        self.turn = -1
        self.finished = ""
        self._cuts = cuts

    @property
    def left(self) -> int:
        """Tokens of the prompt that are not read."""
        return len(self.prompt) - len(self.slot.cache.tokens)

    def part(self, share: int) -> int:
        """How many tokens are read next, if about `share` are this prompt's share."""
        return self._cuts.part(len(self.slot.cache.tokens), len(self.prompt), share)

    def tokens(self, count: int) -> list[int]:
        """The tokens that are read next."""
        start = len(self.slot.cache.tokens)
        return self.prompt[start : start + count]

    def was_fed(self) -> None:
        """What the slot holds has been read as a prompt is, up to the answer."""
        self.slot.read = min(len(self.slot.cache.tokens), self._cuts.body(len(self.prompt)))

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


class StopText:
    """A text that ends an answer, and how much of it the answer ends with so far (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self._text, self.matched = text, 0
        self._shorter = [0]  # behind n + 1 matched characters: how many are matched if the next one is another
        for character in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != character:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == character))

    def first_end(self, text: str) -> int | None:
        """Go on with the answer. Returns the end of the first stop text, counted from the beginning of `text`."""
        stop, matched = self._text, self.matched
        for index, character in enumerate(text, 1):
            while matched and stop[matched] != character:
                matched = self._shorter[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                return index
        self.matched = matched
        return None

    def __len__(self) -> int:
        return len(self._text)


class HeldText:
    """The text of an answer on its way out. What may begin a stop text waits. `stopped` when a stop text has come."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [StopText(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What goes out after this text has come."""
        if not self._stops:
            return text
        before, held = len(self._held), self._held + text
        ends = [(stop, stop.first_end(text)) for stop in self._stops]
        starts = [before + end - len(stop) for stop, end in ends if end is not None]
        if starts:
            self.stopped, self._held = True, ""
            return held[: min(starts)]
        out = len(held) - max(stop.matched for stop in self._stops)
        self._held = held[out:]
        return held[:out]

    def rest(self) -> str:
        """What was held back for a stop text that did not come."""
        held, self._held = self._held, ""
        return held


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


class Answer(Job):
    """A request's answer. A text that comes in parts of characters, and what may begin a stop text, wait."""

    def __init__(
        self,
        request: Request,
        on_piece: OnPiece,
        ticket: Ticket,
        tokenizer: Tokenizer,
        matcher: Matcher | None,
        cuts: Cuts,
        *,
        context: int,
    ) -> None:
        super().__init__(list(request.prompt), cuts)
        self.ticket, self.sampler = ticket, RequestSampler(request, matcher)
        self._on_piece, self._tokenizer = on_piece, tokenizer
        self._most = min(request.max_tokens, context - len(request.prompt) + 1)
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = HeldText(request.stop)
        self._came = self._gone = 0  # characters of the answer, and those that have gone out
        self._waiting: list[tuple[Token, int]] = []  # tokens whose text is held back, and where it ends
        self._last: int | None = None  # the token that was chosen last
        self.waits_for: tuple[Answer, int] | None = None  # who computes so many tokens of the same prompt

    @property
    def cancelled(self) -> bool:
        return self.ticket.cancelled

    def cancel(self) -> None:
        self.ticket.cancelled = True

    def next_tokens(self, part: int) -> list[int]:
        """What is fed next: so many tokens of the prompt, or the last one of the answer."""
        return self.tokens(part) if self._last is None else [self._last]

    def take(self, token: int) -> None:
        """The next token of the answer."""
        if self.sampler.error:
            self.end("failed", self.sampler.error)
            return
        self._last = token
        self.ticket.completion_tokens += 1
        if token in self._tokenizer.ends:
            self.end("stop")
            return
        data = self._tokenizer.piece_bytes(token)
        text = self._characters.decode(data)
        described = self._described(token, data)
        self._came += len(text)
        self._waiting.append((described, self._came))
        out = self._held.push(text)
        self._gone += len(out)
        if self._held.stopped:
            self._say(out, "stop")
        elif self.sampler.complete:
            self.end("stop", text=out)
        elif self.ticket.completion_tokens == self._most:
            self.end("length", text=out)
        else:
            self._say(out)

    def end(self, reason: str, error: str = "", text: str = "") -> None:
        """text: goes out before what is still held."""
        if self.finished:
            return
        rest = self._held.push(self._characters.decode(b"", final=True)) + self._held.rest()
        self._gone += len(rest)
        self._say(text + rest, "stop" if self._held.stopped else reason, error)

    def tell_end(self) -> None:
        self._give(self._end)

    def _say(self, text: str, finished: str = "", error: str = "") -> None:
        """The last piece waits for `tell_end`."""
        ready = [token for token, end in self._waiting if end <= self._gone or (finished and token.offset < self._gone)]
        self._waiting = self._waiting[len(ready) :]
        piece = Piece(text, tuple(ready), finished, error)
        if finished:
            self.finished, self._end = finished, piece
        else:
            self._give(piece)

    def _give(self, piece: Piece) -> None:
        try:
            self._on_piece(piece)
        except Exception:  # whoever does not take its answer has none
            self.ticket.cancelled = True

    def _described(self, token: int, data: bytes) -> Token:
        if not self.sampler.scored:
            return Token(token, data, self._came)
        (_, logprob), *best = self.sampler.scored
        return Token(token, data, self._came, logprob, tuple(self._alternative(scored) for scored in best))

    def _alternative(self, scored: Scored) -> Alternative:
        return Alternative(scored[0], self._tokenizer.piece_bytes(scored[0]), scored[1])


class Embedding(Job):
    """Texts whose vectors are asked for. It has one place in the engine for all of them: after each text, it gives its
    slot back and waits again (`between_texts`)."""

    def __init__(self, texts: Sequence[list[int]], model: Model) -> None:
        super().__init__(texts[0], cuts_for(model.decoder, model.decoder.exact))
        self.future: Future[list[NDArray[np.float32]]] = Future()
        self.between_texts = False
        self._texts, self._model = texts, model
        self._vectors, self._hidden = list[NDArray[np.float32]](), list[NDArray[np.float32]]()

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()

    def cancel(self) -> None:
        self.future.cancel()

    def read(self, count: int) -> None:
        """The next tokens of the text."""
        decoder = self._model.decoder
        self._hidden.append(decoder.run([(self.slot.cache, self.tokens(count))], decoder.exact))
        if self.left:
            return
        self._vectors.append(self._model.pool(np.concatenate(self._hidden)))
        self._hidden = []
        if len(self._vectors) == len(self._texts):
            self.end("stop")
        else:
            self.prompt, self.between_texts = self._texts[len(self._vectors)], True

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
