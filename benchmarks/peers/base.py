"""What a peer is: another library that computes the same product, with weights that its caches cannot keep."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format, Planes, get_format
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize

Floats = NDArray[np.float32]

# Weights are this many random rows, repeated: quantizing them takes no time, and a kernel cannot tell.
DISTINCT_ROWS = 256


@dataclass(frozen=True)
class Case:
    """A product to be timed, y = x @ W.T with W [n, k] in a format; x [M, k] comes later."""

    format: Format
    group_size: int
    k: int
    n: int
    activations: str

    @property
    def label(self) -> str:
        """The format as `--formats` takes it: with its group size where that is not the default."""
        default = self.format.default_group_size
        return self.format.name if self.group_size == default else f"{self.format.name}:{self.group_size}"

    def restated(self, format: str, group_size: int) -> Case:
        """The same product, its weights quantized to another format."""
        return replace(self, format=get_format(format), group_size=group_size)

    @cached_property
    def rows(self) -> Floats:
        """The distinct rows before quantization: [min(n, 256), k]."""
        shape = (min(self.n, DISTINCT_ROWS), self.k)
        return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    @cached_property
    def distinct(self) -> QuantizedTensor:
        """The distinct rows, quantized."""
        return quantize(self.rows, self.format, group_size=self.group_size, method="rtn")

    @cached_property
    def planes(self) -> Planes:
        """The planes of the distinct rows."""
        return self.distinct.planes

    def repeated(self, distinct: NDArray[Any], start: int = 0) -> NDArray[Any]:
        """Distinct rows [R, ...] to all n rows, contiguous, beginning with row `start`."""
        return np.ascontiguousarray(distinct[(np.arange(self.n) + start) % len(distinct)])

    def tensor(self) -> QuantizedTensor:
        """All n rows, quantized."""
        planes = {name: plane if plane.ndim == 0 else self.repeated(plane) for name, plane in self.planes.items()}
        return QuantizedTensor.from_planes(self.format, planes, self.group_size)

    def dense(self) -> Floats:
        """All n rows as the format holds them, in float32."""
        return self.repeated(dequantize(self.distinct, backend="reference"))


class Prepared(ABC):
    """Weights in memory, as many copies of them as it takes to be cold each time."""

    copies: int

    @abstractmethod
    def bind(self, x: Floats) -> Callable[[], object]:
        """A function that multiplies x [M, k] with each copy once: one pass."""

    @abstractmethod
    def result(self) -> Floats:
        """y [M, n] of the first copy or of an equal one, after a pass."""

    def close(self) -> None:  # noqa: B027  (most have nothing to do)
        """Give back memory that Python does not know of."""


class Rotated(Prepared):
    """Copies that are multiplied one call after the other: `multiply(x, copy)`, with x in the library's own type."""

    def __init__(
        self,
        copies: Sequence[Any],
        multiply: Callable[[Any, Any], Any],
        take: Callable[[Floats], Any] = lambda x: x,
        give: Callable[[Any], Floats] = lambda y: y,
    ) -> None:
        self.copies = len(copies)
        self._weights, self._multiply, self._take, self._give = copies, multiply, take, give
        self._y: Any = None

    def bind(self, x: Floats) -> Callable[[], object]:
        taken, weights, multiply = self._take(x), self._weights, self._multiply

        def run() -> None:
            for copy in weights:
                self._y = multiply(taken, copy)

        return run

    def result(self) -> Floats:
        return self._give(self._y)


class Peer(ABC):
    """One way of one library. `load` comes first; without the library it raises BackendUnavailable."""

    name: str
    family: str  # what `--peers` calls it; several peers may be one library
    install: str  # what pip is told

    @abstractmethod
    def load(self) -> None:
        """Import the library."""

    @abstractmethod
    def version(self) -> str:
        """Of the loaded library."""

    @abstractmethod
    def can_run(self, case: Case) -> tuple[bool, str]:
        """Whether it can, and if not, why."""

    @abstractmethod
    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        """Copies of the weights, at least `cold_bytes` of them together; `can_run` has said yes."""

    def label(self, case: Case) -> str:
        """Its name, and after a colon what it computes with where that is not the format of the case."""
        return self.name


def copies_for(nbytes: int, cold_bytes: int) -> int:
    """How many copies of `nbytes` make `cold_bytes`; one at least."""
    return max(1, -(-cold_bytes // nbytes))


def load_package(package: str, install: str) -> Any:
    """Import a package that is no dependency of ours."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BackendUnavailable(f"{package} is not installed ({error}). Run: pip install {install}") from None
