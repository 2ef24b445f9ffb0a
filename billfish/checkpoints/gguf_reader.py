"""The header of a GGUF file, parsed by the `gguf` library with its reads kept inside the file.

Without that, a count that lies makes the library loop for hours, and an honest list of a million numbers becomes a
million Python objects.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from billfish.checkpoints.container import MappedFile, damaged
from billfish.checkpoints.gguf import ARRAY, Field, Header, Info, list_items
from billfish.extras import require
from billfish.storage import Array

# How the library, or a read that goes beyond the end, says no.
REFUSALS = (ValueError, KeyError, IndexError, OverflowError, TypeError, struct.error)


def read_header(file: MappedFile) -> Header:
    """Fields and tensors."""
    gguf = require("gguf", "checkpoints")

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Array:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, inside of what its header promises")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            items = list_items(memoryview(self.data), orig_offs + 12, item, count)
            return 12 + len(items.data), [items], [0], [gguf.GGUFValueType.ARRAY]

    head = file.view(0, min(8, file.size), np.uint8, (-1,)).tobytes()
    if len(head) == 8 and head[4:6] == b"\0\0":
        raise damaged(file.path, "a big-endian GGUF file", "a little-endian one")
    try:
        reader = Reader(file.path)
        fields = {name: _field(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except REFUSALS as error:
        raise damaged(file.path, f"a damaged header ({error})", "a GGUF file") from None
    return fields, [_info(tensor) for tensor in reader.tensors]


def _field(field: Any) -> Field:
    kind = int(field.types[0])
    return Field(kind, field.parts[-1] if kind == ARRAY else field.contents())


def _info(tensor: Any) -> Info:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return Info(tensor.name, tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))
