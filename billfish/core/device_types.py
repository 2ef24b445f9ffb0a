"""The numbers of NumPy's types in torch's tensors: which types there are, how one becomes another, and ldexp."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from billfish.core.arrays import bfloat16
from billfish.core.errors import FormatError, complaint

# torch computes with few unsigned integers. Those of 16 and 32 bits are signed ones with the same bits there.
TYPES = {
    np.dtype(name): name
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
} | {bfloat16: "bfloat16", np.dtype(np.uint16): "int16", np.dtype(np.uint32): "int32"}
NUMPY_TYPES = {name: dtype for dtype, name in TYPES.items() if dtype.kind != "u" or dtype == np.uint8}
DISGUISED = (np.dtype(np.uint16), np.dtype(np.uint32))


def missing(name: str) -> FormatError:
    """What a format gets that uses more of NumPy than there is."""
    takes = "w.cpu(), or functions that billfish.core.device_array has"
    return FormatError(complaint("quantize", "format", f"one that uses {name}, which arrays on a device lack", takes))


def torch_type(dtype: np.dtype[Any]) -> Any:
    if dtype not in TYPES:
        raise missing(f"numbers of type {dtype}")
    return getattr(sys.modules["torch"], TYPES[dtype])


def widened(tensor: Any, dtype: np.dtype[Any]) -> Any:
    """Numbers of a type without a sign in int64."""
    return tensor.long() & (2 ** (8 * dtype.itemsize) - 1)


def cast(tensor: Any, dtype: np.dtype[Any], target: np.dtype[Any]) -> Any:
    kind = torch_type(target)
    if dtype == target:
        return tensor
    if dtype in DISGUISED:
        tensor = widened(tensor, dtype)
    if target in DISGUISED and tensor.dtype.is_floating_point:
        tensor = tensor.long()
    return tensor.to(kind)


def ldexp(x: Any, exponent: Any) -> Any:
    """x * 2^exponent, rounded once.

    A float64 holds 2^-1022 to 2^1023 as they are. Narrower numbers are 0 or infinite beyond. Those of 64 bits take
    three such powers, the outermost first: a product that is rounded before the last power becomes 0.
    """
    torch = sys.modules["torch"]
    rest, powers = exponent.long(), []
    for _ in range(3 if x.dtype == torch.float64 else 1):
        near = rest.clamp(-1022, 1023)
        powers.append((near + 1023 << 52).view(torch.float64))
        rest = rest - near
    product = x.double()
    for power in reversed(powers):
        product = product * power
    return product.to(x.dtype)
