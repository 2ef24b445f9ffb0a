"""x in integers: what `activations="q8"` and `"q16"` mean, in NumPy. Every backend computes the same codes.

Each block of 32 values of a row shares one float32 scale. q8 rounds to int8; q16 to 16 bits, which kernels keep as two
int8 digits, x = 256 * digit 0 + digit 1, so that the same dot-product instructions serve. Beside weights in groups of
more than 32, blocks of q8 are as large as a group, 128 at most: one integer sum then serves the whole group.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from billfish.errors import FormatError, complaint
from billfish.typing import Activations

# How many int8 digits hold x: the number by which kernels know a kind of activations.
DIGITS = {"exact": 0, "q8": 1, "q16": 2}
ACTIVATIONS = tuple(DIGITS)
BLOCK, LARGEST_BLOCK = 32, 128
# The largest code: for q16, 256 * 127 + 127, so that both digits stay within int8.
LARGEST = {"q8": 127, "q16": 32639}


def check_activations(call: str, activations: str) -> Activations:
    """Raises unless `activations` is one of ACTIVATIONS."""
    if activations not in ACTIVATIONS:
        raise FormatError(complaint(call, "activations", repr(activations), " or ".join(map(repr, ACTIVATIONS))))
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
