"""/v1/embeddings: a vector for each text."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive

from billfish.serving.answers import ClientGone, gone, refusals, stopped
from billfish.serving.fields import Fields
from billfish.serving.refusals import Described
from billfish.serving.service import Prompt, Service

CALL = "embeddings"
MOST_TEXTS = 2048  # OpenAI's limit


def read_embeddings(service: Service, fields: Fields) -> tuple[list[Prompt], bool]:
    """The texts, and whether their vectors are wanted in base64."""
    service.check_name(CALL, fields.text("model"))
    texts = service.prompts(fields, "input", special=False)
    encoding = fields.word("encoding_format", ["float", "base64"])
    fields.only("dimensions", service.model.config.hidden)
    fields.done()
    context = service.limits.context
    if len(texts) > MOST_TEXTS:
        raise fields.wrong("input", Described(f"{len(texts)} texts"), f"at most {MOST_TEXTS}")
    longest = max(len(text.tokens) for text in texts)
    if longest > context:
        raise fields.wrong("input", Described(f"{longest} tokens"), f"at most {context} in each text, the context")
    return texts, encoding == "base64"


async def embeddings(service: Service, texts: list[Prompt], in_base64: bool, receive: Receive) -> ASGIApp:
    """The vectors, one after another: a request of many texts has one place in the engine's queue at a time."""
    watch = asyncio.ensure_future(gone(receive))
    data: list[dict[str, Any]] = []
    try:
        for index, text in enumerate(texts):
            vector = await _vector(service, text, watch)
            data.append({"object": "embedding", "index": index, "embedding": _encoded(vector, in_base64)})
    finally:
        watch.cancel()
    count = sum(len(text.tokens) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


async def _vector(service: Service, text: Prompt, watch: asyncio.Future[None]) -> NDArray[np.float32]:
    with refusals():
        vector = asyncio.wrap_future(service.engine.embed(text.tokens))
    either: list[asyncio.Future[Any]] = [vector, watch]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not vector.done():
        vector.cancel()
        raise ClientGone
    if vector.cancelled():
        raise stopped()
    return await vector


def _encoded(vector: NDArray[np.float32], in_base64: bool) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
