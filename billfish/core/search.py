"""Find the scale (and minimum) of each group that leaves the least error: squared, or weighted by importance.

Rounding to nearest fits the scale to the largest weight of a group. A smaller scale clips that one weight a little
and rounds all others more finely; a larger one may move the levels of a float onto the weights. The error as a
function of the scale has many local minima, so we try a grid of factors around the plain scale, each rounded to what
the format can store, and then the least-squares scale for the codes that won. Everything is vectorised over
groups (rows); the caller keeps the plain result for every group that did not improve.

With an importance for each column there are two winners, that of the squared error and that of the weighted one. For
scales alone, one pass over the grid finds both: rounding is what takes the time, and it is the same for both.

This is the oracle, and what runs for foreign elements and for arrays on a device. For arrays in CPU memory the CPU
engine provides :class:`SearchKernels`, which return the same bits: each operation is rounded once, in the order
written here, and sums go by lanes (:func:`dot`). What a format can store is told by a rule, such as
:class:`Float16`, so that kernels know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import FP4, Element, Integer, Signed
from billfish.core.scales import E4M3_MAX, decode_e4m3, encode_e4m3

Floats = NDArray[np.float32]
# Rounds float32 scales [R] to ones that the format can store.
Representable = Callable[[Floats], Floats]
# The same for pairs (scale, minimum).
Pair = tuple[Floats, Floats]
Values = tuple[Floats, ...]  # either: what a candidate is
RepresentablePair = Callable[[Floats, Floats], Pair]


LANES = 16  # of a sum
TIES = ("even", "up", "away", "toward zero")


class SearchKernels(Protocol):
    """Native code for what this module does. Each method returns None for what it does not know."""

    def scales(self, search: Search, w: Floats, element: Element, start: Values, rule: Any) -> list[Values] | None:
        """:meth:`Search.scale`, or with two numbers in `start` :meth:`Search.scale_and_minimum`."""

    def codes(
        self, element: Element, w: Floats, scale: Floats, minimum: Floats | None, zero: Floats | None, ties: str
    ) -> NDArray[np.uint8] | None:
        """:func:`nearest_codes`."""

    def error(
        self,
        values: Floats,
        w: Floats,
        codes: NDArray[np.uint8],
        group_size: int,
        group: tuple[Floats, Floats | None, Floats | None],
        importance: Floats | None,
    ) -> NDArray[np.float64] | None:
        """The squared error of each row, as `Format.quantize` compares it. group: scale, zero point and minimum."""

    def extremes(self, w: Floats) -> tuple[Floats, Floats] | None:
        """:func:`extremes`."""

    def signed_extreme(self, w: Floats) -> Floats | None:
        """:func:`signed_extreme`."""

    def dot(self, a: Floats, b: Floats) -> Floats | None:
        """:func:`dot`."""


_kernels: SearchKernels | None = None


def provide_kernels(kernels: SearchKernels | None) -> SearchKernels | None:
    """Use these kernels, or none, from now on. Returns those that were used before."""
    global _kernels
    before, _kernels = _kernels, kernels
    return before


def kernels_for(*arrays: Any) -> SearchKernels | None:
    """The kernels, if all arrays are NumPy's own and in the order of rows."""
    ours = all(type(array) is np.ndarray and array.flags.c_contiguous for array in arrays)
    return _kernels if ours else None


def dot(a: Any, b: Any) -> Any:
    """The sum of a * b [R, k] of each row [R], in an order that vectors of every width can keep.

    Product k goes into lane k % 16; then the upper half of the lanes is added to the lower until one is left.
    """
    if type(a) is not np.ndarray or type(b) is not np.ndarray:
        return np.einsum("rk,rk->r", a, b)  # a device adds in an order of its own
    kernels = kernels_for(a, b) if a.dtype == b.dtype == np.float32 and a.shape == b.shape else None
    found = kernels.dot(a, b) if kernels is not None else None
    return _lane_sums(a * b) if found is None else found


