"""A running server for tests, in a thread of this process or as a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from billfish.llm import Model, load
from billfish.serving.api.service import EngineFacts, Service
from billfish.serving.engine.engine import Engine
from billfish.serving.http.keys import Keys
from billfish.serving.http.server import Server, address, listen
from billfish.serving.ipc.client import EngineClient
from billfish.serving.ipc.session import Host

# As Qwen's: functions first, calls between marks.
TOOLS_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Running:
    """A server that answers."""

    url: str
    model: Model
    service: Service
    engine: Engine

    def client(self, **options: Any) -> Any:
        """The real one of OpenAI. It does not try again, so that a test sees what came."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)


@contextmanager
def serving(
    path: Path,
    *,
    keys: list[str] | None = None,
    strict_fields: bool = False,
    share_prefixes: bool = False,
    client: type[EngineClient] = EngineClient,
    **options: Any,
) -> Iterator[Running]:
    """A server on a free port. client: what asks the engine. options: the engine's."""
    model = load(path, progress=False)
    engine = Engine(model, **{"activations": "exact", **options})
    facts = EngineFacts(engine.streams, engine.context, engine.queue_limit, model.decoder.nbytes)
    service = Service(client(model.tokenizer), model, facts, path.stem, strict_fields=strict_fields)
    server = Server(Host(engine), service, Keys(keys or []), share_prefixes=share_prefixes)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Running(address(listening), model, service, engine)
        finally:
            server.handle_exit(0, None)
            thread.join()
            engine.close(finish=False)
            service.close()


@contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`billfish serve` on a free port: the process, and the server's address once it listens."""
    command = [sys.executable, "-m", "billfish", "serve", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            found = re.search(r"http://\S+:\d+", started.stdout.readline())
            if found is None:
                raise AssertionError(started.communicate())
            yield started, found[0]
        finally:
            started.kill()


def send(url: str, path: str, body: object = None, method: str = "POST", **headers: str) -> tuple[int, dict, Any]:
    """Status, headers and JSON of an answer. A body of bytes goes as it is."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url + path, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), json.loads(error.read())


def events(url: str, path: str, body: object) -> list[Any]:
    """The JSON of all events, or lines, of a stream."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.read().decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
