"""Runs real clients against `billfish serve`: python tests/in_clients/run.py PYTHON [--record FOLDER] [CLIENT ...]

PYTHON: of an environment that has the packages of requirements.txt. Each client is a process of its own, behind a proxy
that sees what it sends. --record writes that to FOLDER, for tests/serving/api/test_recorded.py. Ends with 1 if a client
fails.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
MOST_SECONDS = 300  # for one client
# Clients that want older packages than others: their environment is in a folder of their name in that of the others.
ALONE = ("pydantic-ai-slim", "semantic-kernel")


class Recorder(ThreadingHTTPServer):
    """Sends all requests on to a server, and keeps their bodies."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.to = urlsplit(server).netloc
        self.seen: list[dict[str, Any]] = []


class Forward(BaseHTTPRequestHandler):
    """One request."""

    server: Recorder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.server.to, timeout=MOST_SECONDS)
        kept = ("content-type", "authorization", "x-api-key")
        headers = {name: value for name, value in self.headers.items() if name.lower() in kept}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        sent = {"method": self.command, "path": self.path.partition("?")[0], "status": answer.status}
        self.server.seen.append({**sent, "body": json.loads(body) if body else None})
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() in ("content-type", "retry-after"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while data := answer.read1(65536):
            self.wfile.write(data)
            self.wfile.flush()
        connection.close()

    do_GET = do_DELETE = do_HEAD = do_POST

    def log_message(self, format: str, *words: object) -> None:
        pass


@contextmanager
def recording(server: str) -> Iterator[Recorder]:
    recorder = Recorder(server)
    thread = threading.Thread(target=recorder.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.shutdown()
        recorder.server_close()


def run_client(python: str, name: str, url: str, model: str) -> str:
    """What went wrong, or ""."""
    quiet = {"CLIENT_URL": url, "CLIENT_MODEL": model, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    try:
        ran = subprocess.run(
            [python, str(HERE / "clients.py"), name],
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {MOST_SECONDS} s"
    return "" if ran.returncode == 0 else ran.stderr[-1500:]


def smaller(value: Any) -> Any:
    """A recorded value without what only makes it long."""
    if isinstance(value, dict):
        return {key: smaller(each) for key, each in value.items()}
    if isinstance(value, list):
        return [smaller(each) for each in value[:12]]
    return f"{value[:300]}..." if isinstance(value, str) and len(value) > 400 else value


def version(python: str, name: str) -> str:
    """Of a package of an environment."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def record(folder: Path, python: str, name: str, seen: list[dict[str, Any]]) -> None:
    """Write each different request of a client to a file."""
    (folder / f"{name}.json").write_text(
        written(name, version(python, name), different([smaller(each) for each in seen]))
    )


def different(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests that have a body, each once."""
    return list({json.dumps(each, sort_keys=True): each for each in seen if each["body"] is not None}.values())


def written(name: str, version: str, requests: list[dict[str, Any]]) -> str:
    """A file of tests/serving/api/recorded."""
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in requests)
    return f'{{"client": "{name}", "version": "{version}", "requests": [\n{lines}\n]}}\n'


def main() -> int:
    from clients import CLIENTS
    from serving_http import process

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("clients", nargs="*", default=list(CLIENTS))
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--url", help="of a server that runs already")
    arguments = parser.parse_args()
    failed = list[str]()

    def run_all(url: str) -> None:
        with http_get(url) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
        for name in arguments.clients:
            python = arguments.python
            if name in ALONE:
                python = str(Path(python).parents[1] / name / "bin/python")
            with recording(url) as recorder:
                port = recorder.server_address[1]
                problem = run_client(python, name, f"http://127.0.0.1:{port}", model)
            refused = [f"{each['path']} {each['status']}" for each in recorder.seen if each["status"] != 200]
            result = "FAILED" if problem else "ok"
            about = f"{name} {version(python, name)}: {result}, {len(recorder.seen)} requests {refused or ''}"
            print(about, flush=True)
            if problem:
                failed.append(name)
                print(problem, flush=True)
            elif arguments.record:
                record(arguments.record, python, name, recorder.seen)

    if arguments.url:
        run_all(arguments.url)
    else:
        with process("--streams", "4", "--no-access-log") as (_, url):
            run_all(url)
    print(f"{len(arguments.clients) - len(failed)} of {len(arguments.clients)} clients work")
    return bool(failed)


def http_get(url: str) -> Any:
    import urllib.request

    return urllib.request.urlopen(f"{url}/v1/models")


if __name__ == "__main__":
    sys.exit(main())
