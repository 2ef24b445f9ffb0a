"""The floating-point mode of a thread, on which no result may depend: ``torch.set_flush_denormal(True)`` changes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def with_known_floats(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator: inside the function this thread, and every thread that it starts, keeps subnormal numbers and rounds
    to nearest. Kernels of the CPU engine do so by themselves; this is for NumPy."""

    @wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        from billfish.backends.cpu import _cpu  # here, because backends need formats, which need this

        with _cpu.KnownFloats():
            return function(*args, **kwargs)

    return wrapped
