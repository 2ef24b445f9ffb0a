"""The oracle: NumPy, obvious and slow. Every other backend is tested against it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import Backend, Problem
from billfish.tensor import QuantizedTensor


class ReferenceBackend(Backend):
    """Decodes all weights, then multiplies in float64 and rounds once to the type of x."""

    name = "reference"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"it computes in CPU memory, and x is on {problem.device}"
        return True, ""

    def prepack(self, tensor: QuantizedTensor) -> NDArray[np.float32]:
        out = np.empty(tensor.shape, np.float32)
        self.dequantize(tensor, out)
        return out

    def matmul(self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None) -> NDArray[Any]:
        with np.errstate(invalid="ignore", over="ignore"):
            y = x.astype(np.float64) @ weights.T.astype(np.float64)
            if bias is not None:
                y += bias.astype(np.float64)
            return y.astype(x.dtype)

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        tensor.format.dequantize_into(tensor.planes, tensor.group_size, out)
