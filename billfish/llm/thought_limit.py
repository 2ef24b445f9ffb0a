"""A budget of tokens for a model's thoughts: behind it, the end of the thought is forced."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import CONTROL, Tokenizer
from billfish.llm.grammar import Matcher


@dataclass(frozen=True)
class ThoughtLimit:
    """budget: tokens of thoughts, at most. opened: the prompt ends inside of a thought. start, end: the marks around
    one. closing: the tokens that end one. again: another thought may come behind one, as in gpt-oss's channels; then
    avoided is the token behind `closing` that would begin one."""

    budget: int
    opened: bool
    start: str
    end: str
    closing: Sequence[int]
    again: bool = False
    avoided: int | None = None

    def matcher(self, tokenizer: Tokenizer, size: int, grammar: Matcher | None) -> ThoughtMatcher:
        """For one answer. size: of the scores. grammar: what the whole answer must be."""
        return ThoughtMatcher(self, tokenizer, size, grammar)


class ThoughtMatcher(Matcher):
    """Allows what a grammar allows, or everything, up to the budget."""

    def __init__(self, limit: ThoughtLimit, tokenizer: Tokenizer, size: int, grammar: Matcher | None) -> None:
        self._limit, self._tokenizer, self._size, self._grammar = limit, tokenizer, size, grammar
        self._thinks, self._over = limit.opened, False
        self._used = 0  # tokens of thoughts
        self._text = ""  # of the thought, or of what came before it
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._forced = deque[int]()
        self._avoids = False
        self._force()

    def bits(self) -> NDArray[np.uint8]:
        if self._forced:
            allowed = np.zeros(self._size, np.bool_)
            allowed[self._forced[0]] = True
            return np.packbits(allowed, bitorder="little")
        bits = np.full(-(-self._size // 8), 255, np.uint8) if self._grammar is None else self._grammar.bits()
        if self._avoids and self._limit.avoided is not None:
            bits = bits.copy()
            bits[self._limit.avoided // 8] &= ~np.uint8(1 << self._limit.avoided % 8)
        return bits

    def take(self, token: int) -> None:
        if self._grammar is not None:
            self._grammar.take(token)
        self._avoids = False
        if self._forced:
            self._forced.popleft()
            if not self._forced:
                self._thinks, self._text, self._over = False, "", not self._limit.again
                self._avoids = True
        elif not self._over:
            self._read(token)
            self._force()

    @property
    def complete(self) -> bool:
        return self._grammar is not None and self._grammar.complete

    def _read(self, token: int) -> None:
        is_control = self._tokenizer.kinds[token] == CONTROL  # its name is in the marks
        piece = self._tokenizer.pieces[token].encode() if is_control else self._tokenizer.piece_bytes(token)
        self._text += self._decoder.decode(piece)
        limit = self._limit
        if self._thinks:
            self._used += 1
            self._text = self._text[-len(limit.end) - len(piece) :]
            if limit.end in self._text:
                self._thinks, self._text, self._over = False, "", not limit.again
        elif limit.again:
            self._text = self._text[-len(limit.start) :]
            self._thinks = self._text == limit.start
        else:
            text = self._text.lstrip()
            self._thinks = text.startswith(limit.start)
            self._over = not self._thinks and not limit.start.startswith(text)

    def _force(self) -> None:
        """End the thought if it has used its budget, but never within a character."""
        if self._thinks and self._used >= self._limit.budget and not self._decoder.getstate()[0]:
            self._forced.extend(self._limit.closing)
