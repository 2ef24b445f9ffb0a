"""What a backend is: something that can say whether it can run a problem, and then run it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import Input
from billfish.format import Format
from billfish.tensor import QuantizedTensor


class Problem(NamedTuple):
    """All that a backend needs to know to accept or refuse."""

    operation: str  # "matmul" or "dequantize"
    format: Format
    group_size: int
    m: int  # rows of x; 0 for dequantize
    n: int
    k: int
    dtype: np.dtype[Any]  # of x and y, or of the dequantized weights
    kind: str = "numpy"  # whose arrays: "numpy", "torch", "mlx"
    device: str = "cpu"  # where they are
    activations: str = "exact"


class Product(NamedTuple):
    """What `Backend.linear` multiplies: x [..., K] with weights [n, K] as `prepack` made them, and adds bias [n]."""

    x: Input
    weights: Any
    n: int
    bias: Input | None


class Backend(ABC):
    """Computes on one kind of hardware. Inputs have been checked by billfish.ops."""

    name: str
    # Whether a row of a batch gives the same bits as that row alone.
    batch_invariant: bool = False

    @abstractmethod
    def can_run(self, problem: Problem) -> tuple[bool, str]:
        """Whether it can, and if not, why, in words for the user."""

    @abstractmethod
    def prepack(self, tensor: QuantizedTensor) -> Any:
        """The weights as `matmul` wants them. Done once for each weight, however often it is multiplied with."""

    @abstractmethod
    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        """x [M, K] @ W.T + bias [N] -> [M, N] of x's type; `weights` is what `prepack` returned."""

    def linear(self, x: Input, weights: Any, n: int, bias: Input | None, activations: str) -> Any:
        """`matmul` for arrays of any library: x [..., K] -> y [..., N] of x's kind and type.

        This goes through NumPy; a backend that computes on other memory overrides it and never copies to the host.
        """
        rows, added = x.numpy(), None if bias is None else bias.numpy()
        if rows.ndim == 2:
            return x.like(self.matmul(rows, weights, added, activations))
        y = self.matmul(rows.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weights, added, activations)
        return x.like(y.reshape(*x.shape[:-1], n))

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        """`linear` for each product. Those with one x have the same Input, one after the other."""
        return [self.linear(*product, activations) for product in products]

    def linear_into(self, x: Input, weights: Any, bias: Input | None, activations: str, out: NDArray[Any]) -> None:
        """`linear` into `out` [..., N], in CPU memory as x is, and of its type."""
        out[...] = x.adapter.to_numpy(self.linear(x, weights, out.shape[-1], bias, activations))

    @abstractmethod
    def matmul_codes(self, codes: NDArray[np.int8], scale: NDArray[np.float32], weights: Any) -> NDArray[np.float32]:
        """The same with x quantized already: codes [M, K], a scale for each 32 of them [M, K/32] -> float32 [M, N]."""

    @abstractmethod
    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        """W into `out` [N, K], bit for bit as the reference has it."""

    def dequantize_there(self, tensor: QuantizedTensor, out: Input) -> None:
        """The same into an array that is not in CPU memory, for a backend that can run such problems."""
        self.dequantize(tensor, out.numpy())
