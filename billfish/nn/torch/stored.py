"""Weights in the buffers of a torch module, as MarlinLinear and stacks of experts hold them.

Moving, converting, loading and pickling the module keeps their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.core.errors import BillfishError, DTypeError, ShapeError, complaint
from billfish.core.format import Format
from billfish.core.format_tag import ABOUT
from billfish.core.typing import Activations
from billfish.nn.torch.watch import to_numpy
from billfish.nn.torch.weights import Weights, shape_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Stored(torch.nn.Module):
    """A module whose buffers are the storage of a matrix [N, K] or a stack of them [E, N, K], perhaps with a bias."""

    format: str
    group_size: int
    activations: Activations
    storage_names: tuple[str, ...]
    bias: torch.nn.Parameter | None

    def _set_up_storage(
        self,
        format: Format,
        shape: tuple[int, ...],
        group_size: int,
        storage: dict[str, Tensor],
        bias: Tensor | None,
    ) -> None:
        """Begins the module. `storage` may lack what is held in packed form."""
        torch.nn.Module.__init__(self)
        self.format, self.group_size = format.name, group_size
        self.storage_names = format.storage_names
        self.__dict__["_buffers"] = Weights(format, shape, group_size)
        for name in self.storage_names:
            self.register_buffer(name, storage.get(name))
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias.detach())
        self.register_parameter("bias", bias)

    @property
    def _weights(self) -> Weights:
        weights = self.__dict__["_buffers"]
        assert isinstance(weights, Weights)
        return weights

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights.for_operator()[0][0].device

    @property
    def storage(self) -> list[Tensor]:
        """The storage arrays, in the order of `storage_names`."""
        return [self._weights[name] for name in self.storage_names]

    @property
    def storage_bytes(self) -> int:
        """Of storage, without asking for it: where the layer holds packed weights, storage would have to be made."""
        return self._weights.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether the layer holds packed weights alone, and storage would have to be made of them."""
        return self._weights.packed is not None

    def repack(self) -> None:
        """Pack the weights anew, on the CPU at the next call, whatever they were: for writes that no layer can notice.

        Memory that is not torch's own (of NumPy or a file) is read at each call, in case somebody writes to it. It is
        not after this, until other memory takes its place.
        """
        self._weights.repack()
        self._weights.pack(self.activations)

    def set_about(self) -> None:
        """Say the format in `about` anew, on the device of the weights: for whoever puts arrays in by hand."""
        self._weights.set_about()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.repack()  # the memory was made for this layer, by whoever read it

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._weights.restore()
        self._convert(fn, recurse)
        self._weights.pack(self.activations)  # now that nobody holds the former storage
        return self

    def _convert(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Storage keeps its types. All buffers stay as they were if `fn` fails, as for want of memory."""
        weights = self._weights
        held = {name: weights.own(name) for name in list(weights)}
        weights.pop(ABOUT, None)  # what `to_empty` would leave of it says nothing
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name in self.storage_names:
                device, dtype = weights.own(name).device, weights.own(name).dtype
                if dtype != held[name].dtype:
                    weights[name] = held[name].to(device)
            self.set_about()
        except BaseException:
            weights.update(held)
            raise

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._take_state(*arguments)
        self._weights.pack(self.activations)

    def _take_state(
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
        held = {
            name: tensor for name, tensor in (*self._weights.items(), *self._parameters.items()) if tensor is not None
        }
        own_about = held.pop(ABOUT, None)
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        fits = True
        try:
            if isinstance(given.get(ABOUT), Tensor):
                self._weights.check_about("load_state_dict", given[ABOUT])
            self._check_state({name: given.get(name, tensor) for name, tensor in held.items()})
        except BillfishError as error:
            fits = False
            error_msgs.append(str(error))
        loaded = dict(state_dict)
        for name in held.keys() & given.keys():
            value = given[name] if fits else held[name]
            if value.dtype == torch.uint32:  # as MLX writes words
                value = value.view(torch.int32)
            if name in self.storage_names and value.dtype != held[name].dtype:
                # copy_ would convert. Scales of a file may have a wider type than quantize() makes: take that type.
                self._weights[name] = torch.empty_like(held[name], dtype=value.dtype)
            loaded[prefix + name] = value
        if own_about is not None:
            loaded[prefix + ABOUT] = own_about  # given or not, it says the same
        super()._load_from_state_dict(loaded, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.set_about()

    def _check_state(self, arrays: dict[str, Any]) -> None:
        """Raises unless these arrays are weights of this layer's format and shape."""
        call, weights = "load_state_dict", self._weights
        whole_row = weights.format.whole_row_groups and self.group_size == weights.shape[-1]
        storage = {name: _described(call, name, arrays[name]) for name in self.storage_names}
        shape, _ = shape_of(call, weights.format, storage, -1 if whole_row else self.group_size)
        if shape != weights.shape:
            got, takes = f"weights {list(shape)}", f"{list(weights.shape)}"
            raise ShapeError(complaint(call, ", ".join(storage), got, takes))
        self._check_rest(call, arrays)

    def _check_rest(self, call: str, arrays: dict[str, Any]) -> None:
        """Raises unless everything beside the storage fits."""


def _described(call: str, name: str, tensor: Any) -> NDArray[Any]:
    """An array of the shape and type of a storage tensor, without its memory."""
    try:
        return np.broadcast_to(np.zeros((), to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype), tuple(tensor.shape))
    except (AttributeError, TypeError):
        got = str(getattr(tensor, "dtype", type(tensor).__name__))
        raise DTypeError(complaint(call, name, got, "a tensor of a type that storage has")) from None
