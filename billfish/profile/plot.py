"""The picture of `billfish profile`: bytes that kernels read, and operations that decoding takes."""

from __future__ import annotations

import io
from typing import Any

from billfish.bench.plot import require
from billfish.profile.counts import MLX, Count
from billfish.profile.operations import Operations

__all__ = ["picture", "require"]

# Okabe and Ito's colours, which the colour-blind can tell apart.
BUFFERS = {
    "codes": ("#D55E00", ("codes", "high", "w")),
    "scales and offsets": ("#E69F00", ("scales", "offsets", "biases")),
    "x": ("#56B4E9", ("x",)),
    "partial sums": ("#999999", ("partials",)),
}
WIDEST = 7.0  # longer bars are cut off; the number behind them is not
KINDS = {"integer": "#0072B2", "floating": "#009E73", "conversions": "#CC79A7", "memory": "#D55E00"}


def picture(counts: list[Count], operations: list[Operations]) -> bytes:
    """A PNG with a panel for each format and one for decoding; MLX's kernels are hatched."""
    formats = list(dict.fromkeys(count.format for count in counts))
    most = max([len(operations), *(sum(count.format == format for count in counts) for format in formats)])
    figure = require()(figsize=(6.5 * (len(formats) + 1), 1.5 + 0.3 * most), layout="constrained")
    for i, format in enumerate(formats):
        _bytes(figure.add_subplot(1, len(formats) + 1, i + 1), [c for c in counts if c.format == format])
    _operations(figure.add_subplot(1, len(formats) + 1, len(formats) + 1), operations)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


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
        style = {"hatch": "///", "edgecolor": "white"} if count.who == MLX else {}
        for colour, names in BUFFERS.values():
            width = sum(count.read.get(name, 0) for name in names) / least
            axes.barh(len(labels) - 1, width, left=ends[-1], color=colour, **style)
            ends[-1] += width
    for row, end in enumerate(ends):
        axes.text(min(end, WIDEST) * 1.01, row, f"{end:.2f}", fontsize=7, va="center")
    for label, (colour, _) in BUFFERS.items():
        axes.barh(0, 0, color=colour, label=label)
    _rows(axes, labels)
    axes.set_xlim(0, WIDEST * 1.1)
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_xlabel("times the least possible, every buffer once")
    axes.legend(fontsize=7, loc="lower right")


def _operations(axes: Any, operations: list[Operations]) -> None:
    axes.set_title("operations for each decoded value", fontsize=10)
    for row, each in enumerate(operations):
        start = 0.0
        for kind, colour in KINDS.items():
            width = getattr(each, kind)
            axes.barh(row, width, left=start, color=colour, label=kind if row == 0 else None)
            start += width
    _rows(axes, [f"{each.element}: {each.way}" for each in operations])
    axes.legend(fontsize=7, loc="lower right")


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
