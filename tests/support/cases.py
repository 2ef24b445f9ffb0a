"""Which cases of a large matrix `make test` runs. The others are marked `full`, for `make test-full`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def diagonal(step: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes. One of `step` is ordinary, the rest are `full`. Every value of every axis still
    occurs, beside others each time, if all axes but one have at least `step` values. A tuple in an axis counts as
    several arguments."""
    cases = []
    for indexed in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        values = [value for _, given in indexed for value in (given if isinstance(given, tuple) else (given,))]
        often = sum(index for index, _ in indexed) % step == 0
        names = "-".join(str(getattr(value, "name", getattr(value, "__name__", value))) for value in values)
        cases.append(pytest.param(*values, id=names, marks=() if often else pytest.mark.full))
    return cases


def sample(step: int, *axes: Iterable[Any]) -> list[Any]:
    """The ordinary cases of `diagonal` alone, where another test has all of them."""
    return [case for case in diagonal(step, *axes) if not case.marks]


def first(count: int, values: Sequence[Any]) -> list[Any]:
    """The first `count` values; the others are `full`. A tuple counts as several arguments."""
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=() if i < count else pytest.mark.full) for i, value in enumerate(given)]
