"""What the server does with requests that are wrong, too large, too many, from strangers, or left by their clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import signal
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import uvicorn
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, Running, process, send, serving, until

from billfish.cli import serve
from billfish.cli.main import main
from billfish.core.errors import DataError
from billfish.serving.api.models import OneModel
from billfish.serving.engine.grammar_compiler import GrammarProcess
from billfish.serving.http import app, bodies, keys
from billfish.serving.http.server import Server

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "ab"}]
TOOL = {"type": "function", "function": {"name": "clock"}}
LONG = 20000
ENDLESS = {"prompt": "ab", "max_tokens": LONG, "logit_bias": {"1": -100}}  # until somebody stops it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models: small; bare, without a chat template; long, whose answers take a while."""
    made = tmp_path_factory.mktemp("models")
    write_model(made / "small.gguf", Small())
    write_model(made / "bare.gguf", Small(template=""))
    write_model(made / "tools.gguf", Small(template=TOOLS_TEMPLATE))
    write_model(made / "long.gguf", Small(context=LONG))
    return made


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder / "small.gguf", streams=2, queue=4) as running:
        yield running


def refused(server: Running, path: str, body: object, status: int = 400) -> dict[str, object]:
    """The error, in OpenAI's shape."""
    code, _, answer = send(server.url, path, body)
    assert code == status, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


# ---- fields -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "facts"),
    [
        ("temperature", "hot", ['"hot"', "number", "from 0 to 2"]),
        ("temperature", 2.1, ["2.1", "from 0 to 2"]),
        ("temperature", True, ["true", "from 0 to 2"]),
        ("min_p", -1, ["-1", "from 0 to 1"]),
        ("top_p", -0.1, ["-0.1", "from 0 to 1"]),
        ("top_k", 1.5, ["1.5", "integer"]),
        ("max_tokens", -2, ["-2", "integer from -1"]),
        ("tool_choice", "required", ["tools"]),
        ("tool_choice", {"type": "allowed_tools"}, ["tool_choice.allowed_tools", "missing", "mode and tools"]),
        ("tool_choice", {"type": "function"}, ["tool_choice.function", "missing", "name"]),
        ("reasoning_effort", "much", ['"much"', "low", "high"]),
        ("presence_penalty", 3, ["3", "from -2 to 2"]),
        ("frequency_penalty", [], ["a list of 0", "from -2 to 2"]),
        ("repetition_penalty", 0, ["above 0", "to 10"]),
        ("max_completion_tokens", "5", ['"5"', "integer"]),
        ("n", 10**30, ["from 1 to 6"]),
        ("n", 7, ["7", "from 1 to 6"]),
        ("stop", [""], ["1 to 1000 characters"]),
        ("stop", "x" * 1001, ["0 to 1000 characters"]),
        ("stop", ["x"] * 17, ["a list of 17", "at most 16"]),
        ("stream", 1, ["is 1", "true or false"]),
        ("logit_bias", {"261": 1}, ["tokens from 0 to 260"]),
        ("logit_bias", {"x": 1}, ["tokens from 0 to 260"]),
        ("logit_bias", {"5": 101}, ["from -100 to 100"]),
        ("logit_bias", [5], ["an object"]),
        ("logit_bias", {str(token): 1 for token in range(1025)}, ["an object of 1025", "at most 1024"]),
        ("logprobs", 1, ["is 1", "true or false"]),
        ("top_logprobs", 3, ['"logprobs": true']),
        ("response_format", "json", ['"json"', "an object", "type"]),
        ("response_format", {"type": "xml"}, ['"xml"', "text", "json_object", "json_schema"]),
        ("response_format", {"type": "json_schema"}, ["missing", "schema"]),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}, ["odd"]),
        ("tools", [{"type": "search"}], ['"search"', "function"]),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], ['"a b"', "{1,128}"]),
        ("tools", [TOOL, TOOL], ["same name"]),
        ("modalities", ["audio"], ["text"]),
        ("messages", [], ["at least 1"]),
        ("messages", None, ["missing", "at least 1"]),
        ("messages", ["ab"], ['"ab"', "an object", "role"]),
        ("messages", [{"role": "poet", "content": "ab"}], ['"poet"', "system", "developer", "user", "tool"]),
        ("messages", [{"role": "user"}], ["missing", "string"]),
        ("messages", [{"role": "assistant"}], ["neither content", "tool_calls"]),
        ("messages", [{"content": "ab"}], ["messages[0].role", "missing", "developer", "user"]),
        ("messages", [{"role": "tool", "content": "ab"}], ["tool_call_id", "missing"]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "text": ""}]}], ['"image_url"', "text"]),
        ("messages", [{"role": "user", "content": "ab"}] * 129, ["129 messages", "128 tokens"]),
    ],
)
def test_a_field_that_is_wrong_is_named(server, field, value, facts):
    error = refused(server, CHAT, {"messages": MESSAGES, field: value})
    assert [fact for fact in facts if fact not in error["message"]] == []
    assert error["param"].startswith(field)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["x" * 3_000_000, "x` - at `$.model", "", "a\nb", "$", "messages[0]", "é"])
