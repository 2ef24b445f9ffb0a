"""method="gptq": columns are rounded one after the other, and the error of each is carried on to those after it.
Then each is rounded once more, and again, beside the errors of all others, and the scales follow.

The scales and offsets of all groups are those of the search that is weighted with the Hessian's diagonal. What is left
is to choose codes so that the error of the product is small: d H d^T for each row d = w - q of the error, with
H = X^T X of the inputs. With H = G^T G, G lower triangular, that error is a sum over columns,

    |G d|^2 = sum over j of G_jj^2 (target_j - q_j)^2,    target_j = w_j + sum over i < j of (G_ji / G_jj) (w_i - q_i)

so each column rounds its target, which knows the errors of all columns before. This is GPTQ, written without an
inverse of H. Columns go in the order of decreasing H_jj. Only codes change, so nothing about the order is stored.

The last columns have the errors of all others to make up for, the first have none. SWEEPS even that out: with all other
columns as they are, the error is least where column j has the value nearest to

    target_j = q_j + (H d)_j / H_jj

After a sweep, the scales fit the codes no longer. With q = c s in a group, c its numbers, another scale s + t leaves
d - c t there, and the error is least with

    t = c^T H d / c^T H c

and with the nearest scale that the format can store, as the error is a parabola. Scales that are plain
floating-point numbers are fitted so. Bytes have too few values for it, and scales at two levels are not free.

Same inputs give the same bits for any number of threads: rows go in slices that do not depend on it, and matrices are
multiplied in patches of PATCH^3 products, which are too few for a BLAS to share them out among threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, bad_argument
from billfish.core.format import Format, Planes
from billfish.core.machine import map_rows, with_known_floats
from billfish.core.search import reciprocal

Doubles = NDArray[np.float64]

PATCH = 48
SLICE_ROWS = 10 * PATCH  # at most: so many that NumPy's overhead for each column does not show
# Added to the diagonal of H: so much of its mean, as what calibration does not show is not nothing; and so much of
# itself. Which inputs are large is much the same in all texts; which go together is less so, and counts for less.
DAMPING, DOUBT = 0.1, 0.5
SWEEPS = 2
STEP = 0.5  # how much of the way to the weights that make up for the layers before: on other texts, less helps more


class Carry(NamedTuple):
    """How errors are carried on. K here is rounded up to whole patches."""

    order: NDArray[np.intp]  # [K of the matrix], the columns in which order they are rounded
    damped: Doubles  # [K, K]: H in this order, with the damping
    factors: Doubles  # [K, K], strictly lower: G_ji / G_jj
    damping: Doubles  # [K]: what was added to the diagonal of H


@with_known_floats
def quantize_gptq(
    call: str,
    format: Format,
    w: NDArray[np.float32],
    group_size: int,
    hessian: NDArray[Any],
    importance: NDArray[Any] | None,
    options: dict[str, str],
    cross: NDArray[Any] | None = None,
) -> Planes:
    """Quantize W [N, K] with a Hessian [K, K] to planes. A row that gets worse by it keeps the codes of the search.

    importance: [K], for the scales; None takes the Hessian's diagonal.
    cross: X^T Y [K, K] of the Hessian's inputs X and the inputs Y that W is meant for: see :func:`retargeted`.
    """
    if importance is None:
        importance = np.diagonal(hessian)
    carry = carry_of(call, hessian)
    if cross is not None:
        w = retargeted(w, hessian, cross, carry)
    searched = format.quantize(w, group_size, "mse", importance, **options)
    n, k = w.shape
    slices = -(-n // SLICE_ROWS)

    def round_rows(start: int, stop: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        planes = {name: plane[start:stop] if plane.ndim else plane for name, plane in searched.items()}
        return _round_rows(format, w[start:stop], planes, group_size, carry)

    step = _whole_patches(-(-n // slices))
    codes, scales = zip(*map_rows(round_rows, n, k, step=step), strict=True)
    return format.with_codes({**searched, "scale": np.concatenate(scales)}, np.concatenate(codes))


def carry_of(call: str, hessian: NDArray[Any]) -> Carry:
    """G of a Hessian [K, K] that is finite and symmetric; raises if it is not positive."""
    diagonal = np.diagonal(hessian).astype(np.float64)
    k, order = len(diagonal), np.argsort(-diagonal, kind="stable")
    least = DAMPING * float(diagonal.mean()) or 1.0  # of nothing but zeros, all columns are alike
    padded = _whole_patches(k)
    damping = np.zeros(padded)
    damping[:k] = DOUBT * diagonal[order] + least
    g = np.eye(padded)
    g[:k, :k] = hessian[np.ix_(order, order)]
    g[np.arange(padded), np.arange(padded)] += damping
    damped = g.copy()
    try:
        _factorize(g)
    except np.linalg.LinAlgError:
        expected = "X^T X of the inputs X [tokens, K]"
        raise DataError(bad_argument(call, "hessian", "not positive semidefinite", expected)) from None
    g /= np.diagonal(g).copy()[:, None]
    g[np.arange(padded), np.arange(padded)] = 0
    return Carry(order, damped, g, damping)


def retargeted(w: NDArray[Any], hessian: NDArray[Any], cross: NDArray[Any], carry: Carry) -> NDArray[np.float32]:
    """Weights V [N, K] with which inputs X give nearly what W gives with inputs Y: the float model's in their place.

    The least |Y W^T - X V^T|^2 has V^T = (X^T X)^-1 X^T Y W^T, or W^T and a step from there,

        V^T = W^T + (H + D)^-1 (X^T Y - H) W^T

    With the damping D of GPTQ, the step is small in directions that the text hardly shows. It is the least of
    |Y W^T - X V^T|^2 and V's distance from W, weighted by D. Least squares find codes for V with the same H afterwards.
    """
    k, order = len(carry.order), carry.order
    damped = carry.damped[:k, :k]
    drift = (cross.astype(np.float64) - hessian)[np.ix_(order, order)]
    step = np.linalg.solve(damped, drift @ w.T[order].astype(np.float64))
    target = np.empty(w.shape, np.float32)  # also of 16-bit weights, whose digits the step would not fit
    target[:, order] = w[:, order].astype(np.float32) + STEP * step.T
    return target


def _factorize(a: Doubles) -> None:
    """A symmetric [K, K], of which the lower half counts, becomes G: lower triangular, A = G^T G.

    From the last patch of rows to the first: what is above and to the left loses the share of the patch's rows.
    """
    patches = _patches(a)
    for p in reversed(range(len(patches))):
        # Cholesky's is L L^T: with rows and columns from the last to the first, that is G^T G.
        root = np.linalg.cholesky(patches[p, p, ::-1, ::-1])[::-1, ::-1].T
        patches[p, p] = root
        patches[p, p + 1 :] = 0
        patches[p, :p] = np.matmul(np.linalg.inv(root).T, patches[p, :p])
        for row in range(p):
            patches[row, : row + 1] -= np.matmul(patches[p, row].T, patches[p, : row + 1])


def has_plain_scales(plane: NDArray[Any], scale: NDArray[np.float32]) -> bool:
    """Whether a plane holds the scales [n, groups] as floating-point numbers, and not in bytes or at two levels."""
    return plane.dtype.kind == "f" and plane.shape == scale.shape


class Rounding:
    """Rounds columns of some rows to the values that their groups have. Columns go by their place in the order."""

    def __init__(self, format: Format, planes: Planes, group_size: int, order: NDArray[np.intp]) -> None:
        self._round, self._groups = format.element.round, order // group_size
        scale, zero, minimum = (None if x is None else x.T.copy() for x in format.group_values(planes))
        assert scale is not None
        self._scale, self._zero, self._minimum, self._inverse = scale, zero, minimum, reciprocal(scale)
        self._type = planes["scale"].dtype
        self.scales_are_numbers = has_plain_scales(planes["scale"], scale.T)
        self.columns = [np.flatnonzero(self._groups == group) for group in range(len(scale))]

    def __call__(self, j: int, target: Doubles) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of targets [n] for column j: the numbers of the element, and the values that they mean."""
        group, x = self._groups[j], target.astype(np.float32)
        if self._minimum is not None:
            x -= self._minimum[group]
        x *= self._inverse[group]
        if self._zero is not None:
            x += self._zero[group]
        level = self._round(x)
        return level, self.values(group, level)

    def values(self, group: int, level: NDArray[np.float32]) -> NDArray[np.float32]:
        """What numbers of the element [n] or [columns, n] mean in a group."""
        value = self.factors(group, level) * self._scale[group]
        if self._minimum is not None:
            value += self._minimum[group]
        return value

    def factors(self, group: int, level: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the scale of a group is multiplied with."""
        return level if self._zero is None else level - self._zero[group]

    def rescale(self, group: int, change: Doubles) -> None:
        """Add a change [n] to the scales of a group. A scale keeps its sign, and stays a finite number of its type."""
        before = self._scale[group]
        after = (before + change).astype(self._type).astype(np.float32)
        self._scale[group] = np.where((after * before > 0) & np.isfinite(after), after, before)
        self._inverse[group] = reciprocal(self._scale[group])

    def scales(self) -> NDArray[Any]:
        """Scales [n, groups], as planes have them."""
        return self._scale.T.astype(self._type)


@np.errstate(all="ignore")  # a scale that overflows is reported once the whole tensor is done
def _round_rows(
    format: Format, w: NDArray[np.float32], planes: Planes, group_size: int, carry: Carry
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """The codes [n, K] and scales of rows w [n, K]. Inside, columns are rows: each is contiguous, and in order."""
    n, k = w.shape
    exact = np.zeros((len(carry.factors), _whole_patches(n)))
    exact[:k, :n] = w.T[carry.order]
    wrong = np.zeros_like(exact)
    wrong[:k, :n] = exact[:k, :n] - format.decode(planes, group_size).T[carry.order]
    before = _errors(wrong, carry)[:n]
    levels = np.zeros((k, n), np.float32)
    rounding = Rounding(format, planes, group_size, carry.order)
    _round_in_order(exact, wrong, levels, rounding, carry)
    for _ in range(SWEEPS):
        _round_again(exact, wrong, levels, rounding, carry.damped)
        if rounding.scales_are_numbers:
            _fit_scales(exact, wrong, levels, rounding, carry.damped)
    better = (_errors(wrong, carry)[:n] < before)[:, None]
    codes = np.empty((n, k), np.uint8)
    codes[:, carry.order] = format.element.encode(levels).T
    scales = rounding.scales() if rounding.scales_are_numbers else planes["scale"]
    return np.where(better, codes, planes["codes"]), np.where(better, scales, planes["scale"])


def _round_in_order(
    exact: Doubles, wrong: Doubles, levels: NDArray[np.float32], rounding: Rounding, carry: Carry
) -> None:
    """GPTQ's pass over columns `exact` [K, n]: fills in `levels`, and `wrong`, what they leave."""
    k, n = levels.shape
    targets = exact.copy()
    for start in range(0, len(targets), PATCH):
        for j in range(start, min(start + PATCH, k)):
            targets[j] += np.einsum("i,in->n", carry.factors[j, start:j], wrong[start:j])
            levels[j], value = rounding(j, targets[j, :n])
            wrong[j, :n] = exact[j, :n] - value
        _carry_on(carry.factors, wrong, start // PATCH, targets)


def _round_again(
    exact: Doubles, wrong: Doubles, levels: NDArray[np.float32], rounding: Rounding, damped: Doubles
) -> None:
    """A sweep over columns that are rounded already: `levels` and `wrong` change."""
    k, n = levels.shape
    for start in range(0, k, PATCH):
        slopes, earlier = _slopes(damped[start : start + PATCH], wrong), wrong[start : start + PATCH].copy()
        for j in range(start, min(start + PATCH, k)):
            moved = wrong[start:j] - earlier[: j - start]
            slope = slopes[j - start] + np.einsum("i,in->n", damped[j, start:j], moved)
            target = exact[j] - wrong[j] + slope / damped[j, j]
            levels[j], value = rounding(j, target[:n])
            wrong[j, :n] = exact[j, :n] - value


def _fit_scales(
    exact: Doubles, wrong: Doubles, levels: NDArray[np.float32], rounding: Rounding, damped: Doubles
) -> None:
    """The scales of least error, one group after the other: `rounding` and `wrong` change."""
    n = levels.shape[1]
    for group, columns in enumerate(rounding.columns):
        factors = np.zeros((_whole_patches(len(columns)), wrong.shape[1]))
        factors[: len(columns), :n] = rounding.factors(group, levels[columns])
        own = np.zeros((len(columns), len(factors)))
        own[:, : len(columns)] = damped[np.ix_(columns, columns)]
        rate = _products(factors, damped[columns], wrong) / _products(factors, own, factors)
        rounding.rescale(group, np.nan_to_num(rate[:n], posinf=0, neginf=0))
        wrong[columns, :n] = exact[columns, :n] - rounding.values(group, levels[columns])


def _errors(wrong: Doubles, carry: Carry) -> Doubles:
    """d H d^T of each column d of `wrong` [K, n], without the damping."""
    return _products(wrong, carry.damped, wrong) - np.einsum("k,kn,kn->n", carry.damping, wrong, wrong)


def _products(left: Doubles, h: Doubles, right: Doubles) -> Doubles:
    """left^T H right of each column [n], with H [m, K] and right [K, n]. Of `left`, the first m rows count."""
    total = np.zeros(right.shape[1])
    for start in range(0, len(h), PATCH):
        rows = h[start : start + PATCH]
        total += np.einsum("kn,kn->n", left[start : start + len(rows)], _slopes(rows, right))
    return total


def _slopes(rows: Doubles, wrong: Doubles) -> Doubles:
    """H d at some columns, of which `rows` [m, K] are H's, for each column d of `wrong` [K, n]: [m, n]."""
    total = np.zeros((wrong.shape[1] // PATCH, len(rows), PATCH))
    for p, part in enumerate(_patches(wrong)):
        total += np.matmul(rows[:, p * PATCH : (p + 1) * PATCH], part)
    return total.transpose(1, 0, 2).reshape(len(rows), -1)


def _carry_on(factors: Doubles, wrong: Doubles, p: int, targets: Doubles) -> None:
    """Add the share of columns, those of patch p, to the targets of all columns after them."""
    below = _patches(factors)[p + 1 :, p][:, None]  # [patches, 1, PATCH, PATCH]
    _patches(targets)[p + 1 :] += np.matmul(below, _patches(wrong)[p])


def _patches(a: Doubles) -> Doubles:
    """[m, n] as patches [m / PATCH, n / PATCH, PATCH, PATCH] of the same memory."""
    m, n = a.shape
    return a.reshape(m // PATCH, PATCH, n // PATCH, PATCH).transpose(0, 2, 1, 3)


def _whole_patches(length: int) -> int:
    return -(-length // PATCH) * PATCH
