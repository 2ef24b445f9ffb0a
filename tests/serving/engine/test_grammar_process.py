"""JSON schemas that overflow the stack, never end or take all memory. They are refused, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from llguidance import gbnf_to_lark
from llm_models import Small, write_model
from serving_http import process, until
from serving_support import PATIENCE, compiled, small_model

import billfish as bf
from billfish.llm import grammar, grammar_process
from billfish.llm.grammar import CHARACTERS, json_schema, text_grammar
from billfish.serving.engine import grammar_compiler
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import QueueFull, ServerClosing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork")
Schema = dict[str, Any]


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def an_object(member: Schema) -> Schema:
    return {"type": "object", "properties": {"a": member}, "required": ["a"]}


def chain(links: int, link: Callable[[Schema], Schema]) -> Schema:
    definitions = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(links)} | {str(links): {"type": "null"}}
    return {"$ref": "#/$defs/0", "$defs": definitions}


def nested(levels: int) -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(levels):
        schema = array(schema)
    return schema


def required(count: int) -> Schema:
    return {"type": "object", "required": [f"n{i}" for i in range(count)]}


def patterns(count: int, first: int = 0) -> Schema:
    """llguidance takes time and memory that grow exponentially with `count`."""
    letters = [(chr(97 + i % 26), i) for i in range(first, first + count)]
    return {"allOf": [{"type": "string", "pattern": f".*{letter}.{{{i}}}{letter}.*"} for letter, i in letters]}


# Each allOf is short enough for LIMITS.
BOMB: Schema = {"allOf": [patterns(10), patterns(10, 10), patterns(10, 20)]}
DEEP = nested(2000)
# Each of them may come next: too many for llguidance once the object has begun.
OPTIONAL: Schema = {"type": "object", "properties": {f"n{i}": {} for i in range(1500)}, "additionalProperties": False}
# Rules that refer to the next one: converting them from GBNF takes quadratic time. Short enough for LIMITS.
GRAMMAR_BOMB = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3500)) + 'r3500 ::= "a"\n'
TOO_LARGE = {
    "chain of arrays": (chain(1500, array), "different $refs"),
    "chain of objects": (chain(1000, an_object), "different $refs"),
    "chain of $refs": (chain(5000, lambda ref: ref), "different $refs"),
    "30,000 required names": (required(30_000), "30000 required names"),
    "50,000 required names": (required(50_000), "50000 required names"),
    "2,000 nested arrays": (DEEP, "levels of nesting"),
    "allOf of 30 patterns": (patterns(30), "30 members of an allOf"),
    "properties": ({"properties": {f"n{i}": {} for i in range(3000)}}, "3000 properties"),
    "values": ({"enum": list(range(30_000))}, "JSON values"),
    "pattern": ({"type": "string", "pattern": "a" * 1_000_000}, "characters"),
    "const": ({"const": "a" * 4_000_000}, "characters"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(small_model(tmp_path_factory.mktemp("model")), streams=1) as engine:
        yield engine


def children(pid: int) -> list[int]:
    """Of a process, with theirs."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found + [each for child in found for each in children(child)]


def helper(engine: Engine) -> int:
    running = engine._grammars._process._process
    assert running is not None
    return running.pid


