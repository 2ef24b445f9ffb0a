"""The quantized matrices of a folder, from headers alone. Nothing here needs vLLM."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from billfish.checkpoints import Checkpoint, open_checkpoint
from billfish.checkpoints.entry import SUPPORTED
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.core.errors import CheckpointError, failure

CALL = "billfish.nn.vllm"


class FolderMatrix(NamedTuple):
    """A quantized matrix [N, K] of a checkpoint, or a stack of experts [E, N, K]."""

    name: str  # in the checkpoint
    format: str
    shape: tuple[int, ...]
    column_step: int  # columns are cut at multiples of this
    reordered: bool  # act-order


@lru_cache(maxsize=2)  # all layers of a process read the same folder
def open_folder(path: str) -> Checkpoint:
    """The checkpoint of a model's folder, with all experts as stacks."""
    if not Path(path).is_dir():
        problem = f"{path} is not a folder on this machine"
        raise CheckpointError(failure(CALL, problem, "Download the model: hf download ORG/NAME --local-dir DIR"))
    return by_stacks(open_checkpoint(os.fspath(path)))


def matrices_of(checkpoint: Checkpoint) -> dict[str, FolderMatrix]:
    """The quantized matrices by the path of their module; raises if there are none, or some that cannot be read."""
    found: dict[str, FolderMatrix] = {}
    for name in checkpoint:
        about = checkpoint.describe(name)
        if about.unsupported:
            raise CheckpointError(failure(CALL, f"{name} is not supported: {about.unsupported}", SUPPORTED))
        if about.format is not None:
            reordered = checkpoint.is_reordered(name)
            matrix = FolderMatrix(name, about.format.name, about.shape, about.column_step, reordered)
            found[name.removesuffix(".weight")] = matrix
    if not found:
        problem = f"{checkpoint.path} has no quantized matrices"
        raise CheckpointError(failure(CALL, problem, f"Run: billfish quantize {checkpoint.path} OUT --format fp4"))
    return found


def patterns_of_arrays(checkpoint: Checkpoint) -> list[str]:
    """Regular expressions for the names of all arrays in the files that quantized matrices are made of."""
    quantized, others = set[str](), set[str]()
    for name in checkpoint:
        (quantized if checkpoint.describe(name).format is not None else others).update(checkpoint.entry(name).parts)
    return patterns(quantized, others)


def patterns(wanted: Iterable[str], others: Iterable[str]) -> list[str]:
    """Regular expressions that match all `wanted` names and none of the others: one for all layers where that does.

    A model has some hundred thousand names, and each would have to be compared with all.
    """
    taken = {_any_number(name) for name in others}
    return sorted({re.escape(name) if _any_number(name) in taken else _any_number(name) for name in wanted})


def _any_number(name: str) -> str:
    """A regular expression for all names that differ from this one in their numbers."""
    return re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name))
