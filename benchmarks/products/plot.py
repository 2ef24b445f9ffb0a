"""The roofline picture: how near each result comes to what memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.products.limits import Limits
from billfish.cli.pictures import FAINT, INK, add_caption, caption, require

# Okabe and Ito's colours, which the colour-blind can tell apart; shapes differ as well.
OURS = ("#D55E00", "o")
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999", "#7A5C00")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
COLUMNS, PANEL_INCHES = 3, (6.0, 4.4)
LEGEND_INCHES = 0.6

Style = tuple[str, str]  # colour, marker


class Point(NamedTuple):
    """One result: whose, at which M, and where in the picture."""

    who: str
    m: int
    x: float
    y: float


def roofline(
    records: list[dict[str, Any]], limits: Limits, machine: Mapping[str, Any], versions: Mapping[str, str]
) -> Any:
    """A figure with a panel for each format, shape and kind of activations, in the order of the records."""
    panels: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        panels.setdefault((record["format"], record["activations"], record["k"], record["n"]), []).append(record)
    styles = styles_of(name for record in records for name in record["peers"])
    across = min(COLUMNS, len(panels))
    down = -(-len(panels) // across)
    size = (PANEL_INCHES[0] * across, PANEL_INCHES[1] * down + LEGEND_INCHES)
    figure = require()(figsize=size, layout="constrained")
    for i, ((format, activations, k, n), group) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1)
        read, peak = limits.read_bytes_per_second / 1e9, limits.peak(activations) / 1e9
        roof = f"memory {read:.3g} GB/s, {limits.arithmetic(activations)} {peak:.4g} GOP/s"
        axes.set_title(f"{format}, x {activations}, K x N = {k} x {n}\n{roof}", fontsize=9)
        _draw(axes, points_of(group), read, peak, styles)
    handles = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    for axes in figure.axes[1:]:  # not every peer is in every panel
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    ordered = {name: handles[name] for name in (ROOF, *styles)}
    figure.legend(ordered.values(), ordered, loc="outside lower center", ncols=4 * across, fontsize=8)
    add_caption(figure, caption(machine, versions))
    return figure


ROOF = "the machine's limit"


def styles_of(peers: Iterable[str]) -> dict[str, Style]:
    """A colour and a marker for each contender; no two have both in common."""
    names = dict.fromkeys(peers)
    rounds = len(MARKERS)
    styles = [(COLOURS[i % rounds], MARKERS[(i + i // rounds) % rounds]) for i in range(len(names))]
    return {"billfish": OURS, **dict(zip(names, styles, strict=True))}


def points_of(records: list[dict[str, Any]]) -> list[Point]:
    """Ours and the peers' results. Across is always operations for each byte of *our* weights, so that all who answer
    the same question stand above one another, whatever they make of the weights."""
    points = []
    for record in records:
        x = record["gops"] / record["weight_gbps"]
        for who, seconds in {"billfish": record["seconds"], **record["peers"]}.items():
            points.append(Point(who, record["m"], x, record["gops"] * record["seconds"] / seconds))
    return points


def _draw(axes: Any, points: list[Point], read: float, peak: float, styles: dict[str, Style]) -> None:
    ridge = peak / read
    left, right = min(ridge, *(p.x for p in points)) / 2, max(ridge, *(p.x for p in points)) * 2
    bottom = min(left * read, *(p.y for p in points)) / 2.5
    top = max(peak, *(p.y for p in points)) * 2
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    axes.set_xlabel("operations per byte of weights")
    axes.set_ylabel("GOP/s")
    axes.plot([left, ridge, right], [left * read, peak, peak], color=INK, linewidth=1.2, label=ROOF)
    for m, x in dict.fromkeys((p.m, p.x) for p in points):
        axes.axvline(x, color=FAINT, linewidth=0.5, zorder=0)
        at = {"xy": (x, bottom), "xytext": (0, 4), "textcoords": "offset points"}
        axes.annotate(f"M = {m}", **at, ha="center", va="bottom", fontsize=8, color=INK, fontweight="bold")
    for who, (colour, marker) in styles.items():
        own = [p for p in points if p.who == who]
        if own:
            # Ours is a ring: a peer that is level with it shows inside.
            ring = {"s": 100, "facecolors": "none", "linewidths": 2, "zorder": 4}
            shape = ring if who == "billfish" else {"s": 30, "facecolors": colour, "zorder": 3}
            axes.scatter([p.x for p in own], [p.y for p in own], edgecolors=colour, marker=marker, label=who, **shape)
