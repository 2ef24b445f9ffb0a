"""The order of the bytes in bricks of 16 rows by 128 k, one layout for every M, in NumPy.

A course is a row block: 16 rows of W, so 16 columns of y.

A brick holds codes, scales and offsets, each in the order in which the lanes of a warp want them (decode.cuh has the
picture), so the same bytes feed `mma` and `wgmma`. pack.cu and unpack.cu do the same on the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.axes import BRICK, COURSE, Codes, Description, Kind

REVERSED_BYTES = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)  # their bits


def brick_shape(n: int, k: int) -> tuple[int, int]:
    """How many bricks a matrix [N, K] has, down and along K."""
    return -(-n // COURSE), -(-k // BRICK)


def pack_codes(kind: Kind, codes: Codes) -> NDArray[np.uint8]:
    """Codes [N, K] to the code part of every brick: uint8 [courses, bricks, code_bytes]. What is missing becomes 0."""
    n, k = codes.shape
    down, along = brick_shape(n, k)
    padded = np.zeros((down * COURSE, along * BRICK), np.uint32)
    padded[:n, :k] = codes
    # Row = 16 course + 8 upper + g, and k = 128 brick + 16 fragment + 8 later + 2 c + odd: see the table in decode.cuh.
    axes = padded.reshape(down, 2, 8, along, 8, 2, 4, 2)
    course, upper, g, brick, fragment, later, c, odd = range(8)
    if kind.words == 2:
        # Word `later` has the bytes (upper, odd); a lane's 16 bytes are two fragments of two words.
        ordered = axes.transpose(course, brick, fragment, g, c, later, upper, odd)
        words = _gather(ordered, [[8 * (2 * u + o) for o in range(2)] for u in range(2)])
        words = words.reshape(down, along, 4, 2, 8, 4, 2).transpose(0, 1, 2, 4, 5, 3, 6)
    else:
        ordered = axes.transpose(course, brick, fragment, g, c, later, upper, odd).reshape(down, along, 8, 8, 4, 4, 2)
        if kind.element == "E2M1":
            spread = (ordered & np.uint32(8)) << np.uint32(4) | (ordered & np.uint32(7)) << np.uint32(1)
            halves = _gather(spread.reshape(*spread.shape[:-2], 2, 2, 2), [[8, 24], [0, 16]])
            words = halves[..., 0] | _reversed(halves[..., 1])
        else:
            words = _gather(ordered, [[4 * p + 16 * o for o in range(2)] for p in range(4)])
        words = words.reshape(down, along, 2, 4, 8, 4).transpose(0, 1, 2, 4, 5, 3)  # 16 bytes: four fragments
    return np.ascontiguousarray(words).view(np.uint8).reshape(down, along, kind.code_bytes)


def unpack_codes(kind: Kind, parts: NDArray[np.uint8], n: int, k: int) -> Codes:
    """The inverse of :func:`pack_codes`: uint8 [courses, bricks, code_bytes] to codes [n, k]."""
    down, along = brick_shape(n, k)
    words = np.ascontiguousarray(parts).view("<u4")
    if kind.words == 2:
        words = words.reshape(down, along, 4, 8, 4, 2, 2).transpose(0, 1, 2, 5, 3, 4, 6)  # words of a fragment together
        fields = _scatter(words, [[8 * (2 * u + o) for o in range(2)] for u in range(2)]) & np.uint32(255)
    else:
        words = words.reshape(down, along, 2, 8, 4, 4).transpose(0, 1, 2, 5, 3, 4)
        if kind.element == "E2M1":
            spread = _scatter(np.stack([words, _reversed(words)], axis=-1), [[8, 24], [0, 16]])
            fields = spread >> np.uint32(4) & np.uint32(8) | spread >> np.uint32(1) & np.uint32(7)
        else:
            fields = _scatter(words, [[4 * p + 16 * o for o in range(2)] for p in range(4)]) & np.uint32(15)
    axes = fields.reshape(down, along, 8, 8, 4, 2, 2, 2)  # course, brick, fragment, g, c, later, upper, odd
    rows = axes.transpose(0, 6, 3, 1, 2, 5, 4, 7).reshape(down * COURSE, along * BRICK)
    return np.ascontiguousarray(rows[:n, :k].astype(np.uint8))


def _gather(fields: NDArray[np.uint32], shifts: list[list[int]]) -> NDArray[np.uint32]:
    """Fields [..., i, j], each shifted by shifts[i][j], in one word."""
    shifted = fields << np.asarray(shifts, np.uint32)
    return np.bitwise_or.reduce(np.bitwise_or.reduce(shifted, axis=-1), axis=-1)


def _scatter(words: NDArray[np.uint32], shifts: list[list[int]]) -> NDArray[np.uint32]:
    """Words [...] to [..., i, j], shifted down by shifts[i][j]."""
    return words[..., None, None] >> np.asarray(shifts, np.uint32)


def _reversed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bits of each word in reverse order."""
    octets = np.ascontiguousarray(words, "<u4")[..., None].view(np.uint8)
    return REVERSED_BYTES[octets[..., ::-1]].view("<u4")[..., 0]


