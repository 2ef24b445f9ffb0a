"""From the tokens of an answer to its text, piece by piece: whole characters, stop strings, log probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError, bad_argument
from billfish.llm.sampler import Scored

MOST_ALTERNATIVES = 20  # OpenAI's limit
MOST_STOPS = 16
LONGEST_STOP = 1000  # characters


@dataclass(frozen=True)
class Alternative:
    """A token that could have been chosen, with the logarithm of its probability before any sampling setting.

    id: the token. data: the bytes that it adds to the text, which may be part of a character; a control token has
    none.
    logprob: the natural logarithm of its probability.

        >>> model = bf.llm.load("model.gguf")
        >>> answer = model.generate([5, 6], max_tokens=1, logprobs=2)
        >>> [alternative.logprob < 0 for alternative in answer.logprobs[0].top]
        [True, True]
    """

    id: int
    data: bytes
    logprob: float


@dataclass(frozen=True)
class Token:
    """A token of an answer, with its log probability where the request asked for it.

    id, data: as of :class:`Alternative`. offset: the character of the answer at which its text begins.
    logprob: None where the request asked for no probabilities. top: the most probable tokens, best first.

        >>> model = bf.llm.load("model.gguf")
        >>> answer = model.generate([5, 6], max_tokens=2, logprobs=0)
        >>> [token.id for token in answer.logprobs] == answer.tokens
        True
    """

    id: int
    data: bytes
    offset: int
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    text: may be "" while part of a character, or what may begin a stop string, is held back. tokens: those whose text
    is out with this piece. A token inside a stop string never comes. finished: "" up to the last piece, which has
    "stop", "length", "cancelled", "failed" or "refused". error: a sentence, with the last two. stop: the stop string
    that ended the answer, if one did.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finished: str = ""
    error: str = ""
    stop: str = ""


def check_text_settings(call: str, stop: Sequence[str], logprobs: int | None) -> None:
    """Raise DataError unless there are few and short stop strings, and a possible number of alternatives."""
    if len(stop) > MOST_STOPS or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stop):
        takes = f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
        raise DataError(bad_argument(call, "stop", repr(stop), takes))
    good = logprobs is None or (type(logprobs) is int and 0 <= logprobs <= MOST_ALTERNATIVES)
    if not good:
        raise DataError(bad_argument(call, "logprobs", repr(logprobs), f"None, or 0 to {MOST_ALTERNATIVES}"))


class StopText:
    """A stop string, and how much of it the answer ends with so far (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0]  # behind n + 1 matched characters: how many are matched if the next one is another
        for character in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != character:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == character))

    def first_end(self, text: str) -> int | None:
        """Go on with the answer. Returns the end of the first stop string, counted from the beginning of `text`."""
        stop, matched = self.text, self.matched
        for index, character in enumerate(text, 1):
            while matched and stop[matched] != character:
                matched = self._shorter[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                return index
        self.matched = matched
        return None

    def __len__(self) -> int:
        return len(self.text)


class HeldText:
    """The text of an answer on its way out. What may begin a stop string waits. stop: the one that came, or ""."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [StopText(stop) for stop in stops]
        self._held = self.stop = ""

    def push(self, text: str) -> str:
        """Return what goes out after this text has come."""
        if not self._stops:
            return text
        before, held = len(self._held), self._held + text
        ends = [(stop, stop.first_end(text)) for stop in self._stops]
        starts = [(before + end - len(stop), stop.text) for stop, end in ends if end is not None]
        if starts:
            start, self.stop = min(starts)
            self._held = ""
            return held[:start]
        out = len(held) - max(stop.matched for stop in self._stops)
        self._held = held[out:]
        return held[:out]

    def rest(self) -> str:
        """Return what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """Turns the tokens of one answer into pieces of text, and tells where the answer ends.

    stop: strings that end the answer and are not part of it. shown: control tokens whose names are part of the text,
    such as marks of tool calls.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], shown: Collection[int] = ()) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = HeldText(stop)
        self._came = self._gone = 0  # characters of the answer, and those that have gone out
        self._waiting: list[tuple[Token, int]] = []  # tokens whose text is held back, and where it ends

    def take(self, token: int, scored: Sequence[Scored] = (), finished: str = "") -> Piece:
        """Return what goes out after a token.

        scored: as of :class:`billfish.llm.sampler.RequestSampler`. finished: why the answer ends with this token; "" if
        it goes on, unless the token is the model's end or completes a stop string.
        """
        if token in self._tokenizer.ends:
            return self.end("stop")
        shown = token in self._shown
        data = self._tokenizer.pieces[token].encode() if shown else self._tokenizer.piece_bytes(token)
        text = self._characters.decode(data)
        described = self._described(token, data, scored)
        self._came += len(text)
        self._waiting.append((described, self._came))
        out = self._held.push(text)
        self._gone += len(out)
        if self._held.stop:
            return self._piece(out, "stop")
        return self.end(finished, text=out) if finished else self._piece(out)

    def end(self, reason: str, error: str = "", text: str = "") -> Piece:
        """Return the last piece. text: goes out before what is still held."""
        rest = self._held.push(self._characters.decode(b"", final=True)) + self._held.rest()
        self._gone += len(rest)
        return self._piece(text + rest, "stop" if self._held.stop else reason, error)

    def _piece(self, text: str, finished: str = "", error: str = "") -> Piece:
        ready = [token for token, end in self._waiting if end <= self._gone or (finished and token.offset < self._gone)]
        self._waiting = self._waiting[len(ready) :]
        return Piece(text, tuple(ready), finished, error, self._held.stop)

    def _described(self, token: int, data: bytes, scored: Sequence[Scored]) -> Token:
        if not scored:
            return Token(token, data, self._came)
        (_, logprob), *best = scored
        top = tuple(Alternative(one, self._tokenizer.piece_bytes(one), number) for one, number in best)
        return Token(token, data, self._came, logprob, top)
