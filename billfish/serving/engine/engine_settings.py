"""What an engine is started with, and starting it: in the server's process, or in one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from billfish.core.typing import Activations
from billfish.llm.model import load_drafter, load_to_run
from billfish.serving.engine.engine import Engine


@dataclass(frozen=True)
class EngineSettings:
    """The options of `billfish serve` that an engine knows; None is its default."""

    device: str = "auto"
    quantize: str | None = None
    activations: str | None = None
    cache_type: str | None = None
    threads: int | None = None
    streams: int = 8
    context: int | None = None
    queue: int = 64
    cache_tokens: int | None = None
    draft: str | None = None
    draft_length: int | None = None


def start_engine(path: str | None, adapters: Mapping[str, str], settings: EngineSettings) -> Engine:
    """Load a model with its LoRA adapters (folders by names), and start its engine."""
    s = settings
    model = load_to_run(
        "serve", path, device=s.device, quantize=s.quantize, activations=s.activations, cache_type=s.cache_type
    )
    for name, folder in adapters.items():
        model.load_adapter(name, folder)
    engine = Engine(
        model,
        streams=s.streams,
        context=s.context,
        queue=s.queue,
        cache_tokens=s.cache_tokens,
        activations=cast(Activations | None, s.activations),
        draft=load_drafter("serve", model, s.draft, s.draft_length, s.activations),
        draft_length=s.draft_length,
    )
    if model.decoder.overlaps:  # a GPU's steps are so short that all would wait for the first grammar's vocabulary
        engine.warm_grammars()
    return engine
