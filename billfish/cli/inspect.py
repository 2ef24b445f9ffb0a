"""`billfish inspect`: what is in a checkpoint, from its headers."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from typing import Any, TextIO

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint, open_checkpoint
from billfish.core.tables import table, terminal_width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a .gguf or .safetensors file, or a model's folder")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> None:
    print_checkpoint(open_checkpoint(arguments.path), arguments.json, sys.stdout)


def print_checkpoint(checkpoint: Checkpoint, as_json: bool, out: TextIO) -> None:
    """A line for each tensor and for each format, or all of it as JSON."""
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
    print("\n".join([*table(rows, width), "", *table(totals, width)]), file=out)


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
    return {"path": str(checkpoint.path), "layouts": sorted(checkpoint.layouts), "tensors": tensors}
