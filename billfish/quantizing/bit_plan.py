"""Bits where they matter: a format for each matrix, so that the average is kept and the damage is least.

Each matrix begins with the format that takes the fewest bits. The upgrade that spares the most damage for each bit that
it costs comes next, until no bits are left. Of a matrix only those formats count that no mixture of two others beats:
the lower edge of its points (bits, damage), along which gains for a bit only fall. So the order of all upgrades is
the order of their gains.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from billfish.checkpoints.names.expert_stacks import stacks_in
from billfish.core.errors import DataError, bad_argument, failure
from billfish.core.files import read_text, write_atomically

CALL = "quantize"


class FormatChoice(NamedTuple):
    """A format that a matrix may have, with its bits for all weights and its damage in nats."""

    format: str  # with a group size where it is not the format's own: "fp4:64"
    bits: float
    damage: float


class PlannedMatrix(NamedTuple):
    """A matrix, or a stack of experts, by the name that its checkpoint has for it, or for the first of the experts."""

    name: str
    layer: int
    kind: str  # such as "ffn_down"
    weights: int


@dataclass(frozen=True)
class BitPlan:
    """A format for most matrices, and rules for others as `--keep` takes them, the first that finds a name counts."""

    format: str
    keep: dict[str, str]  # regular expression: format
    remarks: tuple[str, ...] = ()  # for people

    def text(self) -> str:
        """What a file of the plan says. People may edit it."""
        lines = [f"# {remark}" for remark in self.remarks]
        lines += [f"{pattern}={format}" for pattern, format in self.keep.items()]
        return "\n".join([*lines, f"={self.format}", ""])

    def save(self, path: Path) -> None:
        write_atomically(path, self.text().encode())

    @classmethod
    def load(cls, path: Path) -> BitPlan:
        """A plan that :meth:`save` wrote, or a person did: REGEX=FORMAT in each line, at last =FORMAT for the rest."""
        rules = [line.strip() for line in read_text(CALL, "--plan", path).splitlines()]
        rules = [line for line in rules if line and not line.startswith("#")]
        keep: dict[str, str] = {}
        for rule in rules:
            pattern, equals, format = rule.rpartition("=")
            if not equals or not format or pattern in keep:
                fix = "Write REGEX=FORMAT in each line, each REGEX once, and =FORMAT for all other matrices."
                raise DataError(failure(CALL, f"--plan has the line {rule!r}", fix))
            keep[pattern] = format
        if "" not in keep:
            raise DataError(failure(CALL, f"--plan {path.name} has no line =FORMAT, for all other matrices"))
        return cls(keep.pop(""), keep)


def choose_formats(
    choices: Mapping[PlannedMatrix, Sequence[FormatChoice]], bits: float
) -> dict[PlannedMatrix, FormatChoice]:
    """The least damage with at most `bits` for a weight on average. Raises if even the smallest formats take more."""
    edges = {matrix: lower_edge(offered) for matrix, offered in choices.items()}
    chosen = {matrix: edge[0] for matrix, edge in edges.items()}
    left = bits * sum(matrix.weights for matrix in chosen) - sum(choice.bits for choice in chosen.values())
    if left < 0:
        least = bits - left / sum(matrix.weights for matrix in chosen)
        raise DataError(bad_argument(CALL, "--bits", bits, f"at least {least:.3f}, the bits of the smallest formats"))
    upgrades = [
        ((before.damage - after.damage) / (after.bits - before.bits), matrix, before, after)
        for matrix, edge in edges.items()
        for before, after in itertools.pairwise(edge)
    ]
    for _, matrix, before, after in sorted(upgrades, key=lambda upgrade: (-upgrade[0], upgrade[1])):
        cost = after.bits - before.bits
        if chosen[matrix] is before and cost <= left:
            chosen[matrix] = after
            left -= cost
    return chosen


def lower_edge(choices: Iterable[FormatChoice]) -> list[FormatChoice]:
    """The choices that no mixture of two others beats, by rising bits and falling damage."""
    edge: list[FormatChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bits, choice.damage, choice.format)):
        if edge and choice.damage >= edge[-1].damage:
            continue
        while len(edge) > 1 and _gain(edge[-2], edge[-1]) <= _gain(edge[-2], choice):
            edge.pop()
        edge.append(choice)
    return edge


def _gain(before: FormatChoice, after: FormatChoice) -> float:
    return (before.damage - after.damage) / (after.bits - before.bits)


def plan_of(chosen: Mapping[PlannedMatrix, FormatChoice], remarks: Sequence[str] = ()) -> BitPlan:
    """The plan in as few rules as there are pairs of kind and format, without those of the commonest format."""
    weights = Counter[str]()
    for matrix, choice in chosen.items():
        weights[choice.format] += matrix.weights
    [(common, _)] = weights.most_common(1)
    groups: dict[tuple[str, str], list[PlannedMatrix]] = {}
    for matrix, choice in chosen.items():
        if choice.format != common:
            groups.setdefault((matrix.kind, choice.format), []).append(matrix)
    keep = {_pattern(matrices): format for (_, format), matrices in groups.items()}
    return BitPlan(common, keep, tuple(remarks))


def _pattern(matrices: Sequence[PlannedMatrix]) -> str:
    """A regular expression for matrices whose names differ in the number of their layer only, of experts for all."""
    before, after = re.split(rf"(?<=\.){matrices[0].layer}(?=\.)", matrices[0].name, maxsplit=1)
    layers = "|".join(str(matrix.layer) for matrix in matrices)
    expert = stacks_in(matrices[0].name)[1]
    end = re.escape(after).replace(rf"\.experts\.{expert}\.", r"\.experts\.\d+\.")
    return f"^{re.escape(before)}({layers}){end}$"
