"""Where tests are: in the folders of the package, and the places that conftest.py marks exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import billfish
from tests.conftest import MARKS

HERE, PACKAGE = Path(__file__).parent, Path(billfish.__file__).parent
FOLDERS = sorted({path.parent.relative_to(HERE) for path in HERE.rglob("test_*.py")} - {Path(".")})
# Of what is beside the package.
BESIDE = {"attack", "benchmarks", "docs", "tools"}


@pytest.mark.parametrize("place", MARKS)
def test_a_place_with_a_mark_exists(place):
    assert (HERE / place).exists()


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.parts[0] not in BESIDE], ids=str)
def test_a_folder_of_tests_is_one_of_the_package(folder):
    assert (PACKAGE / folder).is_dir()
