"""What all pictures share: matplotlib's Figure, colours, and a caption that says where the numbers come from."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from typing import Any

from billfish.core import extras

INK, FAINT = "#222222", "#BBBBBB"
CHARACTERS = 13  # of a caption, for each inch of a picture's width


def require() -> Any:
    """matplotlib's Figure, which needs no display."""
    return extras.require("matplotlib.figure", "bench").Figure


def caption(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """Machine, threads, date and versions, as far as the record has them.

    machine: "gpu", "cpu" or else "architecture"; what of it was used, "isa" or "arch"; "threads"; "date".
    """
    where = next((str(machine[key]) for key in ("gpu", "cpu", "architecture") if machine.get(key)), "")
    kind, threads = machine.get("isa") or machine.get("arch", ""), machine.get("threads")
    count = f"{threads} thread{'s' if threads != 1 else ''}" if threads else ""
    facts = (where, str(kind), count, str(machine.get("date", "")))
    used = (f"{name}\N{NO-BREAK SPACE}{version}" for name, version in versions.items())
    return " · ".join(filter(None, (", ".join(filter(None, facts)), ", ".join(used))))


def add_caption(figure: Any, text: str) -> None:
    """Above all panels, in as many lines as the picture's width asks for."""
    width = int(figure.get_figwidth() * CHARACTERS)
    figure.suptitle(textwrap.fill(text, width, break_on_hyphens=False), fontsize=8, color=INK)


def png(figure: Any, dpi: int = 130) -> bytes:
    """The picture as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
