"""The promise of drafting, over prompts, drafters, sampling and batches: the tokens are those without drafts.

    python tests/support/draft_matrix.py --device cuda --prompts 200 --formats q4_0,q8_0

runs it on a device, for small random models, and writes what it has counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from llm_architectures import write_model

from billfish.backends import BACKENDS
from billfish.llm import Model, load
from billfish.llm.drafting.drafter import Controller, Drafter
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Chosen, Request

DRAFTERS = ("ngram", "model", "oracle")
SAMPLING = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 3}}
BATCHES = (1, 5)
MOST = 16  # tokens of an answer


class Oracle(Drafter):
    """Knows answers to some prompts, and lies about every fifth token: right and wrong drafts in one step."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._texts = texts

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        known = next((text for text in self._texts if text[: len(sequence)] == list(sequence)), list(sequence))
        drafted = enumerate(known[len(sequence) : len(sequence) + most], len(sequence))
        return [token if at % 5 else 3 + token % 2 for at, token in drafted]


def prompts_of(count: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Random ones, every other with a part that comes again and again."""
    rng, made = random.Random(seed), []
    for i in range(count):
        part = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(2, 9))]
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 30))]
        made.append(part * rng.randrange(2, 5) + own[:2] + part if i % 2 else own)
    return made


class Matrix:
    """Of one model. small: drafts for it. plain answers are made once for all drafters."""

    def __init__(self, model: Model, small: Model, activations: Any, prompts: Sequence[list[int]]) -> None:
        self._model, self._small, self._activations, self._prompts = model, small, activations, prompts
        self._plain: dict[str, list[list[int]]] = {}

    def plain(self, sampling: str) -> list[list[int]]:
        if sampling not in self._plain:
            how = {"max_tokens": MOST, "activations": self._activations, **SAMPLING[sampling]}
            self._plain[sampling] = [self._model.generate(prompt, **how).tokens for prompt in self._prompts]
        return self._plain[sampling]

    def count(self, drafter: str, sampling: str, batch: int) -> dict[str, Any]:
        """How many answers of so many at once differ, and what was drafted: as much as may be."""
        plain = self.plain(sampling)
        texts = [prompt + tokens for prompt, tokens in zip(self._prompts, plain, strict=True)]
        draft: Any = self._small if drafter == "model" else "ngram"
        always = patch.object(Controller, "length", lambda self, kind=0, others=0: 0 if kind is None else self.most)
        oracle = patch("billfish.llm.model.NgramDrafter", lambda: Oracle(texts))
        with always:
            if drafter == "oracle":
                with oracle:
                    found, drafted, accepted = self._drafted(draft, sampling, batch)
            else:
                found, drafted, accepted = self._drafted(draft, sampling, batch)
        differing = sum(a != b for a, b in zip(found, plain, strict=True))
        kind = {"drafter": drafter, "sampling": sampling, "batch": batch}
        return {**kind, "answers": len(plain), "differing": differing, "drafted": drafted, "accepted": accepted}

    def _drafted(self, draft: Any, sampling: str, batch: int) -> tuple[list[list[int]], int, int]:
        model, how = self._model, SAMPLING[sampling]
        if batch == 1:
            more = {"max_tokens": MOST, "activations": self._activations, "draft": draft, **how}
            answers = [model.generate(prompt, **more) for prompt in self._prompts]
            counts = [answer.drafts for answer in answers]
            return [a.tokens for a in answers], sum(c.drafted for c in counts), sum(c.accepted for c in counts)
        context = max(map(len, self._prompts)) + MOST
        with Engine(
            model, streams=batch, context=context, queue=len(self._prompts), activations=self._activations, draft=draft
        ) as engine:
            made = [_Tokens() for _ in self._prompts]
            for prompt, tokens in zip(self._prompts, made, strict=True):
                engine.submit(Request(prompt, MOST, Sampling(**how)), tokens)
            for tokens in made:
                assert tokens.ended.wait(300)
            counts = engine.counts()
        return [each.tokens for each in made], counts.drafted_tokens, counts.accepted_tokens


class _Tokens:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = Event()

    def __call__(self, chosen: Chosen) -> None:
        self.tokens += [] if chosen.token is None else [chosen.token]
        if chosen.finished:
            self.ended.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--models", default="llama3")
    parser.add_argument("--formats", default="q4_0")
    parser.add_argument("--activations", default="q8,q16,exact")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    BACKENDS["cuda"].batch_invariant = True
    found, kinds = [], [None] if given.device != "cpu" else given.activations.split(",")
    for name in given.models.split(","):
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), name)
            small = load(place, device=given.device, quantize="q8_0", method="rtn")
            for format in given.formats.split(","):
                model = load(place, device=given.device, quantize=format, method="rtn")
                prompts = prompts_of(given.prompts, model.config.vocabulary)
                for activations in kinds:
                    started, matrix = time.time(), Matrix(model, small, activations, prompts)
                    for drafter in DRAFTERS:
                        for sampling in SAMPLING:
                            for batch in BATCHES:
                                about = {"model": name, "format": format, "activations": activations}
                                found.append({**about, **matrix.count(drafter, sampling, batch)})
                                if given.json is not None:
                                    given.json.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
                    bad = sum(each["differing"] for each in found)
                    seconds = time.time() - started
                    print(name, format, activations, f"{seconds:.1f} s, {bad} answers differ so far", flush=True)


if __name__ == "__main__":
    main()
