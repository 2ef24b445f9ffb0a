"""CORS: pages of which other sites may use this server. Browsers ask for it, and keep its answers from all others."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
METHODS = b"GET, POST, DELETE, OPTIONS"
ASKED_HEADERS = 1000  # characters of their names that are allowed at once


class Origins:
    """Answers the questions of browsers, and says in answers which page may read them."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """allowed: as https://chat.example.com; "localhost" is every page of this machine, "*" every page."""
        self._app, self._allowed = app, frozenset(allowed)

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin may use the server."""
        if "*" in self._allowed or origin in self._allowed:
            return True
        try:
            return "localhost" in self._allowed and urlsplit(origin).hostname in THIS_MACHINE
        except ValueError:
            return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = found.get(b"origin")
        if origin is None:
            return await self._app(scope, receive, send)
        allowed = self.allows(origin.decode("latin-1"))
        # The answer depends on who asks, so that a cache keeps one for each. There are no cookies that could be sent.
        added = [(b"vary", b"Origin")]
        if allowed:
            added += [(b"access-control-allow-origin", origin), (b"access-control-allow-credentials", b"true")]
        asked = found.get(b"access-control-request-method")
        if scope["method"] == "OPTIONS" and asked is not None:  # the browser's own question, which has no key
            if allowed:
                headers = found.get(b"access-control-request-headers", b"")[:ASKED_HEADERS]
                added += [(b"access-control-allow-methods", METHODS), (b"access-control-allow-headers", headers)]
                added.append((b"access-control-max-age", b"600"))
            await send({"type": "http.response.start", "status": 200, "headers": added})
            return await send({"type": "http.response.body", "body": b""})

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = [(b"access-control-expose-headers", b"x-billfish-ignored, x-billfish-model")] * allowed
                message = {**message, "headers": [*message.get("headers", ()), *added, *exposed]}
            await send(message)

        return await self._app(scope, receive, watched)
