"""The formats as strips of bits, found by flipping each stored bit and looking at what it changes."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pictures.svg import Drawing
from billfish.core.format import FORMATS, Format

WEIGHTS = 256  # of one row, in every strip
BYTE, BIT = 3, 4  # pixels across and down
TONES = 32  # of codes, by k
LEFT, TOP, PITCH = 128, 112, 46
GAP = 4.0  # between the arrays of a format
FAMILIES = {
    "Words of 32 bits down K (GPTQ, AWQ, Marlin)": ("u4b8", "u4", "fp4", "u8b128"),
    "Rows (compressed-tensors, MLX, bitsandbytes)": ("mxfp4", "nvfp4", "affine4", "nf4", "fp8"),
    "Blocks of GGUF files": ("q4_0", "q4_1", "iq4_nl", "mxfp4_gguf", "nvfp4_gguf", "q5_0", "q5_1", "q8_0"),
    "K-quants and super-blocks of GGUF files": ("q2_k", "q3_k", "q4_k", "iq4_xs", "q5_k", "q6_k"),
}
PLANES = {
    "scale": "orange",
    "sub_scale": "yellow",
    "minimum": "green",
    "zero": "green",
    "sub_minimum": "sky",
    "sum": "grey",
}


class Bit(NamedTuple):
    """What a stored bit belongs to: a plane, which of its values, and which bit of that."""

    plane: str
    index: int
    place: int


def bits_of(format: Format, weights: int = WEIGHTS) -> list[list[Bit]]:
    """The stored bits of one row of `weights` weights, an item for each array that has any, in the order of bytes and
    from each byte's lowest bit on."""
    group = format.default_group_size
    sizes = {}
    for part in format.parts({}):
        if part.axes:
            spec = part.spec(1, weights, group)
            sizes[part.name] = spec.dtype.itemsize * int(np.prod(spec.shape))
    total = 8 * sum(sizes.values())
    # Row 0 has all bits 0, row i + 1 has bit i alone. Planes that differ from those of row 0 have it.
    rows, at, storage = np.eye(total + 1, total, -1, dtype=np.uint8), 0, dict[str, Any]()
    for part in format.parts({}):
        spec = part.spec(total + 1, weights, group)
        if not part.axes:
            storage[part.name] = np.ones(spec.shape, spec.dtype)
            continue
        octets = np.packbits(rows[:, at : at + 8 * sizes[part.name]], axis=1, bitorder="little")
        array = np.ascontiguousarray(octets).view(spec.dtype)
        storage[part.name] = np.ascontiguousarray(array.T if part.axes == "kn" else array)
        at += 8 * sizes[part.name]
    found: list[Bit | None] = [None] * total
    for name, plane in format.unpack(storage).items():
        if plane.ndim:
            raw = np.ascontiguousarray(plane).view(f"u{plane.dtype.itemsize}").astype(np.uint32)
            changed = raw[1:] ^ raw[:1]
            for bit, index in zip(*np.nonzero(changed), strict=True):
                found[bit] = Bit(name, int(index), int(changed[bit, index]).bit_length() - 1)
    assert None not in found, format.name
    whole = [bit for bit in found if bit is not None]
    ends = np.cumsum([8 * size for size in sizes.values()]).tolist()
    return [whole[end - 8 * size : end] for end, size in zip(ends, sizes.values(), strict=True)]


def colour(octet: list[Bit], bit: Bit) -> tuple[str, float]:
    """Of a bit of a byte. Codes get darker along K; high bits of codes that lie apart from the low ones are pink."""
    if bit.plane != "codes":
        return PLANES[bit.plane], 1.0
    apart = min(each.place for each in octet if each.plane == "codes") > 0
    return "pink" if apart else "blue", tone(bit.index * TONES // WEIGHTS)


def tone(step: int) -> float:
    return 0.25 + 0.75 * step / (TONES - 1)


def draw_strip(drawing: Drawing, x: float, y: float, bits: list[Bit]) -> float:
    """Bytes side by side, each with its highest bit above; returns where the strip ends."""
    octets = [bits[i : i + 8] for i in range(0, len(bits), 8)]
    columns = [tuple(colour(octet, bit) for bit in octet) for octet in octets]
    for cells, same in groupby(columns):
        width = BYTE * len(list(same))
        row = 0
        for (fill, opacity), run in groupby(cells):
            height = len(list(run))
            drawing.rect(x, y + BIT * (8 - row - height), width, BIT * height, fill, opacity=opacity)
            row += height
        x += width
    return x


def draw() -> Drawing:
    shown = sum(len(names) + 1 for names in FAMILIES.values())
    height = TOP + PITCH * shown - 8
    title = "256 weights of a row, as files store them"
    drawing = Drawing(
        1010, height, title, "Each strip is the stored bits of 256 weights of a row, coloured by meaning."
    )
    drawing.text(20, 32, title, size=18, bold=True)
    about = "A column is a byte, its lowest bit below. The length is the size: bits per weight are at the right."
    about += " Blue is darker for later k."
    drawing.text(20, 54, about, fill="dim")
    for step in range(TONES):
        drawing.rect(20 + 3 * step, 70, 3, 14, "blue", opacity=tone(step))
    drawing.text(124, 82, "bits of codes, k = 0 to 255", size=12)
    legend = {"pink": "high bits, apart", "orange": "scale", "yellow": "sub-scales", "green": "minimum or zero point"}
    legend["sky"] = "sub-minimums"
    for (fill, words), at in zip(legend.items(), (320, 460, 540, 650, 830), strict=True):
        drawing.rect(at, 70, 14, 14, fill)
        drawing.text(at + 20, 82, words, size=12)
    y = float(TOP)
    for family, names in FAMILIES.items():
        drawing.text(20, y + 18, family, bold=True)
        y += PITCH - 12
        for name in names:
            format, x = FORMATS[name], float(LEFT)
            drawing.text(20, y + 13, name, mono=True, bold=True)
            group = format.default_group_size
            drawing.text(20, y + 27, f"group of {group}", size=11, fill="dim")
            for bits in bits_of(format):
                x = draw_strip(drawing, x, y, bits) + GAP
            drawing.text(x + 6, y + 18, f"{format.bits_per_weight(group):.4g}", size=12, fill="dim")
            y += PITCH - 6
        y += 6
    drawing.height = int(y) + 6
    return drawing
