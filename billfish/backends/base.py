"""What a backend is: something that can say whether it can run a problem, and then run it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.activations import IntegerActivations
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format, Planes
from billfish.core.mixture import checked_ids, checked_routing, open_gate, rows_by_expert
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor

Direct = Callable[[Any, Any], Any]  # see `Backend.direct`


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
    activations: str = "exact"  # as in billfish.core.activations, or "given": x is in integers already
    experts: int = 0  # E of a product with experts; m then counts the rows of x once for each expert that they chose
    chosen: int = 0  # experts of each row


class Product(NamedTuple):
    """y [..., n] = x [..., K] @ W.T + bias [n], W as `Backend.pack` made it. y is of x's kind and type.

    x in integers [M, K] gives NumPy float32. out: where y is to be written, an array like y; it is in CPU memory.
    """

    x: Input | IntegerActivations
    weights: Any
    n: int
    bias: Input | None = None
    out: Input | None = None


class ExpertProduct(NamedTuple):
    """y [T, k, n]: row y[t, j] = W[ids[t, j]] @ x[t] + biases[ids[t, j]]. y is of x's kind and type.

    x [T, K], or [T, k, K] where each chosen expert has a row of its own. ids [T, k] are integers of any library, in the
    place where x is; nobody has looked at them. biases [experts, n].
    """

    x: Input
    ids: Input
    weights: Any  # W [experts, n, K] as `Backend.pack_experts` made it
    experts: int
    n: int
    biases: Input | None = None


class ExpertBlock(NamedTuple):
    """y [T, H]: y[t] = sum over j of routing[t, j] * (down[e] @ h[t, j] + down_biases[e]) with e = ids[t, j], and
    h[t, j] [I] what `activation` makes of the gate and up rows of expert e times x[t].

    x [T, H], ids [T, k] and routing [T, k] as in ExpertProduct: in one place, and nobody has looked at them.
    gate_up: one packed stack [experts, 2 I, H] with all gate rows first, or two of them [experts, I, H], gate and up.
    """

    x: Input
    ids: Input
    routing: Input
    gate_up: Sequence[Any]
    down: Any  # [experts, H, I], packed
    experts: int
    inner: int  # I
    gate_up_biases: Sequence[Input | None]  # one for each stack of gate_up
    down_biases: Input | None
    activation: str  # one of billfish.core.mixture.GATES


class Backend(ABC):
    """Computes on one kind of hardware. Inputs have been checked by billfish.ops.matmul."""

    name: str
    # Whether a row of a batch gives the same bits as that row alone.
    batch_invariant: bool = False

    @abstractmethod
    def can_run(self, problem: Problem) -> tuple[bool, str]:
        """Whether it can, and if not, why, in words for the user."""

    def usable(self) -> tuple[bool, str]:
        """Whether this machine has what the backend computes with: (True, what that is) or (False, why not)."""
        return True, ""

    @abstractmethod
    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> Any:
        """The weights as `linears` wants them for x in that place, such as "cuda:0". They do not keep the tensor.

        Columns stay in stored order: x comes in the order of the tensor's permutation.
        """

    @abstractmethod
    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        """All y. Products with one x have the very same object as x, one after the other."""

    @abstractmethod
    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        """W into `out` [N, K], bit for bit as the reference has it, columns in stored order.

        A backend that has `to_tensors` reads `tensor.made((self.name, out.place), ...)` alone: a layer that holds its
        weights in packed form asks with a tensor whose storage is empty.
        """

    def pack_planes(self, format: Format, planes: Planes, group_size: int, place: str) -> Any:
        """As `pack`, of planes that are in that place already (core.device_array). Optional, with `to_tensors`."""
        raise BackendUnavailable(f"{self.name}: weights cannot be packed from planes on {place}.")

    # ---- experts: the default gathers the rows of each chosen expert ------------------------------------------------

    def pack_experts(self, stack: QuantizedExperts, place: str = "cpu") -> Any:
        """The stack as `expert_linear` and `experts` want it, as `pack` does for one matrix."""
        return [self.pack(matrix, place) for matrix in stack]

    def pack_gate_up(self, stacks: Sequence[QuantizedExperts], place: str = "cpu") -> Sequence[Any] | None:
        """gate_up of a block, one stack or two, as `experts` wants it, if not each by `pack_experts`: then None."""
        return None

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        """y [T, k, n] of x's kind and type. Experts that nobody chose are not read."""
        x, (tokens, chosen) = product.x, product.ids.shape
        ids = checked_ids(product.ids, product.experts)
        rows = x.numpy().reshape(-1, x.shape[-1])
        biases = None if product.biases is None else product.biases.numpy()
        places = rows_by_expert(ids)  # of ids, and so of y [T * k, n]
        products = []
        for e, at in places.items():
            own = x.with_source(x.like(rows[at if len(x.shape) == 3 else at // chosen]))
            bias = None if biases is None else Input(x.call, "biases", biases[e])
            products.append(Product(own, product.weights[e], product.n, bias))
        y = np.empty((tokens * chosen, product.n), rows.dtype)
        for at, own in zip(places.values(), self.linears(products, activations) if products else (), strict=True):
            y[at] = x.with_source(own).numpy()
        return x.like(y.reshape(tokens, chosen, product.n))

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        """y [T, H] of x's kind and type. h is float32, and so is the sum over j, which goes in the order of j."""
        x, dtype = block.x, block.x.numpy().dtype
        routing = checked_routing(block.routing)

        def multiply(rows: Any, weights: Any, n: int, biases: Input | None) -> NDArray[np.float32]:
            own = x.with_source(x.like(rows))
            product = ExpertProduct(own, block.ids, weights, block.experts, n, biases)
            return own.with_source(self.expert_linear(product, activations)).numpy()

        n = 2 * block.inner // len(block.gate_up)
        rows = x.numpy().astype(np.float32)
        parts = [multiply(rows, w, n, b) for w, b in zip(block.gate_up, block.gate_up_biases, strict=True)]
        gate, up = parts if len(parts) == 2 else (parts[0][..., : block.inner], parts[0][..., block.inner :])
        down = multiply(open_gate(gate, up, block.activation), block.down, x.shape[1], block.down_biases)
        y = np.zeros(x.shape, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for j in range(routing.shape[1]):
                y += routing[:, j, None] * down[:, j]
            return x.like(y.astype(dtype))

    # ---- packed weights that take the place of storage, for memory that should hold weights once (optional) --------

    reads_blocks: bool = False  # whether `linears` takes x that is "given" as blocks of q8_0 or q8_1, uint8 [M, bytes]
    unpacks: bool = False  # whether storage can be made of packed weights: a layer then holds these alone
    unpacks_experts: bool = False  # the same of what `pack_experts` makes

    def to_tensors(self, weights: Any) -> tuple[list[Any], str] | None:
        """(torch tensors in the place where `weights` are, all the rest of them as a text), sharing memory.

        A torch layer then holds these tensors as its buffers, and its storage is gone. None: `unpack` could not give
        the storage back, and the layer keeps that in CPU memory.
        """
        return None

    def from_tensors(self, tensors: Sequence[Any], about: str) -> Any:
        """The inverse of `to_tensors`, at every call of a compiled graph: cheap, and on the same memory."""
        raise BackendUnavailable(
            f"{self.name}: packed weights cannot replace the storage: the backend has no `to_tensors`."
        )

    def direct(self, weights: Any) -> Direct | None:
        """`linears` in few steps, for a torch layer: (x [..., K], bias [N] or none) -> y [..., N].

        The function gives None for an x that takes more steps. Nobody watches, and no gradient is wanted.
        """
        return None

    def unpack(self, weights: Any, format: Format, shape: tuple[int, ...], group_size: int) -> Storage:
        """The storage that `weights` were packed from, bit for bit and in its types: NumPy arrays by name."""
        raise BackendUnavailable(
            f"{self.name}: packed weights cannot replace the storage: the backend has no `to_tensors`."
        )


class NumpyBackend(Backend):
    """A backend that computes on NumPy arrays, one product at a time."""

    @abstractmethod
    def multiply(
        self, x: NDArray[Any] | IntegerActivations, weights: Any, bias: NDArray[Any] | None, activations: str
    ) -> NDArray[Any]:
        """x [M, K] @ W.T + bias [N] -> [M, N] of x's type, float32 for integers."""

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        results = []
        for product in products:
            x, bias = product.x, None if product.bias is None else product.bias.numpy()
            if isinstance(x, IntegerActivations):
                results.append(self.multiply(x, product.weights, bias, activations))
                continue
            rows = x.numpy().reshape(math.prod(x.shape[:-1]), x.shape[-1])
            y = self.multiply(rows, product.weights, bias, activations)
            results.append(delivered(product, y.reshape(*x.shape[:-1], product.n)))
        return results


def delivered(product: Product, y: NDArray[Any]) -> Any:
    """y where the product wants it: in `out`, or as an array of x's library."""
    if product.out is not None:
        product.out.numpy()[...] = y
        return product.out.source
    assert isinstance(product.x, Input)
    return product.x.like(y)
