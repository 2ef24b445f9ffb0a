"""x in few bits: what `activations` other than "exact" mean, in NumPy.

In CPU memory, each block of 32 values of a row shares one float32 scale. q8 rounds to int8; q16 to 16 bits, which
kernels keep as two int8 digits, x = 256 * digit 0 + digit 1, so that the same dot-product instructions serve. Beside
weights in groups of more than 32, blocks of q8 are as large as a group, 128 at most: one integer sum then serves the
whole group. Every backend computes the same codes.

On a GPU of NVIDIA's, a whole row of x shares one scale (`RowActivations`): fp8 rounds to E4M3, q8 to int8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import FormatError, bad_argument
from billfish.core.scales import E4M3_MAX, decode_e4m3, encode_e4m3
from billfish.core.typing import Activations

# How many int8 digits hold x: the number by which kernels know a kind of activations.
DIGITS = {"exact": 0, "q8": 1, "q16": 2}
ACTIVATIONS = (*DIGITS, "fp8")
BLOCK, LARGEST_BLOCK = 32, 128
# The largest code: for q16, 256 * 127 + 127, so that both digits stay within int8.
LARGEST = {"q8": 127, "q16": 32639}


def check_activations(call: str, activations: str, known: Iterable[str] = ACTIVATIONS) -> Activations:
    """Raises unless `activations` is one of those that are `known`."""
    if activations not in known:
        raise FormatError(bad_argument(call, "activations", repr(activations), " or ".join(map(repr, known))))
    return cast(Activations, activations)


def block_size(activations: str, group_size: int) -> int:
    """How many values of x share a scale, beside weights in groups of this size: 32, 64 or 128."""
    if activations != "q8" or group_size <= BLOCK:
        return BLOCK
    return 2 * BLOCK if group_size <= 2 * BLOCK else LARGEST_BLOCK


class IntegerActivations(NamedTuple):
    """codes [M, K padded to whole blocks], scale float32 [M, blocks]; x is about codes * scale."""

    codes: NDArray[np.signedinteger[Any]]
    scale: NDArray[np.float32]

    def values(self, k: int) -> NDArray[np.float64]:
        """What the codes stand for, exactly: [M, k]."""
        block = self.codes.shape[1] // max(1, self.scale.shape[1])
        return (self.codes.astype(np.float64) * np.repeat(self.scale, block, axis=1))[:, :k]


def quantize_activations(x: NDArray[Any], activations: str, group_size: int) -> IntegerActivations:
    """Round x [M, K] to integers, for weights in groups of this size. A block with NaN or infinity gets a NaN scale."""
    x = x.astype(np.float32)
    m, k = x.shape
    top = np.float32(LARGEST[activations])
    block = block_size(activations, group_size)
    blocks = -(-k // block)
    padded = np.zeros((m, blocks * block), np.float32)
    padded[:, :k] = x
    padded = padded.reshape(m, blocks, block)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        largest = np.abs(padded).max(axis=2)
        inverse = top / largest
        finite = np.isfinite(largest)
        usable = finite & np.isfinite(inverse)  # not all zeros, nor so small that the inverse overflows
        scale = np.where(usable, largest / top, np.where(finite, np.float32(0), np.float32(np.nan)))
        codes = np.rint(padded * np.where(usable, inverse, np.float32(0))[:, :, None])
    codes = np.where(usable[:, :, None], codes, 0).astype(np.int32)
    return IntegerActivations(codes.reshape(m, blocks * block), scale.astype(np.float32))


class RowActivations(NamedTuple):
    """codes uint8 [M, K], of E4M3 or of int8, and scale float32 [M]; x is about their numbers times the scale."""

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    activations: str

    def values(self) -> NDArray[np.float64]:
        """What the codes stand for, exactly: [M, K]."""
        numbers = decode_e4m3(self.codes) if self.activations == "fp8" else self.codes.view(np.int8)
        return numbers.astype(np.float64) * self.scale[:, None]


def quantize_rows(x: NDArray[Any], activations: str) -> RowActivations:
    """Round x [M, K] to E4M3 ("fp8") or int8 ("q8"), one scale for each row: its largest magnitude is 448, or 127.

    A row with NaN or infinity gets a NaN scale.
    """
    x = x.astype(np.float32)
    top = np.float32(E4M3_MAX if activations == "fp8" else LARGEST[activations])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        largest = np.abs(x).max(axis=1, initial=0)
        finite, inverse = np.isfinite(largest), top / largest
        usable = finite & np.isfinite(inverse)
        scaled = np.where(usable[:, None], x * inverse[:, None], 0).astype(np.float32)
        scale = np.where(finite, largest / top, np.float32(np.nan)).astype(np.float32)
    if activations == "fp8":
        codes = encode_e4m3(np.clip(scaled, -top, top))
    else:
        codes = np.rint(scaled).astype(np.int8).view(np.uint8)
    return RowActivations(codes, scale, activations)
