"""Files of packed weights: zip archives, the headers of their arrays, and what they say about the weights."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from attack.cases import Case, edge, odd_json
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.packed import CODES, LAYOUT, SCALES
from billfish.backends.cuda import packed as bricks
from billfish.backends.cuda.packed import PackedBricks


@functools.cache
def weights(format: str) -> bf.PackedWeights:
    return bf.prepack(bf.quantize(np.random.default_rng(0).standard_normal((4, 256), np.float32), format))


@functools.cache
def packed_bricks(format: str) -> PackedBricks:
    return PackedBricks.of(bf.quantize(np.random.default_rng(0).standard_normal((4, 256), np.float32), format))


def npy(array: np.ndarray, rng: random.Random, honest: bool) -> bytes:
    """An array as NumPy saves it, or with a header that lies."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0))
    content = out.getvalue()
    if honest:
        return content
    shapes = [
        "(1000000000000,)",
        "(-1,)",
        "()",
        "(0,)",
        f"({edge(rng, array.size)},)",
        "(2, 2)",
        "(4294967296, 4294967296)",
        "3",
    ]
    types = ["'|O'", "'<U1000000000'", "'|u1'", "'<f8'", "[('a', '|u1')]", "'|V0'", "'>i4'", "None"]
    order = rng.choice(["False", "True", "0"])
    header = f"{{'descr': {rng.choice(types)}, 'fortran_order': {order}, 'shape': {rng.choice(shapes)}, }}"
    header = rng.choice([header, header, "(" * 5000, "{}", "", "__import__('os')"]).ljust(118)
    magic = rng.choice([b"\x93NUMPY\1\0", b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", b"\x93NUMPY\3\0", b"\x93NUMPX\1\0"])
    return magic + struct.pack("<H", rng.choice([len(header), len(header), 0, 65535])) + header.encode() + content[128:]


def archive(members: dict[str, bytes], rng: random.Random, rule: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice([8, 12, 14]) if rule == "deflated" else zipfile.ZIP_STORED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        if rule == "members":
            for i in range(rng.choice([1, 20, 3000])):
                file.writestr(rng.choice([f"x{i}.npy", f"../{i}.npy", f"/{i}"]), b"")
    content = bytearray(out.getvalue())
    if rule == "bytes":
        for _ in range(rng.choice([1, 4])):
            at = rng.randrange(len(content))
            content[at] = rng.randrange(256)
        del content[rng.choice([len(content), rng.randrange(len(content))]) :]
    if rule == "numbers":  # a number of the archive's own: a size, an offset, a count
        at = rng.choice([bytes(content).rindex(b"PK\5\6"), bytes(content).rindex(b"PK\1\2")]) + rng.randrange(4, 20)
        content[at : at + 4] = struct.pack("<I", edge(rng, len(content)) % 2**32)
    return bytes(content)


RULES = ("about", "about", "about", "axes", "header", "header", "deflated", "members", "bytes", "numbers", "order")


def packed(rng: random.Random) -> Case:
    """Weights for the CPU, which are then multiplied with, and bricks for a GPU."""
    rule, bomb = rng.choice(RULES), bytes(20_000_000)
    arrays: dict[str, Any]
    if rng.random() < 0.25:
        ours = packed_bricks(rng.choice(["u4", "q4_0", "nvfp4"]))
        about: Any = {**dataclasses.asdict(ours.kind), "shape": ours.shape, "layout": bricks.LAYOUT}
        arrays, load = {"bricks": ours.bricks, "row_scale": ours.row_scale}, PackedBricks.load
    else:
        held = weights(rng.choice(list(bf.FORMATS)))
        axes = dataclasses.asdict(held.axes)
        if rule == "axes":  # of another kind, with a stream that is as long as such a kind's
            axes |= {
                "codes": rng.choice(CODES),
                "scales": rng.choice(SCALES),
                "group": rng.choice([16, 32, 64, 128, 256]),
            }
            axes |= {"bias": rng.choice([0, 8, -1, 2**31 - 1]), "table": rng.choice([[], [1] * 16, [255] * 40, [-1]])}
        shape = rng.choice([(4, 256), (1, 1), (33, 300), (0, 256), (4, 0)]) if rule == "axes" else held.shape
        about = {
            "format": held.format.name,
            "shape": shape,
            "group_size": 32,
            "level": held.level,
            "axes": axes,
            "layout": LAYOUT,
        }
        data = held.data
        if rule == "axes":
            table = tuple(value & 255 for value in axes["table"])
            description = dataclasses.replace(held.axes, **axes | {"table": table}).describe(shape)
            data = np.zeros(_cpu.packed_bytes(held.level, description), np.uint8)
        arrays, load = {"data": data}, multiply
    if rule == "about":
        about = odd_json(about, rng)
    if rule == "order":
        order = np.arange(256, dtype=np.int32)
        arrays["permutation"] = rng.choice(
            [order[::-1].copy(), order * 2, order - 1, order[:-1].copy(), order.astype(np.float32)]
        )
    arrays = {"about": np.array(json.dumps(about)), **arrays}
    liar = rng.choice(list(arrays)) if rule == "header" else ""
    members = {f"{name}.npy": npy(array, rng, name != liar) for name, array in arrays.items()}
    if rule == "deflated" and rng.random() < 0.5:
        members["more.npy"] = bomb
    return Case(rule, {"packed.npz": archive(members, rng, rule)}, lambda folder: load(folder / "packed.npz"))


def multiply(path: Path) -> None:
    held = bf.PackedWeights.load(path)
    for rows in (1, 9):
        for activations in ("exact", "q8", "q16"):
            y = bf.quantized_linear(np.ones((rows, held.shape[1]), np.float32), held, activations=activations)
            assert y.shape == (rows, held.shape[0])
