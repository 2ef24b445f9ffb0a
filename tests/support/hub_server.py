"""A Hugging Face Hub on localhost, with the requests that huggingface_hub makes to list and download a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"


class HubServer(ThreadingHTTPServer):
    """repositories: the content of files by name. cut: files of which the next answer ends after so many bytes.
    damaged: files that come with other bytes than their checksum says."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.gated: set[str] = set()
        self.cut: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.requests: list[tuple[str, str, str]] = []  # method, path, range

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """The files whose content was asked for, in order."""
        return [
            path.split("/resolve/")[1].split("/", 1)[1]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        if listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.list(listed[1], listed[2])
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_file(file[1], file[3], with_body)
        else:
            self.refuse(404, "EntryNotFound")

    def list(self, repository: str, revision: str | None) -> None:
        files = self.server.repositories.get(repository)
        if repository in self.server.gated:
            return self.refuse(403, "GatedRepo")
        if files is None:
            return self.refuse(404, "RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": "0", **_lfs(name, data)} for name, data in files.items()
        ]
        return self.send(
            200, json.dumps({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}).encode()
        )

    def send_file(self, repository: str, name: str, with_body: bool) -> None:
        data = self.server.repositories.get(repository, {}).get(name)
        if data is None:
            return self.refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not with_body:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            return self.end_headers()
        if name in self.server.damaged:
            data = bytes(len(data))
        start = int(found[1]) if (found := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.server.cut.pop(name, None)
        return self.send(206 if start else 200, data[start:], headers, cut)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True


def _lfs(name: str, data: bytes) -> dict[str, Any]:
    """What the Hub says of large files: those are not in git, and have a checksum."""
    if not name.endswith((".gguf", ".safetensors")):
        return {}
    return {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}


@contextmanager
def serve_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[HubServer]:
    """A Hub with these repositories until the end."""
    server = HubServer(repositories)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
