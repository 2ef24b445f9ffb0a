"""What was written, and how two checkpoints differ: fields for programs, and text that fits 80 columns for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from billfish.core.errors import printable
from billfish.core.tables import shortened, table

WIDTH = 80
NAME_WIDTH = 40  # a name that would be cut to less gets a line of its own


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
    return ", ".join(map(printable, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def by_reason(remarks: Iterable[Remark], limit: int = 5) -> list[str]:
    """One line for each reason, with the names of the first tensors and the number of the others."""
    return [f"{some_of(names, limit)}: {reason}" for reason, names in names_by_reason(remarks).items()]


# ---- convert, quantize, save --------------------------------------------------------------------------------------


# What became of a tensor: rounded anew; multiplied with a rotation; equal values in another format, as numbers, in
# another type; equal bits.
Done = Literal["quantized", "rotated", "moved", "decoded", "cast", "copied"]


class Written(NamedTuple):
    """One tensor of an output."""

    name: str
    before: str  # its format or type in the source, such as "q4_0" or "bf16"
    after: str  # and in the output
    weights: int
    bytes_before: int
    bytes_after: int
    done: Done


@dataclass(frozen=True)
class ConversionReport:
    """What `convert`, `quantize_checkpoint`, `rotate_checkpoint` and `save` wrote. Printed, it is a summary.

    >>> report = bf.convert("model.gguf", "folder", "billfish", progress=False)
    >>> report.layout, len(report.tensors) == len(bf.open_checkpoint("folder"))
    ('billfish', True)
    """

    path: Path  # of the output
    layout: str  # as `to` calls it
    tensors: tuple[Written, ...]  # all that were written, and what was done to each
    left: Mapping[str, str]  # tensors that quantize_checkpoint left as they were: name -> why
    notes: tuple[Remark, ...]  # what else became of a tensor or a file, such as "left out: ..."
    nbytes: int  # of all files of the output, headers and tokenizer included

    @property
    def quantized(self) -> tuple[str, ...]:
        """The tensors whose values were rounded anew."""
        return tuple(tensor.name for tensor in self.tensors if tensor.done == "quantized")

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
        name = shortened(self.path.name, WIDTH - len(head) - 2)
        lines = [*_wrapped(f"{name}: {head}", 0), *self._kinds()]
        if self.left:
            lines.append(f"left as they were: {counted(self.left)}")
            reasons = names_by_reason(Remark(*item) for item in self.left.items())
            for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
                lines += [*_wrapped(f"{len(names)}: {reason}", 2), *_wrapped(some_of(_fitting(names), 3), 6)]
        for reason, names in names_by_reason(self.notes).items():
            lines += _wrapped(f"{some_of(_fitting(names), 3)}: {reason}", 0)
        return "\n".join(lines)

    def _kinds(self) -> list[str]:
        """A line for each pair of formats, those that were quantized first."""
        order: tuple[Done, ...] = get_args(Done)
        kinds: dict[tuple[int, str, str], list[Written]] = {}
        for tensor in self.tensors:
            kinds.setdefault((order.index(tensor.done), tensor.before, tensor.after), []).append(tensor)
        rows = []
        for (done, before, after), same in sorted(kinds.items()):
            part = replace(self, tensors=tuple(same))
            sizes = _change(size(part.bytes_before), size(part.bytes_after))
            bits = f"{part.bits_per_weight[1]:.2f} bits"
            rows.append((f"  {order[done]}", _change(before, after), str(len(same)), sizes, bits))
        return table(rows, WIDTH)


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _fitting(names: Sequence[str]) -> list[str]:
    return [shortened(name, WIDTH - 10) for name in names]


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of at most WIDTH columns, the first of them less indented than the others."""
    first, others = " " * indent, " " * (indent + 2)
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


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
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class Comparison(NamedTuple):
    """How one tensor of A differs from B's."""

    name: str
    outcome: Outcome
    verdict: str  # the outcome with its numbers
    relative_error: float = 0.0  # |A - B| / |A|, as norms; infinite where one is NaN or infinite and the other is not
    largest_difference: float = 0.0

    @property
    def same(self) -> bool:
        """Whether all values are the same."""
        return self.outcome in ("equal bits", "equal values")


@dataclass(frozen=True)
class VerificationReport:
    """How two checkpoints compare, tensor by tensor. It is true if all values are the same.

    >>> report = bf.verify("model.gguf", "model.gguf", progress=False)
    >>> bool(report), len(report.comparisons)
    (True, 21)
    """

    a: Path  # of the first checkpoint
    b: Path  # of the second
    comparisons: tuple[Comparison, ...]  # one for each tensor of either

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
        rows = [(f"  {outcome}", str(self.count(outcome)), "") for outcome in OUTCOMES]
        if not self.count("not compared"):
            rows.pop()
        worst = max(self.comparisons, key=lambda comparison: comparison.relative_error, default=None)
        if worst is not None and worst.relative_error:
            at = OUTCOMES.index("different")
            rows[at] = (*rows[at][:2], f"relative error up to {worst.relative_error:.3g},")
            rows.insert(at + 1, ("", "", f"in {shortened(worst.name, WIDTH - 28)}"))
        ending = "the same values" if self.same else "different"
        return "\n".join([f"{counted(self.comparisons)}:", *table(rows), ending])

    def text(self, width: int | None = None) -> str:
        """Each tensor with its verdict, and the summary. Lines fit `width` columns; names are shortened for that."""
        lines = []
        for raw, _, verdict, *_ in self.comparisons:
            name = printable(raw)
            room = 0 if width is None else width - len(verdict) - 2
            if width is None or len(name) <= room:
                lines.append(f"{name}: {verdict}")
            elif room >= NAME_WIDTH:
                lines.append(f"{shortened(name, room)}: {verdict}")
            else:
                lines += [f"{shortened(name, width - 1)}:", f"  {shortened(verdict, width - 2)}"]
        return "\n".join([*lines, "", self.summary])

    def __str__(self) -> str:
        return self.text()
