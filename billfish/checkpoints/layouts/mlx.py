"""MLX: affine integers of 4 and 8 bits, mxfp4 and nvfp4.

    weight        u32 [..., N, K*b/32]    least significant bits first, so the bytes of a row are consecutive codes
    scales        [..., N, K/g]           affine: float; mxfp4: u8, E8M0, g = 32; nvfp4: u8, E4M3, g = 16
    biases        as scales               affine only: w = scale * q + bias
    global_scale  f32                     nvfp4, if at all: the largest magnitude of the tensor, 448 * 6 multipliers

Bits, group size and mode are in config.json under "quantization", with exceptions by the path of a module. Without it
the shapes tell mxfp4 and nvfp4 apart, but not 4 affine bits from 8. mlx-lm loads such folders.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.entry import Entry, MatrixEntry, Unsupported, check_part
from billfish.checkpoints.layouts.compressed_tensors import Fp4Matrix
from billfish.checkpoints.layouts.packed_words import FLOATS
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.checkpoints.write.recast import Misfit, holds
from billfish.checkpoints.write.target import Item, Spec, Target, model_type
from billfish.core.arrays import bfloat16
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.affine import AffineFormat
from billfish.core.storage import Array, Storage

DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16)}


# ---- reading ---------------------------------------------------------------------------------------------------------


class AffineMatrix(MatrixEntry):
    layout = "mlx"

    def __init__(self, name: str, parts: dict[str, Stored], shape: tuple[int, ...], bits: int, group: int) -> None:
        self.weight, self.scales, self.biases = (parts[n] for n in ("weight", "scales", "biases"))
        super().__init__(name, f"affine{bits}", shape, group, parts.values())
        self.bits, self.group = bits, group

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        packed = self.weight.rows_of_bytes(self.n)
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        per_byte = 8 // self.bits
        storage = {"packed": packed[rows, columns.start // per_byte : columns.stop // per_byte]}
        for name, stored in (("scales", self.scales), ("biases", self.biases)):
            storage[name] = stored.array().reshape(self.n, -1)[rows, groups]
        return self.format, storage, self.group


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`; `config` is the section "quantization"."""
    name, weight, scales = f"{module}.weight", parts["weight"], parts["scales"]
    own = config.get(module)
    settings: Mapping[str, Any] = ChainMap(own, config) if isinstance(own, dict) else config
    if len(weight.shape) < 2 or weight.shape[:-1] != scales.shape[:-1]:
        raise CheckpointError(bad_argument(CALL, f"shape of {scales.name}", scales.shape, f"rows of {weight.shape}"))
    mode = str(settings.get("mode", "affine"))
    if not config and "biases" not in parts:
        ratio = weight.shape[-1] / max(1, scales.shape[-1])  # of words to scales: 4 bits times the group over 32
        mode = {4.0: "mxfp4", 2.0: "nvfp4"}.get(ratio, "of some other kind")
    default_bits, default_group = DEFAULTS.get(mode, (0, 0))
    bits, group = settings.get("bits", default_bits), settings.get("group_size", default_group)
    whole = isinstance(bits, int) and isinstance(group, int) and bits > 0
    shape = (*weight.shape[:-1], weight.shape[-1] * 32 // bits if whole else 0)
    reason = ""
    if mode not in DEFAULTS:
        reason = f"MLX's mode {mode!r}; {', '.join(DEFAULTS)} are supported"
    elif not config and mode == "affine":
        reason = "MLX's affine weights without config.json, which says how many bits"
    elif (bits, group) not in {"affine": [(b, g) for b in (4, 8) for g in (32, 64, 128)]}.get(mode, [DEFAULTS[mode]]):
        reason = (
            f"MLX's {mode} with {bits} bits in groups of {group}; affine with 4 or 8 bits, mxfp4, nvfp4 are supported"
        )
    if reason:
        return Unsupported(name, "mlx", reason, parts.values(), shape)
    scale_shape = (*shape[:-1], shape[-1] // group)
    if shape[-1] % group:
        raise CheckpointError(bad_argument(CALL, f"K of {weight.name}", shape[-1], f"a multiple of group_size {group}"))
    if mode == "affine":
        if "biases" not in parts:
            raise CheckpointError(failure(CALL, f"{weight.name} has no biases, which affine weights need"))
        check_part(scales, FLOATS, scale_shape)
        check_part(parts["biases"], (scales.kind,), scale_shape)
        return AffineMatrix(name, parts, shape, bits, group)
    check_part(scales, ("U8",), scale_shape)
    global_scale = parts.get("global_scale")
    if global_scale is not None and (global_scale.kind != "F32" or math.prod(global_scale.shape) != 1):
        raise CheckpointError(bad_argument(CALL, f"shape of {global_scale.name}", global_scale.shape, "one F32"))
    return Fp4Matrix(name, "mlx", mode, shape, weight, scales, global_scale, "largest magnitude")


# ---- writing ---------------------------------------------------------------------------------------------------------

U32 = np.dtype(np.uint32)
TYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16")


class MlxTarget(Target):
    name = "mlx"
    formats = ("affine4", "affine8", "mxfp4", "nvfp4")
    quantizes = ("affine4", "affine8", "mxfp4")  # nvfp4 would get a global scale
    expert_names = "mlx stacks"

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return ("affine4" if source.element.bits <= 4 else "affine8", 32) if k % 32 == 0 else None

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if act_order:
            raise Misfit("MLX cannot store a permutation (act-order)")
        if shape[-1] % group_size:
            raise Misfit(f"K = {shape[-1]} is not a multiple of the group size {group_size}")
        if planes.get("global_scale", 1) != 1:
            raise Misfit("MLX cannot store a global scale")

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
