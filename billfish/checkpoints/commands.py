"""What `billfish inspect`, `quantize`, `convert` and `verify` do."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint, load
from billfish.checkpoints.entry import Description
from billfish.checkpoints.names import UnknownModel, by_model_names, is_gguf
from billfish.checkpoints.writers import TARGETS, Report, export
from billfish.checkpoints.writers.base import Target
from billfish.checkpoints.writers.plan import Quantization, Settings, by_reason
from billfish.errors import CheckpointError, FormatError, complaint
from billfish.format import Format, get_format
from billfish.ops import check_method, dequantize
from billfish.progress import Progress
from billfish.tensor import QuantizedTensor

VERIFY_ELEMENTS = 1 << 24  # how many weights are compared at a time


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
        rows.append((name, about.layout, kind_of(about), shape, group, f"{about.bits_per_weight:.3f}", size))
    _print_table(rows, out)
    print(file=out)
    totals = [("format", "tensors", "weights", "bits/weight", "MB")]
    for kind, (count, weights, nbytes) in sorted(_totals(checkpoint).items(), key=lambda row: -row[1][2]):
        totals.append((kind, str(count), str(weights), f"{8 * nbytes / max(1, weights):.3f}", f"{nbytes / 1e6:.3f}"))
    count, weights, nbytes = (sum(row[i] for row in _totals(checkpoint).values()) for i in range(3))
    totals.append(("all", str(count), str(weights), f"{8 * nbytes / max(1, weights):.3f}", f"{nbytes / 1e6:.3f}"))
    _print_table(totals, out)


def kind_of(about: Description) -> str:
    """The format, or the type of a plain array; with what is special about it."""
    if about.unsupported:
        return f"not supported: {about.unsupported}"
    kind = about.dtype.lower() if about.format is None else about.format.name
    return f"{kind}, act-order" if about.act_order else kind


def _totals(checkpoint: Checkpoint) -> dict[str, tuple[int, int, int]]:
    """For each kind: tensors, weights, bytes."""
    totals: dict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
    for name in checkpoint:
        about = checkpoint.describe(name)
        count, weights, nbytes = totals[kind_of(about)]
        totals[kind_of(about)] = (count + 1, weights + int(np.prod(about.shape)), nbytes + about.nbytes)
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


def _print_table(rows: Sequence[Sequence[str]], out: TextIO) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=out)


# ---- quantize and convert -----------------------------------------------------------------------------------------


def convert(source: str, out: str, to: str, requantize: bool, quantization: Quantization | None = None) -> Report:
    """Write a checkpoint in another layout, or quantized, with a progress bar."""
    call = "quantize" if quantization else "convert"
    target = target_of(call, to)
    if quantization:
        for format in (quantization.format, *(rule[1] for rule in quantization.rules)):
            allowed = target.quantizes or target.formats
            if format is not None and target.own(format).name not in allowed:
                takes = f"one of {', '.join(allowed)} for {target.name}"
                raise FormatError(complaint(call, "--format", format.name, takes))
    bars: list[Progress] = []

    def start(total: int) -> Callable[[int, str], None]:
        bars.append(Progress(total, "B"))
        return bars[0].advance

    try:
        report = export(call, load(source), out, Settings(target, quantization, requantize), start)
    finally:
        for bar in bars:
            bar.__exit__(*sys.exc_info())
    for line in by_reason(report.notes):
        print(line, file=sys.stderr)
    return report


def target_of(call: str, name: str) -> Target:
    if name not in TARGETS:
        raise FormatError(complaint(call, "--to", repr(name), f"one of {', '.join(TARGETS)}"))
    return TARGETS[name]()


def quantization_of(format: str, group_size: int | None, method: str, keep: Sequence[str]) -> Quantization:
    """The settings of `billfish quantize`. Rules read REGEX=FORMAT, REGEX=FORMAT:GROUP, or REGEX=keep."""
    call = "quantize"
    check_method(call, method)
    chosen = get_format(format, call)
    _check_group(call, "--group-size", chosen, group_size)
    return Quantization(chosen, group_size, method, tuple(_rule(text) for text in keep))


def _rule(text: str) -> tuple[re.Pattern[str], Format | None, int | None]:
    pattern, equals, choice = text.rpartition("=")
    name, _, group = choice.partition(":")
    try:
        compiled = re.compile(pattern)
        group_size = int(group) if group else None
    except (re.error, ValueError) as error:
        raise FormatError(complaint("quantize", "--keep", f"{text!r} ({error})", "REGEX=FORMAT[:GROUP]")) from None
    if not equals:
        raise FormatError(complaint("quantize", "--keep", repr(text), "REGEX=FORMAT[:GROUP], or REGEX=keep"))
    if name == "keep":
        return compiled, None, None
    format = get_format(name, "quantize")
    _check_group("quantize", "--keep", format, group_size)
    return compiled, format, group_size


def _check_group(call: str, argument: str, format: Format, group_size: int | None) -> None:
    if group_size is not None and group_size not in format.group_sizes:
        if group_size == -1 and format.whole_row_groups:
            return
        allowed = ", ".join(map(str, format.group_sizes)) + (" or -1" if format.whole_row_groups else "")
        raise FormatError(complaint(call, argument, group_size, f"{allowed} for {format.name}"))


# ---- verify -------------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """How one tensor of A differs from B's."""

    name: str
    same: bool
    verdict: str


