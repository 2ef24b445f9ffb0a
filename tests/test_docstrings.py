"""Every public function and class has an example in its docstring, and the example runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llm_models import Small, write_model

import billfish as bf

MODULES = ("billfish", "billfish.llm", "billfish.statistics", "billfish.checkpoints")
FRAMEWORKS = ("nn.torch", "nn.mlx", "nn.transformers", "nn.peft", "nn.parallel")
CLASSES = ("billfish.llm.Model",)  # whose public methods have examples of their own
# Classes without an example of their own, and the function whose example makes one.
ELSEWHERE = {
    "billfish.llm.Cache": "billfish.llm.Model.cache",
    "billfish.nn.parallel.ColumnParallelLinear": "billfish.nn.parallel.parallel_layer",
    "billfish.nn.parallel.RowParallelLinear": "billfish.nn.parallel.parallel_layer",
    "billfish.nn.parallel.ParallelExperts": "billfish.nn.transformers.load_model",
    "billfish.nn.parallel.Share": "billfish.nn.parallel.llama_plan",
}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def public(path: str) -> Iterator[Any]:
    """(Module, name) of functions and classes, as parameters. Exceptions need no example."""
    module = importlib.import_module(path)
    for name in module.__all__:
        if f"{path}.{name}" in ELSEWHERE:
            continue
        if path != "billfish" or not bf._ELSEWHERE.get(name, "").startswith("billfish.nn"):
            value = getattr(module, name)
            if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception)):
                yield pytest.param(path, name, id=f"{path}.{name}")
            if f"{path}.{name}" in CLASSES:
                methods = [own for own, _ in inspect.getmembers(value, inspect.isfunction) if own[0] != "_"]
                yield from (pytest.param(path, f"{name}.{own}", id=f"{path}.{name}.{own}") for own in methods)
        else:  # not imported until the test runs
            yield pytest.param(path, name, id=f"{path}.{name}", marks=pytest.mark.torch)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("docstrings") / "model.gguf"
    write_model(file, Small())
    return file


@pytest.fixture
def folder(model_file, tmp_path, monkeypatch):
    """Where examples run: they find a model there, and may write files."""
    (tmp_path / "model.gguf").symlink_to(model_file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_examples(path: str, value: Any) -> int:
    """How many lines of examples ran. Their failures are printed."""
    names = {"bf": bf, "np": np}
    found = doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, path, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=FLAGS).run(found)
    assert failed == 0, f"the example of {path} prints something else"
    return tried


def check(module: str, name: str) -> None:
    value = operator.attrgetter(name)(importlib.import_module(module))
    assert run_examples(f"{module}.{name}", value) > 0, f"{module}.{name} has no example"


@pytest.mark.parametrize(("module", "name"), [each for path in MODULES for each in public(path)])
@pytest.mark.usefixtures("folder")
def test_an_example_runs(module, name):
    check(module, name)


@pytest.mark.torch
@pytest.mark.parametrize("module", FRAMEWORKS)
@pytest.mark.usefixtures("folder")
def test_the_examples_of_layers_run(module):
    for each in public(f"billfish.{module}"):
        check(*each.values)


def test_classes_without_an_example_are_still_there():
    for path in ELSEWHERE:
        module, _, name = path.rpartition(".")
        assert name in importlib.import_module(module).__all__


def test_an_example_that_prints_something_else_is_found():
    def wrong() -> None:
        """
        >>> 1 + 1
        3
        """

    with pytest.raises(AssertionError, match="wrong"):
        run_examples("wrong", wrong)


def test_no_public_name_hides_a_module():
    hidden = [name for name in bf.__all__ if name != "llm" and importlib.util.find_spec(f"billfish.{name}")]
    assert hidden == []
