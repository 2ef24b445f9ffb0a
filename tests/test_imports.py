"""No circle of files (imports inside functions count), no name of a file twice. import-linter has the floors, in
`make lint`.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from pathlib import Path

import grimp
import pytest

import billfish

FOLDER = Path(billfish.__file__).parent
MIRRORED = ("backends", "nn")  # rooms in them have the same parts with the same names
ROOMS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("billfish", cache_dir=None)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_circle_of_files(graph, room):
    files = [name for name in graph.modules if f"{name}.".startswith(f"billfish.{room}.")]
    graphlib.TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in files}).prepare()


def test_outside_of_mirrored_rooms_a_files_name_tells_it_apart():
    files = [path for path in FOLDER.rglob("*.py") if path.name != "__init__.py"]
    count = Counter(path.name for path in files)
    twice = [str(path.relative_to(FOLDER)) for path in files if count[path.name] > 1]
    assert [path for path in twice if not path.startswith(MIRRORED)] == []
