"""AWQ, in the layout called "gemm".

    qweight  i32 [K, N/8]     nibble i of a word is column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]
    qzeros   i32 [G, N/8]     the same order, the zero point as it is
    scales   [G, N]

w = scales[g, n] * (q - zero). One group size for all modules, and never embeddings or the last layer. vLLM and
transformers load such folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Entry, Unsupported, check_part
from billfish.checkpoints.layouts.packed_words import (
    FLOATS,
    I32,
    UniformTarget,
    WordMatrix,
    agreed,
    group_of,
    left_plain,
    why_not,
)
from billfish.checkpoints.safetensors_files import Stored
from billfish.checkpoints.write.recast import Misfit
from billfish.checkpoints.write.target import Item, Spec
from billfish.core.format import Format, Planes
from billfish.core.formats.word_packing import pack_words, unpack_words
from billfish.core.storage import Array, Storage

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# ---- reading ---------------------------------------------------------------------------------------------------------


class AwqMatrix(WordMatrix):
    layout = "awq"

    def __init__(self, name: str, parts: dict[str, Stored], group: int) -> None:
        self.qweight, self.qzeros, self.stored_scales = (parts[n] for n in ("qweight", "qzeros", "scales"))
        shape = (self.stored_scales.shape[1], self.qweight.shape[0])
        super().__init__(name, shape, 4, group, list(parts.values()), symmetric=False)

    def words(self, rows: slice, columns: slice, order: NDArray[np.int64] | None) -> Array:
        held, within = _whole_words(self.qweight.array()[columns], rows)
        words = np.zeros((len(held) // 8, held.shape[1] * 8), np.uint32)
        for j in range(8):  # k = 8r + j goes to nibble j of word r
            for i, column in enumerate(ORDER):
                words[:, column::8] |= (held[j::8] >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * j)
        return words[:, within]

    def scales(self, rows: slice, groups: slice) -> Array:
        return self.stored_scales.array()[groups, rows]

    def zeros(self, rows: slice, groups: slice) -> Array:
        held, within = _whole_words(self.qzeros.array()[groups], rows)
        zeros = np.empty((len(held), held.shape[1] * 8), np.uint8)
        for i, column in enumerate(ORDER):
            zeros[:, column::8] = held >> np.uint32(4 * i) & np.uint32(15)
        return zeros[:, within]


def _whole_words(words: Array, rows: slice) -> tuple[Array, slice]:
    """The words that hold these columns of N, and where in them the columns are."""
    first = rows.start // 8
    within = slice(rows.start - 8 * first, rows.stop - 8 * first)
    return words.view(np.uint32)[:, first : -(-rows.stop // 8)], within


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`."""
    name, qweight = f"{module}.weight", parts["qweight"]
    (groups, n), k = parts["scales"].shape, qweight.shape[0]
    group = group_of(k, groups, config.get("group_size"))
    reason = why_not(4, k, group)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        reason = f"AWQ in the layout {version!r}; 'gemm' is supported"
    if reason:
        return Unsupported(name, "awq", reason, parts.values(), (n, k))
    check_part(qweight, ("I32", "U32"), (k, n // 8))
    check_part(parts["qzeros"], ("I32", "U32"), (groups, n // 8))
    check_part(parts["scales"], FLOATS, (groups, n))
    return AwqMatrix(name, parts, group)


# ---- writing ---------------------------------------------------------------------------------------------------------


class AwqTarget(UniformTarget):
    name = "awq"
    formats = ("u4",)
    first_zero = 0

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return ("u4", 32) if k % 32 == 0 else None

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if act_order:
            raise Misfit("AWQ cannot store a permutation (act-order)")
        super().check(format, group_size, planes, shape, act_order)
        if shape[1] % group_size:
            raise Misfit(f"K = {shape[1]} is not a multiple of the group size {group_size}")

    def specs(self, item: Item) -> dict[str, Spec]:
        name = item.module
        return {
            f"{name}.qweight": (I32, (item.k, item.n // 8)),
            f"{name}.qzeros": (I32, (item.groups, item.n // 8)),
            f"{name}.scales": (item.dtypes["scales"], (item.groups, item.n)),
        }

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        name = item.module
        return {
            f"{name}.qweight": pack_columns(unpack_words(storage["packed"], 4)),
            f"{name}.qzeros": pack_columns(storage["zeros"].astype(np.uint8)),
            f"{name}.scales": storage["scales"],
        }

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        quantized = [item for item in items if item.format is not None]
        if not quantized:
            return {}
        bits, group_size = agreed(quantized)
        settings: dict[str, Any] = {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
        }
        plain = left_plain(items)
        return {"quantization_config": {**settings, "modules_to_not_convert": plain} if plain else settings}


def pack_columns(codes: Array) -> Array:
    """Codes [rows, N] to words [rows, N/8], in AWQ's order of columns."""
    shuffled = codes.reshape(len(codes), -1, len(ORDER))[:, :, ORDER].reshape(codes.shape)
    return pack_words(shuffled.T, 4).T.view(np.int32)
