"""No circle of files (imports inside functions count, and those by a module's name in a string), no name of a file
twice. import-linter has the floors, in `make lint`.
"""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Set
from pathlib import Path

import grimp
import pytest

import billfish

FOLDER = Path(billfish.__file__).parent
MIRRORED = ("backends", "nn")  # rooms in them have the same parts with the same names
# Imports by name that close a circle, each with its reason. A class or function is asked for when it is needed, and its
# file needs this one.
LATE = {
    ("billfish.nn.layer_base", "billfish.nn.torch.linear"): "the layers of a framework are subclasses of the base",
    ("billfish.nn.layer_base", "billfish.nn.mlx.linear"): "the same, for MLX",
    ("billfish.nn.layer_base", "billfish.nn.torch.modules"): "a kit makes layers, which are subclasses of the base",
    ("billfish.nn.layer_base", "billfish.nn.mlx.modules"): "the same, for MLX",
}
ROOMS = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("billfish", cache_dir=None)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_circle_of_files(graph, room):
    check_order(room, graph, set(LATE))


@pytest.mark.parametrize("late", LATE, ids=" ".join)
def test_a_late_import_closes_a_circle(graph, late):
    with pytest.raises(graphlib.CycleError):
        check_order("nn", graph, LATE.keys() - {late})


def check_order(room: str, graph: grimp.ImportGraph, left_out: Set[tuple[str, str]]) -> None:
    """Raises CycleError for files of a room that cannot be put in an order."""
    files = [name for name in graph.modules if f"{name}.".startswith(f"billfish.{room}.")]
    imported = {name: graph.find_modules_directly_imported_by(name) for name in files}
    named = {name: {other for other in named_in(name, graph) if (name, other) not in left_out} for name in files}
    graphlib.TopologicalSorter({name: imported[name] | named[name] for name in files}).prepare()


def named_in(module: str, graph: grimp.ImportGraph) -> set[str]:
    """Files whose modules' names are strings in a file, as import_module takes them."""
    path = file_of(module)
    nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in strings & graph.modules if text != module and file_of(text).name != "__init__.py"}


def file_of(module: str) -> Path:
    place = FOLDER.parent.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def test_outside_of_mirrored_rooms_a_files_name_tells_it_apart():
    files = [path for path in FOLDER.rglob("*.py") if path.name != "__init__.py"]
    count = Counter(path.name for path in files)
    twice = [str(path.relative_to(FOLDER)) for path in files if count[path.name] > 1]
    assert [path for path in twice if not path.startswith(MIRRORED)] == []
