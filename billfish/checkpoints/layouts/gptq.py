"""GPTQ, versions 1 and 2, with and without act-order.

    qweight  i32 [K*b/32, N]     field j of word r, from the least significant, is k = r * 32/b + j
    qzeros   i32 [G, N*b/32]     fields along N; version 1 stores the zero point minus one, version 2 as it is
    scales   [G, N]
    g_idx    i32 [K]             the group of each k; sorted, unless act-order shuffled it

w = scales[g, n] * (q - zero).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Entry, Unsupported, check_part
from billfish.checkpoints.layouts.packed_words import FLOATS, WordMatrix, gather_words, group_of, unpack_bits, why_not
from billfish.checkpoints.safetensors_files import Stored
from billfish.core.storage import Array

STORED_LESS = {"gptq": 1, "gptq_v2": 0}  # what is taken off zero points, by "checkpoint_format": versions 1 and 2


class GptqMatrix(WordMatrix):
    layout = "gptq"

    def __init__(self, name: str, parts: dict[str, Stored], bits: int, group: int, config: dict[str, Any]) -> None:
        self.qweight, self.qzeros, self.stored_scales = (parts[n] for n in ("qweight", "qzeros", "scales"))
        self.stored_less = STORED_LESS.get(str(config.get("checkpoint_format")), STORED_LESS["gptq"])
        self.declared_symmetric = config.get("sym")
        shape = (self.qweight.shape[1], self.qweight.shape[0] * 32 // bits)
        g_idx = parts.get("g_idx")
        act_order = g_idx is not None and config.get("desc_act") is not False
        super().__init__(
            name, shape, bits, group, list(parts.values()), self.declared_symmetric is True, g_idx, act_order
        )

    def words(self, rows: slice, columns: slice, order: NDArray[np.int64] | None) -> Array:
        words = self.qweight.array().view(np.uint32)
        if order is not None:
            return gather_words(words[:, rows], order, self.bits)
        per_word = 32 // self.bits
        return words[columns.start // per_word : columns.stop // per_word, rows]

    def scales(self, rows: slice, groups: slice) -> Array:
        return self.stored_scales.array()[groups, rows]

    def zeros(self, rows: slice, groups: slice) -> Array | None:
        stored = unpack_bits(self.qzeros.array(), self.bits, axis=1)
        # Of symmetric files the zero points tell the version, which is as well: some of version 2 claim to be 1.
        less = self.stored_less
        if self.declared_symmetric is not False and (stored == stored.flat[0]).all():
            missing = self.offset - int(stored.flat[0])
            less = missing if missing in STORED_LESS.values() else less
        # Added after unpacking, and in a wider type: a stored 15 means 16, and must not carry into its neighbour.
        zeros = stored[groups, rows].astype(np.int16) + less
        return None if self.symmetric and (zeros == self.offset).all() else zeros


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`."""
    name, qweight = f"{module}.weight", parts["qweight"]
    groups, n = parts["scales"].shape
    declared = config.get("bits")
    widths = [b for b in (declared, 4, 8, 2, 3) if isinstance(b, int) and b > 0]
    qzeros = parts["qzeros"]
    bits = next((b for b in widths if qzeros.shape == (groups, n * b // 32)), 0)
    k = qweight.shape[0] * 32 // bits if bits else 0
    group = group_of(k, groups, config.get("group_size"))
    reason = why_not(bits, k, group) if bits else f"zero points of shape {qzeros.shape} for scales {(groups, n)}"
    if config.get("checkpoint_format") == "marlin" or config.get("is_marlin_format"):
        reason = "GPTQ in the order of Marlin's kernels"
    if reason:
        return Unsupported(name, "gptq", reason, parts.values(), (n, k))
    check_part(qweight, ("I32", "U32"), (k * bits // 32, n))
    check_part(qzeros, ("I32", "U32"), (groups, n * bits // 32))
    check_part(parts["scales"], FLOATS, (groups, n))
    if "g_idx" in parts:
        check_part(parts["g_idx"], ("I32", "I64"), (k,))
    return GptqMatrix(name, parts, bits, group, config)
