"""Pictures say where their numbers come from, nothing in them is cut off, and each style has one meaning."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import plots, tables
from benchmarks.machine import GpuLimits, Limits
from benchmarks.metal_profile.counts import MLX, Count
from benchmarks.metal_profile.operations import Operations
from billfish.cli import pictures

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"cpu": "Abacus", "architecture": "wood", "isa": "beads", "threads": 2, "date": "2026-01-31"}
VERSIONS = {"billfish": "1.2", "ggml": "3.4"}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs billfish[bench]")


def recorded(name):
    return json.loads((RESULTS / name).read_text())


def rooflines():
    """From what was recorded: one panel, and many with peers that are not in all of them."""
    results = recorded("cpu_neoverse_n1.json")
    about = Limits(**results["limits"]), results["machine"], results["versions"]
    yield plots.roofline(results["records"][:1], *about), results
    yield plots.roofline(results["records"], *about), results


def profiles():
    results = recorded("metal_profile.json")
    counts = [Count(**record) for record in results["records"]]
    operations = [Operations(**each) for each in results["decode"]]
    yield plots.profile(counts, operations, MACHINE, VERSIONS), results
    yield plots.profile(counts[:1], operations[:1], MACHINE, VERSIONS), results


def tokens():
    results = recorded("inside_a_token.json")
    yield plots.token(results, tables.PARTS), results


FIGURES = pytest.mark.parametrize("make", [rooflines, profiles, tokens])


def entries(figure):
    """The legend: label, handle."""
    (legend,) = figure.legends
    return dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))


def words(text):
    return text.replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")


# ---- all of them ----------------------------------------------------------------------------------------------------


@FIGURES
def test_no_text_is_cut_off(make):
    """At the picture's edge; and what is written inside of a frame, at the frame."""
    for figure, _ in make():
        figure.draw_without_rendering()
        whole = figure.get_tightbbox().padded(-0.01)  # of all artists, in inches
        assert min(whole.x0, whole.y0) >= 0
        assert whole.x1 <= figure.get_figwidth()
        assert whole.y1 <= figure.get_figheight()
        for axes in figure.axes:
            frame = axes.get_window_extent()
            for text in axes.texts:
                box = text.get_window_extent()
                assert frame.x0 <= box.x0, text
                assert box.x1 <= frame.x1, text


