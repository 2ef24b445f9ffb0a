"""Folders without quantized weights, as every program loads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.stacks import STACKED_FILES, one_by_one
from billfish.checkpoints.writers.base import Item, Spec, Target
from billfish.format import Format
from billfish.storage import Array, Storage


class PlainTarget(Target):
    name = "plain"
    formats = ()
    takes_dtype = True

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return True

    def arranged(self, checkpoint: Checkpoint) -> Checkpoint:
        # Files of some models have stacks, which transformers looks for.
        return checkpoint if checkpoint.config.get("model_type") in STACKED_FILES else one_by_one(checkpoint)

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return None  # nothing is quantized here

    def specs(self, item: Item) -> dict[str, Spec]:
        raise AssertionError(f"{item.name} is quantized")

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        raise AssertionError(f"{item.name} is quantized")
