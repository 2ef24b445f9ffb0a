"""Paths of OpenAI's API without /v1, as llama.cpp's server has them: a base URL that lacks it works, too."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"


class Unversioned:
    """Sends a request for /chat/completions on as one for /v1/chat/completions."""

    def __init__(self, app: ASGIApp, paths: Iterable[str]) -> None:
        """paths: that the server has."""
        own = set(paths)
        shorter = {path.removeprefix(VERSION): path for path in own if path.startswith(f"{VERSION}/")}
        self._app, self._paths = app, {short: path for short, path in shorter.items() if short not in own}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._paths.get(scope.get("path", ""))
        if path is not None:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