def test_names_of_unknown_fields_may_be_anything(server, name):
    code, headers, _ = send(server.url, CHAT, {"messages": MESSAGES, "max_tokens": 1, name: 1})
    assert code == 200
    assert len(headers["x-billfish-ignored"]) < 200
    assert headers["x-billfish-ignored"].isascii()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "ab", "temperature": 99, "temperature": 0}', "temperature"),
        (b'{"prompt": "ab", "stop": null, "logit_bias": {"5": 1, "5": 2}}', "5"),
    ],
)
def test_a_name_twice_is_refused(server, body, param):
    error = refused(server, COMPLETIONS, body)
    assert (error["param"], error["code"]) == (param, "duplicate_field")


def test_fields_of_completions_and_embeddings(server):
    for path, body, param, *facts in (
        (COMPLETIONS, {"prompt": "ab", "suffix": "b"}, "suffix", "infill"),
        (COMPLETIONS, {"prompt": "ab", "best_of": 1, "n": 2}, "best_of", "is 1", "2"),
        (COMPLETIONS, {"prompt": "ab", "best_of": 2, "stream": True}, "best_of", "stream"),
        (COMPLETIONS, {"prompt": "ab", "logprobs": 21}, "logprobs", "an integer from 0 to 20"),
        (COMPLETIONS, {}, "prompt", "a string"),
        (COMPLETIONS, {"prompt": []}, "prompt", "a string"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt[0]", "at least one token"),
        (COMPLETIONS, {"prompt": [261]}, "prompt", "261", "0 to 260"),
        (COMPLETIONS, {"prompt": [5, None]}, "prompt", "null", "0 to 260"),
        (COMPLETIONS, {"prompt": ["ab", 5]}, "prompt[1]", "is 5", "a string"),
        (COMPLETIONS, {"prompt": ["ab"] * 7}, "prompt", "7", "at most 6"),
        (COMPLETIONS, {"prompt": ["ab"] * 3, "n": 3}, "prompt", "3", "at most 2"),
        (COMPLETIONS, {"prompt": "b" * 130}, "prompt", "130 tokens", "128"),
        (COMPLETIONS, {"prompt": "ab" * 9000}, "prompt", "18000 characters", "128 tokens"),
        (EMBEDDINGS, {"input": ""}, "input", "at least one token"),
        (EMBEDDINGS, {"input": ["ab"] * 2049}, "input", "2049", "2048"),
        (EMBEDDINGS, {"input": "ab", "dimensions": 5}, "dimensions", "is 5", "64"),
        (EMBEDDINGS, {"input": "b" * 130}, "input", "130 tokens", "128"),
        (EMBEDDINGS, {"input": "ab", "encoding_format": "int8"}, "encoding_format", "float", "base64"),
    ):
        error = refused(server, path, body)
        assert error["param"] == param
        assert [fact for fact in facts if fact not in error["message"]] == []
    error = refused(server, CHAT, {"messages": [{"role": "user", "content": "b" * 130}]})
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), (EMBEDDINGS, "input")])
def test_prompts_are_counted_before_they_are_encoded(server, path, field, monkeypatch):
    """An 8 MB list of them would keep the threads that encode for a minute."""
    encoded, encode = [], server.model.tokenizer.encode

    def counted(text, **how):
        encoded.append(text)
        return encode(text, **how)

    monkeypatch.setattr(server.model.tokenizer, "encode", counted)
    assert refused(server, path, {field: ["a"] * 5000})["param"] == field
    assert encoded == []
    assert refused(server, path, {field: ["b" * 130] * 5})["code"] == "context_length_exceeded"
    assert len(encoded) == 1


