"""MarlinExperts: the experts of a mixture for PyTorch, in the place of transformers' modules with stacked parameters.

ExpertStack     W [E, N, K], and its biases [E, N]
MarlinExperts   three of them, gate_proj, up_proj and down_proj, and what is computed with them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.core.activations import check_activations
from billfish.core.errors import DTypeError, FormatError, ShapeError, bad_argument, failure, type_of
from billfish.core.format import get_format
from billfish.core.mixture import GATES, check_gate, open_gate
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.renamed import renamed
from billfish.core.torch_modes import is_watched, wants_gradient
from billfish.core.typing import Activations, FormatLike, Gate, Method
from billfish.nn import layer_base
from billfish.nn.torch.expert_operator import EXPERTS, run_block
from billfish.nn.torch.linear import autocast
from billfish.nn.torch.module import QuantizedModule
from billfish.nn.torch.weights import Weights, specs_of
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize

CALL = "MarlinExperts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ExpertStack(QuantizedModule):
    """W [E, N, K]: as MarlinLinear's, storage arrays with a leading axis E. `bias` [E, N] is a parameter."""

    activations: Activations = "exact"

    def __init__(
        self,
        shape: tuple[int, int, int],
        bias: bool = False,
        *,
        format: FormatLike = "fp4",
        group_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: str,
    ) -> None:
        """A stack of zeros, to load a state dict into."""
        count, n, k = shape
        known, group, specs = layer_base.empty_weights(format, n, k, group_size, options)
        there = torch.empty(0, device=device).device
        stacked = {name: spec._replace(shape=(count, *spec.shape)) for name, spec in specs_of(specs).items()}
        weights = Weights.on_meta(known, shape, group, stacked)
        if there.type != "meta":
            weights = weights.moved(there, self.activations)
        self._set_up(weights, torch.zeros(count, n, device=there, dtype=dtype) if bias else None, self.activations)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, n, k = self._weights.shape
        return experts, n, k

    @classmethod
    def from_quantized(
        cls, stack: QuantizedExperts, bias: Tensor | None = None, *, device: torch.device | str | None = None
    ) -> ExpertStack:
        """A module with a copy of this stack."""
        if bias is not None and tuple(bias.shape) != stack.shape[:2]:
            raise ShapeError(bad_argument("from_quantized", "bias.shape", tuple(bias.shape), f"{stack.shape[:2]}"))
        there = torch.empty(0, device=device or "cpu").device
        module = cls.__new__(cls)
        weights = Weights.pack(stack, there, cls.activations)
        module._set_up(weights, None if bias is None else bias.to(there), cls.activations)
        return module

    def quantized(self) -> QuantizedExperts:
        """A copy of the stack."""
        stack = self._weights.quantized()
        assert isinstance(stack, QuantizedExperts)
        return stack

    def decoded(self) -> Tensor:
        """W [E, N, K] in float32, where the module is."""
        return dequantize(self.quantized(), like="torch").to(self.device)

    def _check_rest(self, call: str, arrays: dict[str, Any]) -> None:
        bias = arrays.get("bias")
        if bias is not None and tuple(bias.shape) != self.shape[:2]:
            raise ShapeError(bad_argument(call, "bias.shape", tuple(bias.shape), f"{self.shape[:2]}"))

    def extra_repr(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        bits = get_format(self.format).bits_per_weight(self.group_size)
        about = f"format={self.format}, group_size={self.group_size}, bits={bits:g}"
        return f"[{sizes}], bias={self.bias is not None}, {about}"


class MarlinExperts(torch.nn.Module):
    """The feed-forward part of a mixture of experts with quantized weights, as :func:`billfish.experts` computes it.

    `forward` takes x [..., H], ids [T, k] and routing weights [T, k], as transformers' modules do, and gives [..., H].
    Gradients go to x, to the routing weights and to the biases.

    gate, up, down: the stacks, which :meth:`from_quantized` makes. hidden_act: as in :func:`billfish.experts`.
    activations: as in :func:`billfish.quantized_linear`.

        >>> import torch
        >>> from billfish.nn.torch import MarlinExperts
        >>> gate = up = down = bf.quantize(np.ones((4, 32, 32), np.float32), "q8_0")
        >>> layer = MarlinExperts.from_quantized(gate, up, down, hidden_act="silu")
        >>> ids, weights = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2), 0.5)
        >>> layer(torch.ones(2, 32), ids, weights).shape
        torch.Size([2, 32])
    """

    @renamed("activation", "hidden_act")
    def __init__(
        self,
        gate: ExpertStack,
        up: ExpertStack,
        down: ExpertStack,
        hidden_act: Gate = "silu",
        activations: Activations = "exact",
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        check_gate(CALL, hidden_act)
        self.activation: Gate = hidden_act
        self.activations = check_activations(CALL, activations)

    @classmethod
    @renamed("activation", "hidden_act")
    def from_quantized(
        cls,
        gate: QuantizedExperts,
        up: QuantizedExperts,
        down: QuantizedExperts,
        biases: Mapping[str, Tensor | None] | None = None,
        *,
        hidden_act: Gate = "silu",
        activations: Activations = "exact",
        device: torch.device | str | None = None,
    ) -> MarlinExperts:
        """Make a layer with a copy of these stacks.

        gate, up: [E, I, H]. down: [E, H, I]. biases: by the names of PROJECTIONS, each [E, N] or None.
        hidden_act, activations: as in :func:`billfish.experts`. device: of the layer; None is the CPU.
        """
        given = biases or {}
        first, second, last = (
            ExpertStack.from_quantized(stack, given.get(name), device=device)
            for name, stack in zip(PROJECTIONS, (gate, up, down), strict=True)
        )
        return cls(first, second, last, hidden_act, activations)

    @classmethod
    def from_experts(
        cls,
        module: torch.nn.Module,
        format: FormatLike = "fp4",
        *,
        group_size: int | None = None,
        method: Method = "mse",
        activations: Activations = "exact",
        known: Sequence[Mapping[str, Any]] = ({}, {}, {}),
        **options: str,
    ) -> MarlinExperts:
        """Quantize a module of transformers with stacked parameters, on the CPU; the layer is where the module was.

        known: further arguments of :func:`billfish.quantize` for gate, up and down, such as the importance of inputs.
        """
        reason = why_not(module)
        if reason:
            expected = f"experts of transformers in stacked parameters ({reason})"
            raise DTypeError(bad_argument("from_experts", "module", type_of(module), expected))
        gate, up, down = (
            quantize(stack.cpu(), format, group_size=group_size, **{"method": method, **options, **own})
            for stack, own in zip(plain_stacks(module), known, strict=True)
        )
        biases = plain_biases(module)
        device = next(module.parameters()).device
        about: dict[str, Any] = {"hidden_act": activation_of(module), "activations": activations, "device": device}
        return cls.from_quantized(gate, up, down, biases, **about).train(module.training)  # type: ignore[arg-type]

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
        """Gate, up and down."""
        return self.gate_proj, self.up_proj, self.down_proj

    @property
    def format(self) -> str:
        """Of gate; up and down have it too, unless a checkpoint says otherwise."""
        return self.gate_proj.format

    @property
    def group_size(self) -> int:
        """Of gate."""
        return self.gate_proj.group_size

    @property
    def storage_bytes(self) -> int:
        """Of storage."""
        return sum(stack.storage_bytes for stack in self.stacks)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x = autocast(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return self._block(x, top_k_index, top_k_weights).reshape(hidden_states.shape)

    def _block(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        biases = [stack.bias_to_add() for stack in self.stacks]
        eager = not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta and not is_watched()
        if eager and not any(wants_gradient(x, other) for other in (weights, *biases)):
            stacks = [stack._weights.matrix for stack in self.stacks]
            return run_block(x, ids, weights, stacks, biases, self.activation, self.activations)
        held = [stack._weights for stack in self.stacks]
        tensors = [own.tensors for own in held]
        forms, shapes = [own.form for own in held], [size for own in held for size in own.shape]
        about = [s.format for s in self.stacks], [s.group_size for s in self.stacks], shapes, forms, self.activation
        y: Tensor = EXPERTS(x, ids, weights, *tensors, *biases, *about, self.activations)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}" + ("" if self.activations == "exact" else f", {self.activations}")


# ---- transformers' modules ------------------------------------------------------------------------------------------


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module holds experts in the stacked parameters of transformers."""
    stacks = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return all(stack is not None and stack.ndim == 3 for stack in stacks) and hasattr(module, "is_transposed")


def why_not(module: torch.nn.Module) -> str:
    """Why MarlinExperts cannot take the place of a module; empty if it can."""
    if not is_experts(module):
        return "it has no stacks gate_up_proj and down_proj"
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):  # transformers before 5.23 has none
        return "it is no gated feed-forward part"
    try:
        activation_of(module)
    except FormatError as error:
        return str(error)
    return ""


def activation_of(module: Any) -> Gate:
    """Which of our activations the gate of a module is: found by numbers, as modules only have code for it."""
    numbers = torch.linspace(-9, 9, 24, device="cpu").reshape(2, 12)  # whatever device is torch's default
    gate, up = numbers[:, :6], numbers.flip(0, 1)[:, 6:]
    joint = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    theirs = module._apply_gate(joint).detach().numpy()
    for name in GATES:
        if np.allclose(theirs, open_gate(gate.numpy(), up.numpy(), name), rtol=1e-5, atol=1e-5):
            return name  # type: ignore[return-value]  # one of them
    problem = f"the activation of {type(module).__name__} is not supported"
    raise FormatError(failure(CALL, problem, f"Supported are {', '.join(GATES)}."))


def plain_stacks(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(gate [E, I, H], up [E, I, H], down [E, H, I]) of a module."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = halves(gate_up, module)
    return gate, up, down


def plain_biases(module: Any) -> dict[str, Tensor]:
    """Biases by the names of PROJECTIONS."""
    if not module.has_bias:
        return {}
    gate, up = halves(module.gate_up_proj_bias.detach(), module)
    return {"gate_proj": gate.contiguous(), "up_proj": up.contiguous(), "down_proj": module.down_proj_bias}


def halves(gate_up: Tensor, module: Any) -> tuple[Tensor, Tensor]:
    """The gate and the up rows of [E, 2 I, ...]."""
    inner = gate_up.shape[1] // 2
    if module.is_concatenated:
        return gate_up[:, :inner], gate_up[:, inner:]
    return gate_up[:, ::2], gate_up[:, 1::2]


def to_plain(layer: MarlinExperts, module: Any, dtype: torch.dtype | None = None) -> Any:
    """Put the decoded weights of a layer into a module of transformers of the same sizes, and return that. They are
    where the layer is."""
    gate, up, down = (stack.decoded() for stack in layer.stacks)

    def joined(gate: Tensor, up: Tensor) -> Tensor:
        return torch.cat([gate, up], 1) if module.is_concatenated else torch.stack([gate, up], 2).flatten(1, 2)

    numbers = {"gate_up_proj": joined(gate, up), "down_proj": down}
    if module.is_transposed:
        numbers = {name: number.transpose(1, 2).contiguous() for name, number in numbers.items()}
    if module.has_bias:
        biases = [stack.bias for stack in layer.stacks]
        assert all(bias is not None for bias in biases)
        gate_bias, up_bias, down_bias = (bias.detach() for bias in biases if bias is not None)
        numbers |= {"gate_up_proj_bias": joined(gate_bias, up_bias), "down_proj_bias": down_bias.clone()}
    for name, number in numbers.items():
        setattr(module, name, torch.nn.Parameter(number.to(layer.gate_proj.device, dtype or number.dtype)))
    return module.train(layer.training)


# ---- for billfish.nn.torch.modules -----


quantize_experts, stacked = MarlinExperts.from_experts, by_stacks


def stack_shapes(path: str, module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of the stacks of a module, by the paths that they have as layers."""
    return {f"{path}.{part}": tuple(w.shape) for part, w in zip(PROJECTIONS, plain_stacks(module), strict=True)}


def stack_biases(path: str, module: torch.nn.Module) -> dict[str, Tensor]:
    """[E, N] of the stacks that have biases, by the same paths."""
    return {f"{path}.{part}": bias for part, bias in plain_biases(module).items()}


def stack_bytes(module: torch.nn.Module) -> int:
    """Of the stacks of a module."""
    return sum(stack.nbytes for stack in plain_stacks(module))


def layer_of_stacks(
    module: torch.nn.Module,
    stacks: Sequence[QuantizedExperts],
    biases: Sequence[Tensor | None],
    activations: Activations,
) -> MarlinExperts:
    """A layer of these stacks in the place of a module; on the CPU for a meta tensor."""
    gate, up, down = stacks
    device = next(module.parameters()).device
    return MarlinExperts.from_quantized(
        gate,
        up,
        down,
        dict(zip(PROJECTIONS, biases, strict=True)),
        hidden_act=activation_of(module),
        activations=activations,
        device=None if device.type == "meta" else device,
    )
