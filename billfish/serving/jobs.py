"""What has a slot of an engine: an answer under way, or a text whose vector is asked for."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import BillfishError
from billfish.llm.model import Model
from billfish.serving.choosing import RequestSampler, Scored
from billfish.serving.grammar import Matcher
from billfish.serving.requests import Alternative, Piece, Request, Ticket, Token
from billfish.serving.schedule import Cuts, cuts_for
from billfish.serving.slots import Slot
from billfish.serving.stops import HeldText

OnPiece = Callable[[Piece], object]


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
    """A text whose vector is asked for. Its slot holds the text only as long as that takes."""

    def __init__(self, tokens: list[int], model: Model) -> None:
        super().__init__(tokens, cuts_for(model.decoder, model.decoder.exact))
        self.future: Future[NDArray[np.float32]] = Future()
        self._model, self._hidden = model, list[NDArray[np.float32]]()

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()

    def cancel(self) -> None:
        self.future.cancel()

    def read(self, count: int) -> None:
        """The next tokens of the text."""
        decoder = self._model.decoder
        self._hidden.append(decoder.run([(self.slot.cache, self.tokens(count))], decoder.exact))
        if not self.left:
            self._vector = self._model.pool(np.concatenate(self._hidden))
            self.end("stop")

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
            self.future.set_result(self._vector)
