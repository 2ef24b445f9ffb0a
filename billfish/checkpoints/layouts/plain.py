"""Arrays that are not quantized, each under its own name: float folders, which every program loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from billfish.checkpoints.entry import Entry, Plain, Unsupported
from billfish.checkpoints.safetensors_files import Stored
from billfish.checkpoints.write.target import Item, Spec, Target
from billfish.core.format import Format
from billfish.core.storage import Array, Storage

# ---- reading ---------------------------------------------------------------------------------------------------------


def recognise(array: Stored, stored: Mapping[str, Stored]) -> Entry:
    """The entry for an array that no other layout knows; `stored` are all arrays beside it."""
    # Other scaled FP8 is not ours to read, and half of a number is worse than an error.
    scales = [n for n in (f"{array.name}_scale", f"{array.name}_scale_inv") if n in stored]
    if array.kind.startswith("F8_") and scales:
        return Unsupported(array.name, "plain", f"{array.kind} with {scales[0]}", [array], array.shape)
    if array.kind == "I8" and scales:
        return Unsupported(array.name, "plain", f"int-quantized weights with {scales[0]}", [array], array.shape)
    return Plain(array)


# ---- writing ---------------------------------------------------------------------------------------------------------


class PlainTarget(Target):
    name = "plain"
    formats = ()
    takes_dtype = True
    expert_names = "transformers stacks"

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return True

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return None  # nothing is quantized here

    def specs(self, item: Item) -> dict[str, Spec]:
        raise AssertionError(f"{item.name} is quantized")

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        raise AssertionError(f"{item.name} is quantized")
