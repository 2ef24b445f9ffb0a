"""What kernels of rows that are sampled late take and give: late.cuh has the same structures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MOST_SCORED = 21  # of a row: the chosen token, and 20 alternatives
# adjustments, mask: addresses; mask 0: all tokens may come next. row: of the logits.
LATE_ROW = np.dtype(
    [("adjustments", "u8"), ("mask", "u8"), ("count", "i4"), ("row", "i4"), ("above", "f4"), ("below", "f4"),
     ("alternatives", "i4"), ("unused", "i4")]
)  # fmt: skip
SCORED_TOKEN = np.dtype([("token", "i4"), ("log_probability", "f4")])


class LateMemory(NamedTuple):
    """Addresses: rows LATE_ROW [rows], choices CHOICE [rows], logits float32 [rows, vocabulary], picked int32 [rows],
    scored SCORED_TOKEN [rows, MOST_SCORED]."""

    rows: int
    choices: int
    logits: int
    picked: int
    scored: int
