"""Where the time of one token goes: the picture and the table of docs/inside-a-token.md.

    python -m benchmarks.inside_a_token [--threads 2] [--plot docs/inside-a-token.svg] [--json FILE]
    python -m benchmarks.inside_a_token --from benchmarks/results/inside_a_token.json --plot docs/inside-a-token.svg

The second measures nothing: it draws what was recorded.

SmolLM2-135M-Instruct; the parts are timed by the decoder itself, all that they leave is Python (embedding, calls).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

import billfish
from benchmarks import llm_tables
from billfish.backends.cpu import _cpu
from billfish.cli import pictures
from billfish.cli.info import cpu_name
from billfish.core.files import write_atomically
from billfish.llm import load

CASES = (("q8", 0), ("q16", 0), ("exact", 0), ("q8", 1024))
TOKENS = 48
# Okabe and Ito's colours; products in warm ones, the rest in cold ones.
PALETTE = ["#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#8B4513", "#0072B2", "#56B4E9", "#009E73", "#666666", "#BBBBBB"]
COLOURS = dict(zip(llm_tables.PARTS, PALETTE, strict=True))


def measure(model: Any, activations: str, context: int) -> dict[str, float]:
    """Milliseconds of each part of a token, with so many tokens before it."""
    decoder, rng = model.decoder, np.random.default_rng(0)
    cache = model.decoder.cache(context + 2 * TOKENS)
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


LEAST = "reading the weights"


def figure_of(results: dict[str, Any]) -> Any:
    """Bars of what was recorded, and a caption of what the record says of where and when."""
    about, records = results["about"], results["records"]
    figure = pictures.require()(figsize=(9, 3.8), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{r['activations']}, after {r['context']} tokens" for r in records]
    left = np.zeros(len(records))
    for part, colour in COLOURS.items():
        widths = np.array([r["milliseconds"][part] for r in records])
        axes.barh(names, widths, left=left, color=colour, label=part, edgecolor="white", linewidth=0.4)
        left += widths
    for i, total in enumerate(left):
        axes.text(total, i, f" {total:.1f} ms", va="center", fontsize=8)
    axes.axvline(about["least_milliseconds"], color=pictures.INK, linewidth=1, linestyle="--", label=LEAST)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds for one token", xlim=(0, left.max() * 1.12))
    figure.legend(fontsize=8, ncols=1, loc="outside right center")
    machine = {"architecture": about["machine"], "isa": about["kernels"], **about}
    versions = {name: about[name] for name in ("billfish", "numpy", "python") if name in about}
    pictures.add_caption(figure, f"SmolLM2-135M-Instruct · {pictures.caption(machine, versions)}")
    return figure


def draw(results: dict[str, Any], path: str) -> None:
    """The same file for the same record: its identifiers are not random, and it does not hold today's date."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "billfish"}):
        figure_of(results).savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def measured(threads: int) -> dict[str, Any]:
    """The records of this machine."""
    _cpu.set_threads(threads)
    model = load(device="cpu")
    level = _cpu.levels()[0]
    least = model.decoder.nbytes / _cpu.read_rate(level, 256) * 1e3
    records = [
        {"activations": activations, "context": context, "milliseconds": measure(model, activations, context)}
        for activations, context in CASES
    ]
    about = {"machine": platform.machine(), "cpu": cpu_name(), "threads": threads, "kernels": model.decoder.kernels}
    about |= {"billfish": billfish.__version__, "numpy": np.__version__, "python": platform.python_version()}
    about |= {"date": time.strftime("%Y-%m-%d"), "weight_bytes": model.decoder.nbytes, "least_milliseconds": least}
    return {"about": about, "records": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--from", dest="record", metavar="FILE", help="measure nothing; take the records from there")
    parser.add_argument("--plot", metavar="FILE", help="draw the picture there; needs billfish[bench]")
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    results = json.loads(Path(arguments.record).read_text()) if arguments.record else measured(arguments.threads)
    print(llm_tables.token(results) + llm_tables.least(results))
    if arguments.plot:
        draw(results, arguments.plot)
    if arguments.json:
        write_atomically(arguments.json, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
