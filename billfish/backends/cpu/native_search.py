"""The search for scales by native code: what core/search.py asks for, in the terms of search/search_problem.h."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.core.elements import E2M1, E4M3, Element, Integer, Signed, SortedFloats, Table
from billfish.core.search import (
    TIES,
    AnyFloat,
    AtMostZero,
    E4m3Times,
    Float16,
    Floats,
    IntegerTimes,
    Search,
    Separately,
    Values,
    ZeroPoint,
    opposite_factors,
    range_factors,
    scale_factors,
)

# The order of the enums in search/search_problem.h.
ELEMENT_KINDS: dict[type[Element], int] = {Integer: 0, Signed: 0, E2M1: 1, E4M3: 2, Table: 3, SortedFloats: 4}
RULE_KINDS = ("any", "f16", "e4m3", "integer", "at_most_zero", "zero_integer", "zero_f16")


@cache
def element_of(element: Element) -> _cpu.SearchElement | None:
    """An element as the kernels know it, or None: a class of somebody else's may round as it likes."""
    kind = ELEMENT_KINDS.get(type(element))
    if kind is None:
        return None
    bias = float(element.bias) if isinstance(element, Integer) else 0.0
    first, per_unit, codes, cells = element.cells if isinstance(element, (Table, SortedFloats)) else (0.0, 1.0, [], [])
    # The table of E4M3 has NaN, and what is compared with it is lost; what counts are the ends.
    values = np.nan_to_num(element.values, nan=0.0).tolist()
    return _cpu.SearchElement(kind, element.bits, bias, values, first, per_unit, list(codes), list(cells))


def rule_of(rule: Any) -> _cpu.SearchRule | None:
    """A rule of search.py, or None for any other function."""

    def known(kind: str, upper: Floats | None = None, low: float = 0, high: float = 0, factor: float = 1) -> Any:
        return RULE_KINDS.index(kind), upper, float(low), float(high), float(factor)

    if type(rule) is AnyFloat:
        return known("any")
    if type(rule) is Float16:
        return known("f16")
    if type(rule) is E4m3Times:
        return known("e4m3", factor=float(rule.factor))
    if type(rule) is IntegerTimes:
        return known("integer", np.ascontiguousarray(rule.upper), rule.low, rule.high)
    if type(rule) is AtMostZero:
        return known("at_most_zero")
    return None


def rules_of(rule: Any, numbers: int) -> tuple[Any, Any]:
    """Those of the scale and of the minimum, either None if unknown. Without minimums the second does not matter."""
    if numbers == 1:
        return rule_of(rule), rule_of(AnyFloat())
    if type(rule) is Separately:
        return rule_of(rule.scale), rule_of(rule.minimum)
    if type(rule) is ZeroPoint:
        kind = RULE_KINDS.index("zero_integer" if rule.integer else "zero_f16")
        return rule_of(Float16()), (kind, None, 0.0, float(rule.high), 1.0)
    return None, None


def is_float32(*arrays: Any) -> bool:
    return all(array is None or array.dtype == np.float32 for array in arrays)


class NativeSearch:
    """The kernels of one ISA level. choose_level: names it, when something is to be computed."""

    def __init__(self, choose_level: Callable[[], str]) -> None:
        self._level = cache(choose_level)

    def scales(self, search: Search, w: Floats, element: Element, start: Values, rule: Any) -> list[Values] | None:
        known, (scale_rule, minimum_rule) = element_of(element), rules_of(rule, len(start))
        if known is None or scale_rule is None or minimum_rule is None or not is_float32(w, search.importance, *start):
            return None
        factors: list[float] = []
        if search.thorough:
            factors = scale_factors(element) if len(start) == 1 else range_factors(element)
        further = opposite_factors(element) if search.thorough and len(start) == 1 else []
        parts = len(search.parts)
        found = np.empty((parts, len(start), len(w)), np.float32)
        first, second = (np.ascontiguousarray(x) for x in (start[0], start[-1]))
        _cpu.search_scales(
            self._level(),
            known,
            w,
            None if search.importance is None else np.ascontiguousarray(search.importance),
            first,
            second if len(start) == 2 else None,
            scale_rule,
            minimum_rule,
            search.thorough,
            factors,
            further,
            found,
        )
        return [tuple(part) for part in found]

    def codes(
        self, element: Element, w: Floats, scale: Floats, minimum: Floats | None, zero: Floats | None, ties: str
    ) -> NDArray[np.uint8] | None:
        known = element_of(element)
        if known is None or not is_float32(w, scale, minimum, zero):
            return None
        codes = np.empty(w.shape, np.uint8)
        least, offset = (None if x is None else np.ascontiguousarray(x) for x in (minimum, zero))
        _cpu.encode(self._level(), known, TIES.index(ties), w, np.ascontiguousarray(scale), least, offset, codes)
        return codes

    def error(
        self,
        values: Floats,
        w: Floats,
        codes: NDArray[np.uint8],
        group_size: int,
        group: tuple[Floats, Floats | None, Floats | None],
        importance: Floats | None,
    ) -> NDArray[np.float64] | None:
        if not is_float32(values, w, importance, *group) or codes.dtype != np.uint8 or codes.shape != w.shape:
            return None
        error = np.empty(len(w), np.float64)
        scale, zero, minimum = (None if x is None else np.ascontiguousarray(x) for x in group)
        weights = None if importance is None else np.ascontiguousarray(importance)
        _cpu.error_of_codes(self._level(), values, group_size, w, weights, codes, scale, zero, minimum, error)
        return error

    def extremes(self, w: Floats) -> tuple[Floats, Floats] | None:
        if not is_float32(w) or w.ndim != 2 or not w.shape[1]:
            return None
        least, greatest = np.empty(len(w), np.float32), np.empty(len(w), np.float32)
        _cpu.extremes(self._level(), w, least, greatest)
        return least, greatest

    def signed_extreme(self, w: Floats) -> Floats | None:
        if not is_float32(w) or w.ndim != 2 or not w.shape[1]:
            return None
        largest = np.empty(len(w), np.float32)
        _cpu.signed_extreme(self._level(), w, largest)
        return largest

    def dot(self, a: Floats, b: Floats) -> Floats | None:
        if not is_float32(a, b) or a.ndim != 2:
            return None
        out = np.empty(len(a), np.float32)
        _cpu.dot(self._level(), a, b, out)
        return out
