"""Find the scale (and minimum) of each group that leaves the least error: squared, or weighted by importance.

Rounding to nearest fits the scale to the largest weight of a group. A smaller scale clips that one weight a little
and rounds all others more finely; a larger one may move the levels of a float onto the weights. The error as a
function of the scale has many local minima, so we try a grid of factors around the plain scale, each rounded to what
the format can store, and then the least-squares scale for the codes that won. Everything is vectorised over
groups (rows); the caller keeps the plain result for every group that did not improve.

With an importance for each column, one pass over the grid finds both winners, that of the squared error and that of
the weighted one: rounding is what takes the time, and it is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import Element, Integer, Signed

Floats = NDArray[np.float32]
# Rounds float32 scales [R] to ones that the format can store.
Representable = Callable[[Floats], Floats]
# The same for pairs (scale, minimum).
Pair = tuple[Floats, Floats]
Values = tuple[Floats, ...]  # either: what a candidate is
RepresentablePair = Callable[[Floats, Floats], Pair]


def reciprocal(x: Floats) -> Floats:
    """1 / x, and 0 where that is infinite: a group with no scale, or next to none, has only zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / x
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def signed_extreme(w: Floats) -> Floats:
    """Of each row, the number of largest magnitude, with its sign."""
    return np.take_along_axis(w, np.abs(w).argmax(axis=1)[:, None], axis=1)[:, 0]


def extremes(w: Floats) -> tuple[Floats, Floats]:
    """Of each row the least and the greatest number; of equal ones the first.

    -0 and +0 are equal: of both, `min` gives whichever comes first on one machine, or the last on another.
    """
    least, greatest = (np.take_along_axis(w, at[:, None], axis=1)[:, 0] for at in (w.argmin(axis=1), w.argmax(axis=1)))
    return least, greatest


def float16_scale(scale: Floats) -> Floats:
    """Rounded to float16, which is what most formats store."""
    return scale.astype(np.float16).astype(np.float32)


def scale_factors(element: Element) -> list[float]:
    """The grid to try. Evenly spaced levels never gain from a much larger scale; few levels gain from a small one."""
    even = isinstance(element, (Integer, Signed))
    low = 0.5 if element.bits < 4 else 0.65 if element.bits == 4 else 0.8
    return list(np.linspace(low, 1.15 if even else 1.6, 16))


def range_factors(element: Element) -> list[float]:
    """The grid for a range that a minimum and a scale share out."""
    return list(np.linspace(0.5 if element.bits < 4 else 0.7, 1.05, 12))


def _is_lopsided(element: Element) -> bool:
    """Whether uneven levels are others from above: of two weights, the more important one chooses the sign."""
    uneven = not isinstance(element, (Integer, Signed))
    return uneven and not np.array_equal(np.sort(element.values), np.sort(-element.values))


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

        def difference(scale: Floats) -> Floats:
            wrong = element.round(w * reciprocal(scale)[:, None])
            wrong *= scale[:, None]
            wrong -= w
            return wrong

        def fit(importance: Floats | None, scale: Floats) -> tuple[Floats]:
            levels = element.round(w * reciprocal(scale)[:, None])
            weighted = levels if importance is None else levels * importance
            squares = _dot(weighted, levels)
            fitted = _dot(weighted, w) * reciprocal(squares)
            return (representable(np.where(squares > 0, fitted, scale)),)

        def grid() -> Iterator[tuple[Floats]]:
            yield (representable(start),)
            if self.thorough:
                yield from ((representable(start * np.float32(factor)),) for factor in scale_factors(element))

        def opposite() -> Iterator[tuple[Floats]]:
            if self.thorough and _is_lopsided(element):
                yield from ((representable(start * np.float32(-factor)),) for factor in scale_factors(element)[1::3])

        return [scale for (scale,) in self._best(grid(), opposite(), difference, fit)]

    def scale_and_minimum(
        self, w: Floats, element: Element, scale: Floats, minimum: Floats, representable: RepresentablePair
    ) -> list[Pair]:
        """The same for pairs (scale, minimum), with values code * scale + minimum.

        Candidates shrink the range of the codes about its middle; each is then fitted to its codes by least squares,
        in both unknowns, twice.
        """
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
                total, w_sum, code_sum, weighted = np.float32(w.shape[1]), w_total, codes.sum(axis=1), codes
            else:
                weighted = codes * importance
                total, w_sum, code_sum = importance.sum(axis=1), _dot(w, importance), weighted.sum(axis=1)
            squares, products = _dot(codes, weighted), _dot(w, weighted)
            determinant = total * squares - code_sum * code_sum
            solvable = determinant > 0
            inverse = reciprocal(np.where(solvable, determinant, np.float32(0)))
            fitted = (total * products - w_sum * code_sum) * inverse
            least = (w_sum - fitted * code_sum) / total
            return representable(np.where(solvable, fitted, scale), np.where(solvable, least, minimum))

        def grid() -> Iterator[Pair]:
            yield representable(scale, minimum)
            for factor in range_factors(element) if self.thorough else ():
                shrunk = scale * np.float32(factor)
                yield fit(None, shrunk, minimum + (scale - shrunk) * (top / 2))

        w_total = w.sum(axis=1)
        return [(scale, minimum) for scale, minimum in self._best(grid(), (), difference, fit)]

    def _best(
        self,
        candidates: Iterable[Values],
        further: Iterable[Values],
        difference: Callable[..., Floats],
        fit: Callable[..., Values],
    ) -> list[Values]:
        """The winners among candidates and what fits their codes better, one for each of :attr:`parts`.

        further: candidates for the weighted error only.
        """
        bests = [_Best(part.importance) for part in self.parts]
        for values in candidates:
            wrong = difference(*values)
            for best in bests:
                best.consider(values, wrong)
        if self.importance is not None:
            for values in further:
                bests[-1].consider(values, difference(*values))
        for best in bests:
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
        error = _dot(wrong, wrong) if self.importance is None else _dot(wrong * wrong, self.importance)
        if self.error is None:
            self.values, self.error = values, error
            return
        better = error < self.error
        self.values = tuple(np.where(better, new, old) for new, old in zip(values, self.values, strict=True))
        self.error = np.where(better, error, self.error)


def _dot(a: Floats, b: Floats) -> Floats:
    return np.einsum("rk,rk->r", a, b)
