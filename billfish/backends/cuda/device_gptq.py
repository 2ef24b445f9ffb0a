"""method="gptq" where a Hessian is on a GPU: the algorithm of core/gptq_solver.py in torch, in float64.

Rows of W are independent, so one launch rounds PATCH columns of all rows, one after the other (round_columns.cu). What
columns owe to those of other patches is a product of matrices. Columns are rows of tensors here, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.backends.cuda.driver import KernelLaunch, OutOfMemory
from billfish.backends.cuda.memory import room_for
from billfish.core.device_array import DeviceArray, torch_type
from billfish.core.errors import BackendUnavailable, DataError, bad_argument, failure
from billfish.core.format import Format, Planes
from billfish.core.gptq_solver import DAMPING, DOUBT, STEP, SWEEPS, has_plain_scales

# What torch's errors say, and those of cuBLAS and cuSOLVER.
OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED")
PATCH, THREADS = 64, 128  # of round_columns.cu: columns, at most, and rows of a CTA


class Carry(NamedTuple):
    """As the solver's."""

    order: Tensor  # int64 [K]
    damped: Tensor  # [K, K]
    root: Tensor  # [K, K]: G, lower triangular
    damping: Tensor  # [K]


def quantize_gptq_there(
    call: str,
    format: Format,
    w: Any,
    group_size: int,
    hessian: Tensor,
    importance: NDArray[Any] | None,
    options: dict[str, str],
    cross: Any = None,
) -> Planes:
    """As `quantize_gptq`, to planes on the device of `hessian`, which is checked. w: a NumPy array, or a DeviceArray.
    cross: a tensor of any device."""
    with torch.no_grad():
        weights = w.tensor if isinstance(w, DeviceArray) else torch.from_numpy(np.array(w, np.float32))
        weights = weights.to(hessian.device, torch.float32)
        cross = None if cross is None else cross.to(hessian.device)
        return _quantize(call, format, weights, group_size, hessian, importance, options, cross)


@contextmanager
def memory_for_gptq(call: str, k: int) -> Iterator[None]:
    """Says what to do where a GPU has no memory for Hessians [k, k]: torch's error, one of its libraries', or ours."""
    try:
        yield
    except (RuntimeError, OutOfMemory) as error:
        short = isinstance(error, OutOfMemory) or OUT_OF_MEMORY.search(str(error))
        if not short or isinstance(error, BackendUnavailable):
            raise
        problem = f"the GPU has no memory for GPTQ of weights [N, {k}]: it takes about {6 * 8 * k * k / 1e9:.1f} GB"
        raise BackendUnavailable(failure(call, problem, "Use device cpu, or a GPU that nobody else uses.")) from None


def _quantize(
    call: str,
    format: Format,
    w: Tensor,
    group_size: int,
    hessian: Tensor,
    importance: NDArray[Any] | None,
    options: dict[str, str],
    cross: Tensor | None,
) -> Planes:
    if importance is None:
        importance = hessian.diagonal().cpu().numpy()
    carry = carry_of(call, hessian)
    if cross is not None:
        w = retargeted(w, hessian, cross, carry)
    searched = format.quantize(DeviceArray(w), group_size, "mse", importance, **options)  # type: ignore[arg-type]
    exact = w.T[carry.order].double()
    wrong = exact - _tensor(format.decode(searched, group_size)).T[carry.order]
    before = _errors(wrong, carry)
    columns = Columns(format, searched, group_size, carry.order)
    levels = torch.zeros(exact.shape, dtype=torch.float32, device=w.device)
    _round_in_order(exact, wrong, levels, columns, carry.root)
    for _ in range(SWEEPS):
        _round_again(exact, wrong, levels, columns, carry.damped)
        if columns.scales_are_numbers:
            _fit_scales(exact, wrong, levels, columns, carry.damped)
    better = DeviceArray((_errors(wrong, carry) < before)[:, None])
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    codes[:, carry.order] = _tensor(format.element.encode(DeviceArray(levels))).T  # type: ignore[arg-type]
    scales = columns.scales() if columns.scales_are_numbers else searched["scale"]
    chosen = np.where(better, DeviceArray(codes), searched["codes"])
    return format.with_codes({**searched, "scale": np.where(better, scales, searched["scale"])}, chosen)


