"""Packages that only parts of billfish need."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from billfish.core.errors import MissingPackage

ROOT = Path(__file__).parents[2]  # a checkout, or where packages are installed


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra.

    billfish is not on PyPI. Where it came from a wheel, pip finds it installed and gets only the extra's packages.
    """
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]' in a checkout of billfish"
    return f"pip install 'billfish[{extra}]'"


def require(module: str, extra: str) -> Any:
    """A module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module, extra, error) from None


def folder_of(package: str, extra: str) -> Path:
    """Where a package is, without importing it; the same error."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise missing(package, extra)
    return Path(spec.origin).parent


def missing(package: str, extra: str, error: ImportError | None = None) -> MissingPackage:
    """What to raise where a package is not there, or is there and cannot be imported."""
    why = f"cannot be imported ({error})" if error is not None and error.name != package else "is not installed"
    return MissingPackage(f"{package} {why}. Run: {how_to_install(extra)}")
