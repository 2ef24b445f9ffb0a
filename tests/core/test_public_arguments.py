"""Every argument of a public function is used: it is read in the function's body."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator

import pytest

import billfish as bf

CLASSES = (
    bf.llm.Model,
    bf.llm.Cache,
    bf.llm.Generation,
    bf.Checkpoint,
    bf.QuantizedTensor,
    bf.QuantizedExperts,
    bf.PackedWeights,
    bf.PackedExperts,
    bf.Statistics,
)


def unused(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters that the body never reads. A body without statements, or that only raises or returns a constant,
    is an interface."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not body or all(isinstance(node, (ast.Raise, ast.Pass)) for node in body):
        return set()
    if isinstance(body[0], ast.Return) and isinstance(body[0].value, ast.Constant):
        return set()
    a = function.args
    parameters = {each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if each}
    read = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return {name for name in parameters - read - {"self", "cls"} if not name.startswith("_")}


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Those of billfish.__all__ and billfish.llm.__all__, and the public methods of public classes."""
    for module in (bf, bf.llm):
        for name in module.__all__:
            if inspect.isfunction(found := getattr(module, name)):
                yield f"{module.__name__}.{name}", inspect.unwrap(found)
    for cls in CLASSES:
        for name, found in vars(cls).items():
            found = getattr(found, "__func__", found)
            written = inspect.isfunction(found) and found.__code__.co_filename != "<string>"  # a dataclass makes some
            if written and (not name.startswith("_") or name == "__init__"):
                yield f"{cls.__name__}.{name}", inspect.unwrap(found)


@pytest.mark.parametrize("function", [pytest.param(function, id=name) for name, function in functions()])
def test_every_argument_is_used(function):
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    assert unused(node) == set()


def test_an_argument_that_is_not_used_is_found():
    [node] = ast.parse("def f(a, *, b=1, **c):\n    'Doc.'\n    return a + g(**c)").body
    assert isinstance(node, ast.FunctionDef)
    assert unused(node) == {"b"}
