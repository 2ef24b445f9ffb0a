"""A drawing as SVG text, light and dark by the reader's own setting, the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

# Name: light, dark. Hues are Okabe and Ito's, which the colour-blind can tell apart, lighter in the dark.
COLOURS = {
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#161b22"),
    "line": ("#c4ccd5", "#3d444d"),
    "ink": ("#1f2328", "#e6edf3"),
    "dim": ("#59636e", "#9aa4af"),
    "blue": ("#0072b2", "#58a6e0"),
    "orange": ("#d55e00", "#f08a3c"),
    "green": ("#00865f", "#3fb68b"),
    "pink": ("#b5558b", "#e08fbf"),
    "yellow": ("#b98300", "#e6b030"),
    "sky": ("#3d9fd1", "#7cc4ee"),
    "grey": ("#7d8590", "#8b949e"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SMALLEST = 11  # px of text
ADVANCE, BOLD, MONO_ADVANCE = 0.57, 0.62, 0.62  # of the size, for a character on average, in wide fonts


class Label(NamedTuple):
    """Where a text is, for the test that none covers another: its box, from the estimated width."""

    text: str
    left: float
    top: float
    right: float
    bottom: float


def number(value: float) -> str:
    """As short as it goes, with hundredths of a pixel."""
    return f"{round(value, 2) + 0:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """Shapes and texts, in the order in which they are drawn. Colours are names of COLOURS."""

    def __init__(self, width: int, height: int, title: str, about: str) -> None:
        self.width, self.height, self.title, self.about = width, height, title, about
        self.labels: list[Label] = []
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "panel",
        *,
        stroke: str = "",
        radius: float = 0,
        opacity: float = 1,
        dash: str = "",
    ) -> None:
        more = f' rx="{number(radius)}"' if radius else ""
        more += f' fill-opacity="{number(opacity)}"' if opacity != 1 else ""
        more += f' stroke-dasharray="{dash}"' if dash else ""
        size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._parts.append(f'<rect class="{self._classes(fill, stroke)}" {size}{more}/>')

    def circle(self, x: float, y: float, radius: float, fill: str = "", *, stroke: str = "", width: float = 1) -> None:
        more = f' stroke-width="{number(width)}"' if width != 1 else ""
        place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
        self._parts.append(f'<circle class="{self._classes(fill, stroke)}" {place}{more}/>')

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str = "ink", *, width: float = 1, dash: str = ""
    ) -> None:
        more = f' stroke-width="{number(width)}"' if width != 1 else ""
        more += f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{self._classes("", stroke)}" points="{path}"{more}/>')

    def arrow(self, *points: tuple[float, float], stroke: str = "dim", width: float = 1.4, dash: str = "") -> None:
        """A line with a head at its end."""
        (ax, ay), (x, y) = points[-2:]
        angle, size = math.atan2(y - ay, x - ax), 7.0
        tip = x - 0.6 * size * math.cos(angle), y - 0.6 * size * math.sin(angle)
        self.line([*points[:-1], tip], stroke, width=width, dash=dash)
        corners = [(x - size * math.cos(angle + turn), y - size * math.sin(angle + turn)) for turn in (0.45, -0.45)]
        path = " ".join(f"{number(px)},{number(py)}" for px, py in [(x, y), *corners])
        self._parts.append(f'<polygon class="{self._classes(stroke, "")}" points="{path}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        upright: bool = True,
    ) -> None:
        """One line, y being that of its base. upright: else it reads from bottom to top."""
        assert size >= SMALLEST, text
        width = len(text) * size * (MONO_ADVANCE if mono else BOLD if bold else ADVANCE)
        start = {"start": 0.0, "middle": -width / 2, "end": -width}[anchor]
        if upright:
            box = Label(text, x + start, y - 0.78 * size, x + start + width, y + 0.22 * size)
        else:
            box = Label(text, x - 0.78 * size, y - start - width, x + 0.22 * size, y - start)
        self.labels.append(box)
        more = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="600"' if bold else ""
        more += "" if upright else f' transform="rotate(-90 {number(x)} {number(y)})"'
        classes = f"f-{fill}" + (" mono" if mono else "")
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}"'
        self._parts.append(f'<text class="{classes}" {place}{more}>{escape(text, quote=False)}</text>')

    def lines(self, x: float, y: float, lines: Iterable[str], *, leading: float = 17, **style: object) -> None:
        """Texts below each other."""
        for i, line in enumerate(lines):
            self.text(x, y + leading * i, line, **style)  # type: ignore[arg-type]

    def box(
        self, x: float, y: float, width: float, height: float, title: str, lines: Iterable[str] = (), edge: str = "line"
    ) -> None:
        """A frame with a title and small lines, from its upper left corner on."""
        self.rect(x, y, width, height, "panel", stroke=edge, radius=6)
        first = len(self.labels)
        self.text(x + 10, y + 20, title, bold=True)
        self.lines(x + 10, y + 38, lines, size=12, fill="dim", leading=16)
        for label in self.labels[first:]:
            assert label.right < x + width, label
            assert label.bottom < y + height, label

    def _classes(self, fill: str, stroke: str) -> str:
        return " ".join(filter(None, (f"f-{fill}" if fill else "f-none", f"s-{stroke}" if stroke else "")))

    def __str__(self) -> str:
        names = sorted(COLOURS)
        light = ";".join(f"--{name}:{COLOURS[name][0]}" for name in names)
        dark = ";".join(f"--{name}:{COLOURS[name][1]}" for name in names)
        fills = "".join(f".f-{name}{{fill:var(--{name})}}" for name in names)
        strokes = "".join(f".s-{name}{{stroke:var(--{name})}}" for name in names)
        style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{fills}{strokes}"
        style += f".f-none{{fill:none}}text{{font-family:{FONT}}}.mono{{font-family:{MONO}}}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
        head += f' width="{self.width}" height="{self.height}" role="img">'
        about = f"<title>{escape(self.title)}</title><desc>{escape(self.about)}</desc>"
        paper = f'<rect class="f-paper" width="{self.width}" height="{self.height}"/>'
        return "\n".join([head + about, f"<style>{style}</style>", paper + "".join(self._parts), "</svg>"]) + "\n"


class Axis:
    """Values to pixels, evenly or by their logarithms."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        place = math.log if self.log else float
        part = (place(value) - place(self.low)) / (place(self.high) - place(self.low))
        return self.start + part * (self.end - self.start)

    def ticks(self) -> list[float]:
        """The powers of ten within a logarithmic axis; twice and five times these as well, if it has no two of them."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        steps = [[factor * 10.0**power for power in range(first, last + 1)] for factor in (1, 2, 5)]
        found = [[value for value in each if self.low <= value <= self.high] for each in steps]
        return found[0] if len(found[0]) > 1 else sorted(value for each in found for value in each)
