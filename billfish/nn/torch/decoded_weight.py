"""The `weight` of a quantized layer, for code that asks any linear layer for its type, device, shape or numbers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from billfish.core.errors import DTypeError, failure


class Layer(Protocol):
    """What a weight asks of its layer."""

    out_features: int
    in_features: int

    @property
    def device(self) -> torch.device: ...
    def decoded(self, dtype: torch.dtype) -> torch.Tensor: ...


class DecodedWeight(torch.Tensor):
    """W [N, K] of a layer. It has a type, a device and a shape; an operation that wants its numbers decodes them."""

    layer: Layer
    _is_hf_initialized = True  # transformers then leaves it as it is

    @staticmethod
    def __new__(cls, layer: Layer, dtype: torch.dtype) -> DecodedWeight:
        shape = layer.out_features, layer.in_features
        made: DecodedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=layer.device)
        made.layer = layer
        return made

    def decode(self) -> torch.Tensor:
        """The numbers."""
        return self.layer.decoded(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DecodedWeight({self.layer!r}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it without the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], cls):
            fix = "Use load_state_dict or set_storage, or write to to_linear().weight."
            raise DTypeError(failure("MarlinLinear", f"weight is read-only: it is decoded ({func})", fix))
        args, kwargs = tree_map_only(cls, cls.decode, (args, kwargs or {}))
        return func(*args, **kwargs)
