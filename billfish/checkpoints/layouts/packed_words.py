"""What GPTQ, AWQ and compressed-tensors share: 4- and 8-bit integers, and a scale and zero point for each group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import MatrixEntry
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.checkpoints.write.recast import Misfit, narrow
from billfish.checkpoints.write.target import Item, Misplaced, Target, is_sensitive
from billfish.core.errors import CheckpointError, failure
from billfish.core.format import Format, Planes, get_format
from billfish.core.storage import Array, Storage

FLOATS = ("F16", "BF16", "F32")
WORD_GROUPS = (32, 64, 128)
I32 = np.dtype(np.int32)
WHOLE_ROWS = -1  # as a group size


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


class WordMatrix(MatrixEntry):
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
            groups = f"{-(-self.k // self.group)} groups of {self.group} columns"
            raise CheckpointError(failure(CALL, f"{self.g_idx.name} does not number {groups}"))
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


# ---- writing ---------------------------------------------------------------------------------------------------------


def word_format(source: Format, k: int) -> tuple[str, int] | None:
    """The format and group size that weights of another format are quantized to again."""
    bits = 4 if source.element.bits <= 4 else 8
    name = f"u{bits}b{2 ** (bits - 1)}" if source.offset == "none" else f"u{bits}"
    return (name, 32) if k % 32 == 0 else None


def model_columns(words: Array, order: NDArray[np.int64] | None, bits: int) -> Array:
    """K-major words of sorted columns, with the columns back where the model has them."""
    return words if order is None else gather_words(words, np.argsort(order), bits)


def group_index(k: int, group: int, order: NDArray[np.int64] | None) -> NDArray[np.int32]:
    """The group of each column of the model, [K]; `order` is where the sorted columns came from."""
    index = np.empty(k, np.int32)
    index[slice(None) if order is None else order] = np.arange(k) // group
    return index


class UniformTarget(Target):
    """A folder with one (bits, group size) for all quantized modules: GPTQ and AWQ.

    Embeddings and the last layer are never quantized there, as loaders make no quantized layers of them.
    """

    takes_dtype = True
    expert_names = "one by one"
    first_zero: int  # the lowest zero point that can be stored; the highest is 2**bits - 1 above it

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return is_sensitive(name)

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if len(shape) != 2:
            raise Misfit("stacks of matrices are not supported")
        per_word = 32 // format.element.bits
        if shape[0] % per_word:
            raise Misfit(f"N = {shape[0]} is not a multiple of {per_word}, the zero points of a word")
        if "zero" in planes:
            zero, last = planes["zero"].astype(np.float32), self.first_zero + 2**format.element.bits - 1
            stored = (zero == np.rint(zero)) & (zero >= self.first_zero) & (zero <= last)
            if not stored.all():
                odd = f"its zero point {zero[~stored].flat[0]:g}"
                raise Misfit(f"{odd} is not an integer from {self.first_zero} to {last}, as {self.name} needs")

    def odd_ones(self, items: Sequence[Item]) -> Mapping[str, Misplaced]:
        quantized = [item for item in items if item.format is not None]
        if not quantized:
            return {}
        bits, group_size = agreed(quantized)
        (model, *_), others = _split(quantized, bits, group_size)
        assert model.format is not None
        reason = f"{bits} bits in {_groups(group_size)} elsewhere: {self.name} has one setting for all modules"
        return {
            item.name: Misplaced(
                f"{item.bits} bits in {_groups(item.group_size)}, and {reason}", model.format, group_size
            )
            for item in others
        }


def agreed(items: Sequence[Item]) -> tuple[int, int]:
    """The bits and the group size that most weights have."""
    sizes = {item.group_size for item in items if item.group_size in WORD_GROUPS}
    settings = [(bits, size) for bits in {item.bits for item in items} for size in (*sorted(sizes), WHOLE_ROWS)]
    return max(settings, key=lambda setting: sum(item.n * item.k for item in _split(items, *setting)[0]))


def _split(items: Sequence[Item], bits: int, group_size: int) -> tuple[list[Item], list[Item]]:
    """The items that a setting is true of, and the others. A row that is no longer than a group is a group."""
    true_of, others = list[Item](), list[Item]()
    for item in items:
        whole = item.group_size == item.k and (group_size == WHOLE_ROWS or item.k <= group_size)
        agrees = item.bits == bits and (item.group_size == group_size or whole)
        (true_of if agrees else others).append(item)
    return true_of, others


def _groups(group_size: int) -> str:
    return "whole rows" if group_size == WHOLE_ROWS else f"groups of {group_size}"


def left_plain(items: Sequence[Item]) -> list[str]:
    """Modules with a matrix that is not quantized though loaders would expect it to be."""
    return [
        item.module for item in items if item.format is None and len(item.shape) == 2 and not is_sensitive(item.name)
    ]
