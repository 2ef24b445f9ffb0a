"""HTTP in processes of its own: what several of them share, and what becomes of all when one of them ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from llm_models import Small, write_model
from serving_http import events, process, send, serving, until

from billfish.llm.sampler import Sampling
from billfish.serving.engine.requests import Request
from billfish.serving.ipc import messages

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="no sockets that processes share"),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = 20000
ENDLESS = {"prompt": "ab", "max_tokens": LONG, "logit_bias": {"1": -100}}  # until somebody stops it


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("models") / "long.gguf"
    write_model(made, Small(context=LONG))
    return made


@pytest.fixture(scope="module")
def server(path):
    """Two fronts; the process and the address."""
    words = ["--context", str(LONG), "--streams", "3", "--queue", "2", "--activations", "exact", "--fronts", "2"]
    with process(str(path), *words) as (started, url):
        yield started, url
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0


def fronts(started) -> list[int]:
    """The front processes of a server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
                parent = re.search(r"^PPid:\s+(\d+)", (entry / "status").read_text(), re.MULTILINE)
            except OSError:
                continue
            if b"serving.http.front" in line and parent is not None and int(parent[1]) == started.pid:
                found.append(int(entry.name))
    return found


def metric(url: str, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    [line] = re.findall(rf"^billfish_{name} (\S+)$", text, re.MULTILINE)
    return float(line)


def asked(url: str, body: object) -> http.client.HTTPConnection:
    """A connection whose answer nobody has read yet."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def test_requests_keep_all_their_fields_on_the_way():
    """A field that is new is packed, too."""
    sampling = Sampling(0.5, 3, 0.9, 7, 0.1, 0.2, 0.3, 1.1, {5: 1.5})
    request = Request([5, 6], 9, sampling, ("x",), 2, shown=frozenset([3]), tenant=b"one")
    sent = messages.Ask(7, [messages.packed(request)], None)
    data = messages.msgspec.msgpack.encode(sent)
    came = messages.msgspec.msgpack.decode(data, type=messages.ToEngine)
    [found] = [messages.unpacked(each) for each in came.requests]
    for field in fields(Request):
        if field.name not in messages.HERE:
            assert getattr(found, field.name) == getattr(request, field.name), field.name


def test_answers_are_those_of_one_process(server, path):
    """Streamed or whole, with stop strings, log probabilities and a schema, many at once."""
    _, url = server
    schema = {"type": "json_object"}
    bodies = [
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 30, "temperature": 0.9, "seed": 1, "stop": ["e", "a"]}),
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 20, "seed": 2, "logprobs": 3}),
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 20, "seed": 3, "temperature": 2, "n": 2}),
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 2}),
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 40, "seed": 4, "response_format": schema}),
        (CHAT, {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "seed": 5}),
    ]

    def answered(url: str, place: str, body: dict) -> object:
        code, _, answer = send(url, place, body)
        assert code == 200, answer
        streamed = events(url, place, body | {"stream": True})
        pieces = [each["choices"][0] for each in streamed if each["choices"]]
        texts = [piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces]
        usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return answer["choices"], usage, "".join(texts) if body.get("n", 1) == 1 else ""

    with serving(path, streams=3, queue=4, context=LONG) as one:
        expected = [answered(one.url, *each) for each in bodies]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: answered(url, *each), bodies))
    assert found == expected


def test_vectors_and_refusals_cross_processes(server, path):
    _, url = server
    with serving(path, streams=1, context=LONG) as one:
        body = {"input": ["ab", "cd"]}
        assert send(url, "/v1/embeddings", body)[2]["data"] == send(one.url, "/v1/embeddings", body)[2]["data"]
    broken = {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}
    code, _, answer = send(url, COMPLETIONS, {"prompt": "ab", "response_format": broken})
    assert (code, answer["error"]["param"]) == (400, "response_format.json_schema.schema")
    code, _, answer = send(url, COMPLETIONS, {"prompt": "ab", "logit_bias": {"261": 1}})
    assert code == 400


def test_an_answer_of_one_front_goes_on_in_another(server):
    """/v1/responses keeps answers for all of them."""
    _, url = server
    id, turns = None, set()
    for _ in range(6):  # connections that two processes share
        body = {"input": "ab", "max_output_tokens": 4} | ({} if id is None else {"previous_response_id": id})
        code, _, answer = send(url, "/v1/responses", body)
        assert code == 200, answer
        id = answer["id"]
        turns.add(answer["usage"]["input_tokens"])
    assert len(turns) == 6  # each has all that was before
    assert send(url, f"/v1/responses/{id}", None, "GET")[2]["id"] == id
    assert send(url, f"/v1/responses/{id}", None, "DELETE")[0] == 200
    assert send(url, f"/v1/responses/{id}", None, "GET")[0] == 404


def test_the_queue_is_one_for_all_and_clients_that_go_are_cancelled(server):
    _, url = server
    connections = [asked(url, ENDLESS) for _ in range(5)]
    until(lambda: metric(url, "requests_running") + metric(url, "requests_waiting") == 5)
    for _ in range(4):  # whichever front is asked
        code, headers, answer = send(url, COMPLETIONS, ENDLESS)
        assert (code, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
    for connection in connections:
        connection.close()
    until(lambda: metric(url, "requests_running") + metric(url, "requests_waiting") == 0)


def test_counts_are_those_of_all_fronts(server):
    _, url = server
    name = r'http_responses_total\{path="/v1/models",status="200"\}'
    for _ in range(8):
        assert send(url, "/v1/models", None, "GET")[0] == 200
    until(lambda: metric(url, name) == 8)
    assert metric(url, "first_token_seconds_count") > 0


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_front_that_ends_is_started_again_and_its_requests_are_cancelled(server):
    started, url = server
    before = fronts(started)
    assert len(before) == 2
    body = {"prompt": "ab", "max_tokens": 2000, "logit_bias": {"1": -100}}
    connections = [asked(url, body) for _ in range(3)]
    until(lambda: metric(url, "requests_running") == 3)
    os.kill(before[0], signal.SIGKILL)
    for connection in connections:
        with contextlib.suppress(http.client.HTTPException, OSError):  # where it was that front's
            assert connection.getresponse().status == 200
        connection.close()
    until(lambda: len(fronts(started)) == 2 and before[0] not in fronts(started))
    assert metric(url, "requests_running") == 0
    for _ in range(6):
        assert send(url, COMPLETIONS, {"prompt": "ab", "max_tokens": 2})[0] == 200


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_ends_is_told_and_no_process_stays(path, stream):
    with process(str(path), "--context", str(LONG), "--fronts", "2") as (started, url):
        pids = fronts(started)
        connection = asked(url, ENDLESS | {"stream": stream})
        if stream:
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: ")
        else:
            until(lambda: metric(url, "requests_running") == 1)
        started.kill()
        answer = answer if stream else connection.getresponse()
        told = answer.read().decode()
        assert "The engine has ended." in told
        assert stream or answer.status == 500
        connection.close()
        until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids))


def test_sigterm_finishes_what_runs_in_all_fronts(path):
    with process(str(path), "--streams", "4", "--context", str(LONG), "--fronts", "2") as (started, url):
        body = {"prompt": "ab", "max_tokens": 1500, "logit_bias": {"1": -100}, "stream": True}
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(events, url, COMPLETIONS, body) for _ in range(4)]
            until(lambda: metric(url, "requests_running") == 4)
            started.send_signal(signal.SIGTERM)
            until(lambda: send(url, "/health", None, "GET")[0] == 503)
            assert send(url, COMPLETIONS, {"prompt": "ab"})[0] == 503
            for stream in streams:
                assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert started.wait(60) == 0
        log = started.stderr.read()
        assert "finishing 4 answers;" in log
        assert log.count("200, 1 + 1500 tokens") + log.count("200, 2 + 1500 tokens") == 4


@pytest.mark.parametrize("fronts", ["0", "1"])
def test_a_second_signal_ends_at_once(path, fronts):
    with process(str(path), "--context", str(LONG), "--fronts", fronts) as (started, url):
        connection = asked(url, ENDLESS)
        until(lambda: metric(url, "requests_running") == 1)
        started.send_signal(signal.SIGINT)
        until(lambda: send(url, "/health", None, "GET")[0] == 503)
        started.send_signal(signal.SIGINT)
        began = time.monotonic()
        started.wait(30)
        assert time.monotonic() - began < 20
        assert "Traceback" not in started.stderr.read()
        connection.close()


def test_keys_change_in_all_fronts(path, tmp_path):
    file = tmp_path / "KEYS"
    file.write_text("old\n")

    def status(url: str, key: str) -> set[int]:
        return {send(url, "/v1/models", None, "GET", Authorization=f"Bearer {key}")[0] for _ in range(6)}

    with process(str(path), "--api-key-file", str(file), "--fronts", "2", "--context", "100") as (started, url):
        assert (status(url, "old"), status(url, "new")) == ({200}, {401})
        file.write_text("new\n")
        started.send_signal(signal.SIGHUP)
        until(lambda: status(url, "new") == {200})
        until(lambda: status(url, "old") == {401})


def test_threads_end(path):
    """One process alone leaves nothing behind."""
    with serving(path, streams=1, context=100) as one:
        assert send(one.url, COMPLETIONS, {"prompt": "ab", "max_tokens": 2})[0] == 200
    until(lambda: not [t for t in threading.enumerate() if t.name in ("billfish engine", "billfish-closing")])
