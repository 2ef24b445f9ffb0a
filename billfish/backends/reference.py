"""The oracle: NumPy, obvious and slow. Every other backend is tested against it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.activations import IntegerActivations, quantize_activations
from billfish.arrays import round_once
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

    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        with np.errstate(invalid="ignore", over="ignore"):
            values = x.astype(np.float64)
            if activations != "exact":
                values = quantize_activations(x.astype(np.float32), activations).values(x.shape[1])
            y = values @ weights.T.astype(np.float64)
            if bias is not None:
                y += bias.astype(np.float64)
            return round_once(y, x.dtype)

    def matmul_codes(self, codes: NDArray[np.int8], scale: NDArray[np.float32], weights: Any) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore", over="ignore"):
            x = IntegerActivations(codes.astype(np.int32), scale).values(codes.shape[1])
            return (x @ weights.T.astype(np.float64)).astype(np.float32)

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        tensor.format.dequantize_into(tensor.planes, tensor.group_size, out)
