"""What pages name is there: the targets of links, files, formats, kinds of faults."""

from __future__ import annotations

import re

import pytest
from pages import PAGES, ROOT, page

import billfish as bf
from billfish.backends import emulator
from billfish.backends.emulator import lint


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#]+)\)", page(name)):
        assert target.startswith("https://") or (ROOT / name).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("name", PAGES)
def test_files_are_where_the_page_says(name):
    for path in re.findall(r"`((?:tests|benchmarks|examples)/[\w/.]+)`", page(name)):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", PAGES)
def test_tests_have_the_names_that_the_page_says(name):
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page(name)):
        assert f"def {test}(" in page(path), f"{path}::{test}"


def test_every_promise_has_a_test():
    text = page("docs/reliability.md").split("## What is not promised")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and line != "| promise | test |"]
    assert len(rows) > 30
    for row in rows:
        tests = row.strip("| ").split(" | ")[1].split(", ")
        for path, test in (name.strip("`").split("::") for name in tests):
            assert f"def {test}(" in page(path), f"{path}::{test}"


def test_the_formats_in_the_readme_exist():
    (comment,) = re.findall(r"# or (.*), \.\.\.$", page("README.md"), re.MULTILINE)
    for name in comment.split(", "):
        assert name in bf.FORMATS


def test_every_kind_of_fault_and_every_rule_has_its_row():
    rows = re.findall(r"^\| `([\w-]+)` \|", page("docs/emulator.md"), re.MULTILINE)
    assert set(rows) == set(emulator.KINDS) - {"none"} | set(lint.RULES)
