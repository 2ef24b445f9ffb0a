"""What a KV cache in fewer bits costs SmolLM2-135M-Instruct in KL divergence. A table of docs/llm.md.

    pip install --no-deps gensim==4.4.0

The reference is the model on the same device with the type that keeps the most bits. The text is news, as in
quality.py, in windows of 512 tokens. "emulated" is the CUDA decoder on a machine without a GPU: NumPy computes what its
kernels do (tests/support/cuda_numpy.py), which is their rounding but not their order of additions.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import command, machine, records
from benchmarks.quality import test_text
from billfish.core.typing import CacheType
from billfish.llm import Model, default_model, load

WINDOW, ROWS = 512, 64  # ROWS: whose probabilities are in memory at once
# Of each device: the reference, then the others.
TYPES = {"cpu": ("float32", "float16", "int8"), "cuda": ("float16", "fp8"), "emulated": ("float16", "fp8")}


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """device="cuda" is a GPU whose kernels NumPy computes."""
    sys.path.insert(0, str(records.RESULTS.parents[1] / "tests" / "support"))
    with pytest.MonkeyPatch.context() as patch:
        gpu: Any = importlib.import_module("cuda_numpy").NumpyGpu(patch)
        yield
        gc.collect()  # models give their memory back
    gpu.forget()


def logits(model: Model, tokens: list[int]) -> Iterator[NDArray[np.float32]]:
    """Of each window."""
    exact = "exact" if model.decoder.device == "cpu" else None
    for first in range(0, len(tokens) - WINDOW + 1, WINDOW):
        yield model.logits(tokens[first : first + WINDOW], activations=cast(Any, exact))


def probabilities(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Their logarithms."""
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def compared(reference: NDArray[np.float32], other: NDArray[np.float32]) -> list[tuple[float, bool]]:
    """KL(reference || other) of each row in nats, and whether the best token is the same."""
    found: list[tuple[float, bool]] = []
    for first in range(0, len(reference), ROWS):
        rows = slice(first, first + ROWS)
        p, q = probabilities(reference[rows]), probabilities(other[rows])
        lost, same = (np.exp(p) * (p - q)).sum(axis=1), p.argmax(axis=1) == q.argmax(axis=1)
        found += zip(lost.tolist(), same.tolist(), strict=True)
    return found


def measure(device: str, tokens: list[int]) -> list[dict[str, Any]]:
    """A record for each type but the reference."""
    first, *others = TYPES[device]
    place, made = "cpu" if device == "cpu" else "cuda", list[dict[str, Any]]()

    def loaded(cache_type: str) -> Model:
        return load(device=place, cache_type=cast(CacheType, cache_type), progress=False)

    truth = list(logits(loaded(first), tokens))
    for cache_type in others:
        rows = [
            row
            for expected, found in zip(truth, logits(loaded(cache_type), tokens), strict=True)
            for row in compared(expected, found)
        ]
        lost, same = np.array([row[0] for row in rows]), np.mean([row[1] for row in rows])
        about = {"device": device, "reference": first, "cache_type": cache_type, "tokens": len(rows)}
        error = lost.std(ddof=1) / len(lost) ** 0.5
        numbers = {"divergence": lost.mean(), "divergence_error": error, "same_best": same}
        made.append(about | {name: float(value) for name, value in numbers.items()})
    return made


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.listed("--devices", f"devices, of {', '.join(TYPES)}", "cpu,cuda")
    parser.option("--tokens", "tokens of news", 2048, command.positive, "N")
    flags = parser.parse_args()
    text = load(default_model(), device="cpu", progress=False).tokenizer.encode(test_text(), special=False)
    found = []
    for device in flags.devices:
        with emulated_gpu() if device == "emulated" else nullcontext():
            for record in measure(device, text[: flags.tokens]):
                found.append(record)
                print(json.dumps(record), flush=True)
    about = {"model": "SmolLM2-135M-Instruct", "window": WINDOW} | machine.versions("numpy")
    records.write(flags.json, {"about": about, "records": found})


if __name__ == "__main__":
    main()