def carry_of(call: str, hessian: Tensor) -> Carry:
    """G of a Hessian [K, K] that is symmetric; raises if it is not positive."""
    diagonal = hessian.diagonal().double()
    order = torch.argsort(diagonal, descending=True, stable=True)
    damping = DOUBT * diagonal[order] + (DAMPING * float(diagonal.mean()) or 1.0)
    damped = hessian[order][:, order].double()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if bool(failed):
        expected = "X^T X of the inputs X [tokens, K]"
        raise DataError(bad_argument(call, "hessian", "not positive semidefinite", expected))
    return Carry(order, damped, root.flip(0, 1).T.contiguous(), damping)


def retargeted(w: Tensor, hessian: Tensor, cross: Tensor, carry: Carry) -> Tensor:
    """As the solver's."""
    order = carry.order
    drift = (cross.double() - hessian)[order][:, order] @ w.T[order].double()
    halfway = torch.linalg.solve_triangular(carry.root.T, drift, upper=True)
    step = torch.linalg.solve_triangular(carry.root, halfway, upper=False)
    target = torch.empty_like(w)
    target[:, order] = (w[:, order] + STEP * step.T).float()
    return target


class Columns:
    """What rounds columns of all rows to the values that their groups have: scales, offsets and the element's table."""

    def __init__(self, format: Format, planes: Planes, group_size: int, order: Tensor) -> None:
        values = [None if each is None else _tensor(each).T.contiguous() for each in format.group_values(planes)]
        scale, self.zero, self.minimum = values
        assert scale is not None
        self.scale, self.inverse, self.groups = scale, _reciprocal(scale), (order // group_size).int()
        table = np.unique(format.element.values[np.isfinite(format.element.values)])
        self.table = torch.from_numpy(table).to(order.device)
        self.type = planes["scale"].dtype
        self.scales_are_numbers = has_plain_scales(planes["scale"], scale.T)  # type: ignore[arg-type]
        of_group = self.groups.cpu().numpy()
        ends = np.cumsum(np.bincount(of_group, minlength=len(scale)))[:-1]
        places = np.split(np.argsort(of_group, kind="stable"), ends)
        self.places = [torch.from_numpy(each).to(order.device) for each in places]

    def round(self, start: int, factors: Tensor, targets: Tensor, exact: Tensor, wrong: Tensor, levels: Tensor) -> None:
        """Columns from `start` on, as many as `factors` has: fills in `wrong` and `levels`."""
        if targets.is_cuda:
            self._launch(start, factors, targets, exact, wrong, levels)
            return
        middles = (self.table[1:] + self.table[:-1]) / 2
        for i, target in enumerate(targets):
            j, group = start + i, self.groups[start + i]
            x = (target + factors[i, :i] @ wrong[start:j]).float()
            if self.minimum is not None:
                x = x - self.minimum[group]
            x = x * self.inverse[group]
            if self.zero is not None:
                x = x + self.zero[group]
            levels[j] = self.table[torch.bucketize(x, middles)]
            wrong[j] = exact[j] - self.values(int(group), levels[j])

    def _launch(
        self, start: int, factors: Tensor, targets: Tensor, exact: Tensor, wrong: Tensor, levels: Tensor
    ) -> None:
        (columns, n), room = targets.shape, room_for(f"cuda:{targets.device.index}")
        optional = (0 if each is None else each.data_ptr() for each in (self.zero, self.minimum))
        given = targets.data_ptr(), *(each[start:].data_ptr() for each in (exact, wrong, levels, self.groups))
        scales = self.scale.data_ptr(), self.inverse.data_ptr(), *optional, self.table.data_ptr()
        sizes = len(self.table), columns, n
        launch = KernelLaunch("round_columns.cu", "marlin_round_columns", (), (-(-n // THREADS),), THREADS)
        with room.current():
            launch(room.ordinal, room.stream, factors.data_ptr(), factors.stride(0), *given, *scales, *sizes)

    def factors(self, group: int, levels: Tensor) -> Tensor:
        """What the scale of a group is multiplied with."""
        return levels if self.zero is None else levels - self.zero[group]

    def values(self, group: int, levels: Tensor) -> Tensor:
        """What numbers of the element [n] or [columns, n] mean in a group."""
        value = self.factors(group, levels) * self.scale[group]
        return value if self.minimum is None else value + self.minimum[group]

    def rescale(self, group: int, change: Tensor) -> None:
        """Add a change [n] to the scales of a group. A scale keeps its sign, and stays a finite number of its type."""
        before = self.scale[group]
        after = (before + change).to(torch_type(self.type)).float()
        self.scale[group] = torch.where((after * before > 0) & torch.isfinite(after), after, before)
        self.inverse[group] = _reciprocal(self.scale[group])

    def scales(self) -> DeviceArray:
        """Scales [n, groups], as planes have them."""
        return DeviceArray(self.scale.T.to(torch_type(self.type)), self.type)


def _round_in_order(exact: Tensor, wrong: Tensor, levels: Tensor, columns: Columns, root: Tensor) -> None:
    """GPTQ's pass: fills in `levels`, and `wrong`, what they leave."""
    diagonal = root.diagonal()[:, None]
    for start in range(0, len(exact), PATCH):
        rows = slice(start, min(start + PATCH, len(exact)))
        factors = root[rows, : rows.stop] / diagonal[rows]
        targets = exact[rows] + factors[:, :start] @ wrong[:start]
        columns.round(start, factors[:, start:].contiguous(), targets, exact, wrong, levels)


def _round_again(exact: Tensor, wrong: Tensor, levels: Tensor, columns: Columns, damped: Tensor) -> None:
    """A sweep over columns that are rounded already: `levels` and `wrong` change."""
    diagonal = damped.diagonal()[:, None]
    for start in range(0, len(exact), PATCH):
        rows = slice(start, min(start + PATCH, len(exact)))
        earlier = torch.tril(damped[rows, rows], -1) / diagonal[rows]
        slopes = damped[rows] @ wrong / diagonal[rows]
        targets = exact[rows] - wrong[rows] + slopes - earlier @ wrong[rows]
        columns.round(start, earlier, targets, exact, wrong, levels)


def _fit_scales(exact: Tensor, wrong: Tensor, levels: Tensor, columns: Columns, damped: Tensor) -> None:
    """The scales of least error, one group after the other: `columns` and `wrong` change."""
    for group, places in enumerate(columns.places):
        factors, rows = columns.factors(group, levels[places]).double(), damped[places]
        own = (factors * (rows[:, places] @ factors)).sum(0)
        rate = (factors * (rows @ wrong)).sum(0) / own
        columns.rescale(group, torch.nan_to_num(rate, nan=0, posinf=0, neginf=0))
        wrong[places] = exact[places] - columns.values(group, levels[places])


def _errors(wrong: Tensor, carry: Carry) -> Tensor:
    """d H d^T of each column d of `wrong` [K, n], without the damping."""
    return (wrong * (carry.damped @ wrong)).sum(0) - (carry.damping[:, None] * wrong * wrong).sum(0)


def _tensor(array: Any) -> Tensor:
    tensor: Tensor = array.tensor
    return tensor


def _reciprocal(x: Tensor) -> Tensor:
    inverse = 1 / x
    return torch.where(torch.isinf(inverse), 0, inverse)
