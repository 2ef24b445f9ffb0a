"""Packages that only parts of billfish need."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from billfish.core.errors import BackendUnavailable, complaint


def require(module: str, extra: str) -> Any:
    """A module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, extra, f" ({error})") from None


def folder_of(package: str, extra: str) -> Path:
    """Where a package is, without importing it; the same error."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise _missing(package, extra)
    return Path(spec.origin).parent


def _missing(module: str, extra: str, why: str = "") -> BackendUnavailable:
    takes = f"an installed one: pip install 'billfish[{extra}]'"
    return BackendUnavailable(complaint("import", f"the package {module}", f"none{why}", takes))
