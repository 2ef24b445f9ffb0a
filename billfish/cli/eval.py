"""`billfish eval`: perplexity and KL divergence of one model, or a table of several."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from billfish.cli.model_arguments import add_model_arguments, load_model, set_threads
from billfish.cli.pictures import INK, add_caption, png, require
from billfish.core.errors import DataError, readable
from billfish.core.files import read_text, write_atomically
from billfish.llm.evaluation import Evaluation, Truth, evaluate, usual_window
from billfish.llm.model import Model, load_quickly

COLUMNS = ("model", "bits per weight", "perplexity", "KL divergence", "same best token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, several="; one or more", named=False)
    parser.add_argument("--text", required=True, metavar="FILE", help="text to predict, in UTF-8 (required)")
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="reference model: report KL(reference || MODEL). The reference runs with exact activations (float16 on "
        "a GPU); --quantize and --activations do not apply to it (default: none)",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="split the text into windows of N tokens, each run with an empty context "
        "(default: 512, or the model's context length if shorter)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="use the first N tokens of the text (default: all)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document, a list with an object per model (default: off)"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help=".png file to write: KL divergence over bits per weight; needs --against (default: none)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Predict a text with each model in turn. Memory holds the reference and one other model at a time."""
    set_threads("eval", arguments.threads)
    for name, count in (("tokens", arguments.tokens), ("window", arguments.window)):
        if count is not None and count < 2:
            raise DataError(f"eval: --{name} is {count}. Pass at least 2.")
    if arguments.plot:
        _check_plot(arguments.plot, arguments.against)
    text = read_text("eval", "--text", arguments.text)
    against = None if arguments.against is None else load_quickly(arguments.against, arguments.device, None)
    truth: Truth | None = None
    records = []
    for path in arguments.models or [None]:
        model = load_model("eval", arguments, path)
        tokens = model.tokenizer.encode(text, special=False)[: arguments.tokens]
        if against is not None and truth is None:
            truth = Truth(against, tokens, arguments.window or usual_window(model, against))
        window = arguments.window or (usual_window(model) if truth is None else truth.window)
        found = evaluate(model, tokens, against=truth, activations=arguments.activations, window=window, progress=True)
        records.append(record_of(model, path, found, arguments.activations, window))
        del model
    if arguments.json:
        print(json.dumps(records))
    else:
        reference = None if arguments.against is None else Path(arguments.against).name
        print("\n".join(_lines(records, reference) if len(records) > 1 else _sentences(records[0], reference)))
    if arguments.plot:
        write_atomically(arguments.plot, png(picture(records, Path(arguments.against).name)))


def record_of(
    model: Model, path: str | None, found: Evaluation, activations: str | None, window: int
) -> dict[str, Any]:
    """What JSON says of a model."""
    return {
        "model": model.config.name,
        "file": model.config.name if path is None else Path(path).name,
        "activations": activations or model.decoder.usual or "float16",
        "window": window,
        "bits_per_weight": model.decoder.tensors.bits_per_weight,
        "tokens": found.tokens,
        "loss": found.loss,
        "loss_error": found.loss_error,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "divergence": found.divergence,
        "divergence_error": found.divergence_error,
        "same_best": found.same_best,
        "same_best_error": found.same_best_error,
        "divergence_999": found.divergence_999,
    }


def _sentences(record: dict[str, Any], against: str | None) -> list[str]:
    """One model, for people."""
    perplexity = f"{record['perplexity']:.3f} ± {record['perplexity_error']:.3f}"
    lines = [f"perplexity     {perplexity}   ({record['tokens']} tokens, {record['activations']})"]
    if against is not None:
        kl = f"{record['divergence']:.3g} ± {record['divergence_error']:.1g}"
        lines.append(f"KL divergence  {kl} nats from {against}")
        lines.append(f"same best      {record['same_best']:.2%} ± {record['same_best_error']:.2%} of tokens")
    return lines


def _lines(records: list[dict[str, Any]], against: str | None) -> list[str]:
    """Several models, as a table that is Markdown as well."""
    columns = COLUMNS if against is not None else COLUMNS[:3]
    rows: list[tuple[str, ...]] = [columns]
    for record in records:
        cells = [record["file"], f"{record['bits_per_weight']:.2f}"]
        cells.append(f"{record['perplexity']:.3f} ± {record['perplexity_error']:.3f}")
        if against is not None:
            cells.append(f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}")
            cells.append(f"{record['same_best']:.2%} ± {record['same_best_error']:.2%}")
        rows.append(tuple(cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    table = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    tokens = f"{records[0]['tokens']} tokens, {records[0]['activations']}"
    return [*table, f"{tokens}; ± is one standard error" + (f"; KL from {against}" if against else "")]


def picture(records: list[dict[str, Any]], against: str) -> Any:
    """KL divergence over bits per weight, a point with its standard error for each model."""
    figure = require()(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for record in records:
        x, y = record["bits_per_weight"], record["divergence"]
        axes.errorbar(x, y, yerr=record["divergence_error"], fmt="o", color="#D55E00", ecolor=INK, capsize=2)
        axes.annotate(record["file"], (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8, color=INK)
    if all(record["divergence"] > 0 for record in records):
        axes.set_yscale("log")
    axes.set_xlabel("bits per weight of the layers, scales included")
    axes.set_ylabel(f"KL divergence from {against}, nats")
    axes.margins(x=0.15)
    axes.grid(which="both", alpha=0.2)
    add_caption(figure, f"{records[0]['tokens']} tokens, x {records[0]['activations']}")
    return figure


def _check_plot(path: str, against: str | None) -> None:
    """Raises before hours are spent on numbers that nothing can draw."""
    if against is None:
        raise DataError("eval: --plot needs --against MODEL: it shows the KL divergence from that model.")
    if Path(path).suffix != ".png":
        raise DataError(f"eval: --plot {readable(path)} is no .png file. Choose a name that ends in .png.")
    require()
