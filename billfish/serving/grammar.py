"""What an answer must be: JSON, or JSON of a schema. llguidance says which tokens may come next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import CONTROL, UNUSED, Tokenizer
from billfish.core.errors import BillfishError, DataError, complaint
from billfish.core.extras import require

EXTRA = "serve"
# Some white space between the parts of an answer, and an end of it: small models would else go on with it for ever.
# What a schema says that is not understood is an error, and the schema itself cannot ask for less.
OPTIONS = {"whitespace_pattern": r"[ \t\n]{0,16}", "lenient": False, "coerce_one_of": False}


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, for any model. `source` is llguidance's."""

    source: str


def json_object() -> Grammar:
    """An object with any members."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """What the schema describes. Raises DataError for a schema that is none, that nothing satisfies, or with keywords
    that llguidance does not keep to."""
    matcher = require("llguidance", EXTRA).LLMatcher
    with _library_errors("serving.json_schema", "schema", "a JSON schema of keywords that llguidance has"):
        source = matcher.grammar_from_json_schema(schema, overrides=OPTIONS)
        wrong = matcher.validate_grammar(source)
        if wrong:
            raise ValueError(wrong)
    return Grammar(source)


@contextmanager
def _library_errors(call: str, argument: str, takes: str) -> Iterator[None]:
    """What llguidance raises becomes a DataError. A panic inside it is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BillfishError):
        raise
    except BaseException as error:
        raise DataError(complaint(call, argument, f"one that fails ({error})", takes)) from None


class Vocabulary:
    """The tokens of a model, as llguidance takes them: bytes, where control tokens are told apart by a first 0xff."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: of the scores, which may be more than there are tokens."""
        self._tokenizer, self._size = tokenizer, size

    def matcher(self, grammar: Grammar) -> Matcher:
        """One for one answer. Raises DataError if the grammar is too large for this vocabulary."""
        library = require("llguidance", EXTRA)
        limits = library.LLParserLimits(verbose_errors=False)
        with _library_errors("serving.Engine", "grammar", "a smaller one"):
            return Matcher(library.LLMatcher(self._native, grammar.source, log_level=0, limits=limits), self._size)

    @cached_property
    def _native(self) -> Any:
        library = require("llguidance", EXTRA)
        ends = sorted(token for token in self._tokenizer.ends if token < self._size)
        if not ends:
            got = "one for a model without a token that ends answers"
            raise DataError(complaint("serving.Engine", "grammar", got, "another model"))
        return library.LLTokenizer(
            library.TokenizerWrapper(_Bytes(self._tokenizer, self._size, ends)), self._size, ends
        )


class _Bytes:
    """What llguidance asks a tokenizer for. No text has control tokens, nor those that only fill up the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]) -> None:
        no_text = [kind in (CONTROL, UNUSED) for kind in tokenizer.kinds[:size]]
        self._tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = tokenizer.bos, ends[0]
        self.special_token_ids = [token for token, special in enumerate(no_text) if special]
        self.tokens = [
            b"\xff" + tokenizer.pieces[token].encode() if special else tokenizer.piece_bytes(token)
            for token, special in enumerate(no_text)
        ]
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        """The tokens that a text which the grammar leaves no choice about should have."""
        data, ids = text.encode(), self._tokenizer.encode(text, special=False, start=False)
        if b"".join(self._tokenizer.piece_bytes(token) for token in ids) == data:
            return ids
        return self._longest_first(data)  # SentencePiece begins a text with a space that is not there

    def _longest_first(self, data: bytes) -> list[int]:
        ids, start = list[int](), 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next(end for end in ends if data[start:end] in self._by_bytes)
            ids.append(self._by_bytes[data[start:end]])
            start = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: token for token, data in enumerate(self.tokens)}


class Matcher:
    """How far an answer has come along its grammar. Raises DataError where llguidance gives up."""

    def __init__(self, state: Any, size: int) -> None:
        self._state, self._size = state, size
        self._check()

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next [vocabulary]; the model's ends where the answer may be over."""
        with self._errors():
            bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
            self._check()
        return np.unpackbits(bits, bitorder="little", count=self._size).astype(np.bool_)

    def take(self, token: int) -> None:
        """The token was chosen."""
        with self._errors():
            self._state.consume_token(token)
            self._check()

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may come."""
        return bool(self._state.is_stopped())

    def _errors(self) -> AbstractContextManager[None]:
        return _library_errors("serving.Engine", "grammar", "a simpler one: the answer cannot go on")

    def _check(self) -> None:
        if self._state.is_error():
            raise ValueError(self._state.get_error())
