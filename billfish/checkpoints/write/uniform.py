"""What GPTQ's and AWQ's folders have in common: one width and one group size for all modules, and numbers at both ends.

Embeddings and the last layer are never quantized there, as loaders make no quantized layers of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.layouts.packed_words import WORD_GROUPS
from billfish.checkpoints.names.expert_stacks import one_by_one
from billfish.checkpoints.write.recast import Misfit
from billfish.checkpoints.write.selection import SENSITIVE
from billfish.checkpoints.write.target import Item, Misplaced, Target
from billfish.core.format import Format, Planes

WHOLE_ROWS = -1  # as a group size


class UniformTarget(Target):
    """A folder with one (bits, group size) for all quantized modules."""

    takes_dtype = True
    first_zero: int  # the lowest zero point that can be stored; the highest is 2**bits - 1 above it

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return bool(SENSITIVE.search(name))

    def arranged(self, checkpoint: Checkpoint) -> Checkpoint:
        return one_by_one(checkpoint)

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if len(shape) != 2:
            raise Misfit("it is a stack of matrices")
        per_word = 32 // format.element.bits
        if shape[0] % per_word:
            raise Misfit(f"N = {shape[0]} is no multiple of {per_word}: a word holds {per_word} zero points")
        if "zero" in planes:
            zero, last = planes["zero"].astype(np.float32), self.first_zero + 2**format.element.bits - 1
            stored = (zero == np.rint(zero)) & (zero >= self.first_zero) & (zero <= last)
            if not stored.all():
                raise Misfit(f"a zero point of {zero[~stored].flat[0]:g}: {self.name} has {self.first_zero} to {last}")

    def odd_ones(self, items: Sequence[Item]) -> Mapping[str, Misplaced]:
        quantized = [item for item in items if item.format is not None]
        if not quantized:
            return {}
        bits, group_size = agreed(quantized)
        (model, *_), others = _split(quantized, bits, group_size)
        assert model.format is not None
        reason = f"{bits} bits in {_groups(group_size)} elsewhere: {self.name} has one setting for all modules"
        return {
            item.name: Misplaced(
                f"{item.bits} bits in {_groups(item.group_size)}, and {reason}", model.format, group_size
            )
            for item in others
        }


def agreed(items: Sequence[Item]) -> tuple[int, int]:
    """The bits and the group size that most weights have."""
    sizes = {item.group_size for item in items if item.group_size in WORD_GROUPS}
    settings = [(bits, size) for bits in {item.bits for item in items} for size in (*sorted(sizes), WHOLE_ROWS)]
    return max(settings, key=lambda setting: sum(item.n * item.k for item in _split(items, *setting)[0]))


def _split(items: Sequence[Item], bits: int, group_size: int) -> tuple[list[Item], list[Item]]:
    """The items that a setting is true of, and the others. A row that is no longer than a group is a group."""
    true_of, others = list[Item](), list[Item]()
    for item in items:
        whole = item.group_size == item.k and (group_size == WHOLE_ROWS or item.k <= group_size)
        agrees = item.bits == bits and (item.group_size == group_size or whole)
        (true_of if agrees else others).append(item)
    return true_of, others


def _groups(group_size: int) -> str:
    return "whole rows" if group_size == WHOLE_ROWS else f"groups of {group_size}"


def left_plain(items: Sequence[Item]) -> list[str]:
    """Modules with a matrix that is not quantized though loaders would expect it to be."""
    return [
        item.module
        for item in items
        if item.format is None and len(item.shape) == 2 and not SENSITIVE.search(item.name)
    ]
