"""N-gram look-up: what followed the last tokens when they came before, in the prompt or in the answer.

It needs no model. It pays where an answer repeats its prompt: code that is edited, texts that are quoted.
"""

from __future__ import annotations

from collections.abc import Sequence

from billfish.llm.drafting.drafter import Drafter

LONGEST, SHORTEST = 4, 2  # tokens in a row that are looked up
ALIKE = (3, 4, 8, 16)  # tokens that are the same, for a draft to be of the next kind


class NgramDrafter(Drafter):
    """Remembers, for every few tokens in a row, where they came last. The more tokens before that place are the same,
    the more of those behind it are."""

    acceptance = (0.3, 0.5, 0.65, 0.8, 0.9)
    watched = True

    def __init__(self) -> None:
        self._known = 0  # tokens of the sequence that were learned
        self._places: dict[tuple[int, ...], int] = {}  # behind the last occurrence of some tokens

    def kind(self, sequence: Sequence[int]) -> int | None:
        place = self._place(sequence)
        if place is None:
            return None
        alike, most = SHORTEST, min(place, ALIKE[-1])
        while alike < most and sequence[place - 1 - alike] == sequence[-1 - alike]:
            alike += 1
        return sum(alike >= least for least in ALIKE)

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        place = self._place(sequence)
        if place is None:
            return []
        drafted = list(sequence[place : place + most])
        while len(drafted) < most:  # the sequence repeats itself: so may the draft
            drafted.append(drafted[len(drafted) - (len(sequence) - place)])
        return drafted

    def _place(self, sequence: Sequence[int]) -> int | None:
        """Behind the last occurrence of as many of the last tokens as are looked up."""
        self._learn(sequence)
        for length in range(min(LONGEST, len(sequence) - 1), SHORTEST - 1, -1):
            place = self._places.get(tuple(sequence[-length:]))
            if place is not None:
                return place
        return None

    def _learn(self, sequence: Sequence[int]) -> None:
        """All places but the last one, which nothing follows yet."""
        for end in range(max(self._known + 1, SHORTEST), len(sequence)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._places[tuple(sequence[end - length : end])] = end
        self._known = max(self._known, len(sequence) - 1)
