"""Bodies of requests: their size, the time that they take to arrive, and the memory that all of them have together."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest

from billfish.core.errors import readable
from billfish.serving.api.request_bodies import Refusal
from billfish.serving.http.limits import BODIES_BYTES, BODY_BRACKETS, BODY_BYTES, BODY_SECONDS


class Bodies:
    """The bodies of a server that arrive, or wait to be parsed. It is the loop's alone."""

    def __init__(self, most: int = BODIES_BYTES) -> None:
        """most: bytes of all bodies together."""
        self._most, self._held = most, 0
        self._arriving: OrderedDict[asyncio.Future[bytes], None] = OrderedDict()  # the oldest first

    @asynccontextmanager
    async def read(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """The body of a request for JSON, if it is not too large and comes in time. Its bytes count until the end."""
        _check_type(request)
        if int(request.headers.get("content-length", 0)) > BODY_BYTES:
            raise _too_large(f"{request.headers['content-length']} bytes")
        held = 0

        async def arrive() -> bytes:
            nonlocal held
            body = bytearray()
            async for part in request.stream():
                body += part
                if len(body) > BODY_BYTES:
                    raise _too_large(f"more than {BODY_BYTES} bytes")
                held += len(part)
                self._held += len(part)
                self._make_room()
            return bytes(body)

        arriving = asyncio.ensure_future(arrive())
        self._arriving[arriving] = None
        try:
            await asyncio.wait([arriving], timeout=BODY_SECONDS)
            self._arriving.pop(arriving, None)
            if not arriving.done():
                message = f"The body did not arrive within {BODY_SECONDS:g} s."
                raise Refusal(408, message, None, "body_timeout", connection="close")
            if arriving.cancelled():
                message = f"Bodies that arrive have {self._most} bytes together, and this one is the oldest."
                raise Refusal(503, f"{message} Retry later.", None, "busy", connection="close", retry_after="1")
            body = arriving.result()
            if body.count(b"[") + body.count(b"{") > BODY_BRACKETS:
                raise Refusal(413, f"The body has more than {BODY_BRACKETS} lists and objects.", None, "body_too_large")
            yield body
        finally:
            self._arriving.pop(arriving, None)
            arriving.cancel()
            self._held -= held

    def _make_room(self) -> None:
        """Give up the body that has been arriving for longest."""
        if self._held > self._most and self._arriving:
            oldest, _ = self._arriving.popitem(last=False)
            oldest.cancel()  # its bytes are given back when its request is answered


def _check_type(request: HttpRequest) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    by_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    # A browser sends application/json to its own page's server alone. Some programs send no type at all.
    if kind != "application/json" and (kind or by_browser):
        message = f"The Content-Type is {readable(kind or 'missing')}; expected application/json."
        fix = "With curl, add -H 'Content-Type: application/json'."
        raise Refusal(415, f"{message} {fix}", None, "unsupported_media_type")


def _too_large(size: str) -> Refusal:
    return Refusal(413, f"The body has {size}. The limit is {BODY_BYTES} bytes.", None, "body_too_large")
