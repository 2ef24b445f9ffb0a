"""The figures of docs/cuda.md, docs/metal.md and the README's table of GPUs are the recorded ones."""

from __future__ import annotations

import re

from pages import page, recorded

PEERS = ("llama.cpp", "transformers fp16")


def microseconds(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 999.5 else f"{us:.0f}"


def test_u4b8_on_the_h200():
    by_rows: dict[int, list[str]] = {}
    ahead: dict[str, list[str]] = {}
    for record in recorded("cuda_h200.json")["records"]:
        if record["format"] == "u4b8:128":
            ours, peers = record["seconds"], [record["peers"][name] for name in ("cublas:f16", "humming")]
            by_rows.setdefault(record["m"], []).append(" / ".join(map(microseconds, (ours, *peers))))
            if record["m"] in (1, 16, 32, 64, 128, 256, 1024):
                ahead.setdefault(f"{record['k']} x {record['n']}", []).append(f"{min(peers) / ours:.2f}")
    details, readme = page("docs/cuda.md"), page("README.md")
    assert (len(by_rows), len(ahead)) == (10, 5)
    for m, cells in by_rows.items():
        assert f"| {m} | {' | '.join(cells)} |" in details
    for shape, cells in ahead.items():
        assert f"| {shape} | {' | '.join(cells)} |" in readme


def test_other_formats_on_the_h200():
    details = page("docs/cuda.md")
    others: dict[str, list[str]] = {}
    for record in recorded("cuda_h200.json")["records"]:
        if record["format"] != "u4b8:128":
            relative = record["seconds"] / record["seconds_u4b8"]
            others.setdefault(record["format"], []).append(f"{microseconds(record['seconds'])} ({relative:.2f})")
    assert len(others) == 7
    for format, cells in others.items():
        assert f"| {format} |" in details
        assert f" | {' | '.join(cells)} |" in details


def test_what_rounding_x_costs():
    by_weights: dict[str, list[str]] = {}
    for record in recorded("activations.json")["records"]:
        lost = f"{record['divergence']:.3g}" if record["divergence"] > 1e-6 else f"{record['divergence']:.1e}"
        by_weights.setdefault(record["weights"], []).append(f"{lost} ({record['same_best']:.1%})".replace("%", " %"))
    assert [len(cells) for cells in by_weights.values()] == [4, 4]
    for weights, cells in by_weights.items():
        assert f"| {weights} | {' | '.join(cells)} |" in page("docs/cuda.md")


def test_decoding_and_products_of_metal():
    text, counted = page("docs/metal.md"), recorded("metal_profile.json")
    for each in counted["decode"]:
        slots = " | ".join(f"{each['issue'][kind]:.2f}" for kind in ("simple", "complex", "memory"))
        assert f"| {each['element']} | {each['way']} | {slots} | {each['cycles']:.2f} |" in text
    shared = {record["format"] for record in counted["records"] if record["owner"] == "mlx"}
    records = [record for record in counted["records"] if record["n"] == 4096 and record["format"] in shared]
    for record in records:
        times = " | ".join(f"{us:,.0f}" for us in record["estimated_us"].values())
        kernel = record["kernel"].replace(" + ", "` + `")
        first = f"| {record['format']} | {record['m']} | `{kernel}` | {record['cycles_per_weight']:.2f}"
        bytes_of_threadgroups = f"{record['threadgroup_memory']:,}"
        assert f"{first} | {times} | {record['bound_by']['M1 Max']} | {bytes_of_threadgroups} |" in text
    assert len(re.findall(r"^\| \w+ \| \d+ \| `", text, re.MULTILINE)) == len(records)


def test_goals_of_metal():
    """At M = 1 cycles, at M = 8 to 512 times beside MLX's; at M = 2 and 4 memory may bound both."""
    text, records = page("docs/metal.md"), recorded("metal_profile.json")["records"]
    ours = {(r["format"], r["k"], r["n"], r["m"]): r for r in records if r["owner"] == "billfish"}
    goals = dict(re.findall(r"^\| (\w+) \| ([34]\.5) \| [\d.]+ \| [\d.]+ \| memory \|$", text, re.MULTILINE))
    assert len(goals) == 9
    for format, most in goals.items():
        for n in (4096, 14336):
            record = ours[format, 4096, n, 1]
            assert f" {record['cycles_per_weight']:.2f} |" in text
            assert record["cycles_per_weight"] <= float(most)
            assert set(record["bound_by"].values()) == {"memory"}
    for theirs in (record for record in records if record["owner"] == "mlx"):
        mine = ours[theirs["format"], theirs["k"], theirs["n"], theirs["m"]]
        if theirs["m"] == 1:
            part = 0.8 if mine["format"] == "affine4" else 0.6
            assert mine["cycles_per_weight"] <= part * theirs["cycles_per_weight"]
        for chip, us in mine["estimated_us"].items():
            most = 0.6 if theirs["m"] <= 8 else 0.9
            at_the_floor = mine["bound_by"][chip] == "memory" and theirs["m"] <= 4
            assert us <= most * theirs["estimated_us"][chip] or at_the_floor
        assert mine["threadgroup_memory"] <= 12288


def test_models_on_the_h200():
    text = page("docs/cuda.md")
    records = recorded("llm_cuda_h200.json")["records"]
    assert len(records) == 10
    for record in records:
        ours, peers = record["tok_per_s"], record["peers"]
        cells = [f"{peers[name]:,.0f} ({ours / peers[name]:.2f})" if name in peers else "" for name in PEERS]
        assert f"| {record['shape']} | `{record['case']}` | {ours:,.0f} | {' | '.join(cells)} |" in text
    generating = [r for r in records if r["shape"] == "8b" and not r["case"].startswith("prompt")]
    ratios = [record["tok_per_s"] / record["peers"]["llama.cpp"] for record in generating]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as many tokens as llama.cpp" in page("README.md")


def test_quantizing_on_the_h200():
    text, seconds = page("docs/cuda.md"), {}
    for record in recorded("quantize_h200.json")["records"]:
        seconds.setdefault(record["format"], {})[record["method"]] = record["seconds"]
    assert len(seconds) == 8
    for format, by_method in seconds.items():
        assert f"| {format} | {by_method['rtn']:.1f} | {by_method['mse']:.1f} |" in text


def test_calls_on_the_h200():
    text, record = page("docs/cuda.md"), recorded("calls_h200.json")
    micro, milli = record["microseconds"], record["token_milliseconds"]
    ours, theirs = micro["MarlinLinear"], micro["torch.nn.Linear, float16"]
    assert f"takes {ours:.1f} us for a call of\n`MarlinLinear` and {theirs:.1f} us" in text
    assert f"float16, {ours / theirs:.2f} of it" in text
    names = {"float16": "float16", "quantized": "u4b8:128"}
    for name, written in names.items():
        cells = [f"{milli[name][w]:.2f} ({milli['float16'][w] / milli[name][w]:.2f})" for w in ("eager", "graph")]
        assert f"| {written} | {' | '.join(cells)} |" in text


def test_experts_on_the_h200():
    text = page("docs/cuda.md")
    records = recorded("experts_h200.json")["records"]
    assert [record["tokens"] for record in records] == [1, 4, 16, 64, 256, 1024, 4096]
    for record in records:
        ours, dense = 1e3 * record["seconds"], 1e3 * record["seconds_dense"]
        assert re.search(rf"^\| {record['tokens']} \| .* \| {ours:.3f} \| .*\| {dense:.3f}", text, re.MULTILINE)
