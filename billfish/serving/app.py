"""The HTTP side of the server: its paths, who may use them, and what becomes of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.core.errors import DataError, ModelError, complaint
from billfish.serving import metrics
from billfish.serving.answers import ClientGone
from billfish.serving.chat import read_chat
from billfish.serving.completions import read_completions
from billfish.serving.embeddings import embeddings, read_embeddings
from billfish.serving.fields import Fields, parse
from billfish.serving.keys import Keys
from billfish.serving.page import page
from billfish.serving.refusals import Refusal
from billfish.serving.respond import Asked, respond
from billfish.serving.service import Service

BODY_BYTES = 8 * 2**20
BODY_SECONDS = 60.0  # to send a body in
MODELS = "/v1/models"

Handle = Callable[[HttpRequest], Awaitable[ASGIApp]]


def make_app(service: Service, keys: Keys) -> Starlette:
    """What uvicorn runs. The page and /health are for everybody, all else for those who have a key."""

    def route(path: str, handle: Handle, method: str = "GET", open: bool = False) -> Route:
        return Route(path, Endpoint(path, service, Keys([]) if open else keys, handle), methods=[method])

    def generating(call: str, read: Callable[[Service, Fields], Asked]) -> Handle:
        async def handle(request: HttpRequest) -> ASGIApp:
            body = await read_body(call, request)
            asked = await service.read(lambda: read(service, parse(call, body)))
            return await respond(service, asked, request.receive)

        return handle

    async def embed(request: HttpRequest) -> ASGIApp:
        body = await read_body("embeddings", request)
        texts, in_base64 = await service.read(lambda: read_embeddings(service, parse("embeddings", body)))
        return await embeddings(service, texts, in_base64, request.receive)

    async def list_models(request: HttpRequest) -> ASGIApp:
        return JSONResponse({"object": "list", "data": [service.record()]})

    async def one_model(request: HttpRequest) -> ASGIApp:
        service.check_name("models", request.path_params["name"])
        return JSONResponse(service.record())

    async def health(request: HttpRequest) -> ASGIApp:
        return JSONResponse({"status": "closing" if service.closing else "ok"}, 503 if service.closing else 200)

    async def watch(request: HttpRequest) -> ASGIApp:
        return PlainTextResponse(service.watch.text(service.engine.counts()), media_type=metrics.CONTENT_TYPE)

    async def chat_page(request: HttpRequest) -> ASGIApp:
        return page()

    return Starlette(
        routes=[
            route("/", chat_page, open=True),
            route("/health", health, open=True),
            route("/metrics", watch),
            route(MODELS, list_models),
            route(MODELS + "/{name:path}", one_model),
            route("/v1/chat/completions", generating("chat.completions", read_chat), "POST"),
            route("/v1/completions", generating("completions", read_completions), "POST"),
            route("/v1/embeddings", embed, "POST"),
        ],
        exception_handlers={HTTPException: no_such_path},
    )


class Endpoint:
    """One path: the key is checked, then what is raised becomes an answer."""

    def __init__(self, path: str, service: Service, keys: Keys, handle: Handle) -> None:
        self._path, self._service, self._keys, self._handle = path, service, keys, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._service.watch.answered(self._path, message["status"])
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
            logging.getLogger("billfish.serving").exception("%s failed", self._path)
            message = complaint("serve", self._path, "an error of the server", "nothing: its log says more")
            await refused(Refusal(500, message))(scope, receive, watched)


def refused(refusal: Refusal) -> Response:
    """The HTTP answer of a refusal."""
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


async def no_such_path(request: HttpRequest, error: Exception) -> Response:
    """404 and 405, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    message = complaint("serve", "path", f"{request.method} {request.url.path}", "a path and method of this server")
    refusal = Refusal(error.status_code, message, None, "unknown_url")
    return JSONResponse(refusal.body(), refusal.status, error.headers)


async def read_body(call: str, request: HttpRequest) -> bytes:
    """The body of a request for JSON, if it is not too large and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a browser sends to its own page's server alone
        message = complaint(call, "the header Content-Type", kind or "none", "application/json")
        raise Refusal(415, message, None, "unsupported_media_type")
    if int(request.headers.get("content-length", 0)) > BODY_BYTES:
        raise _too_large(call, f"{request.headers['content-length']} bytes")

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY_BYTES:
                raise _too_large(call, f"more than {BODY_BYTES} bytes")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        message = complaint(call, "body", "a part of it", f"all of it within {BODY_SECONDS:g} s")
        raise Refusal(408, message, None, "body_timeout", connection="close") from None


def _too_large(call: str, got: str) -> Refusal:
    return Refusal(413, complaint(call, "body", got, f"at most {BODY_BYTES} bytes"), None, "body_too_large")
