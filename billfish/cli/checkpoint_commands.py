"""What `billfish inspect`, `quantize`, `convert` and `verify` print."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any, TextIO

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint, load
from billfish.checkpoints.conversion import convert
from billfish.checkpoints.verification import verify
from billfish.core.errors import FormatError, complaint
from billfish.core.tables import table, terminal_width

# ---- inspect ------------------------------------------------------------------------------------------------------


def inspect(path: str, as_json: bool, out: TextIO) -> None:
    """Print what is in a checkpoint, from its headers."""
    checkpoint = load(path)
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


# ---- quantize, convert and verify ---------------------------------------------------------------------------------


def quantize_and_print(
    source: str,
    out: str,
    format: str | None,
    bits: float | None,
    formats: str | None,
    plan: str | None,
    keep: list[str],
    method: Any,
    imatrix: str | None,
    calibrate: bool | str,
    **options: Any,
) -> None:
    """`billfish quantize`. Rules read REGEX=FORMAT, REGEX=FORMAT:GROUP, or REGEX=keep."""
    # Here, as it can run models: the other commands start without that.
    from billfish.quantizing.quantize_checkpoint import quantize_checkpoint, quantize_to_bits

    if calibrate is True or (method == "gptq" and not calibrate and imatrix is None):
        print("calibrating with the text that billfish carries; --calibrate TEXT takes another", file=sys.stderr)
    rules, known = dict(map(_rule, keep)), {"method": method, "statistics": imatrix, "calibrate": calibrate}
    if format is not None:
        for name, value in (("formats", formats), ("plan", plan)):
            if value is not None:
                raise FormatError(complaint("quantize", f"--{name}", f"{value!r} beside --format", "it beside --bits"))
        print(quantize_checkpoint(source, out, format, keep=rules, **known, **options))
        return
    assert bits is not None
    print(quantize_to_bits(source, out, bits, formats, plan, rules, **known, **options))


def convert_and_print(source: str, out: str, to: Any, **options: Any) -> None:
    """`billfish convert`."""
    print(convert(source, out, to, **options))


def verify_and_print(a: str, b: str) -> bool:
    """`billfish verify`; whether all values are the same."""
    report = verify(a, b)
    print(report.text(terminal_width(sys.stdout)))
    return report.same


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, choice = text.rpartition("=")
    if not equals:
        raise FormatError(complaint("quantize", "keep", repr(text), "REGEX=FORMAT[:GROUP], or REGEX=keep"))
    return pattern, choice
