"""Our own layout, which holds every format as it is: the storage arrays of a format under the module's name.

    M.packed, M.scales, ...     or M.blocks: the arrays of docs/formats.md; 32-bit words as I32 or U32
    M.permutation               i32 [K], only with act-order

Which format it is says config.json,

    "quantization_config": {"quant_method": "billfish", "format": "fp4", "group_size": 128,
                            "modules": {"lm_head": {"format": "q8_0", "group_size": 32}}}

(a module with "bare": true stands for a tensor of that very name, not for its `.weight`) or, for a file alone, the same
object as JSON in the metadata under "billfish". MarlinLinear's state dicts have these keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.container import CALL, Stored, section
from billfish.checkpoints.entry import Entry, Matrix
from billfish.errors import CheckpointError, complaint
from billfish.format import FORMATS, Array, Format, Storage
from billfish.formats.ggml import BlockFormat
from billfish.formats.words import WordFormat

PARTS = ("packed", "blocks", "scales", "zeros", "biases", "global_scale", "permutation")


class NativeMatrix(Matrix):
    layout = "billfish"

    def __init__(self, name: str, parts: dict[str, Stored], format: Format, shape: tuple[int, ...], group: int) -> None:
        self.arrays = {part: stored for part, stored in parts.items() if part != "permutation"}
        self.order = parts.get("permutation")
        super().__init__(name, format.name, shape, group, parts.values(), self.order is not None)
        self.group = group

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        storage = {part: stored.array() for part, stored in self.arrays.items()}
        group = -1 if self.group == self.k and self.format.whole_row_groups else self.group
        for part, array in storage.items():
            if array.dtype == np.int32:
                storage[part] = array = array.view(np.uint32)
            if array.ndim == 2:
                storage[part] = cut(self.format, part, array, rows, columns, self.group)
        return self.format, storage, group

    def permutation(self) -> NDArray[np.int64] | None:
        if self.order is None:
            return None
        order = self.order.array().astype(np.int64)
        if not np.array_equal(np.sort(order), np.arange(self.k)):
            raise CheckpointError(complaint(CALL, self.order.name, "not each column once", f"an order of {self.k}"))
        return order


def cut(format: Format, part: str, array: Array, rows: slice, columns: slice, group: int) -> Array:
    """Part of a storage array. Words have K along their first axis, everything else along its second."""
    if isinstance(format, BlockFormat):
        size = format.struct.itemsize
        return array[rows, columns.start // format.block_size * size : columns.stop // format.block_size * size]
    words = isinstance(format, WordFormat)
    run = (32 if words else 8) // format.element.bits if part == "packed" else group
    along_k = slice(columns.start // run, -(-columns.stop // run))
    return array[along_k, rows] if words else array[rows, along_k]


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`."""
    settings = {**config, **section(section(config, "modules"), module)}
    format, group = FORMATS.get(str(settings.get("format"))), settings.get("group_size")
    if format is None:
        got = f"format {settings.get('format')!r} for {module}"
        raise CheckpointError(complaint(CALL, "quantization_config", got, f"one of {', '.join(FORMATS)}"))
    main = parts.get("blocks") or parts["packed"]
    if len(main.shape) != 2 or 0 in main.shape:
        raise CheckpointError(complaint(CALL, main.name, f"shape {main.shape}", "a matrix"))
    if isinstance(format, WordFormat):
        shape = (main.shape[1], main.shape[0] * (32 // format.element.bits))
    elif isinstance(format, BlockFormat):
        shape = (main.shape[0], main.shape[1] // format.struct.itemsize * format.block_size)
    else:
        shape = (main.shape[0], main.shape[1] * 8 // format.element.bits)
    if group in (-1, shape[1]) and format.whole_row_groups:
        group = shape[1]
    if group not in format.group_sizes and group != shape[1]:
        got = f"group_size {group!r} for {module}"
        raise CheckpointError(complaint(CALL, "quantization_config", got, f"one of {format.group_sizes}"))
    order = parts.get("permutation")
    if order is not None and (order.kind not in ("I32", "I64") or order.shape != (shape[1],)):
        raise CheckpointError(complaint(CALL, order.name, f"{order.kind} {order.shape}", f"I32 ({shape[1]},)"))
    name = module if settings.get("bare") else f"{module}.weight"
    return NativeMatrix(name, parts, format, _stack(module, shape, settings.get("shape")), int(group))


def _stack(module: str, shape: tuple[int, int], declared: Any) -> tuple[int, ...]:
    """The shape of a stack of matrices, which is stored as one."""
    if declared is None:
        return shape
    whole = isinstance(declared, list) and all(isinstance(size, int) and size > 0 for size in declared)
    if not whole or len(declared) < 2 or (math.prod(declared[:-1]), declared[-1]) != shape:
        got = f"shape {declared!r} for {module}"
        raise CheckpointError(complaint(CALL, "quantization_config", got, f"one that makes {shape}"))
    return tuple(declared)