@pytest.mark.parametrize(("schema", "why"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_schemas_that_are_too_large_are_refused_before_they_are_compiled(schema, why):
    with pytest.raises(bf.DataError, match=rf"{why.replace('$', '.')}.*limit is \d+"):
        json_schema(schema)


def test_large_schemas_of_programs_are_taken(engine):
    """Near the limits: descriptions do not count, and properties may be called as keywords are."""
    words = {"type": "string", "description": "x" * 10_000}
    for schema in (
        {"type": "object", "properties": {f"field_{i}": words for i in range(300)}},
        {
            "type": "object",
            "properties": dict.fromkeys(("allOf", "required", "properties", "$ref", "title"), words),
        },
        {"type": "object", "properties": {f"n{i}": {"type": "integer"} for i in range(500)}, **required(500)},
        {"enum": [f"value {i}" for i in range(3000)]},
        required(2000),
        chain(250, array),
        chain(250, an_object),
        nested(40),
        {"allOf": [{"type": "integer", "minimum": i} for i in range(10)]},
    ):
        compiled(engine, schema)


@pytest.mark.parametrize(
    "schema",
    [chain(1500, array), chain(1000, an_object), chain(5000, lambda ref: ref), required(30_000), patterns(30), BOMB],
    ids=["arrays", "objects", "refs", "required", "patterns", "nested allOf"],
)
def test_what_the_limits_of_size_let_through_ends_a_fork_alone(engine, monkeypatch, schema):
    for what in grammar.LIMITS:
        monkeypatch.setitem(grammar.LIMITS, what, 10**9)
    compiled(engine, {"type": "null"})
    before = helper(engine)
    with pytest.raises(bf.DataError, match="2 s, 64 MiB of memory or 4 MiB of stack"):
        compiled(engine, schema)
    compiled(engine, {"type": "integer"})
    assert helper(engine) == before


def test_a_grammar_is_converted_in_the_process_alone(engine, monkeypatch):
    """Converting takes quadratic time, in Python: here it would delay every request."""
    for name in ("any_to_lark", "gbnf_to_lark"):
        monkeypatch.setattr(gbnf_to_lark, name, lambda text: pytest.fail("converted in the server"))
    for _ in range(2):
        engine.compile(text_grammar('root ::= "a" word+\nword ::= "b" | "c"\n')).result(PATIENCE)
    with pytest.raises(bf.DataError, match=r"cannot be read.*'other' not found"):
        engine.compile(text_grammar("root ::= other")).result(PATIENCE)
    before = helper(engine)
    assert len(GRAMMAR_BOMB) < grammar.LIMITS[CHARACTERS]
    with pytest.raises(bf.DataError, match="2 s, 64 MiB of memory or 4 MiB of stack"):
        engine.compile(text_grammar(GRAMMAR_BOMB)).result(PATIENCE)
    compiled(engine, {"type": "integer"})
    assert helper(engine) == before


@pytest.mark.parametrize(
    ("text", "lark"),
    [
        ('start: "a"', True),
        ('\n \t start\n : "a"', True),
        ('%llguidance {}\nstart: "a"', True),
        ('root ::= "a"\n\n', False),
        ('root ::= "start:"', False),
        ('restart: "a"', False),
        ('root ::= "a"\n  \r\n\n %llguidance', True),
    ],
)
def test_lark_is_told_from_gbnf_as_llguidance_does(text, lark):
    assert bool(grammar_process.IS_LARK.search(text)) == gbnf_to_lark.is_lark_syntax(text) == lark


def test_a_process_that_ended_is_replaced(engine):
    compiled(engine, {"type": "null", "title": "before"})
    before = helper(engine)
    os.kill(before, signal.SIGKILL)
    compiled(engine, {"type": "null", "title": "after"})
    assert helper(engine) != before


def test_a_known_schema_needs_no_process(engine, monkeypatch):
    compiled(engine, {"type": "boolean"})
    monkeypatch.setattr(grammar_compiler.GrammarProcess, "try_schema", lambda self, schema: pytest.fail("tried again"))
    compiled(engine, {"type": "boolean"})


def test_the_first_schema_need_not_wait_for_the_process(tmp_path, monkeypatch):
    with Engine(small_model(tmp_path), streams=1) as engine, monkeypatch.context() as patched:
        engine.warm_grammars()
        patched.setattr(grammar_compiler.GrammarProcess, "_start", lambda self: pytest.fail("started again"))
        patched.setattr(grammar.Vocabulary, "record", lambda self: pytest.fail("read again"))
        compiled(engine, {"type": "boolean"})
    with Engine(small_model(tmp_path), streams=1) as engine:
        monkeypatch.setattr(engine.model.tokenizer, "ends", set())
        engine.warm_grammars()  # what a grammar would be refused for is no error here


def test_requests_do_not_share_what_a_lexer_has_learnt(engine):
    """llguidance counts the states of all copies of a matcher against one limit."""
    assert compiled(engine, {"type": "string"})._native is not compiled(engine, {"type": "string"})._native


def test_schemas_wait_for_a_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", 0.1)
    monkeypatch.setattr(grammar_compiler.GrammarProcess, "try_schema", lambda self, schema: time.sleep(0.5) or {})
    with Engine(small_model(tmp_path), streams=1) as engine:
        busy = [engine.compile(json_schema({"const": i})) for i in range(grammar_compiler.THREADS)]
        until(lambda: all(each.running() for each in busy))
        waiting = [engine.compile(json_schema({"type": "null"})) for _ in range(grammar_compiler.QUEUE)]
        with pytest.raises(QueueFull, match="32 schemas"):
            engine.compile(json_schema({"type": "null"}))
        busy[0].result()
        with pytest.raises(QueueFull, match="waited"):
            waiting[-1].result()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_engine_that_closes_waits_for_no_schema(tmp_path):
    engine = Engine(small_model(tmp_path), streams=1)
    compiled(engine, {"type": "null"})
    pid = helper(engine)
    waiting = [engine.compile(json_schema(BOMB)) for _ in range(10)]
    until(lambda: len(children(pid)) == grammar_compiler.THREADS)
    forks, began = children(pid), time.monotonic()
    engine.close()
    assert time.monotonic() - began < 1.5
    for each in waiting:
        assert isinstance(each.exception(0), ServerClosing)
    until(lambda: not any(os.path.exists(f"/proc/{each}") for each in (pid, *forks)))
    with pytest.raises(ServerClosing):
        engine.compile(json_schema({"type": "null"}))


# ---- a server -----------------------------------------------------------------------------------------------------


def post(url: str, schema: Schema | None = None, **more: Any) -> http.client.HTTPConnection:
    """Send a chat and do not wait."""
    body: Schema = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 5, **more}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def answer(connection: http.client.HTTPConnection) -> tuple[int, Schema]:
    with closing(connection):
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    write_model(tmp_path / "small.gguf", Small())
    with process(str(tmp_path / "small.gguf")) as running:
        yield running


@pytest.mark.promise(
    "server",
    "a JSON schema is bounded and compiled in a process of its own; no schema ends the server or keeps others waiting",
)
def test_a_server_survives_every_schema(server):
    for schema, why in [
        *TOO_LARGE.values(),
        (nested(200), "levels of nesting"),
        ({"$ref": "#"}, "nothing satisfies"),
        (BOMB, "MiB of stack"),
        (OPTIONAL, "items"),
    ]:
        if schema is not DEEP:  # which Python cannot write
            status, found = answer(post(server[1], schema))
            assert status == 400, found
            assert why in found["error"]["message"]
            assert found["error"]["param"] == "response_format.json_schema.schema"
    status, found = answer(post(server[1], grammar=GRAMMAR_BOMB))
    assert (status, found["error"]["param"]) == (400, "grammar")
    assert "MiB of stack" in found["error"]["message"]
    assert answer(post(server[1]))[0] == 200


@pytest.mark.promise(
    "server",
    "a JSON schema is bounded and compiled in a process of its own; no schema ends the server or keeps others waiting",
)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_schemas_that_take_long_keep_no_chat_waiting(server):
    started, url = server

    def both_are_busy() -> bool:
        return any(len(children(each)) == grammar_compiler.THREADS for each in children(started.pid))

    for _ in range(10):
        post(url, BOMB).close()  # the client goes at once
    waits = [post(url, BOMB) for _ in range(grammar_compiler.THREADS)]
    until(both_are_busy)
    began = time.monotonic()
    assert answer(post(url))[0] == 200
    assert time.monotonic() - began < 2
    assert {answer(each)[0] for each in waits} == {400}  # schemas whose clients have gone are not compiled
    connections = [post(url, BOMB) for _ in range(4)]
    until(both_are_busy)
    processes, began = children(started.pid), time.monotonic()
    started.send_signal(signal.SIGTERM)
    assert started.wait(20) == 0
    assert time.monotonic() - began < 5
    assert [answer(each)[0] for each in connections] == [503] * 4
    until(lambda: not any(os.path.exists(f"/proc/{each}") for each in processes))