def test_null_is_as_good_as_no_field(server):
    status, _, answer = send(server.url, CHAT, {"messages": MESSAGES, "max_tokens": 1, "stop": None, "user": None})
    assert status == 200, answer


@pytest.mark.promise("server", "a body may be any bytes of any length")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "ab", "temperature": NaN}',
        b'{"prompt": "ab", "temperature": Infinity}',
        b'{"prompt": "ab", "temperature": 1e999}',
        b'{"prompt": "ab", "temperature": 1' + b"0" * 400 + b"}",
        b'{"prompt": "ab", "seed": 1' + b"0" * 400 + b"}",
        b'{"prompt": "ab", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100000,
        b"\x00" * 100,
        '{"prompt": "ab"}'.encode("utf-16"),
    ],
    ids=range(16),
)
def test_a_hostile_body_is_refused(server, body):
    assert refused(server, COMPLETIONS, body)["param"] in ("body", "prompt", "temperature", "seed")


@pytest.mark.promise("server", "a body may be any bytes of any length")
def test_a_body_that_is_too_large(server, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_BYTES", 100_000)
    assert refused(server, COMPLETIONS, b"x" * 100_001, 413)["code"] == "body_too_large"
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    parts = iter([b"x" * 1000] * 500)  # chunked, without a length
    connection.request("POST", COMPLETIONS, parts, {"Content-Type": "application/json"}, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert "limit is 100000 bytes" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_a_body_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: 10\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_paths_methods_and_types(server):
    for path, method, status in (("/v2", "GET", 404), (CHAT, "GET", 405), ("/health", "POST", 405)):
        code, _, answer = send(server.url, path, b"" if method == "POST" else None, method)
        assert (code, answer["error"]["code"]) == (status, "unknown_url")
    code, _, answer = send(server.url, CHAT, {"messages": MESSAGES}, Content_Type="text/plain")
    assert code == 415
    assert "text/plain" in answer["error"]["message"]
    assert "application/json" in answer["error"]["message"]
    assert send(server.url, "/health", None, "GET")[::2] == (200, {"status": "ok"})


def test_only_browsers_must_send_a_content_type(server):
    """Some programs send none. A page of another site may send none as well, but the browser tells its origin."""
    for headers, status in (({}, 200), ({"Origin": "http://other"}, 415), ({"Sec-Fetch-Site": "cross-site"}, 415)):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        connection.request("POST", COMPLETIONS, b'{"prompt": "ab", "max_tokens": 1}', headers)
        assert connection.getresponse().status == status
        connection.close()


def test_metrics_are_what_prometheus_reads(server):
    send(server.url, COMPLETIONS, {"prompt": "ab", "max_tokens": 2})
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(samples['billfish_http_responses_total{path="/v1/completions",status="200"}']) >= 1
    assert float(samples["billfish_generated_tokens_total"]) >= 1
    assert float(samples["billfish_cache_bytes"]) <= float(samples["billfish_cache_bytes_bound"])
    kinds = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert all(re.sub(r"(_sum|_count|_bucket)?(\{.*)?$", "", name) in kinds for name in samples)


def test_a_model_without_a_template_has_completions_alone(folder):
    with serving(folder / "bare.gguf", streams=1) as server:
        assert "no chat template" in refused(server, CHAT, {"messages": MESSAGES})["message"]
        assert send(server.url, COMPLETIONS, {"prompt": "ab", "max_tokens": 1})[0] == 200


def test_choices_and_calls_that_are_wrong(folder):
    with serving(folder / "tools.gguf", streams=1) as server:
        body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}
        assert refused(server, CHAT, body)["param"] == "tool_choice"
        bad = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "[1]"}}
        body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [bad]}]}
        assert refused(server, CHAT, body)["param"] == "messages[1].tool_calls[0].function.arguments"


