"""PackedWeights: weights in the order in which the kernels of one ISA level read them, to keep or to save."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.errors import BackendUnavailable, BillfishError, CheckpointError, complaint
from billfish.files import replacing
from billfish.format import Format, get_format
from billfish.tensor import check_permutation

# The order of the enums in layout/problem.h; what these have behind it is in plain.py.
CODES = ("u2", "u3", "u4", "u5", "u6", "s8", "table")
SCALES = (
    "f16",
    "f16_minimum",
    "f16_zero8",
    "f16_zero16",
    "e8m0",
    "e4m3",
    "sub",
    "sub_minimum",
    "sub_nibbles",
    "f32",
    "f32_minimum",
)
GROUPS = (16, 32, 64, 128, 256)
LAYOUT = 3  # changes with the order of bytes in the stream
ONE_STREAM = (("neon_i8mm", "neon_dotprod"),)  # levels that read what the others pack, best first


@dataclass(frozen=True)
class Axes:
    """Which kernel axes weights are made of; see layout/problem.h."""

    codes: str
    scales: str
    group: int
    bias: int = 0
    factor: float = 1.0
    table: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """W [N, K] in one sequential stream: `data` is all there is, the rest says how to read it.

    :func:`billfish.prepack` makes one and :func:`billfish.quantized_linear` takes one; nothing else has to be kept.

    format, shape, group_size, permutation: as of QuantizedTensor.
    level, axes: the instruction set that `data` was packed for, and the kind of weights in it.
    """

    format: Format
    shape: tuple[int, int]
    group_size: int
    level: str
    axes: Axes
    data: NDArray[np.uint8]
    permutation: NDArray[np.int32] | None = None

    @cached_property
    def description(self) -> Any:
        """What the native core takes."""
        axes = self.axes
        codes, scales = CODES.index(axes.codes), SCALES.index(axes.scales)
        return _cpu.Description(*self.shape, codes, scales, axes.bias, axes.group, axes.factor, list(axes.table))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __repr__(self) -> str:
        n, k = self.shape
        return f"PackedWeights({self.format.name}, [{n}, {k}], {self.level}, {self.nbytes} bytes)"

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """As of QuantizedTensor."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("description", "_made")}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, an .npz of NumPy, complete or not at all."""
        axes = self.axes.__dict__ | {"table": list(self.axes.table)}
        about = {"format": self.format.name, "shape": self.shape, "group_size": self.group_size, "level": self.level}
        with replacing(path) as file:
            arrays: dict[str, Any] = {"about": np.array(json.dumps(about | {"axes": axes, "layout": LAYOUT}))}
            if self.permutation is not None:
                arrays["permutation"] = self.permutation
            np.savez(file, **arrays, data=self.data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedWeights:
        """What `save` wrote, for the best ISA level here that reads it; for others, prepack the tensor again."""
        call = "PackedWeights.load"
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                about, data = json.loads(str(file["about"])), file["data"]
                order = file.get("permutation")
            axes = Axes(**about["axes"] | {"table": tuple(about["axes"]["table"])})
            n, k = about["shape"]
            readers = next((levels for levels in ONE_STREAM if about["level"] in levels), (about["level"],))
            level = next((level for level in readers if level in _cpu.levels()), about["level"])
            order = None if order is None else check_permutation(call, order, k)
            packed = cls(get_format(about["format"], call), (n, k), about["group_size"], level, axes, data, order)
            usable = axes.group in GROUPS and min(n, k) > 0 and data.dtype == np.uint8 and data.ndim == 1
            if about.get("layout") != LAYOUT:
                raise BackendUnavailable(
                    complaint(call, "path", "weights packed by another version", "prepack(q) again")
                )
            if packed.level not in _cpu.levels():
                takes = f"one of this machine: {', '.join(_cpu.levels())}"
                raise BackendUnavailable(complaint(call, "path", f"weights packed for {packed.level}", takes))
            usable = usable and data.size == _cpu.packed_bytes(packed.level, packed.description)
        except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, BillfishError):
                raise
            usable = False
        if not usable:
            raise CheckpointError(
                complaint(call, "path", f"{os.fspath(path)!r}", "a file that PackedWeights.save wrote")
            )
        return packed
