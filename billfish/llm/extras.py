"""Packages that only this part of billfish needs."""

from __future__ import annotations

import importlib
from typing import Any

from billfish.errors import BackendUnavailable


def require(module: str) -> Any:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(f"[llm] {error}; pip install billfish[llm]") from None
