"""compressed-tensors: pack-quantized integers, nvfp4-pack-quantized and mxfp4-pack-quantized.

weight_packed      i32 [N, K*b/32]    fields along K from the least significant bit, signed value + 2^(b-1)
weight_scale       [N, G]
weight_shape       [2]                N, K
weight_zero_point  i32 [N*b/32, G]    fields along N, offset as the codes; only if asymmetric
weight_g_idx       i32 [K]            only with actorder "group"

weight_packed        u8 [N, K/2]      nvfp4 and mxfp4: the low nibble is the even k
weight_scale         f8_e4m3 [N, K/16]  or, mxfp4, u8 [N, K/32]
weight_global_scale  f32 [1]          nvfp4 only, a divisor

Each scheme is a group of modules in config.json, and has the modules that it is for. vLLM and transformers load such
folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Entry, MatrixEntry, Unsupported, check_part
from billfish.checkpoints.layouts.packed_words import (
    FLOATS,
    WordMatrix,
    gather_words,
    group_index,
    group_of,
    model_columns,
    unpack_bits,
    why_not,
    word_format,
)
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.checkpoints.write.recast import Misfit, holds
from billfish.checkpoints.write.target import Item, Spec, Target, model_type
from billfish.core.arrays import bfloat16
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.word_packing import WordFormat, pack_words
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor
from billfish.models.fields import section

PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
)


# ---- reading ---------------------------------------------------------------------------------------------------------


class PackedMatrix(WordMatrix):
    layout = "compressed-tensors"

    def __init__(self, name: str, parts: dict[str, Stored], shape: tuple[int, int], bits: int, group: int) -> None:
        self.packed, self.stored_scales = parts["weight_packed"], parts["weight_scale"]
        self.zero_point = parts.get("weight_zero_point")
        g_idx = parts.get("weight_g_idx")
        super().__init__(
            name, shape, bits, group, list(parts.values()), self.zero_point is None, g_idx, g_idx is not None
        )

    def words(self, rows: slice, columns: slice, order: NDArray[np.int64] | None) -> Array:
        # Word by word the same as ours, but row-major: a transposed view.
        words = self.packed.array().view(np.uint32)[rows].T
        if order is not None:
            return gather_words(words, order, self.bits)
        per_word = 32 // self.bits
        return words[columns.start // per_word : columns.stop // per_word]

    def scales(self, rows: slice, groups: slice) -> Array:
        return np.ascontiguousarray(self.stored_scales.array().reshape(self.n, -1)[rows, groups].T)

    def zeros(self, rows: slice, groups: slice) -> Array | None:
        if self.zero_point is None:
            return None
        stored = self.zero_point.array()
        if stored.dtype == np.int8:  # as older files have them
            return (stored[rows, groups].astype(np.int16) + self.offset).T
        return unpack_bits(stored[:, groups], self.bits, axis=0)[rows].T


class Fp4Matrix(MatrixEntry):
    """nvfp4 and mxfp4 of any project that stores E2M1 row-major: bytes as they are, and a global scale."""

    def __init__(
        self,
        name: str,
        layout: str,
        format: str,
        shape: tuple[int, ...],
        packed: Stored,
        scales: Stored,
        global_scale: Stored | None = None,
        meaning: str = "multiplier",
    ) -> None:
        self.layout = layout
        self.packed, self.stored_scales, self.global_scale, self.meaning = packed, scales, global_scale, meaning
        parts = [packed, scales, *([global_scale] if global_scale else [])]
        super().__init__(name, format, shape, 16 if format == "nvfp4" else 32, parts)

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        group = self.format.default_group_size
        packed, scales = self.packed.rows_of_bytes(self.n), self.stored_scales.rows_of_bytes(self.n)
        storage = {
            "packed": packed[rows, columns.start // 2 : columns.stop // 2],
            "scales": scales[rows, columns.start // group : columns.stop // group],
        }
        if self.format.name == "nvfp4":
            storage["global_scale"] = self._multiplier()
        return self.format, storage, group

    def _multiplier(self) -> Array:
        if self.global_scale is None:
            return np.asarray(1, np.float32)
        stored = self.global_scale.array().reshape(())
        with np.errstate(divide="ignore"):
            if self.meaning == "divisor":
                return np.asarray(np.float32(1) / stored, np.float32)
            if self.meaning == "largest magnitude":
                return np.asarray(stored / np.float32(448 * 6), np.float32)
        return np.array(stored, np.float32)


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    """How the first group of modules has its weights; files have one group unless they mix schemes."""
    groups = section(config, "config_groups")
    return section(next((g for g in groups.values() if isinstance(g, dict)), {}), "weights")


def recognise(module: str, parts: dict[str, Stored], weights: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`; `weights` is what :func:`weights_of` says."""
    name, packed = f"{module}.weight", parts["weight_packed"]
    if len(packed.shape) != 2:
        raise CheckpointError(bad_argument(CALL, f"shape of {packed.name}", packed.shape, "a matrix"))
    if "weight_scale" not in parts:
        raise CheckpointError(failure(CALL, f"{packed.name} has no weight_scale"))
    if packed.kind == "U8":
        return _recognise_fp4(name, parts)
    if packed.kind != "I32" or "weight_shape" not in parts:
        raise CheckpointError(bad_argument(CALL, f"dtype of {packed.name}", packed.kind, "U8, or I32 and weight_shape"))
    shape = parts["weight_shape"]
    if shape.kind not in ("I64", "I32") or shape.shape != (2,):
        raise CheckpointError(bad_argument(CALL, shape.name, f"{shape.kind} {shape.shape}", "I64 (2,)"))
    n, k = (int(size) for size in shape.array())
    scales = parts["weight_scale"]
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    words = packed.shape[1]
    # Widths that do not divide 32 are dense across words in newer files, and padded in older ones.
    widths = [b for b in (weights.get("num_bits"), 4, 8, *range(1, 9)) if isinstance(b, int) and 0 < b <= 8]
    bits = next((b for b in widths if k > 0 and words in (-(-k * b // 32), -(-k // (32 // b)))), 0)
    if packed.shape[0] != n or not bits:
        raise CheckpointError(failure(CALL, f"{shape.name} is [{n}, {k}], which does not fit {packed.shape} words"))
    group = group_of(k, groups, weights.get("group_size"))
    reason = why_not(bits, k, group)
    if reason:
        return Unsupported(name, "compressed-tensors", reason, parts.values(), (n, k))
    check_part(scales, FLOATS, (n, groups) if len(scales.shape) == 2 else (n,))
    zero_point = parts.get("weight_zero_point")
    if zero_point is not None:
        rows = n if zero_point.kind == "I8" else -(-n * bits // 32)
        check_part(zero_point, ("I32", "I8"), (rows, groups))
    if "weight_g_idx" in parts:
        check_part(parts["weight_g_idx"], ("I32", "I64"), (k,))
    return PackedMatrix(name, parts, (n, k), bits, group)


def _recognise_fp4(name: str, parts: dict[str, Stored]) -> Entry:
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    n, k = packed.shape[0], packed.shape[1] * 2
    global_scale = parts.get("weight_global_scale")
    if global_scale is not None:
        check_part(scales, ("F8_E4M3",), (n, k // 16))
        check_part(global_scale, ("F32",), (1,) if global_scale.shape else ())
        return Fp4Matrix(name, "compressed-tensors", "nvfp4", (n, k), packed, scales, global_scale, "divisor")
    check_part(scales, ("U8", "F8_E8M0"), (n, k // 32))
    return Fp4Matrix(name, "compressed-tensors", "mxfp4", (n, k), packed, scales)


# ---- writing ---------------------------------------------------------------------------------------------------------

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = {
    "nvfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
}


class CompressedTensorsTarget(Target):
    name = "compressed-tensors"
    formats = ("u4b8", "u8b128", "u4", "u8", "mxfp4", "nvfp4")
    expert_names = "one by one"

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return word_format(source, k)

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if len(shape) != 2:
            raise Misfit("stacks of matrices are not supported")
        if shape[1] % group_size:
            raise Misfit(f"K = {shape[1]} is not a multiple of the group size {group_size}")
        if "zero" in planes and planes["zero"].dtype != np.uint8:
            raise Misfit("its zero points are not integers of 8 bits")
        if "zero" in planes and planes["zero"].max(initial=0) >= 2**format.element.bits:
            raise Misfit(f"its zero point {planes['zero'].max()} has more than {format.element.bits} bits")
        if "global_scale" in planes:
            divisor_of(planes["global_scale"])

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
    raise Misfit("its global scale has no exact reciprocal in float32, which the layout stores")


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
