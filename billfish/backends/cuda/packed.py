"""Bricks that were packed on the CPU, and may be saved."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.describe import Floats, describe
from billfish.backends.cuda.kind import Kind
from billfish.backends.cuda.layout import brick_shape, pack
from billfish.errors import DataError, complaint
from billfish.files import replacing
from billfish.tensor import QuantizedTensor

LAYOUT = 4  # of saved bricks; changes with the meaning of their bytes


@dataclass(frozen=True, eq=False)
class PackedBricks:
    """Weights packed on the CPU: to save, and to load on a GPU without the tensor they were made of."""

    kind: Kind
    shape: tuple[int, int]
    bricks: NDArray[np.uint8]
    row_scale: Floats

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> PackedBricks:
        description = describe(tensor)
        return cls(description.kind, tensor.shape, pack(description), description.row_scale)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As an .npz file, written whole or not at all."""
        about = json.dumps({**asdict(self.kind), "shape": self.shape, "layout": LAYOUT})
        with replacing(path) as file:
            np.savez(file, about=np.asarray(about), bricks=self.bricks, row_scale=self.row_scale)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedBricks:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                if about.pop("layout", 1) != LAYOUT:
                    raise ValueError("of another version: pack the tensor again")
                (n, k), table = about.pop("shape"), tuple(about.pop("table"))
                packed = cls(Kind(**about, table=table), (n, k), arrays["bricks"], arrays["row_scale"])
        except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            got = f"{os.fspath(path)!r} ({error})"
            raise DataError(complaint("load", "path", got, "a file that PackedBricks.save wrote")) from None
        down, along = brick_shape(n, k)
        if packed.bricks.nbytes != down * along * packed.kind.brick_bytes or packed.row_scale.shape != (n,):
            got = f"{packed.bricks.nbytes} bytes of bricks for [{n}, {k}]"
            raise DataError(complaint("load", "path", got, f"{down * along * packed.kind.brick_bytes}"))
        return packed
