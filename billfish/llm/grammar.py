"""What an answer must be: JSON, or JSON of a schema. llguidance says which tokens may come next."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import CONTROL, UNUSED, Tokenizer
from billfish.core.errors import BillfishError, DataError, bad_argument, failure
from billfish.core.extras import require
from billfish.llm import grammar_process
from billfish.llm.closed_schema import closed

CALL = "json_schema"
EXTRA = "serve"
CHARACTERS = "characters in names, patterns and values"
# What a schema may have at most. Schemas of programs have a tenth of it. What the limits let through may still take
# long to compile: grammar_process.py ends that.
LIMITS = {
    "levels of nesting": 100,
    "JSON values": 20_000,
    "properties": 2_000,
    "required names": 2_000,
    "different $refs": 256,
    "members of an allOf": 10,
    CHARACTERS: 64_000,
}
LONGEST_FORCED = 1000  # characters that become the tokens that the model knows best; of more, the longest that fit
LARK = grammar_process.LARK
ANNOTATIONS = ("title", "description", "$comment")  # texts that no answer depends on


class GrammarLimitError(DataError):
    """A grammar that needs more states or work for a token than llguidance may take, in the middle of an answer."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, for any model. `schema` is a JSON schema, as a text; or a grammar of llguidance, which
    begins with `LARK`; or one that a client wrote, behind grammar_process.TEXT."""

    schema: str


def json_object() -> Grammar:
    """An object with any members."""
    return json_schema({"type": "object"})


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """What the schema describes, with no properties that it does not name. Raises DataError for a schema that exceeds
    LIMITS. Whether it can be used is known when it is compiled."""
    check_schema(schema)
    without_others = closed(schema)
    try:
        return Grammar(json.dumps(without_others))
    except (TypeError, ValueError) as error:
        raise DataError(failure(CALL, f"the schema is not JSON: {error}")) from None


def text_grammar(text: str) -> Grammar:
    """A grammar in llama.cpp's GBNF, or in llguidance's Lark. Raises DataError for one that exceeds LIMITS. Whether it
    can be read and used is known when it is compiled: converting GBNF takes quadratic time."""
    if len(text) > LIMITS[CHARACTERS]:
        raise DataError(failure(CALL, f"the grammar has {len(text)} characters, more than {LIMITS[CHARACTERS]}"))
    return Grammar(grammar_process.TEXT + text)


def read_response_format(call: str, given: object) -> Grammar | None:
    """The grammar of OpenAI's `response_format`; None for free text. Raises DataError for anything else."""
    takes = """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": ...}}"""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if isinstance(given, Mapping) and kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, Mapping):
            return json_schema(schema)
    elif isinstance(given, Mapping) and kind in ("text", "json_object"):
        return json_object() if kind == "json_object" else None
    raise DataError(bad_argument(call, "response_format", repr(given), takes))


def check_schema(schema: object) -> None:
    """Raises DataError for a schema that exceeds LIMITS."""
    counts: Counter[str] = Counter()
    refs = set[str]()
    waiting: list[tuple[str, object, int]] = [("", schema, 1)]  # key, value, level
    while waiting:
        key, value, level = waiting.pop()
        counts["JSON values"] += 1
        counts["levels of nesting"] = max(counts["levels of nesting"], level)
        if isinstance(value, Mapping):
            if key == "properties":
                counts["properties"] += len(value)
            counts["characters in names, patterns and values"] += sum(len(str(name)) for name in value)
            waiting += [(str(name), each, level + 1) for name, each in value.items()]
        elif isinstance(value, list):
            if key == "required":
                counts["required names"] += len(value)
            if key == "allOf":
                counts["members of an allOf"] = max(counts["members of an allOf"], len(value))
            waiting += [("", each, level + 1) for each in value]
        elif isinstance(value, str):
            if key not in ANNOTATIONS:
                counts["characters in names, patterns and values"] += len(value)
            if key == "$ref":
                refs.add(value)
                counts["different $refs"] = len(refs)
        for what, most in LIMITS.items():
            if counts[what] > most:
                raise DataError(failure(CALL, f"the schema has {counts[what]} {what}; the limit is {most}"))


