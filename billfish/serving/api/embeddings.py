"""Vectors of texts: /v1/embeddings, and /v1/rerank, which compares documents with a query by them."""

from __future__ import annotations

import base64
import time
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from starlette.types import ASGIApp, Receive

from billfish.serving.api.answering import json_response, while_there
from billfish.serving.api.request_bodies import Body, only, refuse, wrong
from billfish.serving.api.service import Prompt, Service
from billfish.serving.api.settings import Positive

MOST_TEXTS = 2048  # OpenAI's limit


class EmbeddingBody(Body):
    harmless: ClassVar = frozenset({"user", "metadata", "input_type", "priority"})
    unsupported: ClassVar = {"truncate_prompt_tokens": (), "embd_normalize": (2,), "normalize": (True,)}
    model: str | None = None
    input: str | list[Any] | dict[str, Any] = []
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def read_embeddings(service: Service, body: EmbeddingBody) -> list[Prompt]:
    """The texts."""
    if body.dimensions is not None:
        only("dimensions", body.dimensions, service.model.config.hidden)
    return service.prompts("input", body.input, most=MOST_TEXTS, whole=True)


async def vectors_of(service: Service, texts: list[Prompt], receive: Receive) -> list[NDArray[np.float32]]:
    """A vector for each text."""
    return await while_there(service.client.embed([text.tokens for text in texts]), receive)


async def embeddings(service: Service, body: EmbeddingBody, texts: list[Prompt], receive: Receive) -> ASGIApp:
    """The vectors, as OpenAI has them."""
    vectors = await vectors_of(service, texts, receive)
    encode = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": i, "embedding": encode(vector)} for i, vector in enumerate(vectors)]
    count = sum(len(text.tokens) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return json_response({"object": "list", "data": data, "model": service.name, "usage": usage})


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class Document(Body):
    text: str


class RerankBody(Body):
    harmless: ClassVar = frozenset({"user", "max_chunks_per_doc", "max_tokens_per_doc", "priority"})
    query: str
    documents: list[str | Document] = []
    texts: list[str] | None = None  # text-embeddings-inference's, whose answer is a list
    return_text: bool = False
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool = True


def read_rerank(service: Service, body: RerankBody) -> list[Prompt]:
    """The query, then the documents; for a model that scores pairs, the query with each document."""
    field, given = "documents" if body.texts is None else "texts", _texts(body)
    if not given:
        raise refuse(field, f"{field} is empty; expected at least one text.")
    if len(given) >= MOST_TEXTS:
        raise wrong(field, f"a list of {len(given)}", f"at most {MOST_TEXTS - 1}")
    if service.model.config.pooling == "rank":
        return service.pairs(field, body.query, given)
    query = service.prompts("query", body.query, most=1, whole=True)
    return query + service.prompts(field, list(given), most=MOST_TEXTS, whole=True)


def _texts(body: RerankBody) -> list[str]:
    if body.texts is not None:
        return body.texts
    return [each if isinstance(each, str) else each.text for each in body.documents]


async def rerank(service: Service, body: RerankBody, texts: list[Prompt], receive: Receive) -> ASGIApp:
    """Documents by what a classifier says of them with the query, or by the cosine of their vectors."""
    started = time.perf_counter()
    vectors = await vectors_of(service, texts, receive)
    if service.model.config.pooling == "rank":
        scores = [service.model.relevance(vector) for vector in vectors]
    else:
        query, *documents = (vector / np.linalg.norm(vector) for vector in vectors)
        scores = [float(query @ document) for document in documents]
    given = _texts(body)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
    if body.texts is not None:
        ranked = [{"index": index, "score": scores[index], "text": given[index]} for index in best]
        return json_response([each if body.return_text else {**each, "text": None} for each in ranked])
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": given[index]}} if body.return_documents else {}),
        }
        for index in best
    ]
    count = sum(len(text.tokens) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    took = {"seconds": round(time.perf_counter() - started, 4)}
    return json_response({"object": "list", "model": service.name, "results": results, "usage": usage, "meta": took})
