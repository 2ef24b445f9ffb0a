"""The HTTP side of the server: its paths, who may use them, what becomes of errors, and the chat page."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.core.errors import DataError, ModelError, readable
from billfish.serving.api import anthropic, ollama, openai_responses, tokens
from billfish.serving.api.answering import Asked, ClientGone, json_response, respond, while_there
from billfish.serving.api.chat_completions import ChatBody, read_chat
from billfish.serving.api.completions import CompletionBody, read_completions
from billfish.serving.api.embeddings import (
    EmbeddingBody,
    RerankBody,
    embeddings,
    read_embeddings,
    read_rerank,
    rerank,
    vectors_of,
)
from billfish.serving.api.models import Models
from billfish.serving.api.request_bodies import AnyBody, Body, Refusal, header_of, parse
from billfish.serving.api.service import Service
from billfish.serving.http.bodies import Bodies
from billfish.serving.http.hosts import HostCheck
from billfish.serving.http.keys import Keys
from billfish.serving.http.limits import BODIES_BYTES
from billfish.serving.http.metrics import CONTENT_TYPE
from billfish.serving.http.openapi import description, description_page
from billfish.serving.http.origins import Origins
from billfish.serving.http.unversioned import Unversioned

LOG, ACCESS = logging.getLogger("billfish.serving"), logging.getLogger("billfish.access")
MODELS, RESPONSES = "/v1/models", "/v1/responses"
MOST_TOLD = 1000  # names of ignored fields that are logged
PAGE = Path(__file__).with_name("page.html")

Handle = Callable[[HttpRequest], Awaitable[ASGIApp]]
ErrorBody = Callable[[Refusal], dict[str, Any]]


def make_app(
    models: Models,
    keys: Keys,
    *,
    access_log: bool = False,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
    share_prefixes: bool = False,
    most_bytes: int = BODIES_BYTES,
) -> Starlette:
    """What uvicorn runs. The page and /health are for everybody, all else for those who have a key. hosts: names of the
    server, beside those that no stranger can have. origins: of pages that may use it. share_prefixes:
    prompts of one key may begin with what the KV cache holds of another's. most_bytes: of all bodies that arrive."""
    client, bodies = models.client, Bodies(most_bytes)
    routes, told = list[Route](), IgnoredFields()

    def add(
        path: str,
        about: str,
        handle: Handle,
        method: str = "GET",
        *,
        body: type[Body] | None = None,
        errors: ErrorBody = Refusal.body,
        open: bool = False,
    ) -> None:
        endpoint = Endpoint(path, client.answered, Keys([]) if open else keys, handle, errors, about, body)
        routes.append(Route(path, endpoint, methods=[method]))

    async def read(request: HttpRequest, kind: type[AnyBody]) -> AnyBody:
        """The body. Fields that are ignored are told in a header."""
        async with bodies.read(request) as data:
            if await request.is_disconnected():  # before it is parsed, rendered and encoded for nobody
                raise ClientGone
            body, ignored = await models.read(lambda: parse(data, kind, strict=models.strict_fields))
        request.state.headers = headers = list[tuple[bytes, bytes]]()
        if ignored:
            told.tell(request.url.path, ignored)
            headers.append((b"x-billfish-ignored", header_of(ignored).encode()))
        return body

    async def read_for(request: HttpRequest, kind: type[AnyBody]) -> tuple[Service, AnyBody]:
        """The body, and the model that it is for, which stays until the answer's end. The name of another model than
        the one that is asked for is told in a header."""
        body = await read(request, kind)
        name = getattr(body, "model", None)
        using = await models.use(name, lambda loading: while_there(loading, request.receive))
        service = request.state.uses.enter_context(using)
        if not service.is_named(name):
            request.state.headers.append((b"x-billfish-model", quote(service.name).encode()))
        return service, body

    def generating(kind: type[AnyBody], ask: Callable[[Service, AnyBody], Asked]) -> Handle:
        async def handle(request: HttpRequest) -> ASGIApp:
            service, body = await read_for(request, kind)
            asked = await service.read(ask, service, body)
            tenant = b"" if share_prefixes else request.state.tenant
            name = getattr(body, "model", None)
            adapter = name if name in service.model.adapters else None
            own = [replace(each, tenant=tenant, adapter=adapter) for each in asked.requests]
            asked = replace(asked, requests=own)
            request.state.tokens = asked.tokens
            return await respond(service, asked, request.receive)

        return handle

    def telling(kind: type[AnyBody], tell: Callable[[Service, AnyBody], dict[str, Any]]) -> Handle:
        async def handle(request: HttpRequest) -> ASGIApp:
            service, body = await read_for(request, kind)
            return json_response(await service.read(tell, service, body))

        return handle

    async def embed(request: HttpRequest) -> ASGIApp:
        service, body = await read_for(request, EmbeddingBody)
        texts = await service.read(read_embeddings, service, body)
        request.state.tokens = lambda: (sum(len(text.tokens) for text in texts), 0)
        return await embeddings(service, body, texts, request.receive)

    async def rank(request: HttpRequest) -> ASGIApp:
        service, body = await read_for(request, RerankBody)
        texts = await service.read(read_rerank, service, body)
        request.state.tokens = lambda: (sum(len(text.tokens) for text in texts), 0)
        return await rerank(service, body, texts, request.receive)

    async def embed_for_ollama(request: HttpRequest) -> ASGIApp:
        service, body = await read_for(request, ollama.EmbedBody)
        given = body.input if body.prompt is None else body.prompt
        texts = await service.read(read_embeddings, service, EmbeddingBody(input=given, dimensions=body.dimensions))
        vectors = [vector.tolist() for vector in await vectors_of(service, texts, request.receive)]
        count = sum(len(text.tokens) for text in texts)
        if body.prompt is not None:
            return json_response({"embedding": vectors[0]})
        return json_response({"model": service.name, "embeddings": vectors, "prompt_eval_count": count})

    async def list_models(request: HttpRequest) -> ASGIApp:
        return json_response({"object": "list", "data": models.records()})

    async def one_model(request: HttpRequest) -> ASGIApp:
        return json_response(models.record(request.path_params["name"]))

    async def one_response(request: HttpRequest) -> ASGIApp:
        found = await models.read(openai_responses.stored, client, request.path_params["id"], "response_id")
        return json_response(found.answer)

    async def delete_response(request: HttpRequest) -> ASGIApp:
        name = request.path_params["id"]
        await models.read(partial(openai_responses.stored, client, name, "response_id", remove=True))
        return json_response({"id": name, "object": "response", "deleted": True})

    async def list_for_ollama(request: HttpRequest) -> ASGIApp:
        return json_response({"models": models.tags()})

    async def list_loaded(request: HttpRequest) -> ASGIApp:
        return json_response({"models": models.tags(loaded=True)})

    async def show(request: HttpRequest) -> ASGIApp:
        return json_response(await models.show(await read(request, ollama.ShowBody)))

    async def version(request: HttpRequest) -> ASGIApp:
        return json_response({"version": ollama.VERSION})

    async def health(request: HttpRequest) -> ASGIApp:
        found = await models.health()
        return json_response(found, 200 if found["status"] == "ok" else 503)

    async def watch(request: HttpRequest) -> ASGIApp:
        return Response(await client.metrics(), media_type=CONTENT_TYPE)

    async def chat_page(request: HttpRequest) -> ASGIApp:
        return page()

    async def openapi(request: HttpRequest) -> ASGIApp:
        return json_response(description(routes))

    async def openapi_page(request: HttpRequest) -> ASGIApp:
        return description_page(routes)

    add("/", "a chat page in one file", chat_page, open=True)
    add("/health", "200, or 503 while the server shuts down or its engine is ill", health, open=True)
    add("/metrics", "counters for Prometheus", watch)
    add("/openapi.json", "the request bodies as OpenAPI", openapi, open=True)
    add("/docs", "the same as a page", openapi_page, open=True)
    add(MODELS, "the models' names", list_models)
    add(MODELS + "/{name:path}", "the same, for one name", one_model)
    for path, about, kind, ask in (
        (
            "/v1/chat/completions",
            "the next message of a conversation, whole or streamed; thoughts, tool calls, JSON",
            ChatBody,
            read_chat,
        ),
        ("/v1/completions", "the continuation of prompts, without a chat template", CompletionBody, read_completions),
        (
            RESPONSES,
            "OpenAI's newer API: the same as items; goes on with an earlier response",
            openai_responses.ResponsesBody,
            openai_responses.read_responses,
        ),
    ):
        add(path, about, generating(kind, ask), "POST", body=kind)  # type: ignore[arg-type]
    counting = telling(ChatBody, tokens.count_chat)
    add("/v1/chat/completions/input_tokens", "the length of its prompt", counting, "POST", body=ChatBody)
    add(RESPONSES + "/{id}", "a response that is kept in memory", one_response)
    add(RESPONSES + "/{id}", "forgets it", delete_response, "DELETE")
    about = "a vector normalized to unit L2 norm for each text, as numbers or base64"
    add("/v1/embeddings", about, embed, "POST", body=EmbeddingBody)
    add("/v1/rerank", "documents by the cosine of their vectors with the query's", rank, "POST", body=RerankBody)
    messages, shape = anthropic.MessagesBody, anthropic.error_body
    handle = generating(messages, anthropic.read_messages)
    add("/v1/messages", "Anthropic's API: content blocks", handle, "POST", body=messages, errors=shape)
    handle = telling(messages, anthropic.count_tokens)
    add("/v1/messages/count_tokens", "the length of its prompt", handle, "POST", body=messages, errors=shape)
    for path, about, body, handle in (
        (
            "/api/chat",
            "Ollama's API: the next message, as lines of JSON",
            ollama.ChatBody,
            generating(ollama.ChatBody, ollama.read_chat),
        ),
        (
            "/api/generate",
            "the answer to a prompt",
            ollama.GenerateBody,
            generating(ollama.GenerateBody, ollama.read_generate),
        ),
        ("/api/embed", "vectors of texts", ollama.EmbedBody, embed_for_ollama),
        ("/api/embeddings", "the vector of one text", ollama.EmbedBody, embed_for_ollama),
        ("/api/show", "what is known about the model", ollama.ShowBody, show),
    ):
        add(path, about, handle, "POST", body=body, errors=ollama.error_body)
    add("/api/tags", "the models", list_for_ollama, errors=ollama.error_body)
    add("/api/ps", "the models that are loaded", list_loaded, errors=ollama.error_body)
    add("/api/version", "a version of Ollama's API", version, errors=ollama.error_body)
    text, ids = tokens.TextBody, tokens.DetokenizeBody
    add("/tokenize", "the tokens of a text, or of messages", telling(text, tokens.tokenize), "POST", body=text)
    add("/detokenize", "the text of tokens", telling(ids, tokens.detokenize), "POST", body=ids)
    handle = telling(text, tokens.apply_template)
    add("/apply-template", "the prompt that messages make", handle, "POST", body=text)
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: no_such_path},
        middleware=[
            *([Middleware(AccessLog)] if access_log else []),
            Middleware(HostCheck, keys, hosts),
            *([Middleware(Origins, origins)] if origins else []),
            Middleware(Unversioned, [route.path for route in routes]),
        ],
    )


