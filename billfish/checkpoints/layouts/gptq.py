"""GPTQ, versions 1 and 2, with and without act-order.

    qweight  i32 [K*b/32, N]     field j of word r, from the least significant, is k = r * 32/b + j
    qzeros   i32 [G, N*b/32]     fields along N; version 1 stores the zero point minus one, version 2 as it is
    scales   [G, N]
    g_idx    i32 [K]             the group of each k; sorted, unless act-order shuffled it

w = scales[g, n] * (q - zero). One width and one group size for all modules, and never embeddings or the last layer.
GPTQModel, vLLM and transformers load such folders; version 1 is the one that every loader knows.
"""

from __future__ import annotations

import re
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
    gather_words,
    group_index,
    group_of,
    left_plain,
    model_columns,
    unpack_bits,
    why_not,
    word_format,
)
from billfish.checkpoints.safetensors_files import Stored
from billfish.checkpoints.write.target import Item, Spec, json_bytes
from billfish.core.format import Format
from billfish.core.formats.word_packing import pack_words
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

PARTS = ("qweight", "qzeros", "scales", "g_idx")  # of a module; AWQ has all but the last
STORED_LESS = {"gptq": 1, "gptq_v2": 0}  # what is taken off zero points, by "checkpoint_format": versions 1 and 2


# ---- reading ---------------------------------------------------------------------------------------------------------


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
        reason = "GPTQ in the layout of Marlin's kernels"
    if reason:
        return Unsupported(name, "gptq", reason, parts.values(), (n, k))
    check_part(qweight, ("I32", "U32"), (k * bits // 32, n))
    check_part(qzeros, ("I32", "U32"), (groups, n * bits // 32))
    check_part(parts["scales"], FLOATS, (groups, n))
    if "g_idx" in parts:
        check_part(parts["g_idx"], ("I32", "I64"), (k,))
    return GptqMatrix(name, parts, bits, group, config)


# ---- writing ---------------------------------------------------------------------------------------------------------


class GptqTarget(UniformTarget):
    """Version 1. It stores zero points less one, so none of them is 0."""

    name = "gptq"
    formats = ("u4b8", "u8b128", "u4", "u8")
    first_zero = STORED_LESS["gptq"]

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return word_format(source, k)

    def adapt(self, tensor: QuantizedTensor) -> QuantizedTensor:
        return raise_zeros(tensor) if self.first_zero and "zeros" in tensor.storage else tensor

    def specs(self, item: Item) -> dict[str, Spec]:
        name, bits = item.module, item.bits
        return {
            f"{name}.qweight": (I32, (item.k * bits // 32, item.n)),
            f"{name}.qzeros": (I32, (item.groups, item.n * bits // 32)),
            f"{name}.scales": (item.dtypes["scales"], (item.groups, item.n)),
            f"{name}.g_idx": (I32, (item.k,)),
        }

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        name, bits = item.module, item.bits
        order = item.order() if item.act_order else None
        # A symmetric format has the same zero point everywhere.
        zeros = storage.get("zeros", np.broadcast_to(np.uint8(2 ** (bits - 1)), storage["scales"].shape))
        stored = (zeros.astype(np.int16) - self.first_zero).astype(np.uint8)
        return {
            f"{name}.qweight": model_columns(storage["packed"], order, bits).view(np.int32),
            f"{name}.qzeros": pack_words(stored.T, bits).T.view(np.int32),
            f"{name}.scales": storage["scales"],
            f"{name}.g_idx": group_index(item.k, item.group_size, order),
        }

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        return {"quantization_config": self._settings(items)} if any(item.format for item in items) else {}

    def further_files(self, items: Sequence[Item]) -> dict[str, bytes]:
        """Where older loaders look for the same."""
        return {"quantize_config.json": json_bytes(self._settings(items))} if any(item.format for item in items) else {}

    def _settings(self, items: Sequence[Item]) -> dict[str, Any]:
        quantized = [item for item in items if item.format is not None]
        bits, group_size = agreed(quantized)
        settings: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": any(item.act_order for item in quantized),
            "sym": all("zeros" not in item.dtypes for item in quantized),
            "checkpoint_format": self.name,
            "lm_head": False,
        }
        # GPTQModel and vLLM leave out the modules that such a pattern finds.
        plain: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in left_plain(items)}
        return {**settings, "dynamic": plain} if plain else settings


class Gptq2Target(GptqTarget):
    """Version 2, which stores zero points as they are."""

    name = "gptq_v2"
    first_zero = STORED_LESS["gptq_v2"]


def raise_zeros(tensor: QuantizedTensor) -> QuantizedTensor:
    """Zero points of 0 made 1. Codes of such a group move up by one; its scale grows where the highest was in use."""
    planes, group = dict(tensor.planes), tensor.group_size
    zero, codes = planes["zero"], planes["codes"]
    starts = np.arange(0, codes.shape[1], group)
    full = np.maximum.reduceat(codes, starts, axis=1) == tensor.format.element.high
    low, scale = zero == 0, planes["scale"]
    highest = np.float32(tensor.format.element.high)
    wider = (scale.astype(np.float32) * (highest / (highest - 1))).astype(scale.dtype)
    new = np.where(low & full, wider, scale)
    ratio = scale.astype(np.float32) / np.where(new == 0, 1, new).astype(np.float32)
    along = np.arange(codes.shape[1]) // group
    moved = np.minimum(np.rint(codes * ratio[:, along]) + 1, highest).astype(np.uint8)
    planes |= {
        "codes": np.where(low[:, along], moved, codes),
        "scale": new,
        "zero": np.where(low, np.uint8(1), zero),
    }
    whole = tensor.format.whole_row_groups and group == codes.shape[1]
    return QuantizedTensor.from_planes(tensor.format, planes, -1 if whole else group)
