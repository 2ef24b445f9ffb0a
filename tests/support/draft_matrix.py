"""The promise of drafting, over prompts, drafters, sampling and batches: the tokens are those without drafts.

    python tests/support/draft_matrix.py --device cuda --jobs 6 --lines FILE --formats q4_0,q8_0

runs it for small random models: in each process one format with one type of activations. FILE gets a line for each
case as it ends, and with --json a record is made of all its lines, those of earlier runs too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import billfish as bf
from billfish.backends import BACKENDS
from billfish.core.format import FORMATS
from billfish.llm import Model, load
from billfish.llm.drafting.drafter import Controller, Drafter
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Chosen, Request

DRAFTERS = ("ngram", "model", "oracle")
SAMPLING = {"greedy": {}, "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 3}}
BATCHES = (1, 5)
MOST = 16  # tokens of an answer
# Long prompts have so many: their answers pass a page of a GPU's KV cache (64 positions), or a slice of the CPU's
# attention (256).
LONG = ((50, 70), (240, 270))
CONTEXT = 512
LENGTHS = {"model": 3, "mtp": 3}  # of drafts that take long to make
# Every format can have all matrices of a layer: no format's blocks have more than 256 columns.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}


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


def long_prompts_of(count: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """As long as LONG says in turns, every other pair with a part that comes again and again."""
    rng, made = random.Random(seed), []
    for i in range(count):
        length = rng.randint(*LONG[i % 2])
        part = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(2, 9) if i // 2 % 2 else length)]
        made.append((part * length)[:length])
    return made


class Matrix:
    """Of one model. small: drafts for it. endless: no token ends an answer before it has `most`. plain answers are made
    once for all drafters."""

    def __init__(
        self,
        model: Model,
        small: Model | None,
        activations: Any,
        prompts: Sequence[list[int]],
        most: int = MOST,
        *,
        endless: bool = False,
    ) -> None:
        if endless:
            model.tokenizer.ends = frozenset()
        self._model, self._small, self._activations, self._prompts = model, small, activations, prompts
        self._most, self._plain = most, dict[str, list[list[int]]]()

    def plain(self, sampling: str) -> list[list[int]]:
        if sampling not in self._plain:
            how = {"max_tokens": self._most, "activations": self._activations, **SAMPLING[sampling]}
            self._plain[sampling] = [self._model.generate(prompt, **how).tokens for prompt in self._prompts]
        return self._plain[sampling]

    def texts(self, sampling: str) -> list[tuple[list[int], list[int]]]:
        """Prompts and their plain answers."""
        return list(zip(self._prompts, self.plain(sampling), strict=True))

    def count(self, drafter: str, sampling: str, batch: int) -> dict[str, Any]:
        """How many answers of so many at once differ, and what was drafted: as much as may be."""
        plain = self.plain(sampling)
        texts = [prompt + tokens for prompt, tokens in zip(self._prompts, plain, strict=True)]
        draft: Any = {"model": self._small, "mtp": "mtp"}.get(drafter, "ngram")
        how = {"draft": draft, "draft_length": LENGTHS.get(drafter)}
        always = patch.object(Controller, "length", lambda self, kind=0, others=0: 0 if kind is None else self.most)
        oracle = patch("billfish.llm.model.NgramDrafter", lambda: Oracle(texts))
        with always:
            if drafter == "oracle":
                with oracle:
                    found, drafted, accepted = self._drafted(how, sampling, batch)
            else:
                found, drafted, accepted = self._drafted(how, sampling, batch)
        differing = sum(a != b for a, b in zip(found, plain, strict=True))
        kind = {"drafter": drafter, "sampling": sampling, "batch": batch}
        return {**kind, "answers": len(plain), "differing": differing, "drafted": drafted, "accepted": accepted}

    def _drafted(self, draft: dict[str, Any], sampling: str, batch: int) -> tuple[list[list[int]], int, int]:
        model, how = self._model, SAMPLING[sampling]
        if batch == 1:
            more = {"max_tokens": self._most, "activations": self._activations, **draft, **how}
            answers = [model.generate(prompt, **more) for prompt in self._prompts]
            counts = [answer.drafts for answer in answers]
            return [a.tokens for a in answers], sum(c.drafted for c in counts), sum(c.accepted for c in counts)
        context = max(map(len, self._prompts)) + self._most
        with Engine(
            model, streams=batch, context=context, queue=len(self._prompts), activations=self._activations, **draft
        ) as engine:
            made = [_Tokens() for _ in self._prompts]
            for prompt, tokens in zip(self._prompts, made, strict=True):
                engine.submit(Request(prompt, self._most, Sampling(**how)), tokens)
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


# ---- as a program ----------------------------------------------------------------------------------------------------


def run(folder: Path, device: str, format: str, activations: str | None, given: argparse.Namespace) -> list[str]:
    """All cases of one model in one format. Writes a line for each, and returns what was wrong."""
    bf.set_threads(1)
    BACKENDS["cuda"].batch_invariant = True
    wrong, about = list[str](), {"model": folder.name, "device": device, "format": format, "activations": activations}
    about |= {"level": bf.BACKENDS["cpu"].level} if device == "cpu" else {}
    started = time.process_time()
    try:
        if on_metal := device.startswith("metal"):  # drafts only where every matrix is quantized
            model = load(folder, device=device, convert=partial(quantized, format))
        else:
            model = load(folder, device=device, quantize=format, method="rtn")
        assert format in model.decoder.tensors.kinds, f"no matrix is {format}"
        drafters = ("mtp",) if model.config.mtp is not None else DRAFTERS
        small = None
        if drafters == DRAFTERS:
            small = load(folder, device="cpu" if on_metal else device, quantize="q8_0", method="rtn")
        prompts = (long_prompts_of if given.long else prompts_of)(given.prompts, model.config.vocabulary)
        about["positions"] = max(map(len, prompts)) + given.tokens
        matrix = Matrix(model, small, activations, prompts, given.tokens, endless=given.long)
        for case in product(drafters, SAMPLING, BATCHES):
            found = about | matrix.count(*case) | {"cpu_seconds": round(time.process_time() - started, 2)}
            with given.lines.open("a") as file:
                file.write(json.dumps(found) + "\n")
            if found["differing"]:
                wrong.append(json.dumps(found))
    except Exception as error:
        wrong.append(f"{about}: {type(error).__name__}: {error}")
    return wrong


def quantized(format: str, name: str, tensor: np.ndarray) -> Any:
    """Every matrix, the embedding and the LM head too."""
    return bf.quantize(tensor.astype(np.float32), format) if tensor.ndim == 2 else tensor


def record(lines: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """What all cases have in common, and the sums of their counts."""
    each = {"models": "model", "formats": "format", "activations": "activations", "drafters": "drafter"}
    each |= {"batches": "batch", "levels": "level", "positions": "positions"}
    kinds = {name: [*dict.fromkeys(line[key] for line in lines if line.get(key))] for name, key in each.items()}
    counts = {name: sum(line[name] for line in lines) for name in ("answers", "differing", "drafted", "accepted")}
    return {"about": about, "prompts": lines[0]["answers"], **kinds, **counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--long", action="store_true", help=f"prompts of {LONG} tokens in turns, endless answers")
    parser.add_argument("--tokens", type=int, default=MOST, help="of each answer")
    parser.add_argument("--models", default="llama3,mtp")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--activations", default="q16,exact,q8", help="on the CPU")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--lines", type=Path, required=True, help="file for the lines")
    parser.add_argument("--json", type=Path, help="file for a record, as benchmarks/results has them")
    given = parser.parse_args()
    from llm_architectures import write_model, write_mtp_model  # here: with torch, which no other process needs

    kinds = given.activations.split(",") if given.device == "cpu" else [None]
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in given.models.split(",")}
        for name, folder in folders.items():
            sizes = {**WIDE, "max_position_embeddings": CONTEXT}
            write_mtp_model(folder, **sizes) if name == "mtp" else write_model(folder, name, **sizes)
        tasks = [*product(kinds, folders.values(), given.formats.split(","))]
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            going = [pool.submit(run, folder, given.device, format, how, given) for how, folder, format in tasks]
            for done, each in enumerate(as_completed(going), 1):
                for problem in each.result():
                    print(problem, flush=True)
                print(f"{done} of {len(tasks)} models", flush=True)
    lines = [*map(json.loads, given.lines.read_text().splitlines())]
    device = bf.BACKENDS["cpu"].level if given.device == "cpu" else given.device
    made = record(lines, {"device": device, "billfish": bf.__version__, "date": time.strftime("%Y-%m-%d")})
    print(len(lines), "cases", {name: made[name] for name in ("answers", "differing", "drafted", "accepted")})
    if given.json is not None:
        given.json.write_text(json.dumps(made, indent=1) + "\n")
    sys.exit(any(each.result() for each in going))


if __name__ == "__main__":
    main()
