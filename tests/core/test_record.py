"""Records: what they share with frozen dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field
from functools import cached_property

import pytest

from billfish.core.record import record


@record(frozen=True)
class Point:
    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)

    @cached_property
    def sum(self) -> int:
        return self.x + self.y


@record(frozen=True)
class Named(Point):
    name: str = "p"

    def __repr__(self) -> str:
        return f"<{self.name}>"


@record(frozen=True, eq=False)
class Alone:
    x: int


def test_fields_are_positional_or_named_and_have_defaults():
    assert (Point(1).x, Point(1).y, Point(1, y=3).y, Point(x=1, names=["a"]).names) == (1, 2, 3, ["a"])
    assert Point(1).names is not Point(1).names
    assert vars(Named(1, 5, name="q")) == {"x": 1, "y": 5, "names": [], "name": "q"}


@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1, 2, [], 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((), {"y": 1, "z": 1})]
)
def test_wrong_arguments_are_refused(values, named):
    with pytest.raises(TypeError, match=r"Point\(x, y, names\)"):
        Point(*values, **named)


def test_equal_and_hashed_by_class_and_fields():
    seen = Point(1, 2)
    assert seen.sum == 3  # which stays in its __dict__, and does not count
    assert seen == Point(1) != Point(2)
    assert Point(1) != Named(1)
    one, same, other = (dataclasses.replace(Named(1), names=(), name=name) for name in "aab")
    assert (one, hash(one)) == (same, hash(same))
    assert len({one, same, other}) == 2
    assert Alone(1) != Alone(1)
    assert len({Alone(1), Alone(1)}) == 2


def test_frozen():
    point = Point(1)
    with pytest.raises(FrozenInstanceError, match="'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="'x'"):
        del point.x
    assert point.x == 1


def test_dataclass_functions_copies_and_pickles():
    named = Named(1, names=["a"])
    assert [each.name for each in dataclasses.fields(Named)] == ["x", "y", "names", "name"]
    assert dataclasses.replace(named, x=3) == Named(3, names=["a"])
    assert dataclasses.asdict(Point(1)) == {"x": 1, "y": 2, "names": []}
    assert pickle.loads(pickle.dumps(named)) == copy.deepcopy(named) == named
    assert (repr(named), repr(Point(1))) == ("<p>", "Point(x=1, y=2, names=[])")
