"""Packed weights as tensors of torch, for layers and for graphs that were compiled: see `Backend.to_tensors`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu.experts import PackedExperts
from billfish.backends.cpu.packed import Axes, PackedWeights
from billfish.core.arrays import TorchArrays
from billfish.core.format import get_format

ARRAYS = TorchArrays()


def to_tensors(weights: PackedWeights | PackedExperts) -> tuple[list[Any], str]:
    """The stream, factors of experts, and the planes that are kept beside it, as bytes; all else as JSON."""
    rest = weights.rest or {}
    kept = {name: part for name, part in rest.items() if not isinstance(part, np.dtype)}
    about: dict[str, Any] = {"shape": weights.shape, "level": weights.level, "group_size": weights.group_size}
    assert weights.axes is not None
    about["axes"] = weights.axes.__dict__ | {"table": list(weights.axes.table)}
    about["types"] = {n: (p if isinstance(p, np.dtype) else p.dtype).name for n, p in rest.items()}
    about["kept"] = {name: part.shape for name, part in kept.items()}
    arrays = [weights.data, *kept.values()]
    if isinstance(weights, PackedExperts):
        about["format"], about["factors"] = weights.kind, weights.factors is not None
        arrays += [] if weights.factors is None else [weights.factors]
    else:
        about["format"] = weights.format.name
    return [_bytes_tensor(array) for array in arrays], json.dumps(about)


def _bytes_tensor(array: NDArray[Any]) -> Any:
    held = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ARRAYS.from_numpy(held if held.flags.writeable else held.copy())


@lru_cache(maxsize=4096)
def _read_about(text: str) -> tuple[dict[str, Any], Axes, dict[str, np.dtype[Any]]]:
    about = json.loads(text)
    axes = Axes(**about["axes"] | {"table": tuple(about["axes"]["table"])})
    return about, axes, {name: np.dtype(kind) for name, kind in about["types"].items()}


def from_tensors(tensors: Sequence[Any], text: str) -> PackedWeights | PackedExperts:
    """The inverse of `to_tensors`, on the same memory."""
    about, axes, types = _read_about(text)
    stream, *others = (tensor.numpy() for tensor in tensors)
    rest: dict[str, Any] = dict(types)
    for (name, shape), array in zip(about["kept"].items(), others, strict=False):
        rest[name] = array.view(types[name]).reshape(shape)
    format, shape, group_size, level = (
        get_format(about["format"]),
        tuple(about["shape"]),
        about["group_size"],
        about["level"],
    )
    if len(shape) == 2:
        return PackedWeights(format, shape, group_size, level, axes, stream, rest=rest)
    factors = others[-1].view(np.float32) if about["factors"] else None
    return PackedExperts(format.name, shape, level, axes, stream, factors, group_size, rest)
