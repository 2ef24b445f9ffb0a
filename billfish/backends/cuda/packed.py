"""Bricks that were packed on the CPU, and may be saved."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.axes import Floats, Kind, describe
from billfish.backends.cuda.layout import brick_shape, pack
from billfish.core.errors import DataError, ShapeError, bad_argument, failure
from billfish.core.files import path_of, read_arrays, replacing
from billfish.core.tensor import QuantizedTensor

LAYOUT = 4  # of saved bricks; changes with the meaning of their bytes


@dataclass(frozen=True, eq=False)
class PackedBricks:
    """Weights packed on the CPU: to save, and to load on a GPU without the tensor they were made of."""

    kind: Kind
    shape: tuple[int, int]
    bricks: NDArray[np.uint8]
    row_scale: Floats

    def __post_init__(self) -> None:
        """Raises unless there are as many bricks as kernels will read."""
        if len(self.shape) != 2 or any(type(size) is not int or size < 0 for size in self.shape):
            raise ShapeError(bad_argument("PackedBricks", "shape", self.shape, "(N, K)"))
        down, along = brick_shape(*self.shape)
        wanted = down * along * self.kind.brick_bytes
        bricks, scales = self.bricks, self.row_scale
        if bricks.dtype != np.uint8 or bricks.nbytes != wanted or not bricks.flags.c_contiguous:
            found = f"{bricks.nbytes} bytes of {bricks.dtype}"
            raise ShapeError(bad_argument("PackedBricks", "bricks", found, f"{wanted} bytes for {list(self.shape)}"))
        if scales.dtype != np.float32 or scales.shape != self.shape[:1]:
            value = f"{scales.dtype} of shape {scales.shape}"
            raise ShapeError(bad_argument("PackedBricks", "row_scale", value, f"float32 of shape {self.shape[:1]}"))

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> PackedBricks:
        description = describe(tensor)
        return cls(description.kind, tensor.shape, pack(description), description.row_scale)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As an .npz file, written whole or not at all."""
        about = json.dumps({**asdict(self.kind), "shape": self.shape, "layout": LAYOUT})
        with replacing(path_of("PackedBricks.save", path)) as file:
            np.savez(file, about=np.asarray(about), bricks=self.bricks, row_scale=self.row_scale)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedBricks:
        file = path_of("load", path)
        try:
            arrays = read_arrays(file)
            about = json.loads(str(arrays["about"]))
            if about.pop("layout", 1) != LAYOUT:
                raise ValueError("packed by another version; pack the tensor again")
            shape, table = tuple(about.pop("shape")), tuple(about.pop("table"))
            return cls(Kind(**about, table=table), shape, arrays["bricks"], arrays["row_scale"])
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(failure("load", f"{file} is no file of PackedBricks.save, or damaged ({error})")) from None
