"""Where tests are: the places that conftest.py marks exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import MARKS

HERE = Path(__file__).parent


@pytest.mark.parametrize("place", MARKS)
def test_a_place_with_a_mark_exists(place):
    assert (HERE / place).exists()
