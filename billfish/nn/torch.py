"""MarlinLinear for PyTorch: storage in buffers, a custom operator for the product, gradients by decoded weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.arrays import TorchArrays
from billfish.errors import DTypeError, complaint
from billfish.format import Format
from billfish.nn import base
from billfish.ops import dequantize, quantize, quantized_linear
from billfish.tensor import QuantizedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

ARRAYS = TorchArrays()

# torch's own tools (pickle, DDP, gloo) do not take uint32, so layers hold the 32-bit words of storage as int32.


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    # detach() makes another tensor of the same memory, so that the cache does not keep the layer's own one alive.
    array = ARRAYS.to_numpy(tensor.detach().cpu())
    return array.view(np.uint32) if array.dtype == np.int32 else array


def to_torch(array: NDArray[Any], device: torch.device | str | None = None) -> Tensor:
    """A storage array as a layer holds it."""
    held = np.array(array)  # a copy: it may be a read-only view of a file
    return ARRAYS.from_numpy(held.view(np.int32) if held.dtype == np.uint32 else held).to(device)


def _stamp(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count what is written to them


WEIGHTS = base.WeightCache(_to_numpy, _stamp)


# ---- the operator: torch.compile sees it as one opaque call, and autograd knows its derivative -----------------------

torch.library.define(
    "billfish::linear",
    "(Tensor x, Tensor[] storage, Tensor? bias, str format, int group_size, int n, str activations) -> Tensor",
)
torch.library.define("billfish::dequantize", "(Tensor[] storage, str format, int group_size, int n, int k) -> Tensor")
LINEAR, DEQUANTIZE = torch.ops.billfish.linear.default, torch.ops.billfish.dequantize.default


@torch.library.impl("billfish::linear", ["cpu", "cuda"])
def _linear(
    x: Tensor,
    storage: list[Tensor],
    bias: Tensor | None,
    format: str,
    group_size: int,
    n: int,
    activations: str,
) -> Tensor:
    return quantized_linear(x, WEIGHTS.get(storage, format, group_size), bias=bias, activations=activations)


@torch.library.register_fake("billfish::linear")  # type: ignore[untyped-decorator]
def _linear_fake(x: Tensor, storage: Any, bias: Any, format: str, group_size: int, n: int, activations: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@torch.library.impl("billfish::dequantize", ["cpu", "cuda"])
def _dequantize(storage: list[Tensor], format: str, group_size: int, n: int, k: int) -> Tensor:
    return dequantize(WEIGHTS.get(storage, format, group_size), out=torch.empty(n, k, device=storage[0].device))


@torch.library.register_fake("billfish::dequantize")  # type: ignore[untyped-decorator]
def _dequantize_fake(storage: list[Tensor], format: str, group_size: int, n: int, k: int) -> Tensor:
    return storage[0].new_empty(n, k, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.storage, bias, ctx.format, ctx.group_size, ctx.out_features, _ = inputs
    ctx.in_features = x.shape[-1]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """d/dx is gradient @ W, in float32 on the decoded weights. Integer activations pass gradients straight through."""
    wide = gradient.float()
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        w = DEQUANTIZE(ctx.storage, ctx.format, ctx.group_size, ctx.out_features, ctx.in_features)
        for_x = (wide @ w).to(gradient.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        for_bias = wide.reshape(-1, ctx.out_features).sum(0).to(ctx.bias_dtype)
    return for_x, [None] * len(ctx.storage), for_bias, None, None, None, None


torch.library.register_autograd("billfish::linear", _backward, setup_context=_keep)


@torch.library.register_vmap("billfish::linear")  # type: ignore[untyped-decorator]
def _vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, storage: list[Tensor], bias: Tensor | None, *rest: Any
) -> Any:
    if in_dims[0] is None or in_dims[2] is not None or any(dim is not None for dim in in_dims[1]):
        raise DTypeError(complaint("MarlinLinear", "vmap", f"in_dims {in_dims}", "a batch of x, and of nothing else"))
    return LINEAR(x.movedim(in_dims[0], 0), storage, bias, *rest), 0


def _nobody_looks(x: Tensor, bias: Tensor | None) -> bool:
    """Whether a call needs no operator: nobody traces, transforms, profiles or differentiates it.

    The dispatch of an operator that is written in Python takes longer than a small product does.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or not (x.is_cpu or x.is_cuda):
        return False
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
        or torch.autograd.forward_ad._current_level >= 0
    )


# ---- the layer -------------------------------------------------------------------------------------------------------


