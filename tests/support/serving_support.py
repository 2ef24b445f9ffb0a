"""Requests to an engine and what comes back, for tests."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from threading import Event
from typing import Any

from llm_models import Small, write_model

import billfish as bf
from billfish.llm.detokenizer import Piece
from billfish.llm.grammar import CompiledGrammar, json_schema
from billfish.llm.sampler import Sampling
from billfish.serving.engine.answer_text import AnswerText
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Chosen, Request, Ticket

PATIENCE = 120  # seconds after which an answer that does not come fails its test


def small_model(folder: Path, **sizes: Any) -> bf.llm.Model:
    path = folder / "model.gguf"
    write_model(path, Small(**{"context": 512, **sizes}))
    return bf.llm.load(path, device="cpu")


class Collected:
    """The pieces of an answer; it is what `submit` takes."""

    ticket: Ticket

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._ended = Event()

    def __call__(self, piece: Piece) -> None:
        assert not self._ended.is_set(), "a piece after the last one"
        self.pieces.append(piece)
        if piece.finished:
            self._ended.set()

    def ended(self, seconds: float = PATIENCE) -> bool:
        """Whether the last piece comes in time."""
        return self._ended.wait(seconds)

    def wait(self) -> Collected:
        assert self.ended(), "no end came"
        return self

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [token.id for piece in self.pieces for token in piece.tokens]

    @property
    def finished(self) -> str:
        return self.pieces[-1].finished


def submit(engine: Engine, request: Request) -> Collected:
    collected, text, submitted = Collected(), AnswerText(request, engine.model.tokenizer), Event()

    def take(chosen: Chosen) -> None:
        piece = text.take(chosen)
        if piece is not None:
            collected(piece)
            if piece.finished and not chosen.finished:
                assert submitted.wait(PATIENCE)
                collected.ticket.cancel(enough=True)

    collected.ticket = engine.submit(request, take)
    submitted.set()
    return collected


def ask(engine: Engine, request: Request) -> Collected:
    return submit(engine, request).wait()


def compiled(engine: Engine, schema: dict[str, Any]) -> CompiledGrammar:
    return engine.compile(json_schema(schema)).result(PATIENCE)


def alone(model: bf.llm.Model, request: Request, **more: Any) -> tuple[str, list[int], str]:
    """Text, ids and end, as `generate` has them."""
    how = {field.name: getattr(request.sampling, field.name) for field in dataclasses.fields(Sampling)}
    answer = model.generate(request.prompt, max_tokens=request.max_tokens, **how, **more)
    text = "".join(answer)
    ids = [token for token in answer.tokens if token not in model.tokenizer.ends]
    return text, ids, answer.finish_reason or ""


def random_sampling(rng: random.Random) -> Sampling:
    """Each setting as it is by default, or another way."""
    return Sampling(
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(1000),
        min_p=rng.choice([0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logit_bias=rng.choice([{}, {5: 2.5, 9: -100.0}]),
    )


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Of small models' vocabulary, without control tokens."""
    return [rng.randrange(4, 261) for _ in range(count)]
