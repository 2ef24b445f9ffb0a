"""Folders without quantized weights, as every program loads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.names.expert_stacks import by_transformers_stacks
from billfish.checkpoints.write.target import Item, Spec, Target
from billfish.core.format import Format
from billfish.core.storage import Array, Storage


class PlainTarget(Target):
    name = "plain"
    formats = ()
    takes_dtype = True

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return True

    def arranged(self, checkpoint: Checkpoint) -> Checkpoint:
        return by_transformers_stacks(checkpoint)

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return None  # nothing is quantized here

    def specs(self, item: Item) -> dict[str, Spec]:
        raise AssertionError(f"{item.name} is quantized")

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        raise AssertionError(f"{item.name} is quantized")