@contextmanager
def library_errors(call: str, problem: str) -> Iterator[None]:
    """What llguidance raises becomes a DataError. A panic inside it is not even an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, BillfishError):
        raise
    except BaseException as error:
        raise DataError(failure(call, f"{problem}: {error}")) from None


class Vocabulary:
    """The tokens of a model, as llguidance takes them."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: of the scores, which may be more than there are tokens."""
        self._tokenizer, self.size = tokenizer, size
        self._lock = threading.Lock()

    @property
    def native(self) -> Any:
        """An LLTokenizer. Raises DataError for a model without a token that ends answers."""
        with self._lock:  # it takes long: no two threads make it
            return self._native

    @cached_property
    def _native(self) -> Any:
        return grammar_process.Tokens(self.record(), self._encode).native(require("llguidance", EXTRA), self.size)

    def record(self) -> dict[str, Any]:
        """The vocabulary as JSON, for grammar_process.py. Each byte of a token is a character. Control tokens and those
        that only fill up the vocabulary are in no text. They begin with 0xff."""
        self._tokenizer.check(CALL)
        ends = sorted(token for token in self._tokenizer.ends if token < self.size)
        if not ends:
            problem = "this model has no end token, which a grammar needs"
            raise DataError(failure(CALL, problem, "Send the request without a schema."))
        special = [i for i, kind in enumerate(self._tokenizer.kinds[: self.size]) if kind in (CONTROL, UNUSED)]
        tokens = [self._tokenizer.piece_bytes(i) for i in range(len(self._tokenizer.kinds[: self.size]))]
        for i in special:
            tokens[i] = b"\xff" + self._tokenizer.pieces[i].encode()
        names = [token.decode("latin-1") for token in tokens]
        return {"tokens": names, "special": special, "bos": self._tokenizer.bos, "ends": ends}

    def _encode(self, text: str) -> list[int] | None:
        """The tokens of a text. None where SentencePiece begins it with a space that is not there, and for a long text:
        llguidance asks for all that it has no choice about, again for each token of it."""
        if len(text) > LONGEST_FORCED:
            return None
        ids = self._tokenizer.encode(text, special=False, start=False)
        return ids if b"".join(map(self._tokenizer.piece_bytes, ids)) == text.encode() else None


class Matcher:
    """How far an answer has come along its grammar. Raises GrammarLimitError where llguidance gives up, and DataError
    where it fails."""

    def __init__(self, state: Any, size: int) -> None:
        self._state, self._size = state, size
        self._check()

    def bits(self) -> NDArray[np.uint8]:
        """Which tokens may come next, a bit for each, the lowest of a byte first; the model's ends where the answer may
        be over."""
        with self._errors():
            bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
            self._check()
        return bits

    def allowed(self) -> NDArray[np.bool_]:
        """The same as booleans [vocabulary]."""
        return np.unpackbits(self.bits(), bitorder="little", count=self._size).astype(np.bool_)

    def take(self, token: int) -> None:
        """The token was chosen."""
        with self._errors():
            self._state.consume_token(token)
            self._check()

    @property
    def complete(self) -> bool:
        """Whether nothing but an end may come."""
        with self._errors():
            return bool(self._state.is_stopped())

    def _errors(self) -> AbstractContextManager[None]:
        return library_errors(CALL, "the grammar failed, and the answer cannot go on")

    def _check(self) -> None:
        try:
            grammar_process.check(self._state)
        except ValueError as error:
            raise GrammarLimitError(
                failure(CALL, f"the schema is too complex for the answer to go on: {error}")
            ) from None


class CompiledGrammar:
    """A grammar for the vocabulary of one model. Answers of one request share it: llguidance limits the lexer states
    of all of them together, so that requests must not."""

    def __init__(self, native: Any, size: int) -> None:
        self._native, self._size = native, size

    def matcher(self) -> Matcher:
        """One for one answer."""
        return Matcher(self._native.deep_copy(), self._size)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile a grammar. Make one for each request. Raises DataError for a schema that cannot be used."""
    with library_errors(CALL, "llguidance cannot compile the schema"):
        native = grammar_process.build(require("llguidance", EXTRA), vocabulary.native, grammar.schema)
    return CompiledGrammar(native, vocabulary.size)
