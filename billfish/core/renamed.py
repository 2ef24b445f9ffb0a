"""Keywords that were renamed, and are still accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the function accepts `old` as a keyword for `new`. Its signature shows `new` alone."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                if new in kwargs:
                    raise TypeError(f"{function.__name__}: {old} is the older name of {new}. Pass {new} alone.")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
