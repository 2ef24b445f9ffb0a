"""How a backend is chosen, and how one says no."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import gaussian

import billfish as bf
from billfish.backends import BACKENDS, BackendEntry, Problem, choose
from billfish.backends.reference import ReferenceBackend

PROBLEM = Problem("matmul", bf.FORMATS["q4_0"], 32, 1, 4, 64, np.dtype(np.float32))


class Picky(ReferenceBackend):
    """Runs only large problems; answers with ones, so that one sees who ran."""

    name = "picky"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        return problem.m >= 8, f"needs M >= 8, M is {problem.m}"

    def multiply(self, x: Any, weights: Any, bias: Any, activations: str = "exact") -> Any:
        return np.ones((len(x), len(weights.values)), x.dtype)


@pytest.fixture
def picky():
    """One more backend is one line: where its class is, how good it is, and what it is for."""
    BACKENDS.register(BackendEntry("picky", f"{__name__}.Picky", 40, lambda problem: problem.operation == "matmul"))
    yield
    del BACKENDS["picky"]


def test_what_is_in_memory_runs_on_the_cpu_unless_told_otherwise():
    assert choose("test", PROBLEM).name == "cpu"
    assert choose("test", PROBLEM, "reference").name == "reference"
    assert BACKENDS["reference"].can_run(PROBLEM) == (True, "")


def test_the_first_backend_that_can_is_chosen(picky):
    q = bf.quantize(gaussian((4, 64)), "q4_0")
    assert (bf.quantized_linear(gaussian((8, 64)), q) == 1).all()
    assert (bf.quantized_linear(gaussian((7, 64)), q) != 1).all()


def test_a_backend_asked_for_by_name_runs_or_says_why_not(picky):
    q = bf.quantize(gaussian((4, 64)), "q4_0")
    assert (bf.quantized_linear(gaussian((8, 64)), q, backend="reference") != 1).all()
    with pytest.raises(bf.BackendUnavailable) as caught:
        bf.quantized_linear(gaussian((7, 64)), q, backend="picky")
    for fact in ("quantized_linear", "backend", "'picky'", "needs M >= 8, M is 7"):
        assert fact in str(caught.value)


def test_a_backend_that_is_assigned_runs_by_its_name():
    q = bf.quantize(gaussian((4, 64)), "q4_0")
    bf.BACKENDS["mine"] = Picky()
    try:
        assert "mine" in bf.BACKENDS
        assert (bf.quantized_linear(gaussian((8, 64)), q, backend="mine") == 1).all()
        assert (bf.quantized_linear(gaussian((8, 64)), q) != 1).all()
    finally:
        del bf.BACKENDS["mine"]
    assert "mine" not in bf.BACKENDS
    with pytest.raises(bf.DTypeError, match=r"'mine'.*Backend object"):
        bf.BACKENDS["mine"] = Picky  # type: ignore[assignment]
    assert "mine" not in bf.BACKENDS
