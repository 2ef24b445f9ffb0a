"""GPTQ folders, as GPTQModel, vLLM and transformers load them. The layout is in billfish.checkpoints.layouts.gptq."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.layouts.gptq import STORED_LESS
from billfish.checkpoints.layouts.packed_words import group_index, model_columns
from billfish.checkpoints.write.target import Item, Spec, json_bytes
from billfish.checkpoints.write.uniform import UniformTarget, agreed, left_plain
from billfish.core.format import Format
from billfish.core.formats.word_packing import pack_words
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

I32 = np.dtype(np.int32)


class GptqTarget(UniformTarget):
    """Version 1, which every loader knows. It stores zero points less one, so none of them is 0."""

    name = "gptq"
    formats = ("u4b8", "u8b128", "u4", "u8")
    first_zero = STORED_LESS["gptq"]

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        bits = 4 if source.element.bits <= 4 else 8
        symmetric = source.offset == "none"
        return (f"u{bits}b{2 ** (bits - 1)}" if symmetric else f"u{bits}", 32) if k % 32 == 0 else None

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
        name, bits, storage = item.module, item.bits, storage
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
