"""N-gram look-up: what followed the last tokens when they came before, in the prompt or in the answer.

It needs no model. It pays where an answer repeats its prompt: code that is edited, texts that are quoted.
"""

from __future__ import annotations

from collections.abc import Sequence

from billfish.llm.drafting.drafter import Drafter

LONGEST, SHORTEST = 4, 2  # tokens that have to be the same


class NgramDrafter(Drafter):
    """Remembers, for every few tokens in a row, where they came last."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}  # behind the last occurrence of some tokens

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        self._learn(sequence)
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._places.get(tuple(sequence[-length:])) if len(sequence) > length else None
            if place is not None:
                return list(sequence[place : place + most])
        return []

    def _learn(self, sequence: Sequence[int]) -> None:
        """All places but the last one, which nothing follows yet."""
        if list(sequence[: len(self._known)]) != self._known:
            self._known, self._places = [], {}
        for end in range(max(len(self._known), SHORTEST), len(sequence)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._places[tuple(sequence[end - length : end])] = end
        self._known = list(sequence[:-1])
