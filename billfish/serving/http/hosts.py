"""Which names of the server a request may use: a page of a stranger may have a name that leads to this machine.

In DNS rebinding, a page of http://evil.example lets its name point to 127.0.0.1. The browser then takes the server for
the page's own, and the page may ask it and read its answers. What tells is the header Host: the browser sends the name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.core.errors import readable
from billfish.serving.api.answering import json_response
from billfish.serving.api.request_bodies import Refusal
from billfish.serving.http.keys import Keys

PRIVATE = (".localhost", ".local", ".internal", ".lan", ".home.arpa")  # nobody can register such a name


class HostCheck:
    """Refuses requests that use another's name. With API keys there is no need: the page of a stranger has none."""

    def __init__(self, app: ASGIApp, keys: Keys, allowed: Collection[str] = ()) -> None:
        """allowed: names of the server, beside those that no stranger can have."""
        self._app, self._keys = app, keys
        self._allowed = {name.lower().rstrip(".") for name in (*allowed, socket.gethostname(), socket.getfqdn())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._keys:
            for host in [value for name, value in scope["headers"] if name == b"host"]:
                if not self.allows(host.decode("latin-1")):
                    named = readable(host.decode("latin-1"), 100)
                    said = f"The header Host is {named}, which is no name of this server."
                    fix = "Start it with --allow-host NAME, or with API keys."
                    refusal = Refusal(421, f"{said} {fix}", None, "unknown_host")
                    return await json_response(refusal.body(), refusal.status)(scope, receive, send)
        return await self._app(scope, receive, send)

    def allows(self, host: str) -> bool:
        """Whether a request may use a name: an address, a name that no stranger can have, or one that was allowed."""
        bracketed = host.startswith("[")  # an IPv6 address
        name, end, behind = host.lower()[bracketed:].partition("]" if bracketed else ":")
        if bracketed and (not end or behind[:1] not in ("", ":")):
            return False
        name = name.rstrip(".")
        try:
            ipaddress.ip_address(name.partition("%")[0])
            return True
        except ValueError:
            return not name or "." not in name or name.endswith(PRIVATE) or name in self._allowed
