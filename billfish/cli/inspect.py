"""`billfish inspect`: what is in a checkpoint, from its headers."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from typing import Any, TextIO

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint, open_checkpoint
from billfish.checkpoints.hub import fetch_model, is_hub_name
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.mixes import FILE_TYPES, MIXES
from billfish.checkpoints.tokenizer.tokenizer_json import chat_template
from billfish.core.errors import BillfishError
from billfish.core.tables import table, terminal_width

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
# llama.cpp's names of its file types: those of mixes, else those of the one format or type.
TYPE_NAMES = {number: kind.upper().replace("FLOAT", "F").removesuffix("_GGUF") for kind, number in FILE_TYPES.items()}
TYPE_NAMES |= {mix.file_type: mix.name for mix in MIXES.values()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="PATH",
        help="GGUF file, safetensors file, model folder, or hf:USER/MODEL[:QUANT] on the Hugging Face Hub",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else (default: off)")


def run(arguments: argparse.Namespace) -> None:
    path = fetch_model("inspect", arguments.path) if is_hub_name(arguments.path) else arguments.path
    print_checkpoint(open_checkpoint(path), arguments.json, sys.stdout)


def print_checkpoint(checkpoint: Checkpoint, as_json: bool, out: TextIO) -> None:
    """The model, then a line for each tensor and for each format; or all of it as JSON."""
    if as_json:
        json.dump(_as_json(checkpoint), out, indent=1)
        print(file=out)
        return
    rows = [("tensor", "layout", "format", "shape", "group", "bits/weight", "MB")]
    for name in checkpoint:
        about = checkpoint.describe(name)
        shape = "x".join(map(str, about.shape)) or "1"
        group = str(about.group_size or "")
        size = f"{about.nbytes / 1e6:.3f}"
        rows.append((name, about.layout, about.kind, shape, group, f"{about.bits_per_weight:.3f}", size))
    counts = _totals(checkpoint)
    totals = [("format", "tensors", "weights", "bits/weight", "MB")]
    for kind, count in sorted(counts.items(), key=lambda row: -row[1][2]):
        totals.append((kind, *_total(*count)))
    totals.append(("all", *_total(*(sum(count[i] for count in counts.values()) for i in range(3)))))
    width = terminal_width(out)
    model = [(label, text) for label, text in _lines(model_facts(checkpoint)) if text]
    parts = [part for part in (table(model, width), table(rows, width), table(totals, width)) if part]
    print("\n\n".join(map("\n".join, parts)), file=out)


def model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What headers and the files beside them say of the model; None for what they do not say."""
    fields, config, folder = checkpoint.metadata, checkpoint.config, checkpoint.folder
    facts: dict[str, Any]
    if isinstance(fields, Metadata):
        architecture = fields.get("general.architecture")
        number = fields.get("general.file_type")
        facts = {
            "name": fields.get("general.name"),
            "architecture": architecture,
            "context_length": fields.get(f"{architecture}.context_length"),
            "file_type": TYPE_NAMES.get(number, number) if isinstance(number, int) else None,
            "tokenizer": fields.get("tokenizer.ggml.model"),
            "vocabulary": fields.length("tokenizer.ggml.tokens") or None,
            "chat_template": "tokenizer.chat_template" in fields,
        }
    else:
        nested = config.get("text_config")  # of models that see, too
        text = {**config, **(nested if isinstance(nested, dict) else {})}
        files = [] if folder is None or not config else [name for name in TOKENIZERS if (folder / name).is_file()]
        facts = {
            "name": folder.name if config and folder else None,
            "architecture": config.get("model_type"),
            "context_length": text.get("max_position_embeddings"),
            "file_type": None,
            "tokenizer": files[0] if files else None,
            "vocabulary": text.get("vocab_size"),
            "chat_template": None,
        }
        with contextlib.suppress(BillfishError):  # a file of the tokenizer that is damaged says nothing of the weights
            facts["chat_template"] = chat_template(folder) is not None if config and folder else None
    return {name: value if isinstance(value, (str, int)) else None for name, value in facts.items()}


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people."""
    vocabulary = [f"{facts['vocabulary']} tokens"] if facts["vocabulary"] else []
    return [
        ("name", str(facts["name"] or "")),
        ("architecture", str(facts["architecture"] or "")),
        ("context length", f"{facts['context_length'] or ''}"),
        ("file type", f"{facts['file_type'] or ''}"),
        ("tokenizer", ", ".join([facts["tokenizer"], *vocabulary]) if facts["tokenizer"] else ""),
        (
            "chat template",
            {True: "yes", False: "no", None: ""}[facts["chat_template"]] if facts["architecture"] else "",
        ),
    ]


def _total(count: int, weights: int, nbytes: int) -> tuple[str, str, str, str]:
    return str(count), str(weights), f"{8 * nbytes / max(1, weights):.3f}", f"{nbytes / 1e6:.3f}"


def _totals(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """For each kind: tensors, weights, bytes."""
    totals: dict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for name in checkpoint:
        about = checkpoint.describe(name)
        count, weights, nbytes = totals[about.kind]
        totals[about.kind] = (count + 1, weights + int(np.prod(about.shape)), nbytes + about.nbytes)
    return totals


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = []
    for name in checkpoint:
        about = checkpoint.describe(name)
        fields = {
            "name": name,
            "layout": about.layout,
            "format": None if about.format is None else about.format.name,
            "dtype": about.dtype,
            "shape": list(about.shape),
            "group_size": about.group_size,
            "act_order": about.act_order,
            "bytes": about.nbytes,
            "bits_per_weight": about.bits_per_weight,
        }
        tensors.append(fields | ({"unsupported": about.unsupported} if about.unsupported else {}))
    head = {"path": str(checkpoint.path), "layouts": sorted(checkpoint.layouts), **model_facts(checkpoint)}
    return {**head, "tensors": tensors}
