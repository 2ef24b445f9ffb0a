"""A torch module with quantized weights: how it is moved, converted, copied, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.backends.base import Direct
from billfish.core.errors import BillfishError, DTypeError, FormatError, ShapeError, bad_argument, failure
from billfish.core.format_tag import ABOUT, About
from billfish.core.typing import Activations
from billfish.nn.torch.weights import META, Weights, shape_of, to_numpy, to_torch

if TYPE_CHECKING:
    from typing_extensions import Self

ORDER = "permutation"
MEMORY = "weights"  # buffers of this name, with a number, are the memory of the packed weights


class QuantizedModule(torch.nn.Module):
    """A module with weights [N, K] or a stack of them [E, N, K], perhaps with a bias.

    A state dict has the format's storage arrays under their own names (`packed`, `scales`, `blocks`, ...), bit for bit,
    and `about`, which says the format. They are copies. The module itself holds the form that products read: no write
    to an array changes it, `load_state_dict` and `set_storage` do.
    """

    format: str
    group_size: int
    activations: Activations
    storage_names: tuple[str, ...]
    bias: torch.nn.Parameter | None
    _held: Weights
    _direct: Direct | None  # the product in few steps
    _number_type: torch.dtype  # of the weights that were quantized, and of `weight`

    def _set_up(self, weights: Weights, bias: Tensor | None, activations: Activations) -> None:
        """Begins the module."""
        torch.nn.Module.__init__(self)
        self.format, self.group_size, self.activations = weights.format.name, weights.group_size, activations
        self.storage_names = weights.format.storage_names
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias.detach())
        self.register_parameter("bias", bias)
        self._number_type = torch.get_default_dtype() if bias is None else bias.dtype
        self._hold(weights)

    def _hold(self, weights: Weights) -> None:
        """These weights in the place of others."""
        self._drop_buffers()
        self._held, self._direct = weights, weights.direct
        if weights.matrix is None:
            about = torch.empty(len(About(self.format, self.group_size).array()), dtype=torch.uint8, device=META)
            for name, tensor in {**weights.storage_tensors(), ABOUT: about}.items():
                self._buffers[name] = tensor
        for i, tensor in enumerate(weights.tensors if weights.form else []):
            self.register_buffer(f"{MEMORY}_{i}", tensor, persistent=False)

    def _drop_buffers(self) -> None:
        for name in [name for name in self._buffers if name.startswith(MEMORY) or name in self._awaited]:
            del self._buffers[name]

    @property
    def _awaited(self) -> tuple[str, ...]:
        """Buffers of a layer on "meta". accelerate and transformers put arrays there by hand."""
        return (*self.storage_names, ABOUT)

    @property
    def _weights(self) -> Weights:
        if self._held.matrix is None:
            self._take_awaited()
        return self._held

    def _take_awaited(self) -> None:
        """Pack arrays that were put into a layer on "meta", if all have come."""
        arrays = {name: self._buffers.get(name) for name in self.storage_names}
        if any(array is None or array.is_meta for array in arrays.values()):
            return
        call, about = "MarlinLinear", self._buffers.get(ABOUT)
        if about is not None and not about.is_meta:
            About(self.format, self.group_size).check(call, to_numpy(about))
        self._check_storage(call, arrays)
        self._take_storage(arrays, arrays[self.storage_names[0]].device)  # type: ignore[arg-type,union-attr]

    def __getattr__(self, name: str) -> Any:
        """Storage arrays by name are copies, as in a state dict, whose keys torch.distributed looks up here."""
        if name in self.__dict__.get("storage_names", ()) and name not in self._buffers:
            return self.storage()[name]
        if name == ABOUT and name not in self._buffers and "_held" in self.__dict__:
            return to_torch(About(self.format, self.group_size).array(), self.device)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises for a storage array by name, which would change nothing."""
        if name in self.__dict__.get("storage_names", ()) and name not in self._buffers:
            fix = "Set all arrays together: set_storage or load_state_dict."
            raise DTypeError(failure(type(self).__name__, f"{name} cannot be assigned alone", fix))
        super().__setattr__(name, value)

    def bias_to_add(self) -> Tensor | None:
        """The bias, for a product.

        Data parallel wrappers put a plain tensor in its place while they run, or take it out of the parameters. FSDP
        then frees the memory of that tensor, which fails once NumPy has looked at it.
        """
        parameters = self._parameters
        bias: Tensor | None = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401  # slow to get
        return bias.clone() if type(bias) is Tensor else bias

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.device

    @property
    def storage_bytes(self) -> int:
        """Of storage, without making it."""
        return self._weights.nbytes

    def storage(self) -> dict[str, Tensor]:
        """A copy of the storage arrays, bit for bit, where the layer is."""
        if torch.compiler.is_dynamo_compiling():  # it would trace NumPy's arithmetic, as torch's
            return _storage_outside_of_graphs(self._weights)
        return self._weights.storage_tensors()

    def set_storage(self, storage: Mapping[str, Any]) -> None:
        """Take other weights of the same format and shape: all storage arrays by name, tensors or NumPy arrays."""
        call = "set_storage"
        if storage.keys() != set(self.storage_names):
            expected = f"a dict with {', '.join(self.storage_names)}, all arrays of {self.format}"
            raise FormatError(bad_argument(call, "storage", f"a dict with {', '.join(storage)}", expected))
        arrays = {name: storage[name] for name in self.storage_names}
        arrays = {name: a if isinstance(a, Tensor) else to_torch(np.asarray(a)) for name, a in arrays.items()}
        self._check_storage(call, arrays)
        self._take_storage(arrays, self.device)

    def _take_storage(self, arrays: Mapping[str, Tensor], device: torch.device) -> None:
        storage = {name: to_numpy(arrays[name]) for name in self.storage_names}
        format, group_size = self._held.format, self._held._group()
        self._hold(Weights.from_storage(format, storage, group_size, device, self.activations))

    def _check_storage(self, call: str, arrays: Mapping[str, Any]) -> None:
        """Raises unless these arrays are weights of this layer's format and shape."""
        weights = self._held
        storage = {name: _described(call, name, arrays[name]) for name in self.storage_names}
        shape, _ = shape_of(call, weights.format, storage, weights._group())
        if shape != weights.shape:
            argument = f"shape of the weights ({', '.join(storage)})"
            raise ShapeError(bad_argument(call, argument, list(shape), f"{list(weights.shape)}"))

    def _check_rest(self, call: str, arrays: dict[str, Any]) -> None:
        """Raises unless everything beside the storage fits."""

    # ---- state dicts -------------------------------------------------------------------------------------------------

    def _rest_of_state(self) -> dict[str, Tensor]:
        """What a state dict has beside parameters, storage and `about`."""
        return {}

    def _take_rest(self, given: Mapping[str, Tensor], device: torch.device) -> None:
        """The same, from a state dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weights = self._weights
        super()._save_to_state_dict(destination, prefix, keep_vars)
        about = {} if weights.matrix is None else {ABOUT: getattr(self, ABOUT)}  # on "meta" it is a buffer, or left out
        for name, tensor in {**weights.storage_tensors(), **self._rest_of_state(), **about}.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes all that is given or, if some of it does not fit, nothing. torch says afterwards what is missing."""
        _ = self._weights  # packs what was put in by hand
        rest = self._rest_of_state()
        own = {*self.storage_names, *rest, ABOUT}
        given = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        others = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in own}
        if strict:
            missing_keys += [prefix + name for name in (*self.storage_names, *rest) if name not in given]
        for name, tensor in given.items():
            if isinstance(tensor, Tensor) and tensor.dtype == torch.uint32:  # as MLX writes words
                given[name] = tensor.view(torch.int32)
        parts = [name for name in self.storage_names if name in given]
        try:
            if isinstance(given.get(ABOUT), Tensor) and not given[ABOUT].is_meta:
                About(self.format, self.group_size).check("load_state_dict", to_numpy(given[ABOUT]))
            arrays: dict[str, Any] = {**(self.storage() if parts else {}), **given}
            if parts:
                self._check_storage("load_state_dict", arrays)
            self._check_rest("load_state_dict", {**arrays, "bias": state_dict.get(prefix + "bias")})
        except BillfishError as error:
            error_msgs.append(str(error))
            others = {k: v for k, v in others.items() if not k.startswith(prefix) or "." in k.removeprefix(prefix)}
            parts, given, strict = [], {}, False
        assign = local_metadata.get("assign_to_params_buffers", False)
        device = arrays[parts[0]].device if assign and parts else self.device
        if parts and device != META and self._can_take(arrays):
            self._take_storage(arrays, device)
        self._take_rest(given, device)
        waiting = {name: self._buffers.pop(name) for name in self._awaited if name in self._buffers}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._buffers.update(waiting)

    def _can_take(self, arrays: Mapping[str, Tensor]) -> bool:
        """Whether all arrays have numbers."""
        return not any(arrays[name].is_meta for name in self.storage_names)

    # ---- moving and copying ------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Weights move, and keep their bits: another type would be other weights."""
        held = self._weights
        probe = fn(torch.empty(0, dtype=self._number_type, device=held.device))
        moves = probe.device != held.device
        weights = held.moved(probe.device, self.activations) if moves else held.applied(fn)
        self._drop_buffers()
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except BaseException:
            self._hold(held)
            raise
        self._number_type = probe.dtype
        self._hold(weights)
        return self

    def __getstate__(self) -> dict[str, Any]:
        _ = self._weights  # packs what was put in by hand
        buffers = {name: t for name, t in self._buffers.items() if not name.startswith(MEMORY)}
        return {name: value for name, value in self.__dict__.items() if name != "_direct"} | {"_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._hold(self._held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return copied


def _described(call: str, name: str, tensor: Any) -> NDArray[Any]:
    """An array of the shape and type of a storage tensor, without its memory."""
    try:
        return np.broadcast_to(np.zeros((), to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype), tuple(tensor.shape))
    except (AttributeError, TypeError):
        found = str(getattr(tensor, "dtype", type(tensor).__name__))
        raise DTypeError(bad_argument(call, f"dtype of {name}", found, "a type that NumPy has")) from None


@torch._disable_dynamo  # type: ignore[attr-defined]
def _storage_outside_of_graphs(weights: Weights) -> dict[str, Tensor]:
    return weights.storage_tensors()
