"""MarlinLinear for PyTorch: packed weights, a custom operator for the product, gradients by decoded weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from billfish.backends.base import Direct
from billfish.core.activations import check_activations
from billfish.core.errors import DTypeError, ShapeError, bad_argument, failure, type_of
from billfish.core.tensor import QuantizedTensor
from billfish.core.torch_modes import is_watched, wants_gradient, wants_numbers_alone
from billfish.core.typing import Activations, AnyArray, FormatLike, Method
from billfish.nn import layer_base
from billfish.nn.torch.decoded_weight import DecodedWeight
from billfish.nn.torch.module import ORDER, QuantizedModule
from billfish.nn.torch.operator import LINEAR, decode
from billfish.nn.torch.weights import ARRAYS, Weights, specs_of, to_torch
from billfish.ops.matmul import quantized_linear
from billfish.ops.quantization import quantize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

CASTS = (torch.float32, torch.float16, torch.bfloat16)  # what autocast takes for x


def autocast(x: Tensor) -> Tensor:
    """x as torch.nn.functional.linear takes it inside `torch.autocast`."""
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    device = x.device.type
    wanted = torch.is_autocast_enabled(device) and x.dtype in CASTS
    return x.to(torch.get_autocast_dtype(device)) if wanted else x


def in_order(direct: Direct, order: Tensor, features: int, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """As `direct`, for x [..., features] and columns that are stored in another order."""
    if x.shape[-1:] != (features,) or x.get_device() != order.get_device():
        return None
    y: Tensor | None = direct(x.index_select(-1, order), bias)
    return y


def device_of(device: torch.device | str | None) -> torch.device:
    """The device with its number; without one, the CPU."""
    return torch.empty(0, device=device or "cpu").device


# ---- the layer -------------------------------------------------------------------------------------------------------


@layer_base.register_layer
class MarlinLinear(layer_base.MarlinLinear, QuantizedModule):
    """A torch layer with quantized weights: y = x @ W.T + bias with W [out_features, in_features].

    The layer holds the weights packed for its device, once. A state dict has the format's storage arrays, bit for bit
    (:class:`QuantizedModule`), and `permutation` int32 [K] where columns are stored in another order (act-order). The
    bias is an ordinary parameter. `.to(dtype)`, `.half()` and the like convert the bias and leave the weights: another
    type would be other weights.

    in_features, out_features, bias: as of torch.nn.Linear. device, dtype: of the layer, and of its bias.
    format, group_size, options: as in :func:`billfish.quantize`. activations: as in :func:`billfish.quantized_linear`.
    act_order: whether to make room for a permutation. framework: "torch".

        >>> import torch
        >>> from billfish.nn.torch import MarlinLinear
        >>> layer = MarlinLinear.from_linear(torch.nn.Linear(64, 8), "q8_0")
        >>> layer
        MarlinLinear(in_features=64, out_features=8, bias=True, format=q8_0, group_size=32, bits=8.5)
        >>> layer.quantized().shape, layer(torch.ones(2, 64)).shape
        ((8, 64), torch.Size([2, 8]))
    """

    kind = "torch"
    all_features: int | None = None  # how many x may have, where W is some columns of a larger matrix
    features: int | None = None  # how many x has then

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
        there = torch.empty(0, device=device).device
        weights = Weights.on_meta(known, (out_features, in_features), group, specs_of(specs))
        if there.type != "meta":
            weights = weights.moved(there, activations)
        permutation = torch.arange(in_features, dtype=torch.int32, device=there) if act_order else None
        zeros = torch.zeros(out_features, device=there, dtype=dtype) if bias else None
        self._begin(weights, zeros, permutation, activations)
        self._number_type = dtype or self._number_type

    def _begin(
        self, weights: Weights, bias: Tensor | None, permutation: Tensor | None, activations: Activations
    ) -> None:
        self._set_up(weights, bias, check_activations("MarlinLinear", activations))
        self.out_features, self.in_features = weights.shape
        self._set_order(permutation)

    def _set_order(self, order: Tensor | None) -> None:
        self.register_buffer("order", order, persistent=False)
        self._hold(self._held)

    def set_features(self, features: int) -> None:
        """How many features x has, where W is some columns of a larger matrix."""
        order = self._buffers["order"]
        if order is not None and not order.is_meta:
            layer_base.check_order("MarlinLinear", order_array(order), self.in_features, features)
        self.features = features
        self._hold(self._held)

    def _hold(self, weights: Weights) -> None:
        super()._hold(weights)
        order = self._buffers.get("order")
        if weights.direct is not None and order is not None:
            features = weights.shape[1] if self.features is None else self.features
            self._direct = partial(in_order, weights.direct, order, features)
        if weights.matrix is None and order is not None:
            self._buffers[ORDER] = order

    @property
    def _awaited(self) -> tuple[str, ...]:
        return (*super()._awaited, ORDER)

    def _take_awaited(self) -> None:
        order = self._buffers.get(ORDER)
        super()._take_awaited()
        if order is not None and self._held.matrix is not None:
            self._check_rest("MarlinLinear", {ORDER: order})
            self._set_order(order.to(self._held.device, torch.int32))

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
        cross: AnyArray | None = None,
        activations: Activations = "exact",
        **options: str,
    ) -> MarlinLinear:
        """Quantize a torch.nn.Linear, on the device it is on. The bias is kept as it is, not copied.

        format, group_size, method, importance, hessian, cross, options: as in :func:`billfish.quantize`. activations:
        as in :func:`billfish.quantized_linear`.
        """
        if not isinstance(linear, torch.nn.Linear):
            raise DTypeError(bad_argument("from_linear", "linear", type_of(linear), "a torch.nn.Linear"))
        weight = linear.weight.detach()
        if weight.is_meta:
            raise DTypeError(failure("from_linear", "the layer is on 'meta', without weights", "Load them first."))
        tensor = quantize(
            weight if weight.is_cuda else weight.cpu(),
            format,
            group_size=group_size,
            method=method,
            importance=importance,
            hessian=hessian,
            cross=cross,
            **options,
        )
        layer = cls.from_quantized(tensor, linear.bias, activations=activations, device=weight.device)
        layer._number_type = weight.dtype
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
        there = device_of(device)
        order = None if taken is None else to_torch(taken, there)
        bias = bias if bias is None or device is None else bias.to(there)
        layer = cls.__new__(cls)
        layer._begin(Weights.pack(tensor, there, activations), bias, order, activations)
        return layer

    def with_bias(self, bias: Tensor | None) -> MarlinLinear:
        """Another layer with the very same weights: tied weights."""
        layer = type(self).__new__(type(self))
        layer._begin(self._weights, bias, self._buffers["order"], self.activations)
        layer._number_type = self._number_type
        return layer.train(self.training)

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
        return self._buffers["order"] is not None

    @property
    def weights_identity(self) -> int:
        """The same for layers that share their weights, as long as one of them lives."""
        return id(self._weights)

    @property
    def qweight(self) -> Tensor:
        """A tensor where the weights are, by the name by which peft and others ask where a quantized layer is."""
        return self._weights.tensors[0]

    @property
    def weight(self) -> Tensor:
        """W [N, K] for code that asks a Linear for its weight: its numbers are decoded when an operation wants them."""
        return DecodedWeight(self, self._number_type)

    def quantized(self) -> QuantizedTensor:
        """A copy of the weights [N, K] with their permutation."""
        tensor, order = self._weights.quantized(), self._buffers["order"]
        assert isinstance(tensor, QuantizedTensor)
        if order is None or self.features is not None:
            return tensor
        about = tensor.format, tensor.shape, tensor.group_size, tensor.storage
        return QuantizedTensor(*about, order_array(order))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K] as numbers, columns in their original order."""
        weights, order = self._weights, self._buffers["order"]
        weight = decode(weights.matrix, torch.empty(weights.shape, dtype=dtype, device=self.device))
        if order is None or self.features is not None:
            return weight
        original = torch.empty_like(weight)
        original[:, order] = weight
        return original

    def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """A plain layer with the decoded weights, columns in their original order."""
        linear = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", dtype)
        linear.weight = torch.nn.Parameter(self.decoded(dtype))
        if self.bias is not None:
            linear.bias = torch.nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            bias, direct = self.bias_to_add(), self._direct
            if direct is not None and self.activations == "exact" and wants_numbers_alone(x, bias):
                y: Tensor | None = direct(x, bias)
                if y is not None:
                    return y
        return self._product(autocast(x))

    def _product(self, x: Tensor) -> Tensor:
        """y of x's type, whatever autocast says."""
        weights, bias, order = self._weights, self.bias_to_add(), self._buffers["order"]
        if order is not None:
            x = x.index_select(-1, order)
        eager = not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta and not is_watched()
        if eager and weights.matrix is not None and not wants_gradient(x, bias):
            # The dispatch of an operator that is written in Python takes longer than a small product does.
            y: Tensor = quantized_linear(x, weights.matrix, bias=bias, activations=self.activations)  # type: ignore[arg-type]
            return y
        about = self.format, self.group_size, self.out_features, self.activations, weights.form
        return LINEAR(x, weights.tensors, bias, *about)

    def extra_repr(self) -> str:
        return self.describe(self.bias is not None, self.has_order)

    def _check_rest(self, call: str, arrays: dict[str, Any]) -> None:
        n, k = self.out_features, self.in_features
        bias, order = arrays.get("bias"), arrays.get(ORDER)
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError(bad_argument(call, "bias.shape", tuple(bias.shape), f"({n},)"))
        if order is not None and not order.is_meta:
            layer_base.check_order(call, order_array(order), k, self.features or self.all_features)

    def __getattr__(self, name: str) -> Any:
        """`permutation` is a copy of the order in which columns are stored, int32 [K], or None."""
        if name == ORDER and name not in self._buffers:
            order = self._buffers["order"]
            return None if order is None else order.clone()
        return super().__getattr__(name)

    def _rest_of_state(self) -> dict[str, Tensor]:
        order = self._buffers["order"]
        return {} if order is None else {ORDER: order.clone()}

    def _take_rest(self, given: Mapping[str, Tensor], device: torch.device) -> None:
        order = given.get(ORDER)
        if order is not None and not order.is_meta and device.type != "meta":
            self._set_order(order.to(device, torch.int32, copy=True))


def order_array(order: Tensor) -> Any:
    """A permutation as an array."""
    return ARRAYS.to_numpy(order.detach().cpu())