# ---- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise("server", "with API keys nobody is served without one; comparison takes constant time")
def test_a_key_is_asked_for(folder):
    with serving(folder / "small.gguf", streams=1, keys=["first", "second"]) as server:
        body = {"prompt": "ab", "max_tokens": 1}
        for given in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}, {"Authorization": "Bearer "}):
            code, headers, answer = send(server.url, COMPLETIONS, body, **given)
            assert (code, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert send(server.url, COMPLETIONS, body, Authorization=f"Bearer {key}")[0] == 200
        for path in ("/v1/models", "/metrics"):
            assert send(server.url, path, None, "GET")[0] == 401
        assert send(server.url, "/health", None, "GET")[0] == 200
        with urllib.request.urlopen(server.url + "/") as answer:
            assert answer.status == 200


@pytest.mark.promise("server", "with API keys nobody is served without one; comparison takes constant time")
def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    keys.Keys(["one", "a longer key"]).check("Bearer one")
    assert len(compared) == 2  # the first match does not end it
    assert {len(each) for pair in compared for each in pair} == {32}


def test_files_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    keys.read_keys(str(file)).check("Bearer two")
    for content, got in (("# none\n", "has no keys"), ("a b\n", "with spaces")):
        file.write_text(content)
        with pytest.raises(DataError, match=got):
            keys.read_keys(str(file))
    with pytest.raises(DataError, match=r"cannot read --api-key-file.*none"):
        keys.read_keys(str(tmp_path / "none"))


# ---- many, and those who leave ------------------------------------------------------------------------------------


@pytest.mark.promise("server", "a full queue answers 429 at once")
def test_a_full_queue_is_refused_at_once(folder):
    with serving(folder / "long.gguf", context=LONG, streams=1, queue=1) as server, ThreadPoolExecutor(2) as pool:
        connections = [_ask(server, ENDLESS) for _ in range(2)]
        until(lambda: server.engine.counts().waiting == 1)
        code, headers, answer = send(server.url, COMPLETIONS, ENDLESS)
        assert (code, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        # n answers take n places, or none.
        connections.pop().close()
        until(lambda: server.engine.counts().waiting == 0)
        assert send(server.url, COMPLETIONS, ENDLESS | {"n": 2})[0] == 429
        until(lambda: server.engine.counts().waiting == 0)
        assert pool.submit(lambda: server.engine.counts().running).result() == 1
        connections.pop().close()
        until(lambda: server.engine.counts().running == 0)


@pytest.mark.promise("server", "a client that disconnects frees its slot")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_is_cancelled(folder, stream):
    with serving(folder / "long.gguf", context=LONG, streams=2) as server:
        connection = _ask(server, ENDLESS | {"stream": stream, "n": 2})
        until(lambda: server.engine.counts().running == 2)
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        connection.close()
        until(lambda: server.engine.counts().running == 0)
        assert server.engine.counts().finished["cancelled"] == 2


@pytest.mark.promise("server", "a client that disconnects frees its slot")
def test_a_client_that_goes_gets_no_vectors(folder):
    with serving(folder / "long.gguf", context=LONG, streams=1) as server:
        connection = _ask(server, {"input": ["ab" * 5000] * 40}, EMBEDDINGS)
        until(lambda: server.engine.counts().running == 1)
        connection.close()
        until(lambda: server.engine.counts().running == 0)


@pytest.mark.promise("server", "a client that disconnects frees its slot")
def test_the_request_of_a_client_that_is_gone_is_not_read(folder, monkeypatch):
    """Its connection ends right behind the body, as those of clients that only close their side do."""
    monkeypatch.setattr(app, "parse", lambda *arguments, **options: pytest.fail("parsed"))
    came = [{"type": "http.request", "body": b'{"prompt": "ab"}'}, {"type": "http.disconnect"}]
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return came.pop(0)

    async def send(message: object) -> None:
        sent.append(message)

    with serving(folder / "small.gguf", streams=1) as server:
        endpoint = app.make_app(OneModel(server.service), keys.Keys([]))
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "root_path": ""}
        asyncio.run(endpoint({**scope, "headers": [(b"host", b"localhost")]}, receive, send))
    assert (came, sent) == ([], [])


def test_an_answer_that_fails_is_told(folder, monkeypatch):
    with serving(folder / "small.gguf", streams=1) as server:
        monkeypatch.setattr(server.model.decoder, "choose", lambda *_: 1 / 0)
        error = refused(server, COMPLETIONS, {"prompt": "ab"}, 500)
        assert (error["type"], error["code"]) == ("server_error", "generation_failed")
        connection = _ask(server, {"prompt": "ab", "stream": True})
        lines = connection.getresponse().read().decode().splitlines()
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"
        connection.close()


def test_the_engine_waits_little_for_python_code_of_requests(server, monkeypatch):
    """Python's 5 ms, several times a token, made answers three times as long beside a flood of requests."""
    seen = list[float]()
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_: seen.append(sys.getswitchinterval()))
    earlier = sys.getswitchinterval()  # of the server of this module
    sys.setswitchinterval(0.005)
    try:
        Server.run(object.__new__(Server))
        assert sys.getswitchinterval() == pytest.approx(0.005)
    finally:
        sys.setswitchinterval(earlier)
    assert seen == [pytest.approx(0.0001)]


