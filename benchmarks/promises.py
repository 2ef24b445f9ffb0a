"""The tables of docs/reliability.md, from the marks of tests: `@pytest.mark.promise(SECTION, PROMISE)`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.tables import table

TESTS = Path(__file__).resolve().parent.parent / "tests"
SECTIONS = ("inputs", "numerics", "chat templates", "server", "files", "threads")


def promised(path: Path) -> Iterator[tuple[str, str, str]]:
    """Section, promise and name of the tests of a file."""
    text = path.read_text()
    if "mark.promise(" not in text:
        return
    for node in ast.parse(text).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("mark.promise"):
                section, promise = map(ast.literal_eval, mark.args)
                yield section, promise, node.name


@functools.cache
def promises() -> dict[str, dict[str, list[str]]]:
    """By section, and by promise: the tests that hold it."""
    found: dict[str, dict[str, list[str]]] = {section: {} for section in SECTIONS}
    for path in sorted(TESTS.rglob("test_*.py")):
        for section, promise, name in promised(path):
            found[section].setdefault(promise, []).append(f"{path.relative_to(TESTS.parent).as_posix()}::{name}")
    return found


def promises_of(section: str) -> Callable[[], str]:
    """The table of a section."""

    def made() -> str:
        rows = [[promise, ", ".join(f"`{test}`" for test in tests)] for promise, tests in promises()[section].items()]
        return table([["promise", "test"], *rows])

    return made


PROMISES = {f"promises-{section.replace(' ', '-')}": promises_of(section) for section in SECTIONS}
