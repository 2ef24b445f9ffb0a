"""What takes long to make: kept in build/tests from run to run, and made once for all processes of a run."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "tests"


def kept(name: str, made_of: object, make: Callable[[Path], object]) -> Path:
    """A file that `make(path)` writes, unless it is there. `made_of` is all that it depends on, with a repr to tell."""
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]
    path = FOLDER / f"{digest}-{name}"
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits here
        if not path.exists():
            partial = path.with_name(f"partial-{path.name}")
            make(partial)
            partial.rename(path)
    return path
