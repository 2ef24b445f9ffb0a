"""What clients may send before anybody has looked at it: heads, trailers, pipelines, connections, bodies, hosts."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from llm_models import Small, write_model
from serving_http import Running, process, send, serving

from billfish.serving.http import limits, protocol
from billfish.serving.http import server as server_module
from billfish.serving.http.hosts import HostCheck
from billfish.serving.http.keys import Keys

COMPLETIONS = "/v1/completions"
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(path, Small())
    return path


@pytest.fixture(scope="module")
def server(model):
    with serving(model, streams=2, queue=4) as running:
        yield running


def connect(server: Running | str) -> socket.socket:
    url = urlsplit(server if isinstance(server, str) else server.url)
    made = socket.create_connection((url.hostname, url.port))
    made.settimeout(10)
    return made


def answer_to(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(2**16):
            came += data
    return came


def push(client: socket.socket, data: bytes, most: int) -> int:
    """Send the same again and again, until the server has had enough. Returns how many bytes it took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            client.sendall(data)
            sent += len(data)
    return sent


def is_healthy(server: Running | str) -> bool:
    return send(server if isinstance(server, str) else server.url, "/health", None, "GET")[0] == 200


# ---- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "server",
    "headers, trailers, pipelines and connections are limited in size, number and time; slow ones keep nobody out",
)
@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (HEAD, b"".join(b"h%d: v\r\n" % i for i in range(1000))),
        (HEAD + b"x: ", b"v" * 10_000),
        (HEAD, b"x" * 10_000),
        (b"GET /", b"x" * 10_000),
        (b"GET /?", b"x=1&" * 10_000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"a: b\r\n" * 1000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\na: ", b"b" * 10_000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"b" * 10_000),
    ],
    ids=["lines", "value", "name", "path", "query", "trailers", "trailer", "extension"],
)
def test_a_head_without_end_is_cut(server, begin, endless):
    """Megabytes may be on their way in buffers of the system; the server reads a few hundred kB at most."""
    with connect(server) as client:
        client.sendall(begin)
        assert push(client, endless, 64 << 20) < 64 << 20
    assert is_healthy(server)


def test_a_head_that_is_too_long_is_told(server):
    for lines in (b"x: %s\r\n" % (b"v" * limits.HEAD_BYTES), b"x: v\r\n" * limits.HEAD_LINES):
        with connect(server) as client:
            client.sendall(HEAD + lines + b"\r\n")
            assert answer_to(client).startswith(b"HTTP/1.1 431 ")
    with connect(server) as client:
        client.sendall(HEAD + b"connection: close\r\n" + b"x: v\r\n" * 100 + b"y: " + b"v" * 40_000 + b"\r\n\r\n")
        assert answer_to(client).startswith(b"HTTP/1.1 200 ")


def test_a_trailer_is_no_header(server):
    """Else a proxy and the server would not agree about what was asked."""
    body = b"1\r\n{\r\n0\r\nContent-Type: application/json\r\n\r\n"
    with connect(server) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: x\r\nConnection: close\r\n")
        client.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert answer_to(client).startswith(b"HTTP/1.1 415 ")


def test_a_body_of_tiny_chunks_is_cut(server):
    """A chunk of a byte costs what a large one does: eight such bodies kept all others waiting for half a minute."""
    clients = [connect(server) for _ in range(8)]
    started = time.monotonic()
    for client in clients:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        assert push(client, b"1\r\n \r\n" * 5000, 9_000_000) < 9_000_000
        client.close()
    assert is_healthy(server)
    assert time.monotonic() - started < 5


def test_too_many_chunks_are_told(server):
    with connect(server) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * limits.BODY_CHUNKS)
        time.sleep(0.2)
        client.sendall(b"1\r\n \r\n")
        assert b"more than 16384 chunks" in answer_to(client)


