"""AWQ, in the layout called "gemm".

    qweight  i32 [K, N/8]     nibble i of a word is column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i]
    qzeros   i32 [G, N/8]     the same order, the zero point as it is
    scales   [G, N]

w = scales[g, n] * (q - zero).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Entry, Unsupported, check_part
from billfish.checkpoints.layouts.packed_words import FLOATS, WordMatrix, group_of, why_not
from billfish.checkpoints.safetensors_files import Stored
from billfish.core.storage import Array

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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
