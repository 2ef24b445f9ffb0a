"""Which model a request is for: the only one there is, or one of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from billfish.serving.api import ollama
from billfish.serving.api.service import Service
from billfish.serving.ipc.client import ServerClient

Result = TypeVar("Result")


class Models(ABC):
    """The models of a server.

    client: for what is one for the whole server. strict_fields: unknown fields of a body are refused. closing: whether
    the server shuts down.
    """

    def __init__(self, client: ServerClient, strict_fields: bool) -> None:
        self.client, self.strict_fields, self.closing = client, strict_fields, False

    @abstractmethod
    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that takes long, outside of the loop, before the model is known."""

    @abstractmethod
    async def use(self, name: str | None, asking: Asking) -> AbstractContextManager[Service]:
        """The model that a request names, which stays there inside the context. asking: awaits something as long as the
        client is there."""

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """All names, as OpenAI lists them."""

    @abstractmethod
    def record(self, name: str) -> dict[str, Any]:
        """One of them. Raises 404."""

    @abstractmethod
    def tags(self, *, loaded: bool = False) -> list[dict[str, Any]]:
        """All models, as Ollama lists them. loaded: only those in memory."""

    @abstractmethod
    async def show(self, body: ollama.ShowBody) -> dict[str, Any]:
        """What is known about a model, for Ollama's clients."""

    @abstractmethod
    async def health(self) -> dict[str, Any]:
        """status is "ok", "closing" or "failed"."""


Asking = Callable[[Awaitable[Any]], Awaitable[Any]]


class OneModel(Models):
    """A model that is there as long as the server."""

    def __init__(self, service: Service) -> None:
        super().__init__(service.client, service.strict_fields)
        self._service = service

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """By the service's threads."""
        return await self._service.read(function, *arguments)

    async def use(self, name: str | None, asking: Asking) -> AbstractContextManager[Service]:
        """Whatever the name is."""
        return nullcontext(self._service)

    def records(self) -> list[dict[str, Any]]:
        """The model and its adapters."""
        return self._service.records()

    def record(self, name: str) -> dict[str, Any]:
        """The model, or an adapter."""
        self._service.check_name(name)
        return self._service.record(name)

    def tags(self, *, loaded: bool = False) -> list[dict[str, Any]]:
        """The model, which is always loaded."""
        return [ollama.model_record(self._service)]

    async def show(self, body: ollama.ShowBody) -> dict[str, Any]:
        """The model, whatever the name is."""
        return await self._service.read(ollama.show, self._service, body)

    async def health(self) -> dict[str, Any]:
        """Of the engine."""
        return {"status": "closing" if self.closing else await self.client.state()}
