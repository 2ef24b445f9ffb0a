"""bitsandbytes' NF4, in blocks that follow each other across rows:

X                                     [N*K/2, 1] bytes, of any type: the high nibble is the even k
X.absmax                              f32 [blocks]; with double quantization u8, an index
X.quant_map                           f32 [16], the levels
X.nested_absmax, X.nested_quant_map   f32 [blocks/256], [256]: absmax = nested_quant_map[index] * nested_absmax + offset
X.quant_state.bitsandbytes__nf4       JSON as bytes: shape, blocksize, nested_blocksize, nested_offset
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from billfish.checkpoints.entry import SUPPORTED, Entry, MatrixEntry, Unsupported, check_part
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.core.elements import NF4
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.files import parse_json
from billfish.core.format import Format, get_format
from billfish.core.storage import Array, Storage

STATE = ".quant_state.bitsandbytes__"
LARGEST_OFFSET = 3e38  # of float32
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Nf4Matrix(MatrixEntry):
    layout = "bitsandbytes"

    def __init__(self, weight: Stored, parts: dict[str, Stored], shape: tuple[int, ...], state: dict[str, Any]) -> None:
        self.weight, self.held, self.state = weight, parts, state
        super().__init__(weight.name, "nf4", shape, state["blocksize"], [weight, *parts.values()])
        self.group = state["blocksize"]

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        packed = self.weight.rows_of_bytes(self.n)[rows, columns.start // 2 : columns.stop // 2]
        scales = self._absmax(rows)[:, columns.start // self.group : columns.stop // self.group]
        return self.format, {"packed": packed, "scales": np.ascontiguousarray(scales)}, self.group

    def _absmax(self, rows: slice) -> Array:
        """Of these rows, float32 [N, groups]."""
        groups = self.k // self.group
        absmax = self.held["absmax"].array().reshape(self.n, groups)[rows]
        if "nested_absmax" not in self.held:
            return absmax
        upper = self.held["nested_absmax"].array()
        blocks = np.arange(rows.start * groups, rows.stop * groups).reshape(absmax.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = self.held["nested_quant_map"].array()[absmax] * upper[blocks // self.state["nested_blocksize"]]
            return np.asarray(scaled + np.float32(self.state["nested_offset"]), np.float32)


def refuse_other_types(stored: Mapping[str, Stored], about: dict[str, Any]) -> None:
    """Raises for bitsandbytes' other types. Its fp4 is not E2M1, and its 8-bit type has scales of rows and outliers."""
    kinds = {name.rpartition(STATE)[2] for name in stored if STATE in name}
    if about.get("quant_method") == "bitsandbytes":
        kinds.add("8-bit" if about.get("load_in_8bit") else str(about.get("bnb_4bit_quant_type", "8-bit")))
    if kinds - {"nf4"}:
        problem = f"bitsandbytes {', '.join(sorted(kinds - {'nf4'}))} is not supported, only nf4"
        raise CheckpointError(failure(CALL, problem, SUPPORTED))


def recognise(name: str, stored: Mapping[str, Stored]) -> Entry:
    """The entry for the array `name`."""
    found = stored.get(f"{name}{STATE}nf4")
    parts = {part: stored[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in stored}
    if found is None or name not in stored or not {"absmax", "quant_map"} <= parts.keys():
        raise CheckpointError(failure(CALL, f"{name} has the arrays {sorted(parts)}", "NF4 has absmax and quant_map."))
    weight, state = stored[name], _state(found)
    shape, group = tuple(state["shape"]), state["blocksize"]
    n, k = math.prod(shape[:-1]), shape[-1]
    nested = parts.keys() > {"absmax", "quant_map"}
    check_part(parts["quant_map"], ("F32",), (16,))
    reason = ""
    if not np.array_equal(parts["quant_map"].array(), NF4.values):
        reason = "NF4 with other levels"
    elif k % group or group not in get_format("nf4").group_sizes:
        reason = f"NF4 in blocks of {group} for rows of {k}"
    if reason:
        return Unsupported(name, "bitsandbytes", reason, [weight, found, *parts.values()], shape)
    if 2 * weight.nbytes != n * k:
        raise CheckpointError(
            bad_argument(CALL, f"size of {name}", f"{weight.nbytes} bytes", f"{n * k // 2} for {list(shape)}")
        )
    blocks = n * k // group
    check_part(parts["absmax"], ("U8",) if nested else ("F32",), (blocks,))
    if nested:
        upper = -(-blocks // _positive(found, state, "nested_blocksize"))
        for part, size in (("nested_absmax", upper), ("nested_quant_map", 256)):
            if part not in parts:
                raise CheckpointError(failure(CALL, f"{name} has no {part}, which double quantization needs"))
            check_part(parts[part], ("F32",), (size,))
        offset = state.get("nested_offset")
        if not isinstance(offset, (int, float)) or abs(offset) > LARGEST_OFFSET:
            raise CheckpointError(bad_argument(CALL, f"nested_offset of {found.name}", repr(offset), "a number"))
    matrix = Nf4Matrix(weight, parts, shape, state)
    matrix.parts |= {found.name}
    return matrix


def _state(stored: Stored) -> dict[str, Any]:
    try:
        state = parse_json(stored.array().tobytes())
    except (ValueError, RecursionError):
        state = None
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or len(shape) < 2 or not all(type(size) is int and size > 0 for size in shape):
        raise CheckpointError(failure(CALL, f"{stored.name} is not JSON with shape and blocksize"))
    assert isinstance(state, dict)
    _positive(stored, state, "blocksize")
    return state


def _positive(stored: Stored, state: dict[str, Any], name: str) -> int:
    number = state.get(name)
    if type(number) is not int or number <= 0:
        raise CheckpointError(bad_argument(CALL, f"{name} of {stored.name}", repr(number), "a positive integer"))
    return number
