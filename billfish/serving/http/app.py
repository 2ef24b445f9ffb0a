"""The HTTP side of the server: its paths, who may use them, what becomes of errors, and the chat page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.core.errors import DataError, ModelError, readable
from billfish.serving.api.chat import ChatBody, read_chat
from billfish.serving.api.completions import CompletionBody, read_completions
from billfish.serving.api.embeddings import EmbeddingBody, embeddings, read_embeddings
from billfish.serving.api.request_bodies import AnyBody, Refusal, parse
from billfish.serving.api.responses import Asked, ClientGone, json_response, respond
from billfish.serving.api.service import Service
from billfish.serving.http.keys import Keys
from billfish.serving.http.metrics import CONTENT_TYPE, Metrics

LOG, ACCESS = logging.getLogger("billfish.serving"), logging.getLogger("billfish.access")
BODY_BYTES = 8 * 2**20
BODY_SECONDS = 60.0  # to send a body in
MODELS = "/v1/models"
PAGE = Path(__file__).with_name("page.html")

Handle = Callable[[HttpRequest], Awaitable[ASGIApp]]


def make_app(service: Service, keys: Keys, *, access_log: bool = False) -> Starlette:
    """What uvicorn runs. The page and /health are for everybody, all else for those who have a key."""
    metrics = Metrics(service)

    def route(path: str, handle: Handle, method: str = "GET", open: bool = False) -> Route:
        return Route(path, Endpoint(path, metrics, Keys([]) if open else keys, handle), methods=[method])

    def generating(kind: type[AnyBody], read: Callable[[Service, AnyBody], Asked]) -> Handle:
        async def handle(request: HttpRequest) -> ASGIApp:
            body = await read_body(request)
            asked = await service.read(lambda: read(service, parse(body, kind)))
            request.state.tokens = asked.tokens
            return await respond(service, asked, request.receive)

        return handle

    async def embed(request: HttpRequest) -> ASGIApp:
        body = await read_body(request)
        asked = await service.read(parse, body, EmbeddingBody)
        texts = await service.read(read_embeddings, service, asked)
        request.state.tokens = lambda: (sum(len(text.tokens) for text in texts), 0)
        return await embeddings(service, asked, texts, request.receive)

    async def list_models(request: HttpRequest) -> ASGIApp:
        return json_response({"object": "list", "data": [service.record()]})

    async def one_model(request: HttpRequest) -> ASGIApp:
        service.check_name(request.path_params["name"])
        return json_response(service.record())

    async def health(request: HttpRequest) -> ASGIApp:
        status = "closing" if service.closing else "ok" if service.engine.is_alive else "failed"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def watch(request: HttpRequest) -> ASGIApp:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def chat_page(request: HttpRequest) -> ASGIApp:
        return page()

    return Starlette(
        routes=[
            route("/", chat_page, open=True),
            route("/health", health, open=True),
            route("/metrics", watch),
            route(MODELS, list_models),
            route(MODELS + "/{name:path}", one_model),
            route("/v1/chat/completions", generating(ChatBody, read_chat), "POST"),
            route("/v1/completions", generating(CompletionBody, read_completions), "POST"),
            route("/v1/embeddings", embed, "POST"),
        ],
        exception_handlers={HTTPException: no_such_path},
        middleware=[Middleware(AccessLog)] if access_log else [],
    )


class AccessLog:
    """Logs a line for each request when it is over: method, path, status, tokens of prompt and answer, time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, started = "closed by the client", time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            tokens = scope.get("state", {}).get("tokens", lambda: ())()
            facts = [status, *([f"{tokens[0]} + {tokens[1]} tokens"] if tokens else [])]
            facts.append(f"{time.perf_counter() - started:.3f} s")
            client = scope["client"][0] if scope.get("client") else "-"
            ACCESS.info("%s %s %s %s", client, scope["method"], readable(scope["path"]), ", ".join(facts))


class Endpoint:
    """One path: the key is checked, then what is raised becomes an answer."""

    def __init__(self, path: str, metrics: Metrics, keys: Keys, handle: Handle) -> None:
        self._path, self._metrics, self._keys, self._handle = path, metrics, keys, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._metrics.answered(self._path, message["status"])
            await send(message)

        request = HttpRequest(scope, receive)
        try:
            self._keys.check(request.headers.get("authorization"))
            response = await self._handle(request)
            await response(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            pass
        except Refusal as refusal:
            await refused(refusal)(scope, receive, watched)
        except (DataError, ModelError) as error:  # about what was asked
            await refused(Refusal(400, str(error)))(scope, receive, watched)
        except Exception:
            if began:
                raise  # uvicorn logs it and closes the connection
            LOG.exception("%s failed", self._path)
            await refused(Refusal(500, "Internal error. See the server's log."))(scope, receive, watched)


def refused(refusal: Refusal) -> Response:
    """The HTTP answer of a refusal."""
    return json_response(refusal.body(), refusal.status, refusal.headers)


async def no_such_path(request: HttpRequest, error: Exception) -> Response:
    """404 and 405, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    asked, routes = readable(f"{request.method} {request.url.path}"), request.app.routes
    known = ", ".join(f"{'POST' if 'POST' in route.methods else 'GET'} {route.path}" for route in routes)
    message = f"There is no {asked}. This server has {known}."
    refusal = Refusal(error.status_code, message.replace("{name:path}", "NAME"), None, "unknown_url")
    return json_response(refusal.body(), refusal.status, error.headers)


async def read_body(request: HttpRequest) -> bytes:
    """The body of a request for JSON, if it is not too large and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a browser sends to its own page's server alone
        message = f"The Content-Type is {readable(kind or 'missing')}; expected application/json."
        fix = "With curl, add -H 'Content-Type: application/json'."
        raise Refusal(415, f"{message} {fix}", None, "unsupported_media_type")
    if int(request.headers.get("content-length", 0)) > BODY_BYTES:
        raise _too_large(f"{request.headers['content-length']} bytes")

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES:
                raise _too_large(f"more than {BODY_BYTES} bytes")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        message = f"The body did not arrive within {BODY_SECONDS:g} s."
        raise Refusal(408, message, None, "body_timeout", connection="close") from None


def _too_large(size: str) -> Refusal:
    return Refusal(413, f"The body has {size}. The limit is {BODY_BYTES} bytes.", None, "body_too_large")


@cache
def page() -> HTMLResponse:
    """The chat at /. Its own script and style are known by their digests; no other runs, whatever a model writes."""
    text = PAGE.read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(text, 'script')}; style-src {_digest(text, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _digest(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
