"""How packed weights lie in memory: the stream of the CPU and the bricks of CUDA."""

from __future__ import annotations

import numpy as np

from benchmarks.pictures.svg import Drawing
from billfish.backends.cuda.axes import BRICK, COURSE, Kind
from billfish.backends.cuda.layout import pack_codes

HUES = ("blue", "orange", "green", "pink")

# ---- the CPU's stream: NEON's tile of 16 rows, four lanes of 32 bits in a vector --------------------------------

TILE, LANES, BLOCK = 16, 4, 32
VECTOR = 4 * LANES  # bytes
SCALES, CODES = 2 * TILE, TILE * BLOCK // 2  # bytes of a span of q4_0


def stream_place(row: int, k: int) -> tuple[int, int]:
    """Of a 4-bit code of a tile's first span: its byte behind the scales, and its lowest bit there.

    Two vectors share the bytes of one. A vector has a quad of k of four rows, so that one dot product serves four rows.
    High nibbles hold the code less 8, as bytes are signed.
    """
    vector = k // 4 * (TILE // LANES) + row // LANES
    return vector // 2 * VECTOR + row % LANES * 4 + k % 4, 4 * (vector % 2)


def cpu_stream() -> Drawing:
    title = "The packed stream on the CPU: q4_0, one tile of 16 rows (NEON)"
    about = (
        "Rows of GGUF blocks become one stream per tile: scales of 16 rows, then codes in the order of the registers."
    )
    drawing = Drawing(960, 700, title, about)
    drawing.text(20, 32, title, size=18, bold=True)
    drawing.text(
        20,
        54,
        "The kernel reads every byte once, in order. One mask decodes 32 codes: no shift, no shuffle.",
        fill="dim",
    )

    drawing.text(20, 90, "In the GGUF file: row after row, each 32 k a block of 18 bytes", bold=True)
    for row in range(TILE):
        y = 102 + 9 * row
        for block in range(4):
            x = 90 + 150 * block
            drawing.rect(x, y, 14, 8, "yellow")
            drawing.rect(x + 15, y, 130, 8, HUES[row // LANES], opacity=0.3 + 0.15 * (row % LANES))
    for i in range(4):
        drawing.text(82, 124 + 36 * i, f"rows {LANES * i}-{LANES * i + 3}", size=11, fill="dim", anchor="end")
    drawing.text(700, 116, "next block: 18 bytes on", size=12, fill="dim")
    drawing.text(700, 134, "next row: K / 32 blocks on,", size=12, fill="dim")
    drawing.text(700, 150, "so 16 rows are 16 places in memory", size=12, fill="dim")

    y = 306
    drawing.text(20, y - 20, "In the stream: a span of 32 k is 32 bytes of scales, then 256 bytes of codes", bold=True)
    x = 90.0
    for span in range(3):
        drawing.rect(x, y, 36, 34, "yellow")
        for i in range(CODES // VECTOR):
            at = x + 38 + 13 * i
            for low in range(2):
                hue = HUES[2 * (i % 2) + low]
                drawing.rect(at, y + 17 * (1 - low), 12, 17, hue, opacity=0.55 + 0.03 * (i // 2))
        offset = span * (SCALES + CODES)
        drawing.text(x, y + 50, f"byte {offset}", size=11, fill="dim")
        drawing.text(x + 38 + 30, y + 50, f"byte {offset + SCALES}: 16 vectors of 16 bytes", size=11, fill="dim")
        x += 38 + 13 * CODES // VECTOR + 26
    drawing.text(x, y + 22, "...", size=16, fill="dim")
    drawing.text(30, y + 14, "16 f16", size=12, fill="dim")
    drawing.text(30, y + 30, "scales", size=12, fill="dim")

    top = 400
    drawing.text(20, top, "The first two vectors of codes, byte by byte; high nibbles hold code - 8, signed", bold=True)
    drawing.line([(128, 342), (128, 372), (90, top + 14)], "line", dash="3 3")
    drawing.line([(153, 342), (153, 372), (90 + 52 * VECTOR, top + 14)], "line", dash="3 3")
    cells = {stream_place(row, k): (row, k) for row in range(TILE) for k in range(BLOCK)}
    for vector in range(2):
        for byte in range(VECTOR):
            x = 90 + 52 * byte
            for nibble in (4, 0):
                row, k = cells[vector * VECTOR + byte, nibble]
                y = top + 16 + 66 * vector + (0 if nibble else 28)
                drawing.rect(x, y, 50, 26, HUES[row // LANES], opacity=0.3 + 0.15 * (row % LANES))
                drawing.text(x + 25, y + 17, f"r{row} k{k}", size=11, anchor="middle", bold=True)
        drawing.text(82, top + 33 + 66 * vector, "bits 7-4", size=11, fill="dim", anchor="end")
        drawing.text(82, top + 61 + 66 * vector, "bits 3-0", size=11, fill="dim", anchor="end")

    y = top + 168
    drawing.text(20, y, "What the kernel does with a vector, for small M", bold=True)
    steps = (
        ("load 16 bytes", ("one vector: 32 codes", "of 8 rows")),
        ("and 15", ("rows 0-3, k 0-3:", "the only mask")),
        ("sdot, low codes", ("with int8 inputs 0-3:", "sums of rows 0-3")),
        ("sdot, whole bytes", ("a byte as it stands", "is 16 * high + low")),
        ("difference", ("16 times rows 4-7; the", "scale has 1/16 of it")),
    )
    for i, (name, lines) in enumerate(steps):
        x = 20 + 188 * i
        drawing.box(x, y + 14, 170, 66, name, lines)
        if i:
            drawing.arrow((x - 18, y + 47), (x, y + 47))
    drawing.height = y + 100
    return drawing


# ---- the bricks of CUDA -----------------------------------------------------------------------------------------

FRAGMENT = 16
Q4_0 = Kind("Int4", "ScaleF16", "NONE", 4)


def brick_places() -> dict[tuple[int, int], tuple[int, int]]:
    """(row, k) of a brick of 4-bit integers: the byte and the lowest bit where layout.py puts its code."""
    codes = np.zeros((COURSE * COURSE * BRICK, BRICK), np.uint8)
    cells = [(row, k) for row in range(COURSE) for k in range(BRICK)]
    for i, (row, k) in enumerate(cells):
        codes[COURSE * i + row, k] = 15
    packed = pack_codes(Q4_0, codes).reshape(len(cells), -1)
    places = {}
    for cell, octets in zip(cells, packed, strict=True):
        (byte,) = np.nonzero(octets)[0]
        places[cell] = int(byte), 4 * int(octets[byte] == 0xF0)
    return places


def cuda_bricks() -> Drawing:
    title = "Bricks on CUDA: q4_0, one layout for mma and wgmma"
    about = (
        "16 rows by 128 k are a brick; bricks of eight row blocks lie together; a lane's 16 bytes are four operands."
    )
    drawing = Drawing(960, 690, title, about)
    places = brick_places()
    drawing.text(20, 32, title, size=18, bold=True)
    words = (
        "Weights are packed once, in the order of the A operand of mma.m16n8k16: no ldmatrix, no shuffle between lanes."
    )
    drawing.text(20, 54, words, fill="dim")

    drawing.text(20, 88, "W [N, K] in bricks, numbered as they lie", bold=True)
    for block in range(8):
        for along in range(4):
            x, y, order = 90 + 62 * along, 98 + 23 * block, 8 * along + block
            drawing.rect(x, y, 60, 21, "blue", opacity=0.2 + 0.2 * along)
            drawing.text(x + 30, y + 15, str(order), size=11, anchor="middle")
    drawing.text(82, 112, "16 rows", size=11, fill="dim", anchor="end")
    drawing.text(120, 298, "128 k", size=11, fill="dim", anchor="middle")
    drawing.arrow((90 + 4 * 62 + 14, 100), (90 + 4 * 62 + 14, 278))
    drawing.lines(
        364,
        130,
        (
            "8 row blocks (128 columns of y)",
            "lie together for each 128 k:",
            "one bulk copy brings",
            "what a CTA needs next.",
        ),
        size=12,
        fill="dim",
    )

    kind = Q4_0
    drawing.text(570, 88, f"A brick: {kind.brick_bytes:,} bytes", bold=True)
    drawing.rect(570, 100, 300, 34, "blue", opacity=0.5)
    drawing.rect(872, 100, 60, 34, "yellow")
    drawing.text(720, 122, f"codes, {kind.code_bytes:,} bytes", size=12, anchor="middle")
    drawing.text(902, 150, f"scales, {kind.group_bytes} B", size=11, fill="dim", anchor="middle")
    half = kind.code_bytes // 2
    for i in range(2):
        drawing.rect(570 + 152 * i, 172, 148, 40, "blue", opacity=0.35)
        drawing.text(644 + 152 * i, 188, f"{half} bytes: 32 lanes x 16", size=11, anchor="middle")
        drawing.text(644 + 152 * i, 204, f"k {64 * i} to {64 * i + 63}, 4 fragments", size=11, anchor="middle")
    drawing.line([(570, 134), (570, 172)], "line", dash="3 3")
    drawing.line([(870, 134), (870, 172)], "line", dash="3 3")
    lines = (
        "A lane loads 16 bytes at once: one word for",
        "each of four fragments of 16 x 16. Scales follow:",
        "4 groups of 32 k for each of 16 rows, float16.",
    )
    drawing.lines(570, 236, lines, size=12, fill="dim")

    top, size = 340, 19
    drawing.text(20, top, "A fragment, 16 rows by 16 k: lanes", bold=True)
    chosen = 6  # a lane in the middle of the picture
    for row in range(FRAGMENT):
        for k in range(FRAGMENT):
            if k % 2 == 0:
                lane, x, y = places[row, k][0] // 16, 58 + size * k, top + 28 + size * row
                fill, opacity = ("orange", 0.7) if lane == chosen else ("blue", 0.15 + 0.1 * (lane % 4))
                drawing.rect(x, y, 2 * size - 1, size - 1, fill, opacity=opacity)
                drawing.text(x + size, y + 14, str(lane), size=11, anchor="middle")
    for i in (0, 8):
        drawing.text(58 + size * i, top + 22, f"k = {i}", size=11, fill="dim")
        drawing.text(50, top + 42 + size * i, f"row {i}", size=11, fill="dim", anchor="end")

    x0, y0 = 410, top
    drawing.text(x0, y0, f"The word of lane {chosen}: 32 bits, 8 codes", bold=True)
    word: dict[int, tuple[int, int]] = {}
    for (row, k), (byte, bit) in places.items():
        if k < FRAGMENT and byte // 16 == chosen and byte % 16 < 4:
            word[2 * (byte % 4) + bit // 4] = (row, k)
    for nibble in range(8):
        row, k = word[nibble]
        x = x0 + 64 * (7 - nibble)
        drawing.rect(x, y0 + 28, 62, 42, "orange", opacity=0.35 + 0.18 * (nibble % 4))
        drawing.text(x + 31, y0 + 46, f"row {row}", size=12, anchor="middle")
        drawing.text(x + 31, y0 + 62, f"k {k}", size=12, anchor="middle")
        drawing.text(x + 31, y0 + 22, f"{4 * nibble + 3}-{4 * nibble}", size=11, fill="dim", anchor="middle")
    masks = ("word & 0x000f000f", "word & 0x00f000f0", "(word >> 8) & 0x000f000f", "(word >> 8) & 0x00f000f0")
    for pair, code in enumerate(masks):
        (row, k), (_, next_k) = word[pair], word[pair + 4]
        meaning = f"row {row}, k {k} and k {next_k}" + (", 16 times as large" if pair % 2 else "")
        drawing.text(x0, y0 + 100 + 19 * pair, code, size=12, mono=True)
        drawing.text(x0 + 200, y0 + 100 + 19 * pair, meaning, size=12)
    lines = (
        "Five operations decode eight codes. A nibble under a mask is a float16",
        "already: the subnormal code * 2^-24, which tensor cores multiply exactly.",
        "gemm_small (mma, small M) multiplies those, and takes 8 * sum(x) and",
        "the power of two off the float32 sums, together with the scale.",
        "gemm_large (wgmma, large M) makes (code - 8) * scale * 2^-9 of a pair",
        "in one fma before the tensor core, rounded once.",
    )
    drawing.lines(x0, y0 + 196, lines, size=12, fill="dim", leading=19)
    return drawing