def pack_groups(kind: Kind, values: NDArray[Any], k: int) -> NDArray[np.uint8]:
    """Scales or offsets [N, groups] to their part of every brick: uint8 [courses, bricks, group_bytes]."""
    n, groups = values.shape
    down, along = brick_shape(n, k)
    padded = np.zeros_like(values, kind.scale_dtype, shape=(down * COURSE, along * kind.groups))
    padded[:n, :groups] = values
    axes = padded.reshape(down, 2, 8, along, kind.groups)  # course, upper, g, brick, group
    ordered = axes.transpose(0, 3, 2, 4, 1).copy()
    if kind.scale == "ScaleE5M3":
        ordered = interleave_e5m3(ordered)
    return ordered.view(np.uint8).reshape(down, along, kind.group_bytes)


def interleave_e5m3(scales: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Scales [..., groups, 2] to words [..., groups / 2]: two halves of each group where float16 has these bits, those
    of the second one rotated by eight bits; see decode.cuh."""
    halves = scales.astype(np.uint32) << np.array([7, 23], np.uint32)
    pairs = halves[..., 0] | halves[..., 1]
    first, second = pairs[..., ::2], pairs[..., 1::2]
    return first | second >> np.uint32(8) | second << np.uint32(24)


def group_parts(description: Description) -> NDArray[np.uint8]:
    """What follows the codes in every brick: uint8 [courses, bricks, scale (and offset) bytes]."""
    kind, k = description.kind, description.shape[1]
    parts = [pack_groups(kind, description.scales, k)]
    if description.offsets is not None:
        parts.append(pack_groups(kind, description.offsets, k))
    return np.concatenate(parts, axis=2)


def pack(description: Description) -> NDArray[np.uint8]:
    """All bricks, one after the other: those of eight courses, then k, then the next eight courses (or fewer)."""
    bricks = np.concatenate([pack_codes(description.kind, description.codes), group_parts(description)], axis=2)
    eights = [bricks[i : i + 8].transpose(1, 0, 2).ravel() for i in range(0, len(bricks), 8)]
    return np.concatenate(eights)


def split(kind: Kind, bricks: NDArray[np.uint8], n: int, k: int) -> NDArray[np.uint8]:
    """All bricks in the order of rows, then k: uint8 [courses, bricks, brick_bytes]."""
    down, along = brick_shape(n, k)
    rows = bricks.reshape(down, along * kind.brick_bytes)  # a row is as long as a course, and of eight courses
    eights = [rows[i : i + 8].reshape(along, -1, kind.brick_bytes).transpose(1, 0, 2) for i in range(0, down, 8)]
    return np.concatenate(eights)