def verify(a: str, b: str, out: TextIO) -> bool:
    """Compare two checkpoints tensor by tensor and print the result; whether all values are the same."""
    first, second = load(a), load(b)
    if is_gguf(first) != is_gguf(second):  # by the names of models
        first, second = _by_model_names(first), _by_model_names(second)
    same = True
    with Progress(first.nbytes + second.nbytes, "B") as bar:
        for name in dict.fromkeys([*first, *second]):
            comparison = compare(first, second, name)
            same = same and comparison.same
            print(f"{comparison.name}: {comparison.verdict}", file=out)
            done = sum(ck.describe(name).nbytes for ck in (first, second) if name in ck)
            bar.advance(done, name)
            first.release()
            second.release()
    print("the same values" if same else "different", file=out)
    return same


def _by_model_names(checkpoint: Checkpoint) -> Checkpoint:
    try:
        return by_model_names(checkpoint)
    except UnknownModel:  # its names may still be those of the other one
        return checkpoint


def compare(first: Checkpoint, second: Checkpoint, name: str) -> Comparison:
    """One tensor of two checkpoints, some rows at a time."""
    if name not in first or name not in second:
        return Comparison(name, False, f"only in {first.path if name in first else second.path}")
    a, b = first.describe(name), second.describe(name)
    if a.shape != b.shape:
        return Comparison(name, False, f"shape {a.shape} and {b.shape}")
    reasons = [about.unsupported for about in (a, b) if about.unsupported]
    if reasons:
        return Comparison(name, False, f"not compared: {reasons[0]}")
    if not a.shape or 0 in a.shape:
        same = first.read(name).tobytes() == second.read(name).tobytes()  # type: ignore[union-attr]
        return Comparison(name, same, "equal bits" if same else "different")
    return _compare_rows(first, second, name)


def _compare_rows(first: Checkpoint, second: Checkpoint, name: str) -> Comparison:
    a, b = first.describe(name), second.describe(name)
    rows = a.shape[0] if a.format is None and b.format is None else int(np.prod(a.shape[:-1])) or 1
    step = max(1, VERIFY_ELEMENTS // max(1, int(np.prod(a.shape)) // rows))
    orders = [ck.permutation(name) for ck in (first, second)]
    in_order = [np.arange(a.shape[-1]) if order is None else order for order in orders]
    bits = kind_of(a) == kind_of(b) and a.group_size == b.group_size and np.array_equal(in_order[0], in_order[1])
    squares = power = largest = 0.0
    for start in range(0, rows, step):
        span = (start, min(start + step, rows))
        parts = [ck.read(name, rows=span) for ck in (first, second)]
        if bits and _same_bits(*parts):
            continue
        bits = False
        x, y = (_values(part, a.shape[-1]) for part in parts)
        with np.errstate(invalid="ignore"):
            difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
        squares += float(np.sum(difference**2))
        power += float(np.sum(x.astype(np.float64) ** 2))
        largest = max(largest, float(difference.max()))
    if bits:
        return Comparison(name, True, "equal bits")
    if squares == 0:
        return Comparison(name, True, f"equal values, {kind_of(a)} and {kind_of(b)}")
    relative = np.sqrt(squares / power) if power else np.inf
    kinds = f"{kind_of(a)} and {kind_of(b)}"
    return Comparison(name, False, f"relative error {relative:.3g}, largest difference {largest:.3g}, {kinds}")


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        pairs = [(a.storage[name], b.storage[name]) for name in a.storage]
    else:
        pairs = [(a, b)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def _values(part: Any, k: int) -> NDArray[np.float64]:
    if isinstance(part, QuantizedTensor):
        return dequantize(part).astype(np.float64)
    if part.dtype.kind == "c":
        raise CheckpointError(complaint("verify", "tensor", str(part.dtype), "real numbers"))
    return part.reshape(-1, k).astype(np.float64)
