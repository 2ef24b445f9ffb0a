"""/v1/embeddings: a vector for each text."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.types import ASGIApp, Receive

from billfish.serving.api.request_bodies import Body, only
from billfish.serving.api.responses import json_response, refusals, while_there
from billfish.serving.api.service import Prompt, Service

MOST_TEXTS = 2048  # OpenAI's limit


class EmbeddingBody(Body):
    model: str | None = None
    input: str | list[Any] = []
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def read_embeddings(service: Service, body: EmbeddingBody) -> list[Prompt]:
    """The texts."""
    service.check_name(body.model)
    if body.dimensions is not None:
        only("dimensions", body.dimensions, service.model.config.hidden)
    return service.prompts("input", body.input, most=MOST_TEXTS, special=False)


async def embeddings(service: Service, body: EmbeddingBody, texts: list[Prompt], receive: Receive) -> ASGIApp:
    """The vectors."""
    with refusals():
        future = await service.read(service.engine.embed, [text.tokens for text in texts])  # it may wait for the engine
    vectors = await while_there(future, receive)
    encode = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
    count = sum(len(text.tokens) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": service.name, "usage": usage})


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
