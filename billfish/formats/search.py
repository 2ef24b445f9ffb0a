"""method="mse": find the scale (and minimum) of each group that leaves the least squared error.

Rounding to nearest fits the scale to the largest weight of a group. A smaller scale clips that one weight a little
and rounds all others more finely; a larger one may move the levels of a float onto the weights. The error as a
function of the scale has many local minima, so we try a grid of factors around the plain scale, each rounded to what
the format can store, and then once the least-squares scale for the codes that won. Everything is vectorised over
groups (rows); the caller keeps the plain result for every group that did not improve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from billfish.elements import Element, Integer, Signed

Floats = NDArray[np.float32]
# Rounds float32 scales [R] to ones that the format can store.
Representable = Callable[[Floats], Floats]
# The same for pairs (scale, minimum).
RepresentablePair = Callable[[Floats, Floats], tuple[Floats, Floats]]


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


def search_scale(w: Floats, element: Element, start: Floats, representable: Representable) -> Floats:
    """The best scale of each row of w [R, g] among candidates around `start` [R]."""
    best = representable(start)
    best_error = _error(w, element, best)

    def consider(scale: Floats) -> None:
        nonlocal best, best_error
        error = _error(w, element, scale)
        better = error < best_error
        best = np.where(better, scale, best)
        best_error = np.where(better, error, best_error)

    for factor in scale_factors(element):
        consider(representable(start * np.float32(factor)))
    levels = element.round(w * reciprocal(best)[:, None])
    weight = _dot(levels, levels)
    consider(representable(np.where(weight > 0, _dot(w, levels) * reciprocal(weight), best)))
    return best


def search_scale_and_minimum(
    w: Floats, element: Element, scale: Floats, minimum: Floats, representable: RepresentablePair
) -> tuple[Floats, Floats]:
    """The best (scale, minimum) of each row of w [R, g], for values code * scale + minimum.

    Candidates shrink the range of the codes about its middle; each is then fitted to its codes by least squares, in
    both unknowns, twice.
    """
    best_scale, best_minimum = representable(scale, minimum)
    best_error = _affine_error(w, element, best_scale, best_minimum)
    length = np.float32(w.shape[1])
    top = np.float32(element.high)
    w_sum = w.sum(axis=1)

    def consider(scale: Floats, minimum: Floats) -> None:
        nonlocal best_scale, best_minimum, best_error
        scale, minimum = representable(scale, minimum)
        error = _affine_error(w, element, scale, minimum)
        better = error < best_error
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
        best_error = np.where(better, error, best_error)

    def fit(scale: Floats, minimum: Floats) -> tuple[Floats, Floats]:
        codes = element.round((w - minimum[:, None]) * reciprocal(scale)[:, None])
        code_sum, code_squares, products = codes.sum(axis=1), _dot(codes, codes), _dot(w, codes)
        determinant = length * code_squares - code_sum * code_sum
        solvable = determinant > 0
        inverse = reciprocal(np.where(solvable, determinant, np.float32(0)))
        fitted = (length * products - w_sum * code_sum) * inverse
        return (
            np.where(solvable, fitted, scale),
            np.where(solvable, (w_sum - fitted * code_sum) / length, minimum),
        )

    for factor in _affine_factors(element):
        shrunk = scale * np.float32(factor)
        fitted = fit(shrunk, minimum + (scale - shrunk) * (top / 2))
        consider(*fitted)
    consider(*fit(best_scale, best_minimum))
    return best_scale, best_minimum


def _affine_factors(element: Element) -> Iterable[float]:
    return np.linspace(0.5 if element.bits < 4 else 0.7, 1.05, 12)


def _dot(a: Floats, b: Floats) -> Floats:
    return np.einsum("rk,rk->r", a, b)


def _error(w: Floats, element: Element, scale: Floats) -> Floats:
    difference = element.round(w * reciprocal(scale)[:, None])
    difference *= scale[:, None]
    difference -= w
    return _dot(difference, difference)


def _affine_error(w: Floats, element: Element, scale: Floats, minimum: Floats) -> Floats:
    shifted = w - minimum[:, None]
    difference = element.round(shifted * reciprocal(scale)[:, None])
    difference *= scale[:, None]
    difference -= shifted
    return _dot(difference, difference)
