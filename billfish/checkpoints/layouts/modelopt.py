"""ModelOpt's NVFP4, and gpt-oss's MXFP4 blocks: the same bytes as compressed-tensors under other names.

M.weight          u8 [N, K/2]          the low nibble is the even k
M.weight_scale    f8_e4m3 [N, K/16]
M.weight_scale_2  f32 []               a multiplier

P_blocks          u8 [E, N, K/32, 16]  gpt-oss: consecutive nibbles, low first
P_scales          u8 [E, N, K/32]
"""

from __future__ import annotations

from typing import Any

from billfish.checkpoints.entry import Entry, check_part
from billfish.checkpoints.layouts.compressed_tensors import Fp4Matrix
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.core.errors import CheckpointError, bad_argument


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`."""
    weight, scales, global_scale = (parts[name] for name in ("weight", "weight_scale", "weight_scale_2"))
    if weight.kind != "U8" or len(weight.shape) != 2:
        raise CheckpointError(bad_argument(CALL, weight.name, f"{weight.kind} {weight.shape}", "U8 [N, K/2]"))
    n, k = weight.shape[0], weight.shape[1] * 2
    check_part(scales, ("F8_E4M3",), (n, k // 16))
    check_part(global_scale, ("F32",), (1,) if global_scale.shape else ())
    return Fp4Matrix(f"{module}.weight", "modelopt", "nvfp4", (n, k), weight, scales, global_scale)


def recognise_blocks(name: str, blocks: Stored, scales: Stored) -> Entry:
    """The entry for gpt-oss's `name`, a stack of matrices."""
    if blocks.kind != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != 16:
        raise CheckpointError(bad_argument(CALL, blocks.name, f"{blocks.kind} {blocks.shape}", "U8 [E, N, K/32, 16]"))
    check_part(scales, ("U8",), blocks.shape[:-1])
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return Fp4Matrix(name, "gpt-oss", "mxfp4", shape, blocks, scales)
