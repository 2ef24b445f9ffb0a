"""Packages that only parts of billfish need."""

from __future__ import annotations

import importlib
from typing import Any

from billfish.errors import BackendUnavailable, complaint


def require(module: str, extra: str) -> Any:
    """A module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        takes = f"an installed one: pip install 'billfish[{extra}]'"
        raise BackendUnavailable(complaint("import", f"the package {module}", f"none ({error})", takes)) from None
