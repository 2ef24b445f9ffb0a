"""MarlinSwitchLinear: a stack of experts for MLX, in the place of mlx-lm's SwitchLinear."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from billfish.checkpoints.names.expert_stacks import by_mlx_stacks
from billfish.core.errors import DTypeError, ShapeError, bad_argument, type_of
from billfish.core.format import get_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.typing import Activations, FormatLike, Method
from billfish.nn.mlx.decode import decode, round_activations
from billfish.nn.mlx.linear import MarlinLinear, decoded, is_traced, packed
from billfish.ops.expert_linear import expert_linear
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize

CALL = "MarlinSwitchLinear"


def is_switch(module: object) -> bool:
    """Whether a module is mlx-lm's SwitchLinear; whoever has one has imported it."""
    theirs = sys.modules.get("mlx_lm.models.switch_layers")
    return theirs is not None and type(module) is theirs.SwitchLinear


class MarlinSwitchLinear(MarlinLinear):
    """mlx-lm's SwitchLinear with quantized weights W [E, N, K]: y = x @ W[e].T + bias[e] for the experts e of
    `indices`.

    Parameters are as of MarlinLinear, each with a leading axis E. :meth:`from_switch` and :meth:`from_stack` make
    one.

        >>> import mlx.core as mx
        >>> from billfish.nn.mlx import MarlinSwitchLinear
        >>> layer = MarlinSwitchLinear.from_stack(bf.quantize(np.ones((4, 8, 32), np.float32), "q8_0"))
        >>> layer(mx.ones((2, 1, 1, 32)), mx.array([[0, 3], [1, 2]])).shape
        (2, 2, 1, 8)
    """

    @classmethod
    def from_switch(
        cls,
        module: Any,
        format: FormatLike = "fp4",
        *,
        group_size: int | None = None,
        method: Method = "mse",
        activations: Activations = "exact",
        known: Sequence[Mapping[str, Any]] = ({},),
        **options: str,
    ) -> MarlinSwitchLinear:
        """Quantize a SwitchLinear. The bias is kept as it is.

        known: further arguments of :func:`billfish.quantize` for the one stack, such as the importance of inputs.
        """
        if not is_switch(module):
            raise DTypeError(bad_argument("from_switch", "module", type_of(module), "mlx-lm's SwitchLinear"))
        settings: dict[str, Any] = {"method": method, **options, **known[0]}
        stack: Any = quantize(module.weight, format, group_size=group_size, **settings)
        layer = cls.from_stack(stack, module.get("bias"), activations=activations)
        layer.train(module.training)
        return layer

    @classmethod
    def from_stack(
        cls, stack: QuantizedExperts, bias: mx.array | None = None, *, activations: Activations = "exact"
    ) -> MarlinSwitchLinear:
        """A layer with a copy of this stack. bias: [E, N]."""
        if bias is not None and tuple(bias.shape) != stack.shape[:2]:
            raise ShapeError(bad_argument("from_stack", "bias.shape", tuple(bias.shape), f"{stack.shape[:2]}"))
        layer = cls.__new__(cls)
        layer._set_up(stack.format, stack.shape, stack.group_size, packed(stack), bias, None, activations)
        return layer

    @property
    def num_experts(self) -> int:
        """E."""
        return self._shape[0]

    def quantized(self) -> QuantizedExperts:  # type: ignore[override]  # a stack where a Linear has a matrix
        """A copy of the stack."""
        self._current()
        storage = {name: np.array(array) for name, array in self._stored().items()}
        return QuantizedExperts.owning(get_format(self.format), self._shape, self.group_size, storage)

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> Any:
        """mlx-lm's SwitchLinear with the decoded weights."""
        from mlx_lm.models.switch_layers import SwitchLinear

        linear = SwitchLinear(1, 1, 1, bias=False)
        linear.weight = dequantize(self.quantized(), dtype)
        if "bias" in self:
            linear.bias = self.bias.astype(dtype)
        linear.train(self.training)
        return linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:  # type: ignore[override]
        """x [..., 1, K] and indices [...] -> [..., 1, N]; the last axis of indices may be 1 in x: one row for them all.

        sorted_indices: for mlx-lm; nothing depends on it.
        """
        own_row = x.shape[:-2] == indices.shape
        if x.shape[-2] != 1 or not (own_row or x.shape[:-2] == (*indices.shape[:-1], 1)):
            expected = f"{(*indices.shape, 1, self.in_features)}, or one row for all experts of a token"
            raise ShapeError(bad_argument(CALL, "x.shape", tuple(x.shape), expected))
        ids = indices.reshape(-1, 1 if own_row else indices.shape[-1])
        rows, bias = x.reshape(ids.shape[0], x.shape[-1]), self.get("bias")
        try:
            stack: Any = self._current()
            if self._runs_on_metal(rows):  # as part of MLX's graph, with a gradient of its own
                y = expert_linear(rows, stack, ids, biases=bias, activations=self.activations)
            else:
                y = _product(stack, self.activations)(rows, ids, bias)
        except (ValueError, RuntimeError) as error:
            if not is_traced(error):
                raise
            y = self._experts_by_operations(rows, ids, bias)
        return y.reshape(*indices.shape, 1, self.out_features)

    def _experts_by_operations(self, x: mx.array, ids: mx.array, bias: mx.array | None) -> mx.array:
        wide = x.astype(mx.float32)
        if self.activations != "exact":
            wide = round_activations(wide, self.activations, self.group_size)
        format = get_format(self.format)
        arrays = self.storage().values()
        experts = [[array[e] for array in arrays] for e in range(self.num_experts)]
        w = mx.stack([decode(format, storage, self.group_size) for storage in experts])
        y = mx.gather_mm(wide[:, None, None], w.swapaxes(-1, -2), rhs_indices=ids)[:, :, 0]
        return (y if bias is None else y + bias[ids]).astype(x.dtype)

    def _extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {super()._extra_repr()}"


