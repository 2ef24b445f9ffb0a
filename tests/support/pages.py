"""The pages, and the records that they are compared with. `make lint` runs this folder: it checks documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PATHS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path.relative_to(ROOT).as_posix() for path in PATHS]


def page(name: str) -> str:
    """The text of "README.md" or of a page such as "docs/cpu.md"."""
    return (ROOT / name).read_text()


def recorded(name: str) -> Any:
    """What benchmarks/results/`name` holds."""
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())
