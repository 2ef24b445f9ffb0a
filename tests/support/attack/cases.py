"""What a case of the attack is, and the values that all generators draw from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import billfish as bf

# Both sides of what 8, 16, 32 and 64 bits hold, signed and not, and of what a product of sizes may be.
EDGES = sorted({0, 1, 2, 3, *(2**bits + d for bits in (7, 8, 15, 16, 31, 32, 40, 53, 62, 63, 64) for d in (-1, 0, 1))})
ODD_NAMES = (
    "",
    ".",
    "..",
    "/",
    "a/b",
    "\0",
    "\n",
    "\x1b[2J\x1b[H",
    "\u202egnp",
    "é" * 300,
    "x" * 70_000,
    ".weight",
    "weight",
    "blk.0.attn_q.weight",
    "blk.99999999999999999999.attn_q.weight",
    "__metadata__",
    "a.scales",
    "a.qweight",
    "a.weight_packed",
    "a.blocks",
    "a.about",
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    32,
    64,
    128,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    10**12,
    10**400,
    "",
    "x",
    "4",
    "llama",
    "\0",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
    [1] * 9,
    {"": {}},
    ["a", None],
)


class Case(NamedTuple):
    """Files in a folder of their own, and what is done with them. A call has no files."""

    name: str  # which rules were broken, for people
    files: dict[str, bytes]
    attempt: Callable[[Path], object]


Generator = Callable[[random.Random], Case]


def edge(rng: random.Random, *near: int) -> int:
    """A number at an edge: of some width, or of a number that would be right."""
    return rng.choice([*EDGES, *(n + d for n in near for d in (-1, 0, 1, n, 31))])


def odd_json(value: Any, rng: random.Random, odd: tuple[Any, ...] = ODD_VALUES) -> Any:
    """A JSON value with something else somewhere in it, or with something missing, twice or in another place."""
    if isinstance(value, dict) and value and rng.random() < 0.92:
        key = rng.choice(list(value))
        chance = rng.random()
        if chance < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if chance < 0.15:
            return {**value, rng.choice(ODD_NAMES): value[key]}
        return {**value, key: odd_json(value[key], rng, odd)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return rng.choice(
            [
                [*value[:at], odd_json(value[at], rng, odd), *value[at + 1 :]],
                value[:at] + value[at + 1 :],
                [*value, value[at]],
                value[::-1],
            ]
        )
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return edge(rng, value)
    return rng.choice(odd)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def odd_text(text: bytes, rng: random.Random) -> bytes:
    """Bytes of JSON, now and then broken as text."""
    if rng.random() < 0.85:
        return text
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        [
            text[:at],
            text[:at] + bytes([rng.randrange(256)]) + text[at:],
            b"[" * 100_000,
            b'{"a":' * 30_000,
            b"[" + b"[]," * 300_000 + b"0]",
            b"",
            b"\xef\xbb\xbf" + text,
            text.decode("utf-8", "replace").encode("utf-16"),
            b"NaN",
            b"1" * 100_000,
            b'"' + b"x" * 200_000 + b'"',
            text + text,
        ]
    )


def read_all(path: Path) -> None:
    """List, describe and read a checkpoint, and decode what is quantized. A refused tensor leaves the others."""
    checkpoint, refusal = bf.load(path), None
    for name in checkpoint:
        about = checkpoint.describe(name)
        assert str(about.kind)
        assert about.bits_per_weight >= 0
        if about.unsupported:
            continue
        try:
            tensor, order = checkpoint[name], checkpoint.permutation(name)
        except bf.BillfishError as error:
            refusal = error
            continue
        if isinstance(tensor, bf.QuantizedTensor):
            assert tensor.shape == (int(np.prod(about.shape[:-1])), about.shape[-1])
            assert order is None or np.array_equal(np.sort(order), np.arange(tensor.shape[1]))
            bf.dequantize(tensor)
        else:
            assert tensor.shape == about.shape
    if refusal is not None:
        raise refusal


def run_model(path: Path) -> None:
    """Load a language model, feed it two tokens, and take a text there and back."""
    model = bf.llm.load(path, progress=False)
    tokens = [min(token, model.config.vocabulary - 1) for token in (3, 5)]
    assert model.logits(tokens).shape == (2, model.config.vocabulary)
    model.tokenizer.decode(model.tokenizer.encode("ab <s> \u00fc"))