class MarlinLinear(base.MarlinLinear, torch.nn.Module):
    """y = x @ W.T + bias with W [out_features, in_features] in one of billfish's formats.

    Buffers are the format's storage arrays under their own names (`packed`, `scales`, `blocks`, ...), bit for bit, and
    `permutation` int32 [K] where columns are stored in another order (act-order); the bias is an ordinary parameter.
    `.to(dtype)`, `.half()` and the like convert the bias and leave storage alone: another type would be other weights.
    """

    kind = "torch"
    bias: torch.nn.Parameter | None
    permutation: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str | Format = "fp4",
        group_size: int | None = None,
        activations: str = "exact",
        act_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: str,
    ) -> None:
        """A layer of zeros, to load a state dict into. `act_order` makes room for a permutation."""
        name, group, template = base.empty_weights(format, out_features, in_features, group_size, options)
        storage = {
            part: torch.zeros(array.shape, dtype=to_torch(array.ravel()[:0], "meta").dtype, device=device)
            for part, array in template.items()
        }
        permutation = torch.arange(in_features, dtype=torch.int32, device=device) if act_order else None
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._set_up(name, (out_features, in_features), group, storage, zeros, permutation, activations)

    def _set_up(
        self,
        format: str,
        shape: tuple[int, int],
        group_size: int,
        storage: dict[str, Tensor],
        bias: Tensor | None,
        permutation: Tensor | None,
        activations: str,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.format, self.group_size = format, group_size
        self.out_features, self.in_features = shape
        self.activations = base.check_activations("MarlinLinear", activations)
        self.storage_names = base.storage_names(format)
        for name in self.storage_names:
            self.register_buffer(name, storage[name])
        self.register_buffer("permutation", permutation)
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias.detach())
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        format: str | Format = "fp4",
        *,
        group_size: int | None = None,
        method: str = "rtn",
        activations: str = "exact",
        **options: str,
    ) -> MarlinLinear:
        """Quantize a torch.nn.Linear, on the device it is on. The bias is kept as it is, not copied."""
        if not isinstance(linear, torch.nn.Linear):
            raise DTypeError(complaint("from_linear", "linear", f"a {type(linear).__name__}", "a torch.nn.Linear"))
        weight = linear.weight.detach()
        tensor = quantize(weight.cpu(), format, group_size=group_size, method=method, **options)
        layer = cls.from_quantized(tensor, linear.bias, activations=activations, device=weight.device)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        tensor: QuantizedTensor,
        bias: Tensor | None = None,
        *,
        permutation: Any = None,
        activations: str = "exact",
        device: torch.device | str | None = None,
    ) -> Self:
        """A layer with a copy of these weights. `permutation` [K]: stored column j takes x[..., permutation[j]]."""
        checked = base.check_weights("from_quantized", tensor, bias, permutation)
        order = None if checked is None else torch.from_numpy(checked).to(device)
        storage = {name: to_torch(array, device) for name, array in tensor.storage.items()}
        layer = cls.__new__(cls)
        layer._set_up(tensor.format.name, tensor.shape, tensor.group_size, storage, bias, order, activations)
        return layer

    def with_bias(self, bias: Tensor | None) -> MarlinLinear:
        """Another layer with the very same weight tensors: tied weights."""
        storage = dict(zip(self.storage_names, self.storage, strict=True))
        shape = (self.out_features, self.in_features)
        layer = type(self).__new__(type(self))
        layer._set_up(self.format, shape, self.group_size, storage, bias, self.permutation, self.activations)
        return layer.train(self.training)

    @staticmethod
    def walk(model: torch.nn.Module) -> base.Walk:
        """The Linear layers of a model, and who else holds a weight."""
        linears: list[base.Place] = []
        others: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, child in module._modules.items():
                if isinstance(child, torch.nn.Linear):
                    linears.append(base.Place(prefix + name, child, partial(setattr, module, name)))
            if not isinstance(module, torch.nn.Linear):
                others |= {id(p): prefix + name for name, p in module.named_parameters(recurse=False)}
        return base.Walk(torch.nn.Linear, linears, others)

    @staticmethod
    def parameter_arrays(model: torch.nn.Module) -> dict[str, Tensor]:
        """Everything that a state dict holds, under all its names."""
        return dict(model.state_dict(keep_vars=True))

    @staticmethod
    def set_parameter(model: torch.nn.Module, name: str, value: Tensor) -> None:
        """Write a value into one of them."""
        with torch.no_grad():
            model.state_dict(keep_vars=True)[name].copy_(value)

    @property
    def storage(self) -> list[Tensor]:
        """The storage arrays, in the order of `storage_names`."""
        return [self._buffers[name] for name in self.storage_names]  # type: ignore[misc]  # never None

    def quantized(self) -> QuantizedTensor:
        """The weights [N, K] in stored order, as views of the buffers where those are in CPU memory."""
        return WEIGHTS.get(self.storage, self.format, self.group_size)

    def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """A plain layer with the decoded weights, columns in their original order."""
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.storage[0].device)
        dequantize(self.quantized(), out=weight)
        if self.permutation is not None:
            original = torch.empty_like(weight)
            original[:, self.permutation] = weight
            weight = original
        linear = torch.nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", dtype)
        linear.weight = torch.nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = torch.nn.Parameter(self.bias.detach().to(dtype, copy=True))
        return linear.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.permutation is not None:
            x = x.index_select(-1, self.permutation)
        storage, bias = self.storage, self.bias
        if _nobody_looks(x, bias):
            weights = WEIGHTS.get(storage, self.format, self.group_size)
            y: Tensor = quantized_linear(x, weights, bias=bias, activations=self.activations)
            return y
        return LINEAR(x, storage, bias, self.format, self.group_size, self.out_features, self.activations)

    def extra_repr(self) -> str:
        return self.describe(self.bias is not None, self.permutation is not None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MarlinLinear:
        held = {name: self._buffers[name] for name in self.storage_names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in held.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # copy_ would convert where types differ. Files have uint32 where MLX wrote them, and scales of a wider type
        # than quantize() makes where somebody else did: take the file's type.
        for name in self.storage_names:
            given, held = state_dict.get(prefix + name), self._buffers[name]
            if given is not None and held is not None and given.dtype != held.dtype:
                if given.dtype == torch.uint32:
                    state_dict[prefix + name] = given.view(torch.int32)
                else:
                    self._buffers[name] = torch.empty_like(held, dtype=given.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)
