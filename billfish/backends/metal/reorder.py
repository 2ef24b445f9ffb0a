"""Codes and scales in the order in which a simdgroup reads them; see decode.metal for what the kernels make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import E2M1, E2M1X2, Element, Signed

Array = NDArray[Any]
Words = NDArray[np.uint32]

PANEL, RUN = 16, 32
SLICE = 64 * PANEL  # columns that are packed at a time
# Of the codes of a panel, column 0 is followed by 4, 8 and 12: the columns that four lanes read with one load.
COLUMN_ORDER = [*range(0, 16, 4), *range(1, 16, 4), *range(2, 16, 4), *range(3, 16, 4)]
# Bits of a code that are in the plane `high`, by the bits that a code has; and where pair t of part i has the lowest of
# them in its half of the word.
HIGH_BITS = {3: 1, 5: 1, 6: 2}
HIGH_PLACES = {
    3: [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    5: [[0, 4, 1, 5], [2, 6, 3, 7], [8, 12, 9, 13], [10, 14, 11, 15]],
    6: [[0, 4, 2, 6], [8, 12, 10, 14], [0, 4, 2, 6], [8, 12, 10, 14]],
}


def padded(array: Array, columns: int, multiple: int = 1) -> Array:
    """With zeros behind, so that the first axis is a multiple of `columns` and the second of `multiple`."""
    behind = [(0, -size % unit) for size, unit in zip(array.shape, (columns, multiple), strict=True)]
    return np.pad(array, behind)


def by_slices(make: Callable[[NDArray[np.uint8]], Words], codes: NDArray[np.uint8]) -> Words:
    """What `make` makes of codes [N, K], some columns at a time: on their way words are four times as large."""
    return np.concatenate([make(codes[start : start + SLICE]) for start in range(0, len(codes), SLICE)])


def panels(groups: Array, multiple: int = 1) -> Array:
    """One number for each group [N, groups] -> [panels, groups, 16], the number of groups a multiple of `multiple`."""
    array = padded(groups, PANEL, multiple)
    return array.reshape(-1, PANEL, array.shape[1]).transpose(0, 2, 1)


def pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Codes [N, K] -> [panels, runs, 16, t, i, 2], k = 8t + 2i + 0 or 1 of a run."""
    array = padded(codes, PANEL, RUN)
    runs = array.reshape(-1, PANEL, array.shape[1] // RUN, 4, 4, 2)
    return runs.transpose(0, 2, 1, 3, 4, 5).astype(np.uint32)


def halves(low_and_high: Words) -> Words:
    """[.., 2], 16 bits each -> words."""
    return low_and_high[..., 0] | low_and_high[..., 1] << np.uint32(16)


def in_places(values: Words, places: list[int]) -> Words:
    """[.., t, i, 2] -> [.., i, 2]: value t is shifted to its place."""
    return sum((values[..., t, :, :] << np.uint32(place) for t, place in enumerate(places)), np.uint32(0))


def code_words(codes: NDArray[np.uint8], element: Element) -> Words:
    """Codes [N, K] -> [panels, runs, 16, words], without the bits that :func:`high_words` takes."""
    if isinstance(element, Signed):
        codes = codes ^ np.uint8(0x80)
    if element is E2M1X2:
        codes = np.where(codes == 8, np.uint8(0), codes)  # it has one zero only
    each = pairs(codes)
    if element.bits == 8:  # part i has words 2i, of t = 0 and 1, and 2i + 1
        words = np.stack(
            [halves(in_places(each[..., :2, :, :], [0, 8])), halves(in_places(each[..., 2:, :, :], [0, 8]))], -1
        )
        words = words.reshape(*words.shape[:-2], 8)
    elif element.bits < 4:  # two parts share a word
        parts = in_places(each & np.uint32(3), [0, 2, 4, 6])
        words = halves(parts[..., ::2, :] | parts[..., 1::2, :] << np.uint32(8))
    elif type(element) is E2M1 or element is E2M1X2:
        signs, rest = each >> np.uint32(3), each & np.uint32(7)
        words = halves(in_places(signs, [15, 12, 13, 14]) | in_places(rest, [9, 6, 3, 0]))
    else:
        words = halves(in_places(each & np.uint32(15), [0, 4, 8, 12]))
    return words[:, :, COLUMN_ORDER]


def high_words(codes: NDArray[np.uint8], bits: int) -> Words:
    """Codes [N, K] -> [panels, runs, 16, words]: the bits above the lowest two or four."""
    each = pairs(codes >> np.uint8(2 if bits == 3 else 4))
    parts = [halves(in_places(each[..., i : i + 1, :], places))[..., 0] for i, places in enumerate(HIGH_PLACES[bits])]
    if bits == 6:  # two parts in each of two words
        return np.stack([parts[0] | parts[1], parts[2] | parts[3]], axis=-1)
    return (parts[0] | parts[1] | parts[2] | parts[3])[..., None]


def six_bit_pairs(first: Array, second: Array) -> NDArray[np.uint8]:
    """Two integers below 64 for each run [N, runs] -> [panels, runs, 24]: see scales.metal."""
    first, second = panels(first), panels(second)
    rest = second >> 2
    return np.concatenate([first | (second & 3) << 6, rest[..., ::2] | rest[..., 1::2] << 4], axis=-1).astype(np.uint8)
