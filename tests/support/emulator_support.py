"""What the tests of the Metal emulator share."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.backends import emulator

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
ORDERS = ("forward", "reverse", "random")


def each(source: str, inputs: list[np.ndarray], dtype: Any, n: int | None = None, **others: Any) -> np.ndarray:
    """`y[i] = source`, for each element of the first input. Inputs are a, b, c."""
    n = inputs[0].size if n is None else n
    names = ["a", "b", "c"][: len(inputs)]
    kernel = emulator.metal_kernel("each", names, ["y"], f"uint i = thread_position_in_grid.x; {source}", **others)
    (y,) = kernel(inputs=inputs, grid=(n, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(n,)], output_dtypes=[dtype])
    return y
