"""What races and kills have in common: two sources, and a row of the attack's table."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint_folders import write_folder


@dataclass
class Rounds:
    """A row of the attack's table. accepted: outputs that are whole; refused: runs that say why they wrote none, or
    were ended by a signal."""

    generator: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    worst_seconds: float = 0.0
    worst_memory: int = 0  # not looked at
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def two_models() -> Iterator[tuple[Path, Path]]:
    """A folder with two models of the same names, sizes and shapes, and an empty folder."""
    with tempfile.TemporaryDirectory(prefix="billfish-attack-") as place:
        for seed, name in enumerate("ab"):
            write_folder(Path(place, "sources", name), "plain", seed=seed)
        Path(place, "work").mkdir()
        yield Path(place, "sources"), Path(place, "work")
