"""What was written, and how two checkpoints differ: fields for programs, and text that fits 80 columns for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from billfish.tables import shortened, table

WIDTH = 80


class Remark(NamedTuple):
    """A tensor or a file, and why it is refused, left as it is or left out: what the user is told."""

    name: str
    reason: str


def names_by_reason(remarks: Iterable[Remark]) -> dict[str, list[str]]:
    """The names that have the same reason."""
    names: dict[str, list[str]] = {}
    for remark in remarks:
        names.setdefault(remark.reason, []).append(remark.name)
    return names


def some_of(names: Sequence[str], limit: int) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def by_reason(remarks: Iterable[Remark], limit: int = 5) -> list[str]:
    """One line for each reason, with the names of the first tensors and the number of the others."""
    return [f"{some_of(names, limit)}: {reason}" for reason, names in names_by_reason(remarks).items()]


# ---- convert, quantize, save --------------------------------------------------------------------------------------


class Written(NamedTuple):
    """One tensor of an output."""

    name: str
    before: str  # its format or type in the source, such as "q4_0" or "bf16"
    after: str  # and in the output
    weights: int
    bytes_before: int
    bytes_after: int
    quantized: bool  # whether its values were rounded anew


@dataclass(frozen=True)
class ConversionReport:
    """What `convert`, `quantize_checkpoint` and `save` wrote; printed, it is a summary."""

    path: Path  # of the output
    layout: str  # as `to` calls it
    tensors: tuple[Written, ...]
    left: Mapping[str, str]  # tensors that quantize_checkpoint left as they were: name -> why
    notes: tuple[Remark, ...]  # what else became of a tensor or a file, such as "left out: ..."
    nbytes: int  # of all files of the output, headers and tokenizer included

    @property
    def quantized(self) -> tuple[str, ...]:
        """The tensors whose values were rounded anew."""
        return tuple(tensor.name for tensor in self.tensors if tensor.quantized)

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors in the output."""
        return sum(tensor.bytes_after for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> tuple[float, float]:
        """Bits for each number of all tensors, in the source and in the output."""
        weights = max(1, sum(tensor.weights for tensor in self.tensors))
        return 8 * self.bytes_before / weights, 8 * self.bytes_after / weights

    def __str__(self) -> str:
        before, after = self.bits_per_weight
        sizes = f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        head = f"{counted(self.tensors)}, {sizes}, {before:.2f} -> {after:.2f} bits per weight"
        lines = [f"{shortened(self.path.name, WIDTH - len(head) - 2)}: {head}", *self._kinds()]
        if self.left:
            lines += [
                f"left as they were: {counted(self.left)}",
                *_reasons(Remark(*item) for item in self.left.items()),
            ]
        if self.notes:
            lines += ["remarks:", *_reasons(self.notes)]
        return "\n".join(lines)

    def _kinds(self) -> list[str]:
        """A line for each pair of formats, those that were quantized first."""
        kinds: dict[tuple[bool, str, str], list[Written]] = {}
        for tensor in self.tensors:
            kinds.setdefault((not tensor.quantized, tensor.before, tensor.after), []).append(tensor)
        rows = []
        for (kept, before, after), same in sorted(kinds.items()):
            verb = ("moved" if before != after else "copied") if kept else "quantized"
            kind = before if before == after else f"{before} -> {after}"
            sizes = [sum(tensor.bytes_before for tensor in same), sum(tensor.bytes_after for tensor in same)]
            sized = size(sizes[0]) if sizes[0] == sizes[1] else f"{size(sizes[0])} -> {size(sizes[1])}"
            rows.append((f"  {verb}", kind, counted(same), sized))
        return table(rows)


def _reasons(remarks: Iterable[Remark]) -> list[str]:
    """For each reason how many names have it, and the first of them."""
    lines = []
    for reason, names in names_by_reason(remarks).items():
        lines += _wrapped(f"{len(names)}: {reason}", "  ")
        lines += _wrapped(some_of([shortened(name, WIDTH - 5) for name in names], 3), "    ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def counted(tensors: Iterable[object]) -> str:
    """ "1 tensor", "7 tensors"."""
    count = sum(1 for _ in tensors)
    return f"{count} tensor{'' if count == 1 else 's'}"


def size(nbytes: int) -> str:
    """Bytes with a unit: "512 B", "3.1 kB", "269.1 MB", "14.5 GB"."""
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= divisor:
            return f"{nbytes / divisor:.1f} {unit}"
    return f"{nbytes} B"


# ---- verify -------------------------------------------------------------------------------------------------------

Outcome = Literal["equal bits", "equal values", "different", "only in A", "only in B", "not compared"]


class Comparison(NamedTuple):
    """How one tensor of A differs from B's."""

    name: str
    outcome: Outcome
    verdict: str  # the outcome with its numbers
    relative_error: float = 0.0  # |A - B| / |A|, as norms
    largest_difference: float = 0.0

    @property
    def same(self) -> bool:
        """Whether all values are the same."""
        return self.outcome in ("equal bits", "equal values")


@dataclass(frozen=True)
class VerificationReport:
    """How two checkpoints compare, tensor by tensor; true if all values are the same."""

    a: Path
    b: Path
    comparisons: tuple[Comparison, ...]

    @property
    def same(self) -> bool:
        """Whether all tensors are in both, with the same values."""
        return all(comparison.same for comparison in self.comparisons)

    def __bool__(self) -> bool:
        return self.same

    def count(self, outcome: Outcome) -> int:
        """How many tensors came out so."""
        return sum(comparison.outcome == outcome for comparison in self.comparisons)

    @property
    def summary(self) -> str:
        """How many tensors came out how, and at last whether the two are the same."""
        worst = max(self.comparisons, key=lambda comparison: comparison.relative_error, default=None)
        rows = []
        for outcome in OUTCOMES:
            detail = ""
            if outcome == "different" and worst is not None and worst.relative_error:
                error = f"relative error up to {worst.relative_error:.3g}, "
                detail = error + shortened(worst.name, WIDTH - len(error) - 28)
            rows.append((f"  {outcome}", str(self.count(outcome)), detail))
        shown = [row for row in rows if row[0].strip() != "not compared" or row[1] != "0"]
        ending = "the same values" if self.same else "different"
        return "\n".join([counted(self.comparisons), *table(shown), ending])

    def text(self, width: int | None = None) -> str:
        """A line for each tensor, names shortened so that they fit `width` columns, and the summary."""
        lines = []
        for name, _, verdict, *_ in self.comparisons:
            room = len(name) if width is None else max(12, width - len(verdict) - 2)
            lines.append(f"{shortened(name, room)}: {verdict}")
        return "\n".join([*lines, "", self.summary])

    def __str__(self) -> str:
        return self.text()


OUTCOMES: tuple[Outcome, ...] = ("equal bits", "equal values", "different", "only in A", "only in B", "not compared")
