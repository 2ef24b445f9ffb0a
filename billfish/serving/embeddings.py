"""/v1/embeddings: a vector for each text."""

from __future__ import annotations

from starlette.types import ASGIApp

from billfish.serving.service import Service


async def embeddings(service: Service, body: bytes) -> ASGIApp:
    raise NotImplementedError