@FIGURES
def test_no_bar_and_no_point_is_cut_off(make):
    for figure, _ in make():
        figure.draw_without_rendering()
        for axes in figure.axes:
            (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
            for bar in axes.patches:
                assert left <= bar.get_x() <= bar.get_x() + bar.get_width() < right
            for points in axes.collections:
                for x, y in points.get_offsets():
                    assert left < x < right
                    assert low < y < high


@FIGURES
def test_the_caption_says_what_the_record_does(make):
    for figure, results in make():
        caption = words(figure.get_suptitle())
        machine = results["machine"] if make is rooflines else MACHINE
        if make is tokens:
            about = results["about"]
            where = f"{about['cpu']}, {about['kernels']}, {about['threads']} threads, {about['date']}"
            versions = f"billfish {about['billfish']}, numpy {about['numpy']}, python {about['python']}"
            assert caption == f"SmolLM2-135M-Instruct · {where} · {versions}"
            continue
        versions = results["versions"] if make is not profiles else VERSIONS
        assert caption.startswith(
            f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads, {machine['date']}"
        )
        for name, version in versions.items():
            assert f"{name} {version}" in caption


def test_a_caption_leaves_out_what_nobody_knows():
    caption = plots.caption
    assert words(caption(MACHINE, VERSIONS)) == "Abacus, beads, 2 threads, 2026-01-31 · billfish 1.2, ggml 3.4"
    assert caption({"gpu": "H200", "cpu": "x", "arch": "sm_90a"}, {}) == "H200, sm_90a"
    assert caption({"architecture": "wood", "threads": 1}, {}) == "wood, 1 thread"
    assert caption({}, {}) == ""


# ---- the legends ----------------------------------------------------------------------------------------------------


def test_every_contender_of_the_roofline_is_in_the_legend():
    from matplotlib.colors import to_hex

    for figure, results in rooflines():
        shown = entries(figure)
        drawn = {}
        for axes in figure.axes:
            for points in axes.collections:
                style = to_hex(points.get_edgecolor()[0]), points.get_paths()[0].vertices.tobytes()
                drawn.setdefault(points.get_label(), set()).add(style)
        assert set(shown) == {plots.ROOF, *drawn}
        assert all(len(styles) == 1 for styles in drawn.values())
        assert len(set.union(*drawn.values())) == len(drawn)  # no two look alike
        for name, (style,) in drawn.items():
            assert to_hex(shown[name].get_edgecolor()[0]) == style[0]
        if len(figure.axes) > 1:
            assert {"billfish", *(peer for record in results["records"] for peer in record["peers"])} == set(drawn)


def test_contenders_never_look_alike():
    names = [str(i) for i in range(40)]
    styles = plots.styles_of(names)
    assert list(styles) == ["billfish", *names]
    assert len(set(styles.values())) == 41


def test_the_roof_is_named_as_what_it_is():
    for limits, word in ((Limits(1e9, 4e9, 1e9), "float32"), (GpuLimits(1e9, 4e9, 1e9), "float16")):
        record = {"format": "q4_0", "activations": "exact", "m": 1, "k": 64, "n": 64, "peers": {}}
        record |= {"seconds": 1e-5, "gops": 0.8, "weight_gbps": 0.2}
        figure = plots.roofline([record], limits, MACHINE, VERSIONS)
        assert figure.axes[0].get_title().endswith(f"memory 1 GB/s, {word} 1 GOP/s")


def test_colours_and_hatches_of_the_profile_have_one_meaning():
    from matplotlib.colors import to_hex

    figure, results = next(profiles())
    shown = entries(figure)
    colours = list(plots.CLASSES.values())
    assert len(set(colours)) == len(colours)
    bars = [bar for axes in figure.axes for bar in axes.patches]
    drawn = {to_hex(bar.get_facecolor()).upper() for bar in bars if bar.get_width()}
    assert drawn == set(colours)
    named = {name: to_hex(handle.get_facecolor()).upper() for name, handle in shown.items()}
    hatched = {name for name, handle in shown.items() if handle.get_hatch()}
    assert hatched == {plots.THEIRS}
    assert {colour for name, colour in named.items() if name not in hatched} == set(colours)
    assert {bar.get_hatch() for bar in bars} == {None, plots.HATCH}
    assert any(record["owner"] == MLX for record in results["records"])


def test_the_number_behind_a_bar_is_that_of_the_record():
    figure, results = next(profiles())
    first, axes = results["records"][0], figure.axes[0]
    assert f" {first['cycles_per_weight'] / first['m']:.2f} " in axes.texts[0].get_text()
    assert f"M1 {first['estimated_us']['M1']:,.0f} us" in axes.texts[0].get_text()


def test_every_part_of_a_token_is_in_the_legend():
    figure, results = next(tokens())
    parts = results["records"][0]["milliseconds"]
    assert set(entries(figure)) == {*parts, "reading the weights"}
    colours = {bar.get_facecolor() for bar in figure.axes[0].patches}
    assert len(colours) == len(parts)


def test_the_picture_in_the_documentation_is_that_of_the_record(tmp_path):
    again = tmp_path / "again.svg"
    figure, _ = next(tokens())
    plots.save(figure, again)
    labels = [text for text in (ROOT / "docs" / "inside-a-token.svg").read_text().splitlines() if "<!--" in text]
    assert labels == [text for text in again.read_text().splitlines() if "<!--" in text]
    assert len(labels) > 20


def test_a_picture_is_a_png():
    figure, _ = next(rooflines())
    assert pictures.png(figure).startswith(b"\x89PNG")
