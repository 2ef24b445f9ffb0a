"""What proposes tokens, and how many of them are worth a try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

MOST_DRAFTED = 7  # tokens of a step, beside the last token of the answer


class Drafter(ABC):
    """Proposes the tokens that come next in one sequence."""

    @abstractmethod
    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `sequence`: fewer, or none, where there is nothing to go by."""


class DraftCounts:
    """Of one answer: decode steps, tokens that were drafted, and those that were right."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = 0

    def note(self, drafted: int, accepted: int) -> None:
        """One decode step."""
        self.steps, self.drafted, self.accepted = self.steps + 1, self.drafted + drafted, self.accepted + accepted

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class Controller:
    """Chooses how many tokens to draft: as many as give the most tokens a second, by what was measured.

    It knows how often drafted tokens were right of late, and how long a step takes by its number of rows. Where
    drafting does not pay it stops, and tries one token again now and then.
    """

    OPTIMISM = 0.8  # the acceptance that it begins with
    FORGETTING = 0.1  # of an average, at each new number
    ROW = 0.15  # what a further row is taken to cost, of a step with one row, until it was measured
    RETRY = 24  # steps without a draft before the next try

    def __init__(self, most: int = MOST_DRAFTED) -> None:
        self.most = most
        self._acceptance = self.OPTIMISM
        self._seconds: dict[int, float] = {}
        self._idle = 0

    def length(self) -> int:
        """How many tokens to draft in the next step."""
        best = max(range(self.most + 1), key=self._rate)
        if best == 0 and self.most:
            self._idle += 1
            if self._idle >= self.RETRY:
                self._idle = 0
                return 1
        return best

    def note(self, drafted: int, accepted: int, seconds: float) -> None:
        """A step with so many drafted tokens, of which the first `accepted` were right."""
        rows = drafted + 1
        before = self._seconds.get(rows, seconds)
        self._seconds[rows] = before + self.FORGETTING * (seconds - before)
        for right in [True] * accepted + [False] * (accepted < drafted):
            self._acceptance += self.FORGETTING * (right - self._acceptance)

    def _rate(self, drafted: int) -> float:
        """Tokens a second that so many drafted tokens are expected to give."""
        tokens = sum(self._acceptance**i for i in range(drafted + 1))
        return tokens / self._step_seconds(drafted + 1)

    def _step_seconds(self, rows: int) -> float:
        """Measured, or scaled from the nearest number of rows that was."""
        if not self._seconds:
            return 1 + self.ROW * (rows - 1)
        nearest = min(self._seconds, key=lambda known: abs(known - rows))
        return self._seconds[nearest] * (1 + self.ROW * (rows - 1)) / (1 + self.ROW * (nearest - 1))
