"""FP8 of several projects: bytes of E4M3 beside scales that are multiplied, whatever they are called.

X              f8_e4m3 [N, K], or a stack [E, N, K]
X_scale        compressed-tensors and ModelOpt: [] or [1] for a matrix, [N, 1] or [N] for rows, [N/b, K/128] for blocks
X_scale_inv    transformers' "fp8", as DeepSeek has it: [N/128, K/128] for blocks
X_scale        u8 [N, K/32], exponents: compressed-tensors' mxfp8

A scale for several rows is repeated for each, which is how `fp8` has it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from billfish.checkpoints.entry import Entry, MatrixEntry, Unsupported
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.core.errors import CheckpointError, bad_argument
from billfish.core.format import Format
from billfish.core.storage import Array, Storage

GROUP = 128  # of `fp8`, where a row has several scales
SCALES = ("F32", "F16", "BF16", "F8_E8M0")
SUFFIXES = ("_scale", "_scale_inv")


class Fp8Matrix(MatrixEntry):
    """Scales for `height` rows and `width` k."""

    def __init__(
        self, layout: str, format: str, shape: tuple[int, ...], weight: Stored, scales: Stored, height: int, width: int
    ) -> None:
        self.layout, self.weight, self.stored_scales = layout, weight, scales
        self.height, self.width = height, width
        self.group = 32 if format == "mxfp8" else min(GROUP, width) if width < shape[-1] else shape[-1]
        super().__init__(weight.name, format, shape, self.group, [weight, scales])
        self.rows = shape[-2]

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        storage = {
            "packed": self.weight.rows_of_bytes(self.n)[rows, columns],
            "scales": self._scales(np.arange(rows.start, rows.stop), columns),
        }
        return self.format, storage, -1 if self.group == self.k else self.group

    def _scales(self, rows: Array, columns: slice) -> Array:
        """Of these rows, [N, groups]."""
        along = -(-self.k // self.width)
        down = -(-self.rows // self.height)
        if self.format.name == "mxfp8":
            held = self.stored_scales.rows_of_bytes(self.n)
        else:
            held = self.stored_scales.array().reshape(-1, along)
            if self.stored_scales.kind == "F8_E8M0":
                held = held.astype(np.float32)
        groups = np.arange(columns.start // self.group, -(-columns.stop // self.group))
        which = rows // self.rows * down + rows % self.rows // self.height
        return np.ascontiguousarray(held[which[:, None], groups * self.group // self.width])


def scale_of(name: str, stored: Any) -> Stored | None:
    """The scales beside an array."""
    return next((stored[name + suffix] for suffix in SUFFIXES if name + suffix in stored), None)


def recognise(weight: Stored, scales: Stored, about: dict[str, Any], weights: dict[str, Any]) -> Entry:
    """The entry for `weight`; `about` is the configuration, and `weights` what compressed-tensors says of weights."""
    shape = weight.shape
    layout = {"compressed-tensors": "compressed-tensors", "modelopt": "modelopt"}.get(
        str(about.get("quant_method")), "fp8"
    )
    if len(shape) < 2 or 0 in shape:
        raise CheckpointError(bad_argument(CALL, f"shape of {weight.name}", shape, "a matrix"))
    *stack, n, k = shape
    count = math.prod(stack)
    if scales.kind == "U8" and scales.shape == (*stack, n, -(-k // 32)):
        return Fp8Matrix(layout, "mxfp8", shape, weight, scales, 1, 32)
    if scales.kind not in SCALES:
        raise CheckpointError(bad_argument(CALL, f"dtype of {scales.name}", scales.kind, " or ".join(SCALES)))
    found = _block(scales.shape, stack, n, k, _declared(about, weights))
    if found is None:
        expected = f"one scale for each matrix, row or block of {shape}"
        raise CheckpointError(bad_argument(CALL, f"shape of {scales.name}", scales.shape, expected))
    height, width = found
    if width < k and width % GROUP:
        reason = f"E4M3 with a scale for {width} weights of a row; `fp8` has {GROUP}, or all"
        return Unsupported(weight.name, layout, reason, [weight, scales], shape)
    assert math.prod(scales.shape) == count * -(-n // height) * -(-k // width)
    return Fp8Matrix(layout, "fp8", shape, weight, scales, height, width)


def _declared(about: dict[str, Any], weights: dict[str, Any]) -> tuple[int, int]:
    """Rows and k of a block, by the configuration; 128 x 128 where it says nothing that could be one."""
    size = about.get("weight_block_size") or weights.get("block_structure")
    if isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size):
        return size[0], size[1]
    group = weights.get("group_size")
    if weights.get("strategy") == "group" and type(group) is int and group > 0:
        return 1, group
    return GROUP, GROUP


def _block(
    held: tuple[int, ...], stack: list[int], n: int, k: int, declared: tuple[int, int]
) -> tuple[int, int] | None:
    """Rows and k that have one scale, if scales of that shape can be those of a stack of [n, k]; else None."""
    height, width = min(declared[0], n), min(declared[1], k)
    one, rows = [(), (1,), (1, 1)], [(n,), (n, 1)]
    if stack:
        one, rows = [(*stack,), (*stack, 1), (*stack, 1, 1)], [(*stack, n), (*stack, n, 1)]
    if held == (*stack, -(-n // height), -(-k // width)):
        return height, width
    return (1, k) if held in rows else (n, k) if held in one else None
