"""Folders without quantized weights, as every program loads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.checkpoints.writers.base import Item, Spec, Target
from billfish.format import Format
from billfish.storage import Array
from billfish.tensor import QuantizedTensor


class PlainTarget(Target):
    name = "plain"
    formats = ()
    takes_dtype = True

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return True

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return None  # nothing is quantized here

    def specs(self, item: Item) -> dict[str, Spec]:
        raise AssertionError(f"{item.name} is quantized")

    def arrays(self, item: Item, tensor: QuantizedTensor) -> dict[str, Array]:
        raise AssertionError(f"{item.name} is quantized")
