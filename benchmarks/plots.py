"""The pictures of records: the roofline of products, the profile of Metal kernels, and the parts of a token.

Colours are Okabe and Ito's, which the colour-blind can tell apart. No style stands for two things in one picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.machine import Limits
from billfish.cli.pictures import INK, add_caption, png, require
from billfish.core.files import write_atomically

FAINT = "#BBBBBB"


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


def save(figure: Any, path: Path) -> None:
    """An SVG or a PNG, by the name. The same figure gives the same SVG: no random identifiers, no date of today."""
    import matplotlib

    if path.suffix != ".svg":
        write_atomically(path, png(figure))
        return
    with matplotlib.rc_context({"svg.hashsalt": "billfish"}):
        figure.savefig(path, metadata={"Date": None})


# ---- the roofline of products -----------------------------------------------------------------------------------

OURS = ("#D55E00", "o")
COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999", "#7A5C00")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
ROOF_COLUMNS, ROOF_INCHES, LEGEND_INCHES = 3, (6.0, 4.4), 0.6
ROOF = "the machine's limit"


def roofline(
    records: list[dict[str, Any]], limits: Limits, machine: Mapping[str, Any], versions: Mapping[str, str]
) -> Any:
    """A figure with a panel for each format, shape and kind of activations, in the order of the records."""
    panels: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for record in records:
        panels.setdefault((record["format"], record["activations"], record["k"], record["n"]), []).append(record)
    styles = styles_of(name for record in records for name in record["peers"])
    across = min(ROOF_COLUMNS, len(panels))
    down = -(-len(panels) // across)
    figure = require()(figsize=(ROOF_INCHES[0] * across, ROOF_INCHES[1] * down + LEGEND_INCHES), layout="constrained")
    handles: dict[str, Any] = {}
    for i, ((format, activations, k, n), group) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1)
        read, peak = limits.read_bytes_per_second / 1e9, limits.peak(activations) / 1e9
        roof = f"memory {read:.3g} GB/s, {limits.arithmetic(activations)} {peak:.4g} GOP/s"
        axes.set_title(f"{format}, x {activations}, K x N = {k} x {n}\n{roof}", fontsize=9)
        _draw_panel(axes, points_of(group), read, peak, styles)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    ordered = {name: handles[name] for name in (ROOF, *styles)}
    figure.legend(ordered.values(), ordered, loc="outside lower center", ncols=4 * across, fontsize=8)
    add_caption(figure, caption(machine, versions))
    return figure


def styles_of(peers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each contender; no two have both in common."""
    names, rounds = dict.fromkeys(peers), len(MARKERS)
    styles = [(COLOURS[i % rounds], MARKERS[(i + i // rounds) % rounds]) for i in range(len(names))]
    return {"billfish": OURS, **dict(zip(names, styles, strict=True))}


def points_of(records: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Ours and the peers' results. Across is always operations for each byte of *our* weights, so that all who answer
    the same question stand above one another, whatever they make of the weights."""
    return [
        SimpleNamespace(who=who, m=r["m"], x=r["gops"] / r["weight_gbps"], y=r["gops"] * r["seconds"] / seconds)
        for r in records
        for who, seconds in {"billfish": r["seconds"], **r["peers"]}.items()
    ]


def _draw_panel(
    axes: Any, points: list[SimpleNamespace], read: float, peak: float, styles: dict[str, tuple[str, str]]
) -> None:
    ridge = peak / read
    left, right = min(ridge, *(p.x for p in points)) / 2, max(ridge, *(p.x for p in points)) * 2
    bottom = min(left * read, *(p.y for p in points)) / 2.5
    top = max(peak, *(p.y for p in points)) * 2
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    axes.set(xlabel="operations per byte of weights", ylabel="GOP/s")
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


# ---- the profile of Metal kernels -------------------------------------------------------------------------------

CLASSES = {
    "simple": "#009E73",
    "complex": "#CC79A7",
    "worse": "#D55E00",
    "between lanes": "#E69F00",
    "matrix": "#0072B2",
    "memory": "#56B4E9",
}
HATCH, THEIRS = "///", "MLX's kernel (ours are plain)"
PROFILE_COLUMNS, PROFILE_INCHES = 2, 6.5
ROOM = 2.2  # for what is written behind the longest bar


def profile(counts: list[Any], operations: list[Any], machine: Mapping[str, Any], versions: Mapping[str, str]) -> Any:
    """A figure with a panel for each format and shape of metal_profile's counts, and one for decoding; a bar has the
    issue slots of a lane by class, and behind it stand cycles and estimated times. MLX's kernels are hatched."""
    from matplotlib.patches import Patch

    panels: dict[tuple[str, int, int], list[Any]] = {}
    for count in counts:
        panels.setdefault((count.format, count.k, count.n), []).append(count)
    most = max([len(operations), *map(len, panels.values())])
    down = -(-(len(panels) + 1) // PROFILE_COLUMNS)
    size = (PROFILE_INCHES * PROFILE_COLUMNS, (1.2 + 0.28 * most) * down + 1)
    figure = require()(figsize=size, layout="constrained")
    for i, ((format, k, n), each) in enumerate(panels.items()):
        axes = figure.add_subplot(down, PROFILE_COLUMNS, i + 1)
        axes.set_title(f"{format}, K x N = {k} x {n}", fontsize=10)
        axes.set_xlabel("issue slots of a lane for each weight and row of x; cycles; estimated time", fontsize=8)
        bars = [{kind: slots / count.m for kind, slots in count.issue.items()} for count in each]
        labels, behind = [f"M={count.m} {count.kernel}" for count in each], [_behind(count) for count in each]
        _draw_bars(axes, labels, bars, behind, {i for i, count in enumerate(each) if count.owner == "mlx"})
    axes = figure.add_subplot(down, PROFILE_COLUMNS, len(panels) + 1)
    axes.set_title("decoding a value, the scale included", fontsize=10)
    axes.set_xlabel("issue slots of a lane; cycles", fontsize=8)
    ways = [f"{each.element}: {each.way}" for each in operations]
    _draw_bars(axes, ways, [each.issue for each in operations], [f" {each.cycles:.2f}" for each in operations])
    entries: dict[str, Any] = {name: Patch(color=colour) for name, colour in CLASSES.items()}
    entries[THEIRS] = Patch(facecolor=INK, edgecolor="white", hatch=HATCH)
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8)
    add_caption(figure, caption(machine, versions))
    return figure


def _behind(count: Any) -> str:
    """Cycles, and the estimated times of the first and the last chip."""
    chips = list(count.estimated_us.items())
    times = ", ".join(f"{chip} {us:,.0f} us" for chip, us in (chips[0], chips[-1]))
    return f" {count.cycles_per_weight / count.m:.2f}  {times}"


def _draw_bars(
    axes: Any, labels: list[str], bars: list[Mapping[str, float]], behind: list[str], hatched: Iterable[int] = ()
) -> None:
    for row, slots in enumerate(bars):
        style, start = {"hatch": HATCH, "edgecolor": "white"} if row in hatched else {}, 0.0
        for kind, colour in CLASSES.items():
            axes.barh(row, slots.get(kind, 0.0), left=start, color=colour, **style)
            start += slots.get(kind, 0.0)
        axes.text(start, row, behind[row], fontsize=6, va="center")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, ROOM * axes.dataLim.xmax)


# ---- the parts of a token ---------------------------------------------------------------------------------------

# Products in warm colours, the rest in cold ones; in the order of tables.PARTS.
TOKEN_COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#8B4513")
TOKEN_COLOURS += ("#0072B2", "#56B4E9", "#009E73", "#666666", "#BBBBBB")
LEAST = "reading the weights"


def token(results: dict[str, Any], parts: Iterable[str]) -> Any:
    """Bars of what inside_a_token recorded, and a caption of what the record says of where and when."""
    about, records = results["about"], results["records"]
    figure = require()(figsize=(9, 3.8), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{r['activations']}, after {r['context']} tokens" for r in records]
    left = np.zeros(len(records))
    for part, colour in zip(parts, TOKEN_COLOURS, strict=True):
        widths = np.array([r["milliseconds"][part] for r in records])
        axes.barh(names, widths, left=left, color=colour, label=part, edgecolor="white", linewidth=0.4)
        left += widths
    for i, total in enumerate(left):
        axes.text(total, i, f" {total:.1f} ms", va="center", fontsize=8)
    axes.axvline(about["least_milliseconds"], color=INK, linewidth=1, linestyle="--", label=LEAST)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds for one token", xlim=(0, left.max() * 1.12))
    figure.legend(fontsize=8, ncols=1, loc="outside right center")
    machine = {"architecture": about["machine"], "isa": about["kernels"], **about}
    versions = {name: about[name] for name in ("billfish", "numpy", "python") if name in about}
    add_caption(figure, f"SmolLM2-135M-Instruct · {caption(machine, versions)}")
    return figure
