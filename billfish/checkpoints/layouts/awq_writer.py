"""AWQ folders in the layout "gemm", as vLLM and transformers load them.."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.layouts.awq import ORDER
from billfish.checkpoints.write.recast import Misfit
from billfish.checkpoints.write.target import Item, Spec
from billfish.checkpoints.write.uniform import UniformTarget, agreed, left_plain
from billfish.core.format import Format, Planes
from billfish.core.formats.word_packing import pack_words, unpack_words
from billfish.core.storage import Array, Storage

I32 = np.dtype(np.int32)


class AwqTarget(UniformTarget):
    name = "awq"
    formats = ("u4",)
    first_zero = 0

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return ("u4", 32) if k % 32 == 0 else None

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if act_order:
            raise Misfit("act-order: AWQ has no place for a permutation")
        super().check(format, group_size, planes, shape, act_order)
        if shape[1] % group_size:
            raise Misfit(f"the last group of {group_size} is partial")

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