def _product(stack: Any, activations: Activations) -> Any:
    """x, ids, bias -> y by our kernels, as a function whose derivative MLX knows."""

    @mx.custom_function
    def linear(x: mx.array, ids: mx.array, bias: mx.array | None) -> mx.array:
        return expert_linear(x, stack, ids, biases=bias, activations=activations)

    @linear.vjp
    def vjp(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        x, ids, bias = primals
        wide = cotangent.astype(mx.float32)
        w = mx.array(decoded(stack))
        for_x = mx.gather_mm(wide[:, :, None], w, rhs_indices=ids)[:, :, 0].sum(axis=1).astype(x.dtype)
        flat = wide.reshape(math.prod(ids.shape), -1)
        if bias is None:
            return for_x, mx.zeros_like(ids), None
        for_bias = mx.zeros(bias.shape, mx.float32).at[ids.reshape(-1)].add(flat)
        return for_x, mx.zeros_like(ids), for_bias.astype(bias.dtype)

    return linear


# ---- for billfish.nn.mlx.modules -----


quantize_experts, stacked = MarlinSwitchLinear.from_switch, by_mlx_stacks


def why_not(module: Any) -> str:
    """Any SwitchLinear can become a layer of ours."""
    return ""


def stack_shapes(path: str, module: Any) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of a SwitchLinear, by its path."""
    return {path: tuple(module.weight.shape)}


def stack_biases(path: str, module: Any) -> dict[str, mx.array]:
    """[E, N] of a SwitchLinear, if it has a bias, by its path."""
    return {path: module.bias} if "bias" in module else {}


def stack_bytes(module: Any) -> int:
    """Of the stack of a SwitchLinear."""
    return int(module.weight.nbytes)


def layer_of_stacks(
    module: Any, stacks: Sequence[QuantizedExperts], biases: Sequence[mx.array | None], activations: Activations
) -> MarlinSwitchLinear:
    """A layer of this stack in the place of a SwitchLinear."""
    (stack,), (bias,) = stacks, biases
    return MarlinSwitchLinear.from_stack(stack, bias, activations=activations)
