"""What all pictures share: matplotlib's Figure, the colour of ink, a caption, and the bytes of a PNG."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from billfish.core import extras

INK = "#222222"
CHARACTERS = 13  # of a caption, for each inch of a picture's width


def require() -> Any:
    """matplotlib's Figure, which needs no display."""
    return extras.require("matplotlib.figure", "bench").Figure


def add_caption(figure: Any, text: str) -> None:
    """Above all panels, in as many lines as the picture's width asks for."""
    width = int(figure.get_figwidth() * CHARACTERS)
    figure.suptitle(textwrap.fill(text, width, break_on_hyphens=False), fontsize=8, color=INK)


def png(figure: Any, dpi: int = 130) -> bytes:
    """The picture as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
