"""Types for annotations: the names that arguments take, so that editors complete them, and arrays of any library.

Nothing is imported for them: a type checker that does not find torch or MLX takes their types for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx
    import torch

    from billfish.core.format import Format

__all__ = [
    "Activations",
    "AnyArray",
    "CacheType",
    "FloatName",
    "FloatType",
    "FormatLike",
    "FormatName",
    "Gate",
    "Layout",
    "Library",
    "Method",
]

FormatName: TypeAlias = Literal[
    "u4",
    "u8",
    "u4b8",
    "u8b128",
    "affine4",
    "affine8",
    "fp4",
    "mxfp4",
    "nvfp4",
    "fp8",
    "mxfp8",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q8_1",
    "iq4_nl",
    "mxfp4_gguf",
    "nvfp4_gguf",
    "q4_k",
    "q5_k",
    "q6_k",
    "q2_k",
    "q3_k",
    "iq4_xs",
    "nf4",
]
FormatLike: TypeAlias = "FormatName | str | Format"  # a str may be the name of a format that somebody registered
Method: TypeAlias = Literal["rtn", "mse", "gptq"]
Activations: TypeAlias = Literal["exact", "q8", "q16", "fp8"]
Gate: TypeAlias = Literal["silu", "gelu", "clamped_silu"]  # what a feed-forward part does to its gate and up rows
CacheType: TypeAlias = Literal["float32", "float16", "int8", "fp8"]  # of the keys and values of a sequence
FloatName: TypeAlias = Literal["float32", "float16", "bfloat16"]
FloatType: TypeAlias = "FloatName | type[np.generic] | np.dtype[Any] | torch.dtype | mx.Dtype"
Library: TypeAlias = Literal["numpy", "torch", "mlx"]
Layout: TypeAlias = Literal["billfish", "compressed-tensors", "mlx", "gptq", "gptq_v2", "awq", "plain", "gguf"]


class AnyArray(Protocol):
    """An array of NumPy, torch, MLX or CuPy."""

    @property
    def shape(self) -> Any: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...


ArrayT = TypeVar("ArrayT", bound=AnyArray)  # gives back the kind that came in
