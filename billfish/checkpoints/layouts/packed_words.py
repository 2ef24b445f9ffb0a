"""What GPTQ, AWQ and compressed-tensors share: 4- and 8-bit integers, and a scale and zero point for each group."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Matrix
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.core.errors import CheckpointError, complaint
from billfish.core.format import Format, get_format
from billfish.core.storage import Array, Storage

FLOATS = ("F16", "BF16", "F32")
WORD_GROUPS = (32, 64, 128)


def narrow(scales: Array) -> Array:
    """float16 if that holds every scale as it is, else float32."""
    if scales.dtype == np.float16:
        return scales
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    exact = np.array_equal(half.astype(np.float32), wide, equal_nan=True)
    return half if exact else wide


def unpack_bits(words: Array, bits: int, axis: int) -> NDArray[np.uint8]:
    """Fields of 32-bit words along `axis`, least significant first; that axis grows by 32 / bits."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = words[..., None] >> shifts & np.uint32(2**bits - 1)
    return np.moveaxis(fields.astype(np.uint8).reshape(*words.shape[:-1], -1), -1, axis)


def group_of(k: int, groups: int, declared: Any) -> int:
    """How many consecutive k share a scale, or 0 if that cannot be told. The last group may be smaller."""
    if groups == 1:
        return k
    if isinstance(declared, int) and 0 < declared < k and -(-k // declared) == groups:
        return declared
    return k // groups if groups and k % groups == 0 else 0


def why_not(bits: int, k: int, group: int) -> str:
    """Why a matrix with these groups is not supported, or "". Groups of several 128 are split, the scale repeated."""
    if bits not in (4, 8):
        return f"{bits}-bit integers; 4 and 8 bits are supported"
    if k % (32 // bits):
        return f"K = {k}, not a multiple of {32 // bits}"
    if group != k and group not in WORD_GROUPS and (group == 0 or group % 128):
        return f"groups of {group or 'unequal size'}; 32, 64, multiples of 128, or all of K are supported"
    return ""


class WordMatrix(Matrix):
    """Reads to `u4`, `u4b8`, `u8` or `u8b128`."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        bits: int,
        group: int,
        parts: list[Stored],
        symmetric: bool,
        g_idx: Stored | None = None,
        act_order: bool = False,
    ) -> None:
        self.bits, self.group, self.symmetric, self.g_idx = bits, group, symmetric, g_idx
        self.offset = 2 ** (bits - 1)
        held_group = group if group in WORD_GROUPS or group == shape[1] else 128
        format = f"u{bits}b{self.offset}" if symmetric else f"u{bits}"
        super().__init__(name, format, shape, held_group, parts, act_order, group)

    @abstractmethod
    def words(self, rows: slice, columns: slice, order: NDArray[np.int64] | None) -> Array:
        """The codes, uint32 [K * bits / 32, N], of columns in sorted order."""

    @abstractmethod
    def scales(self, rows: slice, groups: slice) -> Array:
        """[groups, N]."""

    @abstractmethod
    def zeros(self, rows: slice, groups: slice) -> Array | None:
        """Zero points, integers [groups, N]; None where they all are the offset of a symmetric format."""

    def permutation(self) -> NDArray[np.int64] | None:
        if self.g_idx is None:
            return None
        g_idx = self.g_idx.array()
        if np.array_equal(g_idx, np.arange(self.k) // self.group) or (g_idx == -1).all():  # -1: never set
            return None
        order = np.argsort(g_idx, kind="stable")
        if not np.array_equal(g_idx[order], np.arange(self.k) // self.group):
            got = f"groups other than 0..{-(-self.k // self.group) - 1} with {self.group} columns each"
            raise CheckpointError(complaint(CALL, self.g_idx.name, got, "each group once, of the same size"))
        return order

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        order = self.permutation()
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        zeros = self.zeros(rows, groups)
        storage = {
            "packed": self.words(rows, columns, None if order is None else order[columns]),
            "scales": narrow(self.scales(rows, groups)),
        }
        format = f"u{self.bits}b{self.offset}"
        if zeros is not None:
            # GPTQ's v1 can hold one zero point more than there are codes, and 256 is no byte.
            storage["zeros"] = zeros.astype(np.uint8 if zeros.max(initial=0) < 256 else np.float16)
            format = f"u{self.bits}"
        k, held = columns.stop - columns.start, self.description.group_size or self.k
        if held < self.group:  # a group of several 128: repeat
            count = -(-k // held)
            for name in storage.keys() - {"packed"}:
                storage[name] = np.repeat(storage[name], self.group // held, axis=0)[:count]
        return get_format(format, CALL), storage, -1 if self.group == self.k else held


def gather_words(words: Array, order: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """Columns of K-major words [K * bits / 32, N] in another order: of word r, field j is column order[per * r + j]."""
    per_word = 32 // bits
    sources = order.reshape(-1, per_word)
    from_bits, to_bits = (sources % per_word * bits).astype(np.uint32), np.arange(0, 32, bits, dtype=np.uint32)
    gathered = np.empty((len(sources), words.shape[1]), np.uint32)
    for r in range(0, len(sources), 4):  # a few words at a time: each takes a whole word for each of its fields
        some = slice(r, r + 4)
        fields = words[sources[some] // per_word]
        fields >>= from_bits[some, :, None]
        fields &= np.uint32(2**bits - 1)
        fields <<= to_bits[:, None]
        np.bitwise_or.reduce(fields, axis=1, out=gathered[some])
    return gathered


def model_columns(words: Array, order: NDArray[np.int64] | None, bits: int) -> Array:
    """K-major words of sorted columns, with the columns back where the model has them."""
    return words if order is None else gather_words(words, np.argsort(order), bits)


def group_index(k: int, group: int, order: NDArray[np.int64] | None) -> NDArray[np.int32]:
    """The group of each column of the model, [K]; `order` is where the sorted columns came from."""
    index = np.empty(k, np.int32)
    index[slice(None) if order is None else order] = np.arange(k) // group
    return index
