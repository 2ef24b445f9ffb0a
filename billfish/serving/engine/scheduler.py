"""How much of each prompt is read in a step, so that a long one stops neither the answers nor the other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from billfish.core.typing import Activations
from billfish.llm.decoder import Decoder

SMALLEST = 16


@dataclass(frozen=True)
class Cuts:
    """Where prompts are cut into parts.

    chunk: what a decoder feeds at once of a prompt alone. smallest: of a part. Fewer rows may take other kernels than
    many, and the numbers would differ in their last digits from those of the prompt alone.
    """

    chunk: int
    smallest: int

    def body(self, prompt: int) -> int:
        """The tokens of a prompt without the few behind the last whole chunk, which are fed apart from them."""
        tail = prompt % self.chunk
        return prompt - tail if tail < self.smallest else prompt

    def part(self, read: int, prompt: int, share: int) -> int:
        """How many tokens of a prompt are read next: about `share`, and so many that no few are left."""
        left, share = self.body(prompt) - read, max(share, self.smallest)
        if left <= 0:
            return prompt - read
        return left if left < share + self.smallest else share

    def reusable(self, shared: int, prompt: int) -> int:
        """How many of the first tokens of a prompt need not be read if a cache holds `shared` of them. At least one
        whole part is left."""
        most = min(shared, self.body(prompt) - self.smallest)
        return max(0, most // self.smallest * self.smallest)


def cuts_for(decoder: Decoder, activations: Activations | None) -> Cuts:
    """Which rows an expert gets depends on the part, and in exact mode its kernels on how many: parts are chunks then,
    as of a prompt alone."""
    whole = activations == "exact" and decoder.config.experts is not None
    return Cuts(decoder.chunk, decoder.chunk if whole else SMALLEST)


class Reader(Protocol):
    """Whoever reads a prompt."""

    turn: int  # when it read last: numbers that grow

    @property
    def left(self) -> int:
        """Tokens that it has not read."""

    def part(self, share: int) -> int:
        """How many it reads next, if about `share` are its share."""


SomeReader = TypeVar("SomeReader", bound=Reader)


def share_out(readers: Sequence[SomeReader], bound: int, smallest: int) -> dict[SomeReader, int]:
    """Who reads how many tokens in this step: about `bound` together, about `smallest` each at least. Who has waited
    longest comes first; what a short prompt does not need goes to the longer ones."""
    served = sorted(readers, key=lambda reader: reader.turn)[: max(1, bound // smallest)]
    parts, left = dict.fromkeys(served, 0), bound
    for i, reader in enumerate(sorted(served, key=lambda reader: reader.left)):
        parts[reader] = reader.part(max(0, left) // (len(served) - i))
        left -= parts[reader]
    return parts