def test_a_schema_that_takes_too_much_within_an_answer_is_refused(folder, monkeypatch):
    """After the tokens that are tried before: none are. 800 properties may come next, too many for llguidance."""
    monkeypatch.setattr(GrammarProcess, "try_schema", lambda self, schema: "")
    many = {"type": "object", "properties": {f"n{i}": {} for i in range(800)}, "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": many}}
    body = {"prompt": "ab", "response_format": format, "temperature": 0, "max_tokens": 50}
    with serving(folder / "small.gguf", streams=1) as server:
        body["logit_bias"] = {server.model.encode("{")[-1]: 100, server.model.encode(" ")[-1]: -100}
        error = refused(server, COMPLETIONS, body)
        assert error["param"] == "response_format.json_schema.schema"
        assert "too complex" in error["message"]
        connection = _ask(server, body | {"stream": True})
        lines = connection.getresponse().read().decode().splitlines()
        assert "too complex" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
        connection.close()
        assert server.engine.counts().finished["refused"] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_tells_that_the_engine_has_ended(folder, monkeypatch):
    with serving(folder / "small.gguf", streams=1) as server:
        engine = server.engine
        monkeypatch.setattr(engine, "_step", lambda: sys.exit())
        monkeypatch.setattr(engine, "_fail_all", lambda error: sys.exit())
        connection = _ask(server, {"prompt": "ab"})
        until(lambda: not engine.is_alive)
        assert send(server.url, "/health", None, "GET")[::2] == (503, {"status": "failed"})
        assert refused(server, COMPLETIONS, {"prompt": "ab"}, 503)["code"] == "server_closing"
        connection.close()


def test_a_full_queue_keeps_the_vectors_of_a_request(folder):
    """Its texts have one place together."""
    with serving(folder / "long.gguf", context=LONG, streams=2, queue=1) as server:
        running = _ask(server, ENDLESS)
        until(lambda: server.engine.counts().running == 1)
        vectors = _ask(server, {"input": ["ab" * 100] * 12}, EMBEDDINGS)
        until(lambda: server.engine.counts().prompt_tokens > 300)
        others = [_ask(server, ENDLESS | {"max_tokens": 300})]  # its end makes room for the texts that are left
        answer = vectors.getresponse()
        others += [_ask(server, ENDLESS)]
        assert (answer.status, len(json.loads(answer.read())["data"])) == (200, 12)
        for connection in (running, vectors, *others):
            connection.close()


def test_a_fault_of_ours_tells_nothing_of_the_inside(server, monkeypatch, caplog):
    monkeypatch.setattr(server.engine, "counts", lambda: 1 / 0)
    code, _, answer = send(server.url, "/metrics", None, "GET")
    assert code == 500
    assert "division" not in json.dumps(answer)
    assert "division by zero" in caplog.text


