"""How much of each prompt is read in a step, so that a long one stops neither the answers nor the other prompts.

A prompt is read in parts of at least SMALLEST tokens. Fewer rows may take other kernels than a whole prompt, and the
numbers would differ in their last digits from those of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

SMALLEST = 16


class Reader(Protocol):
    """Whoever reads a prompt."""

    turn: int  # the step in which it read last

    @property
    def left(self) -> int:
        """Tokens that it has not read."""

    def part(self, share: int) -> int:
        """How many it reads next, if about `share` are its share."""


SomeReader = TypeVar("SomeReader", bound=Reader)


def body_length(prompt: int, chunk: int) -> int:
    """The tokens of a prompt without the few behind the last whole chunk, which a decoder feeds apart from them."""
    tail = prompt % chunk
    return prompt - tail if tail < SMALLEST else prompt


def part_length(read: int, prompt: int, share: int, chunk: int) -> int:
    """How many tokens of a prompt are read next: `share`, or up to SMALLEST more, so that no few are left."""
    body = body_length(prompt, chunk)
    if read >= body:
        return prompt - read
    return body - read if body - read < share + SMALLEST else share


def reusable(shared: int, prompt: int, chunk: int) -> int:
    """How many of the `shared` first tokens of a prompt need not be read: what is left is at least one whole part."""
    most = body_length(prompt, chunk) - SMALLEST
    return min(shared, most) if min(shared, most) >= SMALLEST else 0


def share_out(readers: Sequence[SomeReader], bound: int) -> list[tuple[SomeReader, int]]:
    """Who reads how many tokens in this step, about `bound` together. Who has waited longest comes first; what a short
    prompt does not need goes to the longer ones."""
    served = sorted(readers, key=lambda reader: reader.turn)[: max(1, bound // SMALLEST)]
    parts, left = [], bound
    for i, reader in enumerate(sorted(served, key=lambda reader: reader.left)):
        part = reader.part(max(SMALLEST, left // (len(served) - i)))
        parts.append((reader, part))
        left -= part
    return parts
