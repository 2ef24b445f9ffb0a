"""A small HTTP client and the processes of servers, for benchmarks: nothing in it costs more than reading a line."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

HEADERS = {"Content-Type": "application/json"}


class ServerProcess(NamedTuple):
    """A server that runs in a process of its own."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def billfish_server(*words: str) -> Iterator[ServerProcess]:
    """`billfish serve` on a free port. It must end well after SIGTERM."""
    command = [sys.executable, "-m", "billfish", "serve", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+:\d+", process.stdout.readline())
            if found is None:
                raise SystemExit("billfish serve did not start")
            yield ServerProcess(process, found[0])
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise SystemExit(f"billfish serve ended with {process.returncode}")
        finally:
            process.kill()


@contextmanager
def other_server(command: list[str], port: int) -> Iterator[ServerProcess]:
    """A server that listens on a port once it has loaded its model."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            while process.poll() is None and not _answers(f"{url}/v1/models"):
                time.sleep(0.2)
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            yield ServerProcess(process, url)
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def posted(url: str, path: str, body: Any, wait: bool = True) -> Iterator[Any]:
    """The answer to a request (wait=False: None, before it comes); leaving closes the connection, whatever was read.
    A body of bytes goes as it is."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), HEADERS)
        yield connection.getresponse() if wait else None
    finally:
        connection.close()


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """The JSON of server-sent events, up to [DONE]. Raises ConnectionError where a stream ends without it."""
    for line in answer:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                return
            yield json.loads(line[6:])
    raise ConnectionError("a stream without its end")