def _ask(server: Running, body: object, path: str = COMPLETIONS) -> http.client.HTTPConnection:
    """A connection whose answer nobody has read yet."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.mark.promise("server", "SIGTERM loses no answer")
def test_sigterm_finishes_what_runs_and_refuses_what_comes(folder):
    with process(str(folder / "long.gguf"), "--streams", "1", "--context", str(LONG)) as (started, url):
        line = started.stdout.readline()
        assert "127.0.0.1" in line
        assert "--host 0.0.0.0" in line
        netloc = urlsplit(url).netloc
        running, coming = http.client.HTTPConnection(netloc), http.client.HTTPConnection(netloc)
        body = ENDLESS | {"max_tokens": 3000, "stream": True}
        running.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        answer = running.getresponse()
        assert answer.readline().startswith(b"data: ")
        started.send_signal(signal.SIGTERM)
        until(lambda: send(url, "/health", None, "GET")[0] == 503)
        coming.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        refusal = coming.getresponse()
        assert (refusal.status, json.loads(refusal.read())["error"]["code"]) == (503, "server_closing")
        events = answer.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        coming.close()
        running.close()
        assert started.wait(60) == 0
        log = started.stderr.read().splitlines()
        [told] = [line for line in log if "finishing 1 answer;" in line]
        assert "Ctrl-C again" in told
        posts = [line.split(" 127.0.0.1 ")[1] for line in log if "POST" in line]
        assert posts[0].startswith(f"POST {COMPLETIONS} 503, ")
        assert re.fullmatch(rf"POST {COMPLETIONS} 200, \d+ \+ 3000 tokens, \d+\.\d+ s", posts[1])


def test_an_open_address_without_keys_is_warned_of(folder):
    with process(str(folder / "small.gguf"), "--host", "0.0.0.0") as (started, _):
        assert "0.0.0.0" in started.stdout.readline()
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
        error = started.stderr.read()
        assert "warning: " in error
        assert "--api-key-file FILE" in error


def test_a_name_and_keys_of_the_command_line_and_no_access_log(folder, tmp_path):
    (tmp_path / "keys").write_text("of-the-file\n")
    words = ["--alias", "mine", "--api-key", "one", "--api-key", "two", "--api-key-file", str(tmp_path / "keys")]
    with process("-m", str(folder / "small.gguf"), *words, "--no-access-log") as (started, url):
        for key, known in (("one", True), ("two", True), ("of-the-file", True), ("three", False)):
            code, _, answer = send(url, "/v1/models", None, "GET", Authorization=f"Bearer {key}")
            assert code == (200 if known else 401)
            assert not known or answer["data"][0]["id"] == "mine"
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
        assert started.stderr.read() == "billfish: stopping\n"


def test_a_line_is_logged_for_each_request(server, caplog):
    caplog.set_level(logging.INFO, "billfish.access")
    prompt = ENDLESS | {"prompt": [5, 6, 7], "max_tokens": 4}
    for words in ((COMPLETIONS, prompt), ("/no/such%0a", None), (COMPLETIONS, "no object"), ("/health", None, "GET")):
        send(server.url, *words)
    until(lambda: len(caplog.messages) == 4)
    found = [re.sub(r"[\d.]+ s$", "T", message.removeprefix("127.0.0.1 ")) for message in caplog.messages]
    assert found == [
        f"POST {COMPLETIONS} 200, 3 + 4 tokens, T",
        "POST /no/such\\n 404, T",
        f"POST {COMPLETIONS} 400, T",
        "GET /health 200, T",
    ]


def test_words_of_the_command_that_are_wrong(folder, capsys):
    model = str(folder / "small.gguf")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, facts in (
            (["--port", port], rf"{port}.*in use"),
            (["--port", "70000"], "70000"),
            (["--host", "no.such.host.invalid"], r"no\.such\.host\.invalid"),
            (["--port", "0", "--api-key", "with space"], "--api-key"),
            (["-m", model], "-m"),
            (["--port", "0", "--streams", "0"], r"streams.*0.*1 or more"),
            (["--port", "0", "--context", "129"], r"context.*129.*1 to 128"),
            (["--api-key-file", "/no/such/file"], r"--api-key-file.*/no/such/file"),
        ):
            assert main(["serve", model, *words]) == 2
            assert re.search(facts, capsys.readouterr().err)


@pytest.mark.parametrize("package", serve.PACKAGES)
def test_a_missing_package_is_named_with_the_command_that_brings_it(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert f"{package} is not installed" in error
    assert "pip install '.[serve]'" in error
