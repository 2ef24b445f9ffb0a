"""The oracle: NumPy, obvious and slow. Every other backend is tested against it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import NumpyBackend, Problem
from billfish.core.activations import IntegerActivations, quantize_activations, quantize_rows
from billfish.core.arrays import Input, round_once
from billfish.core.machine import with_known_floats
from billfish.core.tensor import QuantizedTensor


class DecodedWeights(NamedTuple):
    """values float32 [N, K]; how many along K share a scale decides how x is rounded to integers."""

    values: NDArray[np.float32]
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class ReferenceBackend(NumpyBackend):
    """Decodes all weights, then multiplies in float64 and rounds once to the type of x."""

    name = "reference"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"runs on arrays in CPU memory; x is on {problem.device}"
        return True, ""

    def usable(self) -> tuple[bool, str]:
        return True, "NumPy in float64; slow"

    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> DecodedWeights:
        out = np.empty(tensor.shape, np.float32)
        tensor.format.dequantize_into(tensor.planes, tensor.group_size, out)
        return DecodedWeights(out, tensor.group_size)

    @with_known_floats
    def multiply(
        self, x: NDArray[Any] | IntegerActivations, weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        k, dtype = weights.shape[1], np.dtype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            if isinstance(x, IntegerActivations):
                values = x.values(k)
            else:
                dtype = x.dtype
                if activations == "exact":
                    values = x.astype(np.float64)
                elif activations == "fp8":
                    values = quantize_rows(x, activations).values()
                else:
                    values = quantize_activations(x, activations, weights.group_size).values(k)
            y = values @ weights.values.T.astype(np.float64)
            if bias is not None:
                y += bias.astype(np.float64)
            return round_once(y, dtype)

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        tensor.format.dequantize_into(tensor.planes, tensor.group_size, out.numpy())
