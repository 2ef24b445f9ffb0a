"""Where the time of one token goes: the picture and the table of docs/inside-a-token.md.

    python benchmarks/inside_a_token.py [--threads 2] [--plot docs/inside-a-token.svg] [--json FILE]

SmolLM2-135M-Instruct; the parts are timed by the decoder itself, all that they leave is Python (embedding, calls).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import llm_tables
import numpy as np

import billfish
from billfish.backends.cpu import _cpu
from billfish.files import write_atomically
from billfish.llm import Cache, load

CASES = (("q8", 0), ("q16", 0), ("exact", 0), ("q8", 1024))
TOKENS = 48
# Okabe and Ito's colours; products in warm ones, the rest in cold ones.
PALETTE = ["#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#8B4513", "#0072B2", "#56B4E9", "#009E73", "#666666", "#BBBBBB"]
COLOURS = dict(zip(llm_tables.PARTS, PALETTE, strict=True))


def measure(model: Any, activations: str, context: int) -> dict[str, float]:
    """Milliseconds of each part of a token, with so many tokens before it."""
    decoder, rng = model.decoder, np.random.default_rng(0)
    cache = Cache(model.config, context + 2 * TOKENS)
    for _ in range(context // 256):
        decoder.run([(cache, rng.integers(100, 40000, 256).tolist())], activations)
    tokens = rng.integers(100, 40000, 2 * TOKENS).tolist()
    for i, token in enumerate(tokens):
        if i == TOKENS:  # the first half warms up
            before, started = decoder.seconds, time.perf_counter()
        decoder.logits(decoder.run([(cache, [token])], activations), activations)
    whole = time.perf_counter() - started
    parts = {name: (after - before[name]) / TOKENS * 1e3 for name, after in decoder.seconds.items()}
    return {**parts, "Python": whole / TOKENS * 1e3 - sum(parts.values())}


def draw(records: list[dict[str, Any]], least: float, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{r['activations']}, after {r['context']}" for r in records]
    left = np.zeros(len(records))
    for part, colour in COLOURS.items():
        widths = np.array([r["milliseconds"][part] for r in records])
        axes.barh(names, widths, left=left, color=colour, label=part, edgecolor="white", linewidth=0.4)
        left += widths
    for i, total in enumerate(left):
        axes.text(total, i, f" {total:.1f} ms", va="center", fontsize=8)
    axes.axvline(least, color="#222222", linewidth=1, linestyle="--")
    axes.text(least, -0.62, "reading the weights", fontsize=8, ha="center", va="bottom")
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds for one token", xlim=(0, left.max() * 1.08))
    axes.legend(fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", metavar="FILE", help="draw the picture there; needs billfish[bench]")
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    _cpu.set_threads(arguments.threads)
    model = load()
    level = _cpu.levels()[0]
    least = model.decoder.nbytes / _cpu.read_rate(level, 256) * 1e3
    records = [
        {"activations": activations, "context": context, "milliseconds": measure(model, activations, context)}
        for activations, context in CASES
    ]
    about = {"machine": platform.machine(), "threads": arguments.threads, "kernels": model.decoder.kernels}
    about |= {"billfish": billfish.__version__, "weight_bytes": model.decoder.nbytes, "least_milliseconds": least}
    results = {"about": about, "records": records}
    print(llm_tables.token(results) + llm_tables.least(results))
    if arguments.plot:
        draw(records, least, arguments.plot)
    if arguments.json:
        write_atomically(arguments.json, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
