"""No circle of files; imports inside functions count. import-linter has the floors, in `make lint`."""

from __future__ import annotations

import graphlib
from pathlib import Path

import grimp
import pytest

import billfish

ROOMS = sorted(path.parent.name for path in Path(billfish.__file__).parent.glob("*/__init__.py"))


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("billfish", cache_dir=None)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_circle_of_files(graph, room):
    files = [name for name in graph.modules if f"{name}.".startswith(f"billfish.{room}.")]
    graphlib.TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in files}).prepare()
