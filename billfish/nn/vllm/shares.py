"""Which rows and columns of a folder's matrices a rank has, and how they are read. Nothing here needs vLLM.

vLLM has one layer for several matrices, q_proj, k_proj and v_proj say, and cuts each of these *parts* evenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from billfish.checkpoints import Checkpoint
from billfish.core.errors import FormatError, ShapeError, bad_argument, failure
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor, join_rows, why_not_joined
from billfish.nn.vllm.checkpoint_folder import CALL, FolderMatrix

Span = tuple[int, int]


class MatrixRows(NamedTuple):
    """Rows of a layer that are one matrix for the model: share `place` of `shares` even ones, of `size` rows each."""

    size: int
    place: int = 0
    shares: int = 1


class Share(NamedTuple):
    """What a rank has of a matrix [N, K]."""

    matrix: FolderMatrix
    rows: Span
    columns: Span | None = None  # all of them


def parts_of(sizes: Sequence[int], rank: int, ranks: int, replicas: int = 1) -> list[MatrixRows]:
    """The parts of a layer, of which a rank has so many rows.

    replicas: how many ranks have the same keys and values, the second and third part.
    """
    same = [1 if i == 0 else replicas for i in range(len(sizes))]
    return [MatrixRows(size, rank % ranks // r, ranks // r) for size, r in zip(sizes, same, strict=True)]


def names_of_parts(path: str, merged: dict[str, list[str]], matrices: dict[str, FolderMatrix]) -> list[str]:
    """The modules of a folder that a layer of vLLM's is made of; none where they are not quantized.

    merged: the parts of merged layers by the last name of such a layer. A folder may have them as one matrix, too.
    """
    if path in matrices:
        return [path]
    parent, dot, last = path.rpartition(".")
    return all_or_none(path, [f"{parent}{dot}{part}" for part in merged.get(last, [last])], matrices)


def names_of_experts(path: str, matrices: dict[str, FolderMatrix]) -> list[str]:
    """The modules of a folder that hold gate, up and down of all experts; none where these are not quantized."""
    block = path.removesuffix(".routed_experts")  # vLLM's own module in a mixture
    return all_or_none(block, [f"{block}.{part}_proj" for part in ("gate", "up", "down")], matrices)


def all_or_none(path: str, names: list[str], matrices: dict[str, FolderMatrix]) -> list[str]:
    """The names if all of them are quantized; raises if only some are, which vLLM has in one layer."""
    missing = [name for name in names if name not in matrices]
    if missing and missing != names:
        problem = f"{path} needs {', '.join(names)} all quantized or none, and {missing[0]} is not quantized"
        raise FormatError(failure(CALL, problem))
    return [] if missing else names


def shares_of(
    path: str, matrices: Sequence[FolderMatrix], parts: Sequence[MatrixRows], columns: Span | None
) -> list[Share]:
    """A rank's share of each part of a layer, whose parts are a matrix each, or all in one."""
    whole = [part.size * part.shares for part in parts]
    starts = [0] * len(parts)
    if len(matrices) == 1:
        starts = [0, *itertools.accumulate(whole)][:-1]
        matrices, whole = [*matrices] * len(parts), [sum(whole)] * len(parts)
    if [matrix.shape[0] for matrix in matrices] != whole:
        found = ", ".join(str(matrix.shape) for matrix in matrices)
        expected = f"{', '.join(map(str, whole))} rows, as in vLLM's layer"
        raise ShapeError(bad_argument(CALL, f"shape of {path}", found, expected))
    for matrix in matrices:
        check_columns(matrix, columns)
    rows = [(s + p.place * p.size, s + (p.place + 1) * p.size) for s, p in zip(starts, parts, strict=True)]
    return [Share(matrix, span, columns) for matrix, span in zip(matrices, rows, strict=True)]


def check_columns(matrix: FolderMatrix, columns: Span | None) -> None:
    """Raises unless a rank can have these columns of a matrix: all, or some that begin and end where groups do."""
    if columns is None:
        return
    k, step = matrix.shape[-1], matrix.column_step
    possible = [r for r in range(1, k // step + 1) if k % r == 0 and k // r % step == 0]
    if matrix.reordered:
        problem = f"{matrix.name} has permuted columns (act-order), which cannot be split"
        raise ShapeError(failure(CALL, problem, "Use --tensor-parallel-size 1, or a checkpoint without act-order."))
    if columns[0] % step or (columns[1] % step and columns[1] != k):
        problem = f"{matrix.name} ({matrix.format}) cannot be split at columns {columns[0]} and {columns[1]} of {k}"
        fix = f"It can be split at multiples of {step}: for {', '.join(map(str, possible))} ranks."
        raise ShapeError(failure(CALL, problem, fix))


def read_shares(checkpoint: Checkpoint, shares: Sequence[Share]) -> list[QuantizedTensor]:
    """The matrices for a layer's product: one with the rows of all parts, or several where these cannot be joined."""
    tensors: list[QuantizedTensor] = []
    for matrix, rows, columns in shares:
        tensor = checkpoint.read(matrix.name, rows=rows, columns=columns)
        assert isinstance(tensor, QuantizedTensor)
        tensors.append(tensor)
    return tensors if why_not_joined(tensors) else [join_rows(tensors)]


def read_stack(
    checkpoint: Checkpoint, matrix: FolderMatrix, rows: Span | None, columns: Span | None, experts: Span
) -> QuantizedExperts:
    """Some rows, or some columns, of some experts of a stack."""
    stack = checkpoint.read(matrix.name, rows=rows, columns=columns, experts=experts)
    assert isinstance(stack, QuantizedExperts)
    return stack


def span_of(place: int, size: int, whole: int) -> Span | None:
    """Share `place` of an axis; None for all of it."""
    return None if size == whole else (place * size, (place + 1) * size)
