"""MarlinLinear for PyTorch: storage in buffers, a custom operator for the product, gradients by decoded weights."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from billfish.core.activations import check_activations
from billfish.core.errors import DTypeError, ShapeError, complaint
from billfish.core.format import Format
from billfish.core.tensor import QuantizedTensor
from billfish.core.torch_modes import is_watched, wants_gradient, wants_numbers_alone
from billfish.core.typing import Activations, AnyArray, FormatLike, Method
from billfish.nn import layer_base
from billfish.nn.torch.operator import LINEAR
from billfish.nn.torch.stored import Stored
from billfish.nn.torch.watch import order_array, to_torch
from billfish.nn.torch.weights import ORDER, Packed, packed_beside
from billfish.ops.linear import dequantize, quantized_linear
from billfish.ops.quantization import quantize

if TYPE_CHECKING:
    from typing_extensions import Self

CASTS = (torch.float32, torch.float16, torch.bfloat16)  # what autocast takes for x


def autocast(x: Tensor) -> Tensor:
    """x as torch.nn.functional.linear takes it inside `torch.autocast`."""
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    device = x.device.type
    wanted = torch.is_autocast_enabled(device) and x.dtype in CASTS
    return x.to(torch.get_autocast_dtype(device)) if wanted else x


# ---- the layer -------------------------------------------------------------------------------------------------------


@layer_base.register_layer
class MarlinLinear(layer_base.MarlinLinear, Stored):
    """y = x @ W.T + bias with W [out_features, in_features] in one of billfish's formats.

    Buffers are the format's storage arrays under their own names (`packed`, `scales`, `blocks`, ...), bit for bit,
    `permutation` int32 [K] where columns are stored in another order (act-order), and `about`, which says the
    format. The bias is an ordinary parameter.
    `.to(dtype)`, `.half()` and the like convert the bias and leave storage alone: another type would be other weights.
    """

    kind = "torch"
    all_features: int | None = None  # how many x may have, where W is some columns of a larger matrix
    bias: torch.nn.Parameter | None
    permutation: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: FormatLike = "fp4",
        group_size: int | None = None,
        activations: Activations = "exact",
        act_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        framework: Literal["torch"] = "torch",
        **options: str,
    ) -> None:
        """A layer of zeros, to load a state dict into. `act_order` makes room for a permutation."""
        layer_base.check_framework(framework, self.kind)
        known, group, specs = layer_base.empty_weights(format, out_features, in_features, group_size, options)
        storage = {
            name: torch.zeros(spec.shape, dtype=to_torch(np.empty(0, spec.dtype)).dtype, device=device)
            for name, spec in specs.items()
        }
        permutation = torch.arange(in_features, dtype=torch.int32, device=device) if act_order else None
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._set_up(known, (out_features, in_features), group, storage, zeros, permutation, activations)

    def _set_up(
        self,
        format: Format,
        shape: tuple[int, int],
        group_size: int,
        storage: dict[str, Tensor],
        bias: Tensor | None,
        permutation: Tensor | None,
        activations: Activations,
        packed: Packed | None = None,
    ) -> None:
        """`packed`: in the place of storage, which is then empty."""
        self._set_up_storage(format, shape, group_size, storage, bias)
        self.out_features, self.in_features = shape
        self.activations = check_activations("MarlinLinear", activations)
        self._weights.features = self.all_features
        self.register_buffer(ORDER, permutation)
        if packed is not None:
            self._weights.hold(packed)
        self.set_about()

    @classmethod
    def from_linear(  # type: ignore[override]  # the front takes the layers of all frameworks
        cls,
        linear: torch.nn.Linear,
        format: FormatLike = "fp4",
        *,
        group_size: int | None = None,
        method: Method = "mse",
        importance: AnyArray | None = None,
        hessian: AnyArray | None = None,
        activations: Activations = "exact",
        **options: str,
    ) -> MarlinLinear:
        """Quantize a torch.nn.Linear, on the device it is on. The bias is kept as it is, not copied."""
        if not isinstance(linear, torch.nn.Linear):
            raise DTypeError(complaint("from_linear", "linear", f"a {type(linear).__name__}", "a torch.nn.Linear"))
        weight = linear.weight.detach()
        tensor = quantize(
            weight if weight.is_cuda else weight.cpu(),
            format,
            group_size=group_size,
            method=method,
            importance=importance,
            hessian=hessian,
            **options,
        )
        layer = cls.from_quantized(tensor, linear.bias, activations=activations, device=weight.device)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        tensor: QuantizedTensor,
        bias: Tensor | None = None,
        *,
        permutation: Any = None,
        activations: Activations = "exact",
        device: torch.device | str | None = None,
    ) -> Self:
        """A layer with a copy of these weights, on the CPU or another device.

        permutation [K]: stored column j takes x[..., permutation[j]]; a tensor with act-order has its own.
        """
        layer_base.check_weights("from_quantized", tensor, bias)
        taken = layer_base.order_of("from_quantized", tensor, permutation, cls.all_features)
        there = torch.empty(0, device=device or "cpu").device  # with its number
        order = None if taken is None else to_torch(taken, there)
        bias = bias if bias is None or device is None else bias.to(there)
        packed = packed_beside(tensor, there, activations)
        storage = {} if packed else {name: to_torch(array, there) for name, array in tensor.storage.items()}
        layer = cls.__new__(cls)
        layer._set_up(tensor.format, tensor.shape, tensor.group_size, storage, bias, order, activations, packed)
        return layer

    def with_bias(self, bias: Tensor | None) -> MarlinLinear:
        """Another layer with the very same weight tensors: tied weights."""
        storage = dict(zip(self.storage_names, self.storage, strict=True))
        shape = (self.out_features, self.in_features)
        layer = type(self).__new__(type(self))
        format = self._weights.format
        layer._set_up(format, shape, self.group_size, storage, bias, self.permutation, self.activations)
        return layer.train(self.training)

    @staticmethod
    def walk(model: torch.nn.Module) -> layer_base.Walk:
        """The Linear layers of a model, and who else holds a weight."""
        from billfish.nn.torch.expert_layers import is_experts  # which is made of more than this module

        linears: list[layer_base.Place] = []
        experts: list[layer_base.Place] = []
        others: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, child in module._modules.items():
                if isinstance(child, torch.nn.Linear):
                    linears.append(layer_base.Place(prefix + name, child, partial(setattr, module, name)))
                elif is_experts(child):
                    experts.append(layer_base.Place(prefix + name, child, partial(setattr, module, name)))
            if not isinstance(module, torch.nn.Linear):
                others |= {id(p): prefix + name for name, p in module.named_parameters(recurse=False)}
        return layer_base.Walk(torch.nn.Linear, linears, others, experts)

    @staticmethod
    def joints(model: torch.nn.Module) -> list[Any]:
        """The Linear layers of a model that may become joint ones: of :class:`billfish.nn.torch.merge.Joint`."""
        from billfish.nn.torch.merge import find_joints  # which makes layers of this class

        return list(find_joints(model))

    @staticmethod
    def note_layers(model: torch.nn.Module) -> None:
        """A model of transformers saves layers that were put into it as ours."""
        transformers = sys.modules.get("transformers")
        if transformers is not None and isinstance(model, transformers.PreTrainedModel):
            from billfish.nn.transformers_saving import note_layers  # here: its models alone need transformers

            note_layers(model)

    @staticmethod
    def parameter_arrays(model: torch.nn.Module) -> dict[str, Tensor]:
        """Everything that a state dict holds, under all its names."""
        return dict(model.state_dict(keep_vars=True))

    @staticmethod
    def set_parameter(model: torch.nn.Module, name: str, value: Tensor) -> None:
        """Write a value into one of them."""
        with torch.no_grad():
            model.state_dict(keep_vars=True)[name].copy_(value)

    @staticmethod
    def place_of(linear: torch.nn.Module) -> dict[str, Any]:
        """Where `from_quantized` is to put the layer that takes the place of `linear`; on the CPU for a meta tensor."""
        device = next(linear.parameters()).device
        return {"device": None if device.type == "meta" else device}

    @property
    def has_order(self) -> bool:
        """Whether columns are stored in another order than that of x's features."""
        return self._weights.own(ORDER) is not None

    @property
    def qweight(self) -> Tensor:
        """The first storage array, by the name by which peft and others ask where a quantized layer is."""
        return self.storage[0]

    def quantized(self) -> QuantizedTensor:
        """A copy of the weights [N, K] with their permutation."""
        matrix, order = self._weights.matrix(), self._weights.own(ORDER)
        permutation = None if order is None or self._weights.features is not None else order_array(order)
        return QuantizedTensor(matrix.format, matrix.shape, matrix.group_size, matrix.storage, permutation)

    def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """A plain layer with the decoded weights, columns in their original order."""
        weights, order = self._weights, self._weights.own(ORDER)
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.device)
        dequantize(weights.matrix_beside(weight), out=weight)
        if order is not None:
            original = torch.empty_like(weight)
            original[:, order] = weight
            weight = original
        linear = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", dtype)
        linear.weight = torch.nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = torch.nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            bias, direct = self._parameters["bias"], self.__dict__["_buffers"].direct
            if direct is not None and self.activations == "exact" and wants_numbers_alone(x, bias):
                y: Tensor | None = direct(x, bias)
                if y is not None:
                    return y
        return self._product(autocast(x))

    def _product(self, x: Tensor) -> Tensor:
        """y of x's type, whatever autocast says."""
        weights, bias = self.__dict__["_buffers"], self._parameters["bias"]
        order = weights.own(ORDER)
        eager = not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta and not is_watched()
        if eager:
            matrix = weights.matrix_beside(x)
        if order is not None:
            x = x.index_select(-1, order)
        if eager and not wants_gradient(x, bias):
            # The dispatch of an operator that is written in Python takes longer than a small product does.
            y: Tensor = quantized_linear(x, matrix, bias=bias, activations=self.activations)
            weights.settle()
            return y
        if eager and not x.is_cpu:
            weights.pack(self.activations)
        tensors, form = weights.for_operator()
        return LINEAR(x, tensors, bias, self.format, self.group_size, self.out_features, self.activations, form)

    def extra_repr(self) -> str:
        return self.describe(self.bias is not None, self.has_order)

    def _check_rest(self, call: str, arrays: dict[str, Any]) -> None:
        n, k = self.out_features, self.in_features
        bias, order = arrays.get("bias"), arrays.get(ORDER)
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError(complaint(call, "bias", f"shape {tuple(bias.shape)}", f"({n},)"))
        if order is not None and not order.is_meta:
            layer_base.check_order(call, order_array(order), k, self._weights.features)
