"""verify: two checkpoints, tensor by tensor. Equal bits, equal values, or the error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint, Source, opened
from billfish.checkpoints.entry import Span, Tensor
from billfish.checkpoints.names.expert_stacks import by_stacks, upright
from billfish.checkpoints.names.gguf_names import UnknownModel, by_model_names, is_gguf
from billfish.checkpoints.reports import Comparison, Outcome, VerificationReport
from billfish.core.errors import CheckpointError, failure
from billfish.core.progress import OnProgress, follow
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize

VERIFY_ELEMENTS = 1 << 24  # how many weights are compared at a time


def verify(a: Source, b: Source, *, progress: bool | OnProgress = True) -> VerificationReport:
    """Compare two checkpoints tensor by tensor, whatever their layouts: what `billfish verify` does.

    a, b: paths that :func:`billfish.open_checkpoint` takes, or checkpoints that it returned. GGUF's names are
    translated where the other one has those of transformers.
    progress: True draws a bar on terminals, False nothing; or a callable (bytes done, bytes in all, name).

    Returns a VerificationReport, which is true if every tensor is in both with the same values. Raises CheckpointError
    for what cannot be read.

        >>> bool(bf.verify("model.gguf", "model.gguf", progress=False))
        True
    """
    first, second = opened(a), opened(b)
    if is_gguf(first) != is_gguf(second):  # by the names of models
        first, second = _by_model_names(first), _by_model_names(second)
    if set(first) != set(second):  # stacks of one may be a matrix for each expert in the other
        first, second = by_stacks(first), by_stacks(second)
    first, second = upright(first), upright(second)
    comparisons = []
    with follow(progress, first.nbytes + second.nbytes) as advance:
        for name in dict.fromkeys([*first, *second]):
            comparisons.append(compare(first, second, name))
            advance(sum(ck.describe(name).nbytes for ck in (first, second) if name in ck), name)
            first.release()
            second.release()
    return VerificationReport(first.path, second.path, tuple(comparisons))


def _by_model_names(checkpoint: Checkpoint) -> Checkpoint:
    try:
        return by_model_names(checkpoint)
    except UnknownModel:  # its names may still be those of the other one
        return checkpoint


def compare(first: Checkpoint, second: Checkpoint, name: str) -> Comparison:
    """One tensor of two checkpoints, some rows at a time."""
    if name not in first or name not in second:
        outcome: Outcome = "only in A" if name in first else "only in B"
        return Comparison(name, outcome, f"only in {first.path if name in first else second.path}")
    a, b = first.describe(name), second.describe(name)
    if a.shape != b.shape:
        return Comparison(name, "different", f"shape {a.shape} and {b.shape}")
    reasons = [about.unsupported for about in (a, b) if about.unsupported]
    if reasons:
        return Comparison(name, "not compared", f"not compared: {reasons[0]}")
    if not a.shape or 0 in a.shape:
        same = first.read(name).tobytes() == second.read(name).tobytes()  # type: ignore[union-attr]
        return Comparison(name, "equal bits", "equal bits") if same else Comparison(name, "different", "different")
    return _compare_rows(first, second, name)


def _compare_rows(first: Checkpoint, second: Checkpoint, name: str) -> Comparison:
    a, b = first.describe(name), second.describe(name)
    orders = [ck.permutation(name) for ck in (first, second)]
    in_order = [np.arange(a.shape[-1]) if order is None else order for order in orders]
    bits = a.kind == b.kind and a.group_size == b.group_size and np.array_equal(in_order[0], in_order[1])
    squares = power = largest = 0.0
    equal = []  # parts before the first difference; their values only matter if there is one
    for experts, rows in _spans(a.shape):
        parts = [_matrix(ck.read(name, rows=rows, experts=experts)) for ck in (first, second)]
        if bits and _same_bits(*parts):
            equal.append((experts, rows))
            continue
        bits = False
        x, y = (_values(part, a.shape[-1]) for part in parts)
        with np.errstate(invalid="ignore"):
            difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
        difference[np.isnan(difference)] = np.inf  # NaN beside a number
        squares += float(np.sum(difference**2))
        power += _power(x)
        largest = max(largest, float(difference.max()))
    if bits:
        return Comparison(name, "equal bits", "equal bits")
    if squares == 0:
        return Comparison(name, "equal values", f"equal values, {a.kind} and {b.kind}")
    for experts, rows in equal:
        power += _power(_values(_matrix(first.read(name, rows=rows, experts=experts)), a.shape[-1]))
    relative = float(np.sqrt(squares / power)) if power else np.inf
    verdict = f"relative error {relative:.3g}, largest difference {largest:.3g}, {a.kind} and {b.kind}"
    return Comparison(name, "different", verdict, relative, largest)


def _spans(shape: tuple[int, ...]) -> Iterator[tuple[Span | None, Span | None]]:
    """The parts of a tensor that are compared at a time: some rows of a matrix, or of one matrix of a stack."""
    stacked = len(shape) > 2
    row = math.prod(shape[1 + stacked :])
    step = max(1, VERIFY_ELEMENTS // max(1, row))
    for expert in range(shape[0] if stacked else 1):
        for start in range(0, shape[stacked], step):
            rows = (start, min(start + step, shape[stacked]))
            yield ((expert, expert + 1) if stacked else None), rows


def _matrix(part: Tensor) -> QuantizedTensor | Array:
    return part[0] if isinstance(part, QuantizedExperts) else part


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        pairs = [(a.storage[name], b.storage[name]) for name in a.storage]
    else:
        pairs = [(a, b)]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def _power(x: NDArray[np.float64]) -> float:
    """The sum of squares of all that is finite."""
    return float(np.sum(x**2, where=np.isfinite(x)))


def _values(part: Any, k: int) -> NDArray[np.float64]:
    if isinstance(part, QuantizedTensor):
        return dequantize(part).astype(np.float64)
    if part.dtype.kind == "c":
        raise CheckpointError(failure("verify", f"tensors of type {part.dtype} cannot be compared"))
    return part.reshape(-1, k).astype(np.float64)
