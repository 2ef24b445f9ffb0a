"""Whole small files of each kind with a few bytes changed: flipped, cut, spliced, or numbers at an edge of their width.

A case costs a millisecond, so that there can be hundreds of thousands. The other generators break one rule of a format
each, and go deeper.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import billfish as bf
from attack.cases import EDGES, Case, as_json, odd_json, read_all
from attack.folders import CONFIG, tokenizer, use_tokenizer
from attack.gguf_files import collection
from attack.packed_files import multiply, weights
from attack.safetensors_files import file_of, joined, layout
from billfish.statistics import InputStatistics

WIDTHS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


def use_statistics(path: Path) -> None:
    """Load, use and save them in both other layouts."""
    found = bf.Statistics.load(path)
    for name in found:
        assert np.asarray(found[name].squares).ndim >= 1
    for suffix in (".safetensors", ".gguf", ".dat"):
        found.save(path.with_name(f"again{suffix}"))


def statistics() -> bf.Statistics:
    """Of two matrices."""
    rng = np.random.default_rng(0)
    names = [f"blk.{i}.attn_q.weight" for i in range(2)]
    inputs = {name: InputStatistics(rng.random(32), np.array(8)) for name in names}
    shapes = dict.fromkeys(names, (16, 32))
    return bf.Statistics(inputs, architecture="llama", shapes=shapes, window=4, texts=("a",))


@functools.cache
def whole() -> dict[str, tuple[dict[str, bytes], str, Callable[[Path], object]]]:
    """By name: the files, which one is changed, and what is done with it."""
    found: dict[str, tuple[dict[str, bytes], str, Callable[[Path], object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for suffix in (".safetensors", ".gguf", ".dat"):
            statistics().save(place / f"s{suffix}")
            found[f"statistics{suffix}"] = (
                {f"s{suffix}": (place / f"s{suffix}").read_bytes()},
                f"s{suffix}",
                use_statistics,
            )
        weights("q4_0").save(place / "p.npz")
        found["packed"] = ({"p.npz": (place / "p.npz").read_bytes()}, "p.npz", multiply)
    for seed in range(4):
        found[f"gguf {seed}"] = ({"m.gguf": collection(random.Random(seed)).bytes()}, "m.gguf", read_all)
    for seed in range(12):
        rng = random.Random(seed)
        kind, arrays, config = layout(rng)
        header, data = file_of(arrays, rng)
        files = {"model.safetensors": joined(as_json(header), data), "config.json": as_json(config)}
        found[f"{kind} {seed}"] = (files, "model.safetensors", lambda path: read_all(path.parent))
        found[f"{kind} {seed} config"] = (files, "config.json", lambda path: read_all(path.parent))
    known = {"tokenizer.json": as_json(tokenizer()), "config.json": as_json(CONFIG)}
    found["tokenizer.json"] = (known, "tokenizer.json", lambda path: use_tokenizer(path.parent))
    return found


def changed(content: bytes, rng: random.Random) -> bytes:
    """The same with one to four changes, most of them near the beginning, where headers are."""
    made = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(min(len(made), rng.choice([64, 1024, 1 << 30]))) if made else 0
        chance = rng.random()
        if chance < 0.35:
            made[at : at + 1] = bytes([rng.randrange(256)])
        elif chance < 0.6:
            width = rng.choice(list(WIDTHS))
            made[at : at + width] = struct.pack(WIDTHS[width], rng.choice(EDGES) % 2 ** (8 * width))
        elif chance < 0.7:
            made[at:] = b""
        elif chance < 0.8:
            start = rng.randrange(len(made) + 1)
            made[at:at] = made[start : start + rng.choice([1, 8, 64])]
        elif chance < 0.9:
            made[at : at + rng.choice([1, 8, 64])] = b""
        else:
            made[at : at + 1] = rng.choice([b"\\ud800", b"1e999", b"-1", b"null", b"{}", b"[]", b'""', b"0" * 30])
    return bytes(made)


def odd_header(content: bytes, rng: random.Random) -> bytes:
    """A .safetensors file whose header is JSON of the right length, with some odd values, so that more than the parser
    of JSON sees it."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    told = [key for key, value in header.get("__metadata__", {}).items() if value.startswith(("{", "["))]
    if told and rng.random() < 0.5:  # JSON in a string of the JSON
        key = rng.choice(told)
        inner = as_json(odd_json(json.loads(header["__metadata__"][key]), rng)).decode()
        header["__metadata__"] = {**header["__metadata__"], key: inner}
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            header = odd_json(header, rng)
    return joined(as_json(header), content[8 + size :])


def mutated(rng: random.Random) -> Case:
    """A file that was whole."""
    known = whole()
    name = rng.choice(list(known))
    files, changing, attempt = known[name]
    content, chance = files[changing], rng.random()
    if changing.endswith(".safetensors") and chance < 0.5:
        content = odd_header(content, rng)
    elif changing.endswith(".json") and chance < 0.5:
        content = as_json(odd_json(json.loads(content), rng))
    if content is files[changing] or chance < 0.1:
        content = changed(content, rng)
    made = {**files, changing: content}
    return Case(name, made, lambda folder: attempt(folder / changing))
