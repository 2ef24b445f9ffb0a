"""CORS: which pages of other sites may use the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from billfish.cli.main import main
from billfish.serving.http.origins import Origins

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def answered(allowed: list[str], origin: str, method: str = "POST", **headers: str) -> tuple[bool, dict[str, str]]:
    """Whether the server behind it was asked, and the headers of the answer."""
    asked, sent = [], list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(True)
        await send({"type": "http.response.start", "status": 204, "headers": [(b"x-own", b"1")]})

    async def keep(message: dict[str, Any]) -> None:
        sent.append(message)

    given = {"origin": origin, **{name.replace("_", "-"): value for name, value in headers.items()}}
    pairs = [(name.encode(), value.encode()) for name, value in given.items() if value]
    scope = {"type": "http", "method": method, "headers": pairs}
    asyncio.run(Origins(app, allowed)(scope, None, keep))
    return bool(asked), {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        (["https://a.example"], "https://a.example", True),
        (["https://a.example"], "https://b.example", False),
        (["https://a.example"], "http://a.example", False),
        (["*"], "https://b.example", True),
        (["localhost"], "http://localhost:3000", True),
        (["localhost"], "http://127.0.0.1", True),
        (["localhost"], "http://[::1]:3000", True),
        (["localhost"], "http://localhost.evil.example", False),
        (["localhost"], "http://evil.example/localhost", False),
        (["localhost"], "http://[", False),
        (["localhost"], "null", False),
    ],
)
def test_who_may(allowed, origin, may):
    asked, headers = answered(allowed, origin)
    assert asked
    assert headers["x-own"] == "1"
    assert headers.get("access-control-allow-origin") == (origin if may else None)
    assert headers["vary"] == "Origin"
    asked, headers = answered(allowed, origin, "OPTIONS", **PREFLIGHT)
    assert not asked
    assert headers.get("access-control-allow-headers") == (PREFLIGHT["access-control-request-headers"] if may else None)


def test_requests_that_are_of_no_page(tmp_path):
    asked, headers = answered(["*"], "")
    assert asked
    assert headers == {"x-own": "1"}


def test_all_pages_need_a_key(capsys):
    assert main(["serve", "none.gguf", "--cors-origin", "*"]) != 0
    assert "--cors-origin" in capsys.readouterr().err