def _lane_sums(products: NDArray[Any]) -> NDArray[Any]:
    rows, length = products.shape
    if length % LANES:
        products = np.concatenate([products, np.zeros((rows, -length % LANES), products.dtype)], axis=1)
    sums = products[:, :LANES]
    for start in range(LANES, products.shape[1], LANES):
        sums = sums + products[:, start : start + LANES]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def reciprocal(x: Floats) -> Floats:
    """1 / x, and 0 where that is infinite: a group with no scale, or next to none, has only zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / x
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def signed_extreme(w: Floats) -> Floats:
    """Of each row, the number of largest magnitude, with its sign."""
    kernels = kernels_for(w)
    found = kernels.signed_extreme(w) if kernels is not None else None
    if found is not None:
        return found
    return np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)[:, 0]


def extremes(w: Floats) -> tuple[Floats, Floats]:
    """Of each row the least and the greatest number; of equal ones the first.

    -0 and +0 are equal: of both, `min` gives whichever comes first on one machine, or the last on another.
    """
    kernels = kernels_for(w)
    found = kernels.extremes(w) if kernels is not None else None
    if found is not None:
        return found
    least, greatest = (np.take_along_axis(w, at[:, None], axis=1)[:, 0] for at in (w.argmin(axis=1), w.argmax(axis=1)))
    return least, greatest


def largest_magnitude(w: Floats) -> Floats:
    """Of each row."""
    return np.abs(signed_extreme(w))


def nearest_codes(
    element: Element,
    w: Floats,
    scale: Floats,
    minimum: Floats | None = None,
    zero: Floats | None = None,
    ties: str = "even",
) -> NDArray[np.uint8]:
    """Codes [R, g] of the values nearest to (w - minimum) / scale + zero, with numbers [R] for each row.

    ties: "even" is the element's own rule. Some formats have ggml's: of integers "up", or "away" from zero; of E2M1
    "toward zero", without a negative zero.
    """
    kernels = kernels_for(w)
    found = kernels.codes(element, w, scale, minimum, zero, ties) if kernels is not None else None
    if found is not None:
        return found
    x = (w if minimum is None else w - minimum[:, None]) * reciprocal(scale)[:, None]
    if zero is not None:
        x = x + zero[:, None]
    return _WITH_TIES[ties](x, element)


def _up(x: Floats, element: Element) -> NDArray[np.uint8]:
    assert isinstance(element, Integer)
    return np.trunc(x + np.float32(0.5 + element.bias)).clip(0, 2**element.bits - 1).astype(np.uint8)


def _away(x: Floats, element: Element) -> NDArray[np.uint8]:
    whole = np.floor(np.abs(x))  # |x| + 0.5 would round up the float just below 0.5
    codes = np.copysign(whole + np.floor(2 * (np.abs(x) - whole)), x)
    return codes.astype(np.int8).view(np.uint8)


def _toward_zero(x: Floats, element: Element) -> NDArray[np.uint8]:
    assert element.bits == FP4.bits
    magnitude = np.abs(x)
    codes = np.zeros_like(x, np.uint8)
    for middle in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        codes += magnitude > np.float32(middle)
    return np.where((x < 0) & (codes > 0), codes | np.uint8(8), codes)


_WITH_TIES: dict[str, Callable[[Floats, Element], NDArray[np.uint8]]] = {
    "even": lambda x, element: element.encode(x),
    "up": _up,
    "away": _away,
    "toward zero": _toward_zero,
}


# ---- what a format can store ---------------------------------------------------------------------------------------


class AnyFloat:
    """Float32."""

    def __call__(self, x: Floats) -> Floats:
        return x


class Float16:
    """Rounded to float16, which is what most formats store."""

    def __call__(self, x: Floats) -> Floats:
        return x.astype(np.float16).astype(np.float32)


@dataclass(frozen=True)
class E4m3Times:
    """A byte times the scale of the tensor."""

    factor: Floats

    def codes(self, x: Floats) -> NDArray[np.uint8]:
        return encode_e4m3(np.minimum(x * reciprocal(self.factor), np.float32(E4M3_MAX)))

    def __call__(self, x: Floats) -> Floats:
        return decode_e4m3(self.codes(x)) * self.factor


@dataclass(frozen=True)
class IntegerTimes:
    """An integer from low to high times upper [R]."""

    upper: Floats
    low: int
    high: int

    def integers(self, x: Floats) -> Floats:
        return np.rint(x * reciprocal(self.upper)).clip(self.low, self.high)

    def __call__(self, x: Floats) -> Floats:
        return self.integers(x) * self.upper


class AtMostZero:
    """The lesser of x and +0. Of -0 and +0, machines call one or the other the lesser."""

    def __call__(self, x: Floats) -> Floats:
        return np.where(x < 0, x, np.float32(0))


@dataclass(frozen=True)
class Separately:
    """A rule for scales, and one for minimums."""

    scale: Representable
    minimum: Representable

    def __call__(self, scale: Floats, minimum: Floats) -> Pair:
        return self.scale(scale), self.minimum(minimum)


@dataclass(frozen=True)
class ZeroPoint:
    """Float16 scales, and minimums that are a zero point times the scale: an integer from 0 to high, or a float16."""

    integer: bool
    high: float

    def zero(self, scale: Floats, minimum: Floats) -> NDArray[Any]:
        zero = -minimum * reciprocal(scale)
        return np.clip(np.rint(zero), 0, self.high).astype(np.uint8) if self.integer else zero.astype(np.float16)

    def __call__(self, scale: Floats, minimum: Floats) -> Pair:
        scale = float16_scale(scale)
        return scale, -scale * self.zero(scale, minimum).astype(np.float32)


float16_scale = Float16()


# ---- the search ----------------------------------------------------------------------------------------------------


@cache
def scale_factors(element: Element) -> list[float]:
    """The grid to try. Evenly spaced levels never gain from a much larger scale; few levels gain from a small one."""
    even = isinstance(element, (Integer, Signed))
    low = 0.5 if element.bits < 4 else 0.65 if element.bits == 4 else 0.8
    return list(np.linspace(low, 1.15 if even else 1.6, 16))


@cache
def range_factors(element: Element) -> list[float]:
    """The grid of scales for a range that has a minimum, too: a few steps fewer or more across it.

    Even entries keep the lower end of the range on a level, odd ones the upper end. With many levels a step fewer
    costs little, and one more clips.
    """
    steps = 2**element.bits - 1
    return list(steps / (steps + np.linspace(-0.5 * steps**0.5, 1.5, 12)))


@cache
def opposite_factors(element: Element) -> list[float]:
    """What to try for the weighted error only: scales of the other sign.

    Where uneven levels are others from above, of two weights the more important one chooses the sign.
    """
    uneven = not isinstance(element, (Integer, Signed))
    lopsided = uneven and not np.array_equal(np.sort(element.values), np.sort(-element.values))
    return [-factor for factor in scale_factors(element)[1::3]] if lopsided else []


class Search(NamedTuple):
    """What to look for: the least squared error, or the least error weighted by importance, or either.

    importance: None, or float32 [R, g] beside the weights, at least 0.
    thorough: whether to try the grid. Without it, the plain scale is fitted to its codes by importance.
    """

    importance: Floats | None = None
    thorough: bool = True

    def over(self, length: int) -> Search:
        """The same for rows that are cut into groups of `length`."""
        return self if self.importance is None else self._replace(importance=self.importance.reshape(-1, length))

    @property
    def parts(self) -> list[Search]:
        """One for each result of :meth:`scale`: how to go on from there, where another step depends on it."""
        found = [Search()] if self.thorough else []
        return found if self.importance is None else [*found, Search(self.importance, thorough=False)]

    def scale(self, w: Floats, element: Element, start: Floats, representable: Representable) -> list[Floats]:
        """The best scales of each row of w [R, g] among candidates around `start` [R].

        One has the least squared error, one the least weighted error: see :attr:`parts`.
        """
        kernels = kernels_for(w)
        native = kernels.scales(self, w, element, (start,), representable) if kernels is not None else None
        if native is not None:
            return [scale for (scale,) in native]

        def difference(scale: Floats) -> Floats:
            wrong = element.round(w * reciprocal(scale)[:, None])
            wrong *= scale[:, None]
            wrong -= w
            return wrong

        def fit(importance: Floats | None, scale: Floats) -> tuple[Floats]:
            levels = element.round(w * reciprocal(scale)[:, None])
            weighted = levels if importance is None else levels * importance
            squares = dot(weighted, levels)
            fitted = dot(weighted, w) * reciprocal(squares)
            return (representable(np.where(squares > 0, fitted, scale)),)

        def grid() -> Iterator[tuple[Floats]]:
            yield (representable(start),)
            if self.thorough:
                yield from ((representable(start * np.float32(factor)),) for factor in scale_factors(element))

        def opposite(importance: Floats | None) -> Iterator[tuple[Floats]]:
            if self.thorough and importance is not None:
                yield from ((representable(start * np.float32(factor)),) for factor in opposite_factors(element))

        return [scale for (scale,) in self._best(grid(), opposite, difference, fit)]

    def scale_and_minimum(
        self, w: Floats, element: Element, scale: Floats, minimum: Floats, representable: RepresentablePair
    ) -> list[Pair]:
        """The same for pairs (scale, minimum), with values code * scale + minimum.

        Candidates have finer or coarser steps from one end of the range, in turns. Each is fitted to its codes by
        least squares, in both unknowns, and the winner once more. With an importance, both errors have fits of their
        own.
        """
        kernels = kernels_for(w)
        native = kernels.scales(self, w, element, (scale, minimum), representable) if kernels is not None else None
        if native is not None:
            return [(d, m) for d, m in native]
        top = np.float32(element.high)

        def difference(scale: Floats, minimum: Floats) -> Floats:
            shifted = w - minimum[:, None]
            wrong = element.round(shifted * reciprocal(scale)[:, None])
            wrong *= scale[:, None]
            wrong -= shifted
            return wrong

        def fit(importance: Floats | None, scale: Floats, minimum: Floats) -> Pair:
            codes = element.round((w - minimum[:, None]) * reciprocal(scale)[:, None])
            if importance is None:
                total, w_sum, code_sum, weighted = np.float32(w.shape[1]), w_total, dot(codes, ones), codes
            else:
                weighted = codes * importance
                total, w_sum, code_sum = dot(importance, ones), dot(w, importance), dot(weighted, ones)
            squares, products = dot(codes, weighted), dot(w, weighted)
            determinant = total * squares - code_sum * code_sum
            solvable = determinant > 0
            inverse = reciprocal(np.where(solvable, determinant, np.float32(0)))
            fitted = (total * products - w_sum * code_sum) * inverse
            least = (w_sum - fitted * code_sum) / total
            return representable(np.where(solvable, fitted, scale), np.where(solvable, least, minimum))

        def grid(importance: Floats | None) -> Iterator[Pair]:
            for i, factor in enumerate(range_factors(element) if self.thorough else ()):
                other = scale * np.float32(factor)
                yield fit(importance, other, minimum + (scale - other) * top if i % 2 else minimum)

        ones = np.ones_like(w)
        w_total = dot(w, ones)
        start = representable(scale, minimum)
        return [(scale, minimum) for scale, minimum in self._best([start], grid, difference, fit)]

    def _best(
        self,
        shared: Iterable[Values],
        own: Callable[[Floats | None], Iterable[Values]],
        difference: Callable[..., Floats],
        fit: Callable[..., Values],
    ) -> list[Values]:
        """The winners among candidates and what fits their codes better, one for each of :attr:`parts`.

        shared: candidates for all parts. own: further ones for the part with that importance.
        """
        bests = [_Best(part.importance) for part in self.parts]
        for values in shared:
            wrong = difference(*values)
            for best in bests:
                best.consider(values, wrong)
        for best in bests:
            for values in own(best.importance):
                best.consider(values, difference(*values))
            fitted = fit(best.importance, *best.values)
            best.consider(fitted, difference(*fitted))
        return [best.values for best in bests]


class _Best:
    """Of each row, the candidate of least error so far."""

    def __init__(self, importance: Floats | None) -> None:
        self.importance = importance
        self.values: Values = ()
        self.error: Floats | None = None

    def consider(self, values: Values, wrong: Floats) -> None:
        """values: of the candidate, each [R]. wrong: what it leaves of the weights [R, g]."""
        error = dot(wrong, wrong) if self.importance is None else dot(wrong * wrong, self.importance)
        if self.error is None:
            self.values, self.error = values, error
            return
        better = error < self.error
        self.values = tuple(np.where(better, new, old) for new, old in zip(values, self.values, strict=True))
        self.error = np.where(better, error, self.error)