class IgnoredFields:
    """Logs the names of fields that are ignored, each once."""

    def __init__(self) -> None:
        self._told = set[str]()

    def tell(self, path: str, names: Sequence[str]) -> None:
        """Of one request."""
        new = [name for name in names if f"{path} {name}" not in self._told]
        if new and len(self._told) < MOST_TOLD:
            self._told.update(f"{path} {name}" for name in new)
            LOG.warning("%s: ignored unknown fields: %s", path, readable(", ".join(new), 500))


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

    def __init__(
        self,
        path: str,
        answered: Callable[[str, int], object],
        keys: Keys,
        handle: Handle,
        errors: ErrorBody = Refusal.body,
        about: str = "",
        body: type[Body] | None = None,
    ) -> None:
        """answered: told when an answer begins. errors: the JSON of a refusal. about, body: what it answers with, and
        what it takes, for its description."""
        self._path, self._answered, self._keys, self._handle = path, answered, keys, handle
        self._errors, self.about, self.body = errors, about, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._answered(self._path, message["status"])
                more = scope.get("state", {}).get("headers", ())
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        request = HttpRequest(scope, receive)
        request.state.uses = uses = ExitStack()
        try:
            key = request.headers.get("x-api-key")  # Anthropic's clients send it
            given = request.headers.get("authorization") or (None if key is None else f"Bearer {key}")
            request.state.tenant = self._keys.check(given)
            response = await self._handle(request)
            await response(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            pass
        except Refusal as refusal:
            await self._refused(refusal)(scope, receive, watched)
        except (DataError, ModelError) as error:  # about what was asked
            await self._refused(Refusal(400, str(error)))(scope, receive, watched)
        except Exception:
            if began:
                raise  # uvicorn logs it and closes the connection
            LOG.exception("%s failed", self._path)
            await self._refused(Refusal(500, "Internal error. See the server's log."))(scope, receive, watched)
        finally:
            uses.close()

    def _refused(self, refusal: Refusal) -> Response:
        return json_response(self._errors(refusal), refusal.status, refusal.headers)


async def no_such_path(request: HttpRequest, error: Exception) -> Response:
    """404 and 405, in the shape of all errors."""
    assert isinstance(error, HTTPException)
    asked, routes = readable(f"{request.method} {request.url.path}"), request.app.routes
    known = ", ".join(f"{min(route.methods - {'HEAD'})} {route.path}" for route in routes)
    message = f"There is no {asked}. This server has {known}."
    refusal = Refusal(error.status_code, message.replace("{name:path}", "NAME"), None, "unknown_url")
    return json_response(refusal.body(), refusal.status, error.headers)


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
