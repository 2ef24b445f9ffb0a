"""The process that tries JSON schemas and grammars. :mod:`billfish.serving.engine.grammar_compiler` runs this script.

A schema comes from a stranger, and llguidance may recurse without end or take exponential time and memory for it. So
this process compiles it first. It also converts GBNF to Lark, which takes quadratic time. It holds the vocabulary and
forks for each schema. The system ends a fork that takes more than the limits below, and nothing else is lost.

Standard input is a Unix socket. Each message on it carries another socket, with JSON to read up to its end and
JSON to answer. The first is the vocabulary. Each further one is a schema; the answer is {} or {"error": ...}, or
{"lark": ...} for a text that was converted. A fork that was ended closes its socket without an answer.

Only the standard library and llguidance are imported, so that the process is small and has one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

CPU_SECONDS = 2  # an ordinary schema takes 2 ms, one with 2,000 optional properties 0.8 s
WALL_SECONDS = 6
MEMORY_BYTES = 64 * 2**20  # beyond the vocabulary
STACK_BYTES = 4 * 2**20  # much less than the threads of the server have, which compile the schema after us
# While an answer is generated: states of the lexer, and what one token may cost in the thread of the engine.
LEXER_STATES, STEP_ITEMS, STEP_FUEL = 50_000, 50_000, 100_000
TRIED_TOKENS = 8  # of an answer: what exceeds these limits often does so soon
ERROR_LENGTH = 500
LARK = "%llguidance {}"  # what a grammar in Lark begins with
TEXT = "%text\n"  # what precedes a grammar that a client wrote, in GBNF or in Lark
# As llguidance tells Lark from GBNF, but in linear time: its own pattern is quadratic in empty lines.
IS_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
# Bounded white space: small models would otherwise write it for ever. Unknown keywords are errors, and "x-guidance" in
# a schema cannot change that.
OPTIONS = {"whitespace_pattern": r"[ \t\n]{0,16}", "lenient": False, "coerce_one_of": False}


def main(folders: list[str]) -> None:
    """Fork for each schema until the other end is closed. `folders` are where llguidance is."""
    sys.path += folders  # last, so that they shadow nothing
    import llguidance
    import llguidance.gbnf_to_lark  # here, that no fork need import it

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes forks that have ended
    control = socket.socket(fileno=0)
    tokenizer: Any = None
    while connection := next_connection(control):
        with connection:
            if tokenizer is None:
                tokenizer = Tokens(json.loads(read(connection))).native(llguidance)
                connection.sendall(b"{}")
            elif os.fork() == 0:
                control.close()
                set_limits()
                connection.sendall(json.dumps(tried(llguidance, tokenizer, connection)).encode())
                os._exit(0)


def next_connection(control: socket.socket) -> socket.socket | None:
    """The next socket that was sent, or None at the end."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def read(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


def tried(library: Any, tokenizer: Any, connection: socket.socket) -> dict[str, str]:
    """The answer for a schema."""
    try:
        given = read(connection).decode()
        schema = converted(given)
        go_on(build(library, tokenizer, schema))
    except BaseException as error:  # a panic inside llguidance is no Exception
        return {"error": str(error)[:ERROR_LENGTH]}
    return {"lark": schema} if given.startswith(TEXT) else {}


def converted(schema: str) -> str:
    """Lark instead of a text behind `TEXT`; anything else as it is. Raises ValueError for a text that is no GBNF."""
    if not schema.startswith(TEXT):
        return schema
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = schema[len(TEXT) :]
    try:
        lark = text if IS_LARK.search(text) else gbnf_to_lark(text)
    except Exception as error:  # it has no class for all that it raises
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"the grammar cannot be read: {problem}") from None
    return lark if lark.startswith(LARK) else f"{LARK}\n{lark}"


def build(library: Any, tokenizer: Any, schema: str) -> Any:
    """An LLMatcher for a schema or a grammar, with its first mask computed. Raises ValueError for what cannot be
    used."""
    schema = converted(schema)
    if schema.startswith(LARK):
        source = library.LLMatcher.grammar_from_lark(schema)
    else:
        source = library.LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    limits = library.LLParserLimits(
        max_lexer_states=LEXER_STATES, step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, verbose_errors=False
    )
    matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    check(matcher)
    return matcher


def go_on(matcher: Any) -> None:
    """Take TRIED_TOKENS tokens that the grammar allows, always the same ones. Raises ValueError as `build` does."""
    rng = random.Random(0)
    for _ in range(TRIED_TOKENS):
        mask = matcher.compute_bitmask()
        start = rng.randrange(len(mask))
        from_start = mask[start:] + mask[:start]
        rest = from_start.lstrip(b"\0")
        if not rest or matcher.is_stopped():
            break
        place = (start + len(mask) - len(rest)) % len(mask)
        matcher.consume_token(8 * place + (rest[0] & -rest[0]).bit_length() - 1)
    check(matcher)


def check(matcher: Any) -> None:
    """Raises ValueError where llguidance has given up."""
    if matcher.is_error():
        error = matcher.get_error().removesuffix("\n<non-verbose/>")
        raise ValueError("nothing satisfies it" if error.startswith("NoExtension") else error)


class Tokens:
    """A vocabulary that came as JSON, as llguidance takes it. encode: the tokens of a text that the grammar leaves no
    choice about; None for the longest ones that fit."""

    def __init__(
        self, vocabulary: dict[str, Any], encode: Callable[[str], list[int] | None] = lambda text: None
    ) -> None:
        self.tokens = [token.encode("latin-1") for token in vocabulary["tokens"]]
        self.special_token_ids, self.bos_token_id = vocabulary["special"], vocabulary["bos"]
        self._ends, self._encode = vocabulary["ends"], encode
        self.eos_token_id = self._ends[0]

    def native(self, library: Any, size: int | None = None) -> Any:
        """An LLTokenizer."""
        size = len(self.tokens) if size is None else size
        self._native = library.LLTokenizer(library.TokenizerWrapper(self), size, self._ends)
        return self._native

    def __call__(self, text: str) -> list[int]:
        ids = self._encode(text)
        return self._native.greedy_tokenize(text) if ids is None else ids


def set_limits() -> None:
    """Limit this process. macOS does not limit memory."""
    import resource

    for limit, most in (
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_DATA, data_bytes() + MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        with contextlib.suppress(OSError, ValueError):  # a system that has no such limit
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    for number in (signal.SIGPROF, signal.SIGALRM):  # whoever started us may have ignored or blocked them
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def data_bytes() -> int:
    """What RLIMIT_DATA counts already."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


if __name__ == "__main__":
    main(sys.argv[1:])