def test_a_body_of_many_chunks_is_read(server):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with connect(server) as client:
        client.sendall(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
        assert answer_to(client).startswith(b"HTTP/1.1 200 ")


def test_a_slow_head_is_closed(server, monkeypatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with connect(server) as silent, connect(server) as slow:
        started = time.monotonic()
        slow.sendall(b"GET / HTTP/1.1\r\nX-a: ")
        assert answer_to(slow).startswith(b"HTTP/1.1 408 ")
        assert answer_to(silent) == b""
        assert time.monotonic() - started < 5
    with connect(server) as kept:
        kept.sendall(HEAD + b"\r\n")  # the time begins again with each request
        kept.recv(2**16)
        kept.sendall(b"\r\nGET / HTTP/1.1\r\nX-a: ")
        assert b"HTTP/1.1 408 " in answer_to(kept)


def test_the_rest_of_a_body_that_nobody_needs_is_not_awaited(server, monkeypatch):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.3)
    with connect(server) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
        started = time.monotonic()
        assert answer_to(client).startswith(b"HTTP/1.1 404 ")
        assert time.monotonic() - started < 4


def test_pipelined_requests_are_answered_in_order(server):
    """However many there are, few are parsed at once."""
    body = json.dumps({"prompt": "ab", "max_tokens": 1}).encode()
    posts = [POST + b"Content-Length: %d\r\n\r\n" % len(body) + body] * 3
    with connect(server) as client:
        client.sendall(b"".join([*posts, *[HEAD + b"\r\n"] * 3000, HEAD + b"Connection: close\r\n\r\n"]))
        came = answer_to(client)
    assert came.count(b"HTTP/1.1 200 ") == 3004
    assert came.index(b'{"status"') > came.rindex(b'"text_completion"')


# ---- connections --------------------------------------------------------------------------------------------------


def test_the_oldest_idle_connection_makes_room(model, monkeypatch):
    monkeypatch.setattr(limits, "CONNECTIONS", 10)
    with serving(model, streams=2, queue=4) as server, contextlib.ExitStack() as open_ones:
        idle = [open_ones.enter_context(connect(server)) for _ in range(40)]
        for client in idle:
            client.sendall(b"GET / HTTP/1.1\r\nX-a: ")
        assert is_healthy(server)
        assert answer_to(idle[0]) == b""


@pytest.mark.promise(
    "server",
    "headers, trailers, pipelines and connections are limited in size, number and time; slow ones keep nobody out",
)
@pytest.mark.process
def test_slow_heads_do_not_keep_others_out(model):
    """More connections than the process may have files: others are served at once."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); " + (
        "from billfish.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            url = "http://" + started.stdout.readline().partition("http://")[2].partition(": ")[0]
            with contextlib.ExitStack() as open_ones:
                for _ in range(900):
                    open_ones.enter_context(connect(url)).sendall(b"GET / HTTP/1.1\r\nX-a: ")
                assert is_healthy(url)
        finally:
            started.terminate()
            _, errors = started.communicate(timeout=30)
    assert "Traceback" not in errors
    assert "Too many open files" not in errors


# ---- bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("server", "bodies that arrive have a limit together")
def test_bodies_have_a_limit_together(model, monkeypatch):
    """The body that has been arriving for longest makes room."""
    monkeypatch.setattr(server_module, "BODIES_BYTES", 3_000_000)
    begun = POST + b"Content-Length: 2000000\r\n\r\n" + b" " * 1_000_000
    with serving(model, streams=2, queue=4) as server, contextlib.ExitStack() as open_ones:
        clients = [open_ones.enter_context(connect(server)) for _ in range(6)]
        for client in clients:
            client.sendall(begun)
        assert clients[0].recv(100).startswith(b"HTTP/1.1 503 ")
        assert send(server.url, COMPLETIONS, {"prompt": "ab", "max_tokens": 1, "user": "x" * 500_000})[0] == 200


def test_a_body_of_brackets_is_refused(server):
    """Its objects would take 20 times its bytes."""
    body = b'{"prompt": [' + b"{}," * limits.BODY_BRACKETS + b"0]}"
    code, _, answer = send(server.url, COMPLETIONS, body)
    assert (code, answer["error"]["code"]) == (413, "body_too_large")


# ---- names of the host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "[::1]:8080", "[fe80::1%25eth0]", "10.0.0.7", "box", "box.local",
     "a.b.localhost", "llm.example.com", "llm.example.com.:443", ""],
)  # fmt: skip
def test_names_of_the_host_that_are_let_in(host):
    assert HostCheck(None, Keys([]), ["LLM.example.com"]).allows(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example.com", "evil.example.com:8080", "127.0.0.1.evil.com", "[evil.com]", "[::1].evil.com", "[::1", "a.b"],
)
def test_names_of_the_host_that_are_not(host):
    assert not HostCheck(None, Keys([]), ["llm.example.com"]).allows(host)


@pytest.mark.promise("server", "without API keys, requests for public host names are refused (DNS rebinding)")
def test_a_page_whose_name_leads_here_gets_nothing(server, model):
    """DNS rebinding: the browser takes the server for the page's own, and sends the page's name."""
    body, names = {"prompt": "ab", "max_tokens": 1}, {"Origin": "http://evil.example.com", "Host": "evil.example.com"}
    code, _, answer = send(server.url, COMPLETIONS, body, **names)
    assert (code, answer["error"]["code"]) == (421, "unknown_host")
    for hint in ("evil.example.com", "--allow-host", "API keys"):
        assert hint in answer["error"]["message"]
    for path in ("/", "/metrics", "/v1/models"):
        assert send(server.url, path, None, "GET", **names)[0] == 421
    with serving(model, keys=["k"], streams=1, queue=1) as other:  # a page has no key
        assert send(other.url, COMPLETIONS, body, Authorization="Bearer k", **names)[0] == 200


def test_a_name_may_be_allowed(model):
    with process(str(model), "--allow-host", "llm.example.com") as (_, url):
        assert send(url, "/health", None, "GET", Host="llm.example.com")[0] == 200
        assert send(url, "/health", None, "GET", Host="example.com")[0] == 421
