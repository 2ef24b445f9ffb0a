"""What proposes tokens, and how many of them are worth a try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from billfish.core.errors import DataError, bad_argument

if TYPE_CHECKING:
    from typing_extensions import Self

    from billfish.llm.kv_cache import Cache

MOST_DRAFTED = 7  # tokens of a step, beside the last token of the answer


class Drafter(ABC):
    """Proposes the tokens that come next in one sequence, which only grows.

    acceptance: of each kind of draft, how often its tokens are taken to be right until that was measured.
    most: tokens of a draft.
    watched: whether answers that are submitted before the model's first draft are watched. That takes a look-up at each
    token, so it is for drafters that cost next to nothing.
    """

    acceptance: tuple[float, ...] = (0.8,)
    most: int = MOST_DRAFTED
    watched: bool = False

    def kind(self, sequence: Sequence[int]) -> int | None:
        """The kind of draft that may follow `sequence`: drafts of one kind are right about equally often. None if there
        is nothing to go by."""
        return 0

    def follow(self, cache: Cache) -> None:  # noqa: B027  # most need the tokens alone
        """`cache` will hold the sequence. Called before it is fed."""

    @abstractmethod
    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `sequence`: fewer, or none, where there is nothing to go by."""

    @classmethod
    def draft_together(cls, asked: Sequence[tuple[Self, Sequence[int], int]]) -> list[list[int]]:
        """What `draft` gives of several drafters of this class, each with its sequence and its `most`."""
        return [drafter.draft(sequence, most) for drafter, sequence, most in asked]


def check_draft_length(call: str, length: int | None) -> int:
    """Tokens of a draft, at most. Raises unless a step has room for them."""
    if length is None:
        return MOST_DRAFTED
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MOST_DRAFTED:
        raise DataError(bad_argument(call, "draft_length", repr(length), f"1 to {MOST_DRAFTED} tokens"))
    return length


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


class StepSeconds:
    """How long decode steps take by their number of rows, as measured of late."""

    FORGETTING = 0.1  # of an average, at each new number
    ROW = 0.15  # what a further row is taken to cost, of a step with one row, until it was measured

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """A step with so many rows. Nothing makes it quicker than it can be, but other programs make it slower: what is
        quicker than the average counts more."""
        before = self._seconds.get(rows, seconds)
        weight = self.FORGETTING * (4 if seconds < before else 1)
        self._seconds[rows] = before + weight * (seconds - before)

    def of(self, rows: int) -> float:
        """Measured, or scaled from the nearest number of rows that was."""
        if not self._seconds:
            return self._guess(rows)
        nearest = min(self._seconds, key=lambda known: abs(known - rows))
        return self._seconds[nearest] * self._guess(rows) / self._guess(nearest)

    def _guess(self, rows: int) -> float:
        return 1 + self.ROW * (rows - 1)


class Controller:
    """Chooses how many tokens to draft: as many as give the most tokens a second, by what was measured.

    It knows how often drafted tokens of each kind were right of late, and how long a step takes by its number of rows.
    Where drafting does not pay it stops, and tries one token again now and then.

    seconds: what steps take; several sequences of one batch share it.
    watching: whether nothing is drafted until `watch` finds that it would pay. From a model's first draft on, steps
    without drafts may be slower, too (`Decoder.begin_drafting`), so texts without repetitions should not trigger it.
    """

    FORGETTING = 0.1  # of an average, at each new number
    RETRY = 24  # steps that might have had a draft before the next try
    # Watched tokens make a cumulative sum (CUSUM), which grows where more than a third of them could be drafted.
    RIGHT, OTHER, ENOUGH = 1.0, -0.5, 6.0

    def __init__(
        self,
        most: int,
        acceptance: Sequence[float] = Drafter.acceptance,
        seconds: StepSeconds | None = None,
        *,
        watching: bool = False,
    ) -> None:
        """acceptance: of each kind of draft, until it was measured."""
        self.most = most
        self.seconds = StepSeconds() if seconds is None else seconds
        self.watching = watching
        self._acceptance = list(acceptance)
        self._idle = 0
        self._watched = 0.0

    def length(self, kind: int | None = 0, others: int = 0) -> int:
        """How many tokens of such a draft to try in the next step, which has a row for each of `others` as well."""
        if kind is None or self.watching:
            return 0
        best = max(range(self.most + 1), key=lambda drafted: self._rate(drafted, self._acceptance[kind], others))
        return best or min(self.most, int(self._idle >= self.RETRY))

    def note(self, drafted: int, accepted: int, kind: int | None = 0) -> None:
        """In a step, the first `accepted` of so many drafted tokens were right."""
        if kind is None or self.watching:
            return
        self._idle = 0 if drafted else self._idle + 1
        for right in [True] * accepted + [False] * (accepted < drafted):
            self._acceptance[kind] += self.FORGETTING * (right - self._acceptance[kind])

    def watch(self, drafter: Drafter, sequence: Sequence[int], token: int) -> None:
        """`token` was chosen behind `sequence`. Until drafting begins, count whether the drafter proposes it."""
        if self.watching:
            right = drafter.draft(sequence, 1) == [token]
            self._watched = max(0.0, self._watched + (self.RIGHT if right else self.OTHER))
            self.watching = self._watched < self.ENOUGH

    def _rate(self, drafted: int, acceptance: float, others: int) -> float:
        """Tokens a second that a step with so many drafted tokens is expected to give."""
        tokens = others + sum(acceptance**i for i in range(drafted + 1))
        return tokens / self.seconds.of(others + 1 + drafted)
