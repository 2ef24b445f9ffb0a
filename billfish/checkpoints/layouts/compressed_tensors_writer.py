"""compressed-tensors folders, as vLLM and transformers load them; their layout: checkpoints/compressed_tensors.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.layouts.packed_words import group_index, model_columns
from billfish.checkpoints.names.expert_stacks import one_by_one
from billfish.checkpoints.write.recast import Misfit, holds
from billfish.checkpoints.write.target import Item, Spec, Target, model_type
from billfish.core.arrays import bfloat16
from billfish.core.format import Format, Planes
from billfish.core.formats.word_packing import WordFormat, pack_words
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = {
    "nvfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
}


class CompressedTensorsTarget(Target):
    name = "compressed-tensors"
    formats = ("u4b8", "u8b128", "u4", "u8", "mxfp4", "nvfp4")

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        symmetric = source.offset == "none"
        bits = 4 if source.element.bits <= 4 else 8
        return (f"u{bits}b{2 ** (bits - 1)}" if symmetric else f"u{bits}", 32) if k % 32 == 0 else None

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if len(shape) != 2:
            raise Misfit("it is a stack of matrices")
        if shape[1] % group_size:
            raise Misfit(f"the last group of {group_size} is partial")
        if "zero" in planes and planes["zero"].dtype != np.uint8:
            raise Misfit("its zero points are no bytes")
        if "zero" in planes and planes["zero"].max(initial=0) >= 2**format.element.bits:
            raise Misfit(f"a zero point of {planes['zero'].max()}")
        if "global_scale" in planes:
            divisor_of(planes["global_scale"])

    def arranged(self, checkpoint: Checkpoint) -> Checkpoint:
        return one_by_one(checkpoint)

    def adapt(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """The global scale moved by an ulp, so that it is the reciprocal of a float32."""
        if "global_scale" not in tensor.storage:
            return tensor
        one, scale = np.float32(1), tensor.storage["global_scale"]
        moved = np.asarray(one / np.float32(one / scale), np.float32)
        return replace(tensor, storage={**tensor.storage, "global_scale": moved})

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        return {"quantization_config": quantization_config(items)}

    def preferred(self, format: Format, planes: Planes, config: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
        # The type of the model itself is what loaders expect.
        wanted = isinstance(format, WordFormat) and model_type(config) == "bfloat16"
        return {"scales": bfloat16} if wanted and holds(planes["scale"].astype(np.float32), bfloat16) else {}

    def specs(self, item: Item) -> dict[str, Spec]:
        name, bits, n, k = item.module, item.bits, item.n, item.k
        if not isinstance(item.format, WordFormat):
            scales = E4M3 if "global_scale" in item.dtypes else np.dtype(np.uint8)
            specs: dict[str, Spec] = {
                f"{name}.weight_packed": (np.dtype(np.uint8), (n, k // 2)),
                f"{name}.weight_scale": (scales, (n, item.groups)),
            }
            if "global_scale" in item.dtypes:
                specs[f"{name}.weight_global_scale"] = (np.dtype(np.float32), (1,))
            return specs
        specs = {
            f"{name}.weight_packed": (np.dtype(np.int32), (n, k * bits // 32)),
            f"{name}.weight_scale": (item.dtypes["scales"], (n, item.groups)),
            f"{name}.weight_shape": (np.dtype(np.int64), (2,)),
        }
        if "zeros" in item.dtypes:
            specs[f"{name}.weight_zero_point"] = (np.dtype(np.int32), (-(-n * bits // 32), item.groups))
        if item.act_order:
            specs[f"{name}.weight_g_idx"] = (np.dtype(np.int32), (k,))
        return specs

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        name = item.module
        if not isinstance(item.format, WordFormat):
            arrays = {f"{name}.weight_packed": storage["packed"], f"{name}.weight_scale": storage["scales"]}
            if "global_scale" in storage:
                arrays[f"{name}.weight_scale"] = storage["scales"].view(E4M3)
                arrays[f"{name}.weight_global_scale"] = divisor_of(storage["global_scale"])
            return arrays
        order = item.order() if item.act_order else None
        packed = model_columns(storage["packed"], order, item.bits)
        arrays = {
            f"{name}.weight_packed": packed.T.view(np.int32) if packed.T.flags.c_contiguous else _turned(packed),
            f"{name}.weight_scale": storage["scales"].T,
            f"{name}.weight_shape": np.array(item.shape, np.int64),
        }
        if "zeros" in storage:
            arrays[f"{name}.weight_zero_point"] = pack_zeros(storage["zeros"], item.bits)
        if item.act_order:
            arrays[f"{name}.weight_g_idx"] = group_index(item.k, item.group_size, order)
        return arrays


def _turned(words: Array) -> Array:
    return np.ascontiguousarray(words.T).view(np.int32)


def pack_zeros(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Zero points [G, N] to words [ceil(N * bits / 32), G], fields along N."""
    per_word = 32 // bits
    groups, n = zeros.shape
    padded = np.zeros((-(-n // per_word) * per_word, groups), np.uint8)
    padded[:n] = zeros.T
    return pack_words(padded, bits).view(np.int32)


def divisor_of(multiplier: Array) -> NDArray[np.float32]:
    """The float32 whose reciprocal is the multiplier, to the bit. Not every one has such a divisor."""
    with np.errstate(divide="ignore"):
        near = np.float32(1) / np.float32(multiplier)
        for divisor in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
            if np.float32(1) / divisor == multiplier:
                return np.array([divisor], np.float32)
    raise Misfit("its global scale is the reciprocal of no float32, and only reciprocals are stored")


def quantization_config(items: Sequence[Item]) -> dict[str, Any]:
    """One group of modules for each scheme; if there is but one, all Linear layers that are not ignored."""
    schemes: dict[tuple[str, str], list[str]] = {}
    for item in items:
        if item.format is not None:
            kind, weights = _scheme(item)
            schemes.setdefault((kind, repr(sorted(weights.items()))), []).append(item.module)
    by_module = {item.module: _scheme(item) for item in items if item.format is not None}
    groups = {}
    for i, ((kind, _), modules) in enumerate(schemes.items()):
        targets = ["Linear"] if len(schemes) == 1 else modules
        weights = by_module[modules[0]][1]
        groups[f"group_{i}"] = {"format": kind, "targets": targets, "weights": weights}
    kinds = sorted({kind for kind, _ in schemes})
    plain = [item.module for item in items if item.format is None and len(item.shape) == 2]
    return {
        "quant_method": "compressed-tensors",
        "format": kinds[0] if len(kinds) == 1 else "mixed-precision" if kinds else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(name for name in plain),
    }


def _scheme(item: Item) -> tuple[str, dict[str, Any]]:
    assert item.format is not None
    if item.format.name in FP4:
        return f"{item.format.name}-pack-quantized", dict(FP4[item.format.name])
    weights: dict[str, Any] = {"num_bits": item.bits, "type": "int", "symmetric": "zeros" not in item.dtypes}
    if item.group_size == item.k:
        weights["strategy"] = "channel"
    else:
        weights |= {"strategy": "group", "group_size": item.group_size}
    if item.act_order:
        weights["actorder"] = "group"
    return "pack-quantized", weights
