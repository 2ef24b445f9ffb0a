"""MLX folders, as mlx-lm loads them. The layout is in billfish.checkpoints.layouts.mlx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.names.expert_stacks import by_mlx_stacks
from billfish.checkpoints.write.recast import Misfit, holds
from billfish.checkpoints.write.target import Item, Spec, Target, model_type
from billfish.core.arrays import bfloat16
from billfish.core.format import Format, Planes
from billfish.core.formats.affine import AffineFormat
from billfish.core.storage import Array, Storage

U32 = np.dtype(np.uint32)
TYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16")


class MlxTarget(Target):
    name = "mlx"
    formats = ("affine4", "affine8", "mxfp4", "nvfp4")
    quantizes = ("affine4", "affine8", "mxfp4")  # nvfp4 would get a global scale

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return ("affine4" if source.element.bits <= 4 else "affine8", 32) if k % 32 == 0 else None

    def arranged(self, checkpoint: Checkpoint) -> Checkpoint:
        return by_mlx_stacks(checkpoint)

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if act_order:
            raise Misfit("act-order: MLX's layers have no place for a permutation")
        if shape[-1] % group_size:
            raise Misfit(f"the last group of {group_size} is partial")
        if planes.get("global_scale", 1) != 1:
            raise Misfit("MLX's layers have no global scale")

    def check_plain(self, dtype: np.dtype[Any]) -> None:
        if dtype.name not in (*TYPES, "float32"):
            raise Misfit(f"MLX has no type {dtype.name}")

    def preferred(self, format: Format, planes: Planes, config: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
        # The type of the model itself: products with another would be in float32.
        wanted = isinstance(format, AffineFormat) and model_type(config) == "bfloat16"
        if wanted and all(holds(planes[part].astype(np.float32), bfloat16) for part in ("scale", "minimum")):
            return {"scales": bfloat16, "biases": bfloat16}
        return {}

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        quantization = quantization_config(items)
        return {"quantization": quantization, "quantization_config": quantization} if quantization else {}

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        return {"format": "mlx"}

    def specs(self, item: Item) -> dict[str, Spec]:
        leading = item.shape[:-1]
        specs: dict[str, Spec] = {f"{item.module}.weight": (U32, (*leading, item.k * item.bits // 32))}
        for part in ("scales", "biases"):
            if part in item.dtypes:
                specs[f"{item.module}.{part}"] = (item.dtypes[part], (*leading, item.groups))
        return specs

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        packed = np.ascontiguousarray(storage["packed"]).view(np.uint32)
        parts = {part: storage[part] for part in ("scales", "biases") if part in storage}
        return {f"{item.module}.weight": packed, **{f"{item.module}.{part}": array for part, array in parts.items()}}


def quantization_config(items: Sequence[Item]) -> dict[str, Any]:
    """What most modules have, and the exceptions under their names."""
    settings = {item.module: _settings(item) for item in items if item.format is not None}
    if not settings:
        return {}
    counts = Counter(tuple(about.items()) for about in settings.values())
    common = dict(counts.most_common(1)[0][0])
    return {**common, **{module: about for module, about in settings.items() if about != common}}


def _settings(item: Item) -> dict[str, Any]:
    assert item.format is not None
    mode = "affine" if isinstance(item.format, AffineFormat) else item.format.name
    return {"group_size": item.group_size, "bits": item.bits, "mode": mode}
