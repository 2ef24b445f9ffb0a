"""Launches that all parts of a model share: any kernel, products, norms, and gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, KernelLaunch, copy_in, current, device
from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, Gemm, can_fold, gate_ctas, launches
from billfish.backends.cuda.step_memory import StepMemory
from billfish.core.errors import BackendUnavailable

REORDER_THREADS = 256
NORM_COLUMNS = 64  # folded_norm.cuh: a row of `squares`, a number for 16 columns, is read 16 bytes at a time


@dataclass(frozen=True)
class DeviceMatrix:
    """Weights, the float32 bias of their product, and the int32 order in which they have the columns of x."""

    weights: DeviceWeights
    bias: Buffer | None = None
    order: Buffer | None = None


@dataclass(frozen=True)
class Residual:
    """How the output of a part is added: hidden = (hidden + scale * post_norm(added)) * output_scale."""

    post_norm: Buffer | None = None
    scale: float = 1.0
    output_scale: float = 1.0


@dataclass(frozen=True)
class NextNorm:
    """The norm that a part's last product takes over: it adds `scale` times its output to `hidden`, and writes `x`."""

    weight: Buffer
    scale: float


@dataclass(frozen=True)
class FoldedNorms:
    """What a part's products take over from `normalize` (folded_norm.cuh). before: rows of `x` lack the factor of
    their norm."""

    before: bool = False
    after: NextNorm | None = None


class RoutedRows(NamedTuple):
    """Rows grouped by expert: the expert and the token of each row, int32 [rows]."""

    experts: NDArray[np.int32]
    tokens: NDArray[np.int32]


UNFOLDED = FoldedNorms()
# Gets the weights that multiply x (the first, if there are several), the address of x, its rows and their routing.
Observe = Callable[[object, int, int, RoutedRows | None], object]


