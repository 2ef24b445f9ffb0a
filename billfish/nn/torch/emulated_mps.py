"""torch's device "mps" where there is none: tensors in CPU memory that say they are on mps, and the emulator for Metal.

    with mps():
        y = layer.to("mps")(x.to("mps"))

Memory is on mps or it is not, so views are where their base is. Results are where their arguments are. A CPU tensor
beside one on mps is an error, as are float64 and NumPy's look at such memory. What torch computes, the CPU computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from billfish.backends.emulator.shader import compile_shader
from billfish.nn.torch import operator

MPS = torch.device("mps", 0)
MARK = "_emulated_mps"  # of memory: torch keeps one object for it, whoever has a tensor there
_TOO_WIDE = (torch.float64, torch.complex128)
_Tensor: Any = torch.Tensor
# These look at tensors, or write to one from anywhere.
_FREE = (_Tensor.copy_, _Tensor.data.__set__, _Tensor.grad.__set__, torch._has_compatible_shallow_copy_type)
_GETTERS: dict[Any, Any] = {
    _Tensor.device.__get__: lambda tensor: MPS,
    _Tensor.is_cpu.__get__: lambda tensor: False,
    _Tensor.is_mps.__get__: lambda tensor: True,
    _Tensor.get_device: lambda tensor: 0,
}


def is_there(tensor: Any) -> bool:
    """Whether a tensor's memory is on mps."""
    return isinstance(tensor, _Tensor) and not tensor.is_meta and hasattr(tensor.untyped_storage(), MARK)


def put(result: Any) -> Any:
    """The same, with all tensors on mps."""
    for tensor in tree_leaves(result):
        if isinstance(tensor, _Tensor) and not tensor.is_meta:
            if tensor.dtype in _TOO_WIDE:
                raise TypeError(f"Cannot convert a MPS Tensor to {tensor.dtype}: the MPS framework does not have it")
            setattr(tensor.untyped_storage(), MARK, True)
    return result


def _device_in(values: Any) -> torch.device | None:
    """The device that an argument names."""
    for value in values:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str):
            return torch.device(value)
    return None


class _Mps(TorchFunctionMode):
    """What Python code sees of torch. It is off while it answers: operations below are the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _GETTERS:
            return _GETTERS[func](args[0]) if is_there(args[0]) else func(*args, **kwargs)
        if func is _Tensor.backward:  # our derivatives are Python, and look at devices
            with self:
                torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
            return None
        if func in (_Tensor.to, _Tensor.cpu):
            return self._moved(func, args, kwargs)
        if func in (_Tensor.numpy, _Tensor.__array__) and is_there(args[0]):
            raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() first.")
        named = _device_in([kwargs["device"]]) if kwargs.get("device") is not None else None
        if named is not None and named.type == "mps":
            return put(func(*args, **kwargs | {"device": torch.device("cpu")}))
        return self._computed(func, args, kwargs, named)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that torch calls, perhaps while the mode is off, with the mode on."""

        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`x.to(...)` and `x.cpu()`."""
        tensor, *rest = args
        other = next((value for value in rest if isinstance(value, _Tensor)), None)
        target = _device_in([*rest, *filter(None, [kwargs.get("device")])])
        if func is _Tensor.cpu:
            target = torch.device("cpu")
        elif other is not None:
            target = MPS if is_there(other) else other.device
        elif target is None:
            target = MPS if is_there(tensor) else tensor.device
        there = target.type == "mps"
        here = [torch.device("cpu") if isinstance(value, (str, torch.device)) else value for value in rest]
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        moved = func(tensor, *here, **kwargs)
        if there != is_there(tensor) and moved.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            moved = moved.clone()
        return put(moved) if there else moved

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], named: torch.device | None) -> Any:
        """Any other function: its result is where its arguments are, unless it says another device."""
        tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, _Tensor) and not leaf.is_meta]
        there = [is_there(tensor) for tensor in tensors]
        in_backward = torch._C._current_graph_task_id() != -1  # where C++ hands over what it has made
        if any(there) and func not in _FREE and not in_backward:
            astray = [t for t, is_mps in zip(tensors, there, strict=True) if not is_mps and t.dim() > 0]
            if astray:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two, mps:0 and cpu!"
                )
        result = func(*args, **kwargs)
        return put(result) if any(there) and named is None and func not in _FREE else result


@contextmanager
def mps() -> Iterator[None]:
    """torch with a device "mps" inside the `with` block, whose kernels run in the emulator."""
    device = _Mps()
    kernels = {name: device.inside(kernel) for name, kernel in operator.KERNELS.items()}
    with (
        patch.dict(operator.KERNELS, kernels),
        patch.object(torch.mps, "compile_shader", compile_shader),
        patch.object(torch.backends.mps, "is_available", lambda: True),
        patch.object(torch.mps, "synchronize", lambda: None),
        device,
    ):
        yield
