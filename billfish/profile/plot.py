"""The picture of `billfish profile`: bytes that kernels read, and operations that decoding takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billfish.pictures import INK, add_caption, caption, require
from billfish.profile.counts import MLX, Count
from billfish.profile.operations import Operations

# Okabe and Ito's colours, which the colour-blind can tell apart. No colour stands for two things.
BUFFERS = {
    "codes": ("#D55E00", ("codes", "high", "w")),
    "scales and offsets": ("#E69F00", ("scales", "offsets", "biases")),
    "x": ("#56B4E9", ("x",)),
    "partial sums": ("#999999", ("partials",)),
}
KINDS = {
    "integer": ("#0072B2", "integer operations"),
    "floating": ("#009E73", "floating-point operations"),
    "conversions": ("#CC79A7", "conversions"),
    "memory": ("#F0E442", "loads from memory"),
}
HATCH = "///"
WIDEST = 7.0  # a longer bar ends here, in an arrow; the number behind it is its own
COLUMNS, PANEL_INCHES = 2, 6.5
THEIRS, LEAST, LONGER = "MLX's kernel (ours are plain)", "least possible", "longer than shown"


def picture(
    counts: list[Count], operations: list[Operations], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> Any:
    """A figure with a panel for each format and one for decoding; MLX's kernels are hatched."""
    formats = list(dict.fromkeys(count.format for count in counts))
    most = max([len(operations), *(sum(count.format == format for count in counts) for format in formats)])
    down = -(-(len(formats) + 1) // COLUMNS)
    size = (PANEL_INCHES * COLUMNS, (1.2 + 0.28 * most) * down + 1)
    figure = require()(figsize=size, layout="constrained")
    for i, format in enumerate(formats):
        _bytes(figure.add_subplot(down, COLUMNS, i + 1), [c for c in counts if c.format == format])
    _operations(figure.add_subplot(down, COLUMNS, len(formats) + 1), operations)
    _legend(figure)
    add_caption(figure, caption(machine, versions))
    return figure


def _bytes(axes: Any, counts: list[Count]) -> None:
    """A bar for each product: the partial sums that marlin_reduce reads belong to the launch before it."""
    first = counts[0]
    axes.set_title(f"{first.format}, K x N = {first.k} x {first.n}: device bytes read", fontsize=10)
    labels: list[str] = []
    ends: list[float] = []
    for count in counts:
        if "partials" not in count.least:
            labels.append(f"M={count.m} {count.kernel}")
            ends.append(0.0)
            least = sum(count.least.values())
        style = {"hatch": HATCH, "edgecolor": "white"} if count.who == MLX else {}
        for colour, names in BUFFERS.values():
            width = sum(count.read.get(name, 0) for name in names) / least
            shown = min(width, WIDEST - ends[-1])
            if shown > 0:
                axes.barh(len(labels) - 1, shown, left=ends[-1], color=colour, **style)
            ends[-1] += width
    for row, end in enumerate(ends):
        if end > WIDEST:
            axes.plot(WIDEST + 0.15, row, **ARROW)
        axes.text(min(end, WIDEST) + (0.3 if end > WIDEST else 0.05), row, f"{end:.2f}", fontsize=7, va="center")
    _rows(axes, labels)
    axes.set_xlim(0, WIDEST * 1.15)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("times the least possible, every buffer once")


ARROW: dict[str, Any] = {"marker": ">", "color": INK, "markersize": 6, "linestyle": "none"}


def _operations(axes: Any, operations: list[Operations]) -> None:
    axes.set_title("operations for each decoded value", fontsize=10)
    for row, each in enumerate(operations):
        start = 0.0
        for kind, (colour, _) in KINDS.items():
            width = getattr(each, kind)
            axes.barh(row, width, left=start, color=colour)
            start += width
        axes.text(start + 0.1, row, f"{start:.2f}", fontsize=7, va="center")
    _rows(axes, [f"{each.element}: {each.way}" for each in operations])
    axes.set_xlim(0, 1.15 * axes.dataLim.xmax)


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any) -> None:
    """Every colour, the hatch, the line and the arrow, once for all panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {name: Patch(color=colour) for name, (colour, _) in BUFFERS.items()}
    entries[THEIRS] = Patch(facecolor=INK, edgecolor="white", hatch=HATCH)
    entries[LEAST] = Line2D([], [], color=INK, linewidth=0.8)
    entries[LONGER] = Line2D([], [], **ARROW)
    entries |= {name: Patch(color=colour) for colour, name in KINDS.values()}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8)