class Launcher:
    """Launches kernels on one device, which is current. Nothing is allocated and nothing waits, so that a step can be
    captured in a graph.

    heard: where it is a set, launches are put into it to be compiled, and nothing is launched. activations: of x in
    products of many rows, "exact", "fp8" or "q8". batch_invariant: a sequence gets the same bits in any batch.
    observe: where it is a function, it is called before a DeviceMatrix, a DeviceRouter or DeviceExperts multiply x
    [rows, k]. No norm is folded then, so x is what weights are multiplied with.
    """

    def __init__(self, hidden: int, epsilon: float, *, bfloat16: bool = False, ordinal: int = 0) -> None:
        self.hidden, self.epsilon = hidden, epsilon
        self.ordinal, self.device = ordinal, device(ordinal)
        self.bfloat16, self.type = bfloat16, "BF16" if bfloat16 else "F16"
        self.batch_invariant = False
        self.activations = "exact"
        self.heard: set[KernelLaunch] | None = None
        self.observe: Observe | None = None

    def launch(
        self,
        stream: int,
        name: str,
        macros: dict[str, Any],
        grid: tuple[int, ...],
        threads: int,
        *arguments: int | float,
        **shape: int,
    ) -> None:
        """marlin_`name` of `name`.cu. shape: `shared_bytes` and `cluster`, where they are not 0 and 1."""
        defined = tuple(sorted((macro, str(value)) for macro, value in macros.items()))
        overlap = self.device.capability >= (9, 0)
        launch = KernelLaunch(f"{name}.cu", f"marlin_{name}", defined, grid, threads, overlap=overlap, **shape)
        if self.heard is None:
            launch(self.ordinal, stream, *arguments)
        else:
            self.heard.add(launch)

    @property
    def observed(self) -> bool:
        """Whether anybody observes what `tell` reports."""
        return self.observe is not None and self.heard is None

    def tell(self, weights: object, x: int, rows: int, routed: RoutedRows | None = None) -> None:
        """Report that weights are about to multiply x [rows, k]."""
        if self.observe is not None and self.heard is None:
            self.observe(weights, x, rows, routed)

    def products(
        self,
        stream: int,
        step: StepMemory,
        matrices: Sequence[DeviceMatrix],
        x: int,
        y: int,
        rows: int,
        *,
        gate: str | None = None,
        float_y: bool = False,
        normed: bool = False,
        after: NextNorm | None = None,
    ) -> None:
        """Products with x [rows, k], each [rows, n] behind the one before it, from y on.

        normed: rows of x lack the factor of their norm. after: see `output`.
        """
        self.tell(matrices[0], x, rows)
        norm: str | None = None
        fold: tuple[int | float, ...] = ()
        if normed or after is not None:
            norm = "second" if after is None else "first"
            weight, scale = (0, 0.0) if after is None else (after.weight.pointer, float(after.scale))
            fold = step.at("hidden"), weight, step.at("squares"), step.at("factors"), self.epsilon, scale
        ordered = None
        for matrix in matrices:
            (n, k), bias, read = matrix.weights.shape, matrix.bias, x
            if matrix.order is not None:
                read = step.at("ordered")
                if matrix.order is not ordered:
                    self.launch(stream, "reorder", {}, (rows,), REORDER_THREADS, x, matrix.order.pointer, read, k)
                    ordered = matrix.order
            gemm, added = self._gemm(matrix, rows, gate, float_y, norm), 0 if bias is None else bias.pointer
            heard = launches(gemm, self.device) if self.heard is not None else None
            if heard and self.heard is not None:
                self.heard.update(heard)
            elif not matrix.weights.multiply(stream, gemm, read, k, added, y, step.at("work"), fold):
                raise BackendUnavailable(f"cuda: kernels for {self.device.name} support batches up to 64, not {rows}.")
            y += (4 if float_y else 2) * rows * n

    def _gemm(
        self, matrix: DeviceMatrix, rows: int, gate: str | None = None, float_y: bool = False, norm: str | None = None
    ) -> Gemm:
        (n, k), biased = matrix.weights.shape, matrix.bias is not None
        about = self.bfloat16, biased, None, self.batch_invariant, gate, float_y, self.activations
        return Gemm(matrix.weights.kind, rows, n, k, *about, norm)

    def output(
        self, stream: int, step: StepMemory, matrix: DeviceMatrix, x: int, rows: int, after: NextNorm | None
    ) -> None:
        """The last product of a part, to `added`, or, where it takes over the norm behind it, to `hidden` and `x`."""
        y = step.at("added" if after is None else "x")
        self.products(stream, step, (matrix,), x, y, rows, after=after)

    def folded(
        self,
        rows: int,
        output: DeviceMatrix,
        inputs: Sequence[DeviceMatrix],
        residual: Residual,
        weight: Buffer | None,
    ) -> NextNorm | None:
        """A norm between a part's `output` and the next part's `inputs`, if these can take it over; else None."""
        plain = residual.post_norm is None and residual.output_scale == 1
        if weight is None or not plain or self.hidden % NORM_COLUMNS or self.observe is not None:
            return None
        if not all(can_fold(self._gemm(matrix, rows), self.device) for matrix in (output, *inputs)):
            return None
        return NextNorm(weight, residual.scale)

    def normalize(
        self,
        stream: int,
        step: StepMemory,
        rows: int,
        weight: Buffer | None,
        residual: Residual | None = None,
        *,
        which: int = 0,
        x: int = 0,
    ) -> None:
        """Add `added` to the residual stream, and normalize that for the next part (RMSNorm).

        weight: of the norm. None: x is the residual stream as it is. residual: how `added` is added; None: there is
        nothing to add. which: the address of the rows that are wanted; 0: all. x: where the output goes, if not to
        `x`.
        """
        threads = min(1024, max(32, -(-self.hidden // 8 // 32) * 32))
        how = residual or Residual()
        post = 0 if how.post_norm is None else how.post_norm.pointer
        macros = {
            "TYPE": self.type,
            "HIDDEN": self.hidden,
            "THREADS": threads,
            "ADD": int(residual is not None),
            "POST": int(how.post_norm is not None),
            "NORM": int(weight is not None),
        }
        pointers = step.at("hidden"), step.at("added"), 0 if weight is None else weight.pointer, which
        factors = 0 if weight is None or which else step.at("factors")  # for norms that are folded
        numbers = x or step.at("x"), post, factors, self.epsilon, float(how.scale), float(how.output_scale)
        self.launch(stream, "normalize", macros, (rows,), threads, *pointers, *numbers)

    def gate(self, stream: int, activation: str, gates: int, numbers: int, out: int, rows: int, columns: int) -> None:
        """out = activation(gates) * numbers, each [rows, columns]."""
        macros, grid = {"TYPE": self.type, "GATE": GATES[activation]}, (gate_ctas(rows, columns),)
        self.launch(stream, "gate", macros, grid, GATE_COLUMNS, gates, numbers, out, rows, columns, columns)


def sent(array: NDArray[Any], ordinal: int) -> Buffer:
    """A copy of an array on a device."""
    buffer = Buffer(array.nbytes, ordinal)
    with current(ordinal):
        copy_in(buffer.pointer, np.ascontiguousarray(array), 0)
    return buffer
