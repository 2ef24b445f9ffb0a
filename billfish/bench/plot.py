"""The roofline picture: how near each result comes to what memory and arithmetic allow."""

from __future__ import annotations

import importlib
import io
import math
from itertools import groupby
from typing import Any, NamedTuple

from billfish.bench.limits import Limits
from billfish.errors import BackendUnavailable

# Okabe and Ito's colours, which the colour-blind can tell apart; shapes differ as well, and every point has its name.
OURS = ("#D55E00", "o")
PEERS = (
    ("#0072B2", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#56B4E9", "v"),
    ("#E69F00", "P"),
    ("#000000", "X"),
    ("#999999", "<"),
    ("#7A5C00", ">"),
)
INK, FAINT = "#222222", "#BBBBBB"
COLUMNS, PANEL_INCHES, DPI = 3, (6.6, 4.8), 130
LINES = 30  # of labels that fit one above the other


class Point(NamedTuple):
    """One result: whose, at which M, and where in the picture."""

    who: str
    m: int
    x: float
    y: float


def require() -> Any:
    """matplotlib's Figure, which needs no display."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise BackendUnavailable(f"[bench] --plot: {error}; pip install billfish[bench]") from None


def roofline(records: list[dict[str, Any]], limits: Limits) -> bytes:
    """A PNG with a panel for each format, shape and kind of activations, in the order of the records."""
    panels: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        panels.setdefault((record["format"], record["activations"], record["k"], record["n"]), []).append(record)
    names = dict.fromkeys(name for record in records for name in record["peers"])
    styles = {"billfish": OURS, **{name: PEERS[i % len(PEERS)] for i, name in enumerate(names)}}
    across = min(COLUMNS, len(panels))
    down = -(-len(panels) // across)
    figure = require()(figsize=(PANEL_INCHES[0] * across, PANEL_INCHES[1] * down), layout="constrained")
    for i, ((format, activations, k, n), group) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1)
        axes.set_title(f"{format}, x {activations}, K x N = {k} x {n}", fontsize=10)
        _draw(axes, points_of(group), limits, activations, styles)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def points_of(records: list[dict[str, Any]]) -> list[Point]:
    """Ours and the peers' results. Across is always operations for each byte of *our* weights, so that all who answer
    the same question stand above one another, whatever they make of the weights."""
    points = []
    for record in records:
        x = record["gops"] / record["weight_gbps"]
        for who, seconds in {"billfish": record["seconds"], **record["peers"]}.items():
            points.append(Point(who, record["m"], x, record["gops"] * record["seconds"] / seconds))
    return points


def _draw(axes: Any, points: list[Point], limits: Limits, activations: str, styles: dict[str, tuple[str, str]]) -> None:
    read, peak = limits.read_bytes_per_second / 1e9, limits.peak(activations) / 1e9
    ridge = peak / read
    left = min(ridge, *(p.x for p in points)) / 2
    right = max(ridge, *(p.x for p in points)) * 5  # room for the names of the last column
    bottom = min(left * read, *(p.y for p in points)) / 2.5
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, peak * 2.5))
    axes.set_xlabel("operations per byte of weights")
    axes.set_ylabel("GOP/s")
    axes.plot([left, ridge, right], [left * read, peak, peak], color=INK, linewidth=1.2)
    arithmetic = {"exact": "float32", "q8": "int8", "q16": "int8, two products each"}[activations]
    _write(axes, f"{arithmetic}: {peak:.4g} GOP/s", (right, peak), (-4, 4), ha="right", va="bottom")
    _write(axes, f"memory: {read:.3g} GB/s", (ridge, peak), (-8, 4), ha="right", va="bottom")
    for m, column in groupby(sorted(points, key=lambda p: p.m), key=lambda p: p.m):
        members = list(column)
        x = members[0].x
        axes.axvline(x, color=FAINT, linewidth=0.5, zorder=0)
        _write(axes, f"M = {m}", (x, bottom), (3, 4), va="bottom", fontweight="bold")
        heights = spread([math.log(p.y) for p in members], math.log(peak * 2.5 / bottom) / LINES)
        for point, height in zip(members, heights, strict=True):
            colour, marker = styles[point.who]
            ours = point.who == "billfish"
            axes.scatter(point.x, point.y, s=48 if ours else 30, color=colour, marker=marker, zorder=3 + ours)
            axes.annotate(
                point.who,
                (point.x, point.y),
                (point.x * 1.2, math.exp(height)),
                va="center",
                fontsize=7,
                color=INK,
                fontweight="bold" if ours else "normal",
                arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
            )


def _write(axes: Any, text: str, at: tuple[float, float], offset: tuple[int, int], **how: Any) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", fontsize=8, color=INK, **how)


def spread(heights: list[float], step: float) -> list[float]:
    """Heights at least `step` apart, in the same order and as near as may be to those given."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # Runs of labels that touch: each is [sum of (height - place in the run), members].
    runs: list[tuple[float, list[int]]] = []
    for i in order:
        total, members = heights[i], [i]
        while runs and runs[-1][0] / len(runs[-1][1]) + step * len(runs[-1][1]) > total / len(members):
            below_total, below = runs.pop()
            total, members = below_total + total - step * len(below) * len(members), below + members
        runs.append((total, members))
    placed = {i: total / len(members) + step * j for total, members in runs for j, i in enumerate(members)}
    return [placed[i] for i in range(len(heights))]
