"""The picture of `billfish profile`: what kernels and decode functions issue, and how long the kernels should take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.metal_profile.counts import MLX, Count
from benchmarks.metal_profile.operations import Operations
from billfish.cli.pictures import INK, add_caption, caption, require

# Okabe and Ito's colours, which the colour-blind can tell apart. No colour stands for two things.
CLASSES = {
    "simple": "#009E73",
    "complex": "#CC79A7",
    "worse": "#D55E00",
    "between lanes": "#E69F00",
    "matrix": "#0072B2",
    "memory": "#56B4E9",
}
HATCH = "///"
COLUMNS, PANEL_INCHES = 2, 6.5
ROOM = 2.2  # for what is written behind the longest bar
THEIRS = "MLX's kernel (ours are plain)"


def picture(
    counts: list[Count], operations: list[Operations], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> Any:
    """A figure with a panel for each format and shape, and one for decoding; MLX's kernels are hatched."""
    panels = list(dict.fromkeys((count.format, count.k, count.n) for count in counts))
    by_panel = [[c for c in counts if (c.format, c.k, c.n) == panel] for panel in panels]
    most = max([len(operations), *(len(each) for each in by_panel)])
    down = -(-(len(panels) + 1) // COLUMNS)
    size = (PANEL_INCHES * COLUMNS, (1.2 + 0.28 * most) * down + 1)
    figure = require()(figsize=size, layout="constrained")
    for i, each in enumerate(by_panel):
        _products(figure.add_subplot(down, COLUMNS, i + 1), each)
    _decoding(figure.add_subplot(down, COLUMNS, len(panels) + 1), operations)
    _legend(figure)
    add_caption(figure, caption(machine, versions))
    return figure


def _products(axes: Any, counts: list[Count]) -> None:
    """A bar for each product: issue slots for a weight and a row of x. Behind it the cycles, and estimated times."""
    first = counts[0]
    axes.set_title(f"{first.format}, K x N = {first.k} x {first.n}", fontsize=10)
    for row, count in enumerate(counts):
        style = {"hatch": HATCH, "edgecolor": "white"} if count.owner == MLX else {}
        end = _bar(axes, row, {kind: slots / count.m for kind, slots in count.issue.items()}, style)
        chips = [next(iter(count.estimated_us)), list(count.estimated_us)[-1]]
        times = ", ".join(f"{chip} {count.estimated_us[chip]:,.0f} us" for chip in chips)
        axes.text(end, row, f" {count.cycles_per_weight / count.m:.2f}  {times}", fontsize=6, va="center")
    _rows(axes, [f"M={count.m} {count.kernel}" for count in counts])
    axes.set_xlabel("issue slots of a lane for each weight and row of x; cycles; estimated time", fontsize=8)


def _decoding(axes: Any, operations: list[Operations]) -> None:
    axes.set_title("decoding a value, the scale included", fontsize=10)
    for row, each in enumerate(operations):
        end = _bar(axes, row, each.issue, {})
        axes.text(end, row, f" {each.cycles:.2f}", fontsize=6, va="center")
    _rows(axes, [f"{each.element}: {each.way}" for each in operations])
    axes.set_xlabel("issue slots of a lane; cycles", fontsize=8)


def _bar(axes: Any, row: int, slots: Mapping[str, float], style: Mapping[str, Any]) -> float:
    """Where it ends."""
    start = 0.0
    for kind, colour in CLASSES.items():
        axes.barh(row, slots.get(kind, 0.0), left=start, color=colour, **style)
        start += slots.get(kind, 0.0)
    return start


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, ROOM * axes.dataLim.xmax)


def _legend(figure: Any) -> None:
    """Every colour and the hatch, once for all panels."""
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {name: Patch(color=colour) for name, colour in CLASSES.items()}
    entries[THEIRS] = Patch(facecolor=INK, edgecolor="white", hatch=HATCH)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8)
