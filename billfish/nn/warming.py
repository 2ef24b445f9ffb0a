"""warm_up: what the first products of a model would wait for, before somebody waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from billfish.core.arrays import float_dtype
from billfish.core.errors import ShapeError, bad_argument
from billfish.core.typing import FloatType
from billfish.nn.layer_base import kit_of

CALL = "warm_up"


class WarmUp(NamedTuple):
    """What :func:`warm_up` did: with how many `layers`, in how many `products`, in how many `seconds`.

    >>> print(bf.WarmUp(layers=2, products=8, seconds=0.5))
    2 layers, 8 products, 0.5 s
    """

    layers: int
    products: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.products} products, {self.seconds:.1f} s"


def warm_up(
    model: Any, *, rows: Sequence[int] = (1, 8, 64, 512), dtype: FloatType = "float16", chosen: int = 2
) -> WarmUp:
    """Pack the weights of a model's quantized layers and compile their kernels, before the first request waits for it.

    A GPU's kernels are compiled at their first use: by macOS (MLX, and torch on mps) or by NVRTC (torch on cuda). Each
    layer multiplies a row of zeros, so that its weights are packed. The first layer of each format and size multiplies
    as many rows as `rows` says, too: other numbers of rows may take other kernels.

    model: a torch.nn.Module or an mlx.nn.Module, a single layer or one with layers in it.
    rows: of the input; 1 is a decode step, many are a prompt. dtype: of the input; each type has kernels of its own.
    chosen: of layers of experts, how many experts each row has.

    Returns a WarmUp. Raises ShapeError for rows that are no positive integers.

        >>> import torch
        >>> model = torch.nn.Sequential(bf.QuantizedLinear(64, 8, format="fp4", framework="torch"))
        >>> bf.warm_up(model, rows=(1, 8), dtype="float32").layers
        1
    """
    if not rows or any(not isinstance(m, int) or m < 1 for m in rows):
        raise ShapeError(bad_argument(CALL, "rows", rows, "positive integers, such as (1, 8, 64, 512)"))
    name = float_dtype(CALL, dtype).name
    started, seen, found, products = time.perf_counter(), set(), 0, 0
    for kind, multiply in kit_of(CALL, model).warm_layers(model, name, chosen):
        wanted = (1,) if kind in seen else (1, *(m for m in rows if m != 1))
        for m in wanted:
            multiply(m)
        seen.add(kind)
        found, products = found + 1, products + len(wanted)
    return WarmUp(found, products, time.perf_counter() - started)
