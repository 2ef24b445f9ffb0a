"""A command and the function behind it have the same defaults."""

from __future__ import annotations

import inspect

import pytest

import billfish as bf
from billfish.cli.main import parser_of
from billfish.serving.engine.engine import Engine

FUNCTIONS = {
    "run": bf.llm.Model.stream,
    "eval": bf.llm.evaluate,
    "convert": bf.convert,
    "quantize": bf.quantize_checkpoint,
    "calibrate": bf.calibrate_checkpoint,
    "rotate": bf.rotate_checkpoint,
    "tune": bf.tune_checkpoint,
    "serve": Engine,
}
EMPTY = (None, [], ())


@pytest.mark.parametrize("command", FUNCTIONS)
def test_defaults_are_the_same(command):
    options = {action.dest: action.default for action in parser_of(command)._actions}
    parameters = inspect.signature(FUNCTIONS[command]).parameters.values()
    shared = {one.name: one.default for one in parameters if one.name in options and one.default is not one.empty}
    assert len(shared) >= 2
    given = {name: options[name] for name in shared}
    differing = [name for name in shared if given[name] != shared[name] and given[name] not in EMPTY]
    assert differing == []


def test_generate_and_stream_have_the_same_arguments():
    assert inspect.signature(bf.llm.Model.generate).parameters == inspect.signature(bf.llm.Model.stream).parameters
