"""`_cpu.digest`: 64 bits that stand for the bytes of an array."""

from __future__ import annotations

import numpy as np
import pytest

from billfish.backends.cpu import _cpu

PIECE = 1 << 16  # bytes whose digests are made on their own
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 77)


def random_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_flipped_bit_changes_it(size):
    data = random_bytes(size)
    before = _cpu.digest(data)
    places = {*range(min(size, 70)), *range(max(0, size - 70), size), *(i for i in (PIECE - 1, PIECE) if i < size)}
    seen = {before}
    for place in sorted(places):
        for bit in range(8):
            data[place] ^= 1 << bit
            seen.add(_cpu.digest(data))
            data[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(places)  # no two of them are the same, either
    assert _cpu.digest(data) == before


def test_flipped_bits_reach_all_bits_of_it():
    data = random_bytes(3 * PIECE)
    before = _cpu.digest(data)
    flipped = np.zeros(64)
    places = np.random.default_rng(1).integers(0, 8 * len(data), 4000)
    for place in places:
        data[place // 8] ^= 1 << (place % 8)
        changes = before ^ _cpu.digest(data)
        data[place // 8] ^= 1 << (place % 8)
        flipped += [changes >> i & 1 for i in range(64)]
    # Half of the time each; 0.05 are more than six standard deviations.
    assert (np.abs(flipped / len(places) - 0.5) < 0.05).all()


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 64, PIECE])
def test_order_counts(unit):
    data = random_bytes(4 * PIECE)
    units = data.reshape(-1, unit)
    seen = {_cpu.digest(data)}
    pairs = [(0, 1), (0, len(units) - 1), (1, 2), (len(units) // 2, len(units) - 1)]
    for a, b in pairs:
        assert not np.array_equal(units[a], units[b])
        swapped = units.copy()
        swapped[[a, b]] = units[[b, a]]
        seen.add(_cpu.digest(swapped.reshape(-1)))
    assert len(seen) == 1 + len({frozenset(pair) for pair in pairs})


def test_length_counts():
    zeros = np.zeros(2 * PIECE, np.uint8)
    assert len({_cpu.digest(zeros[:size]) for size in range(300)}) == 300
    assert len({_cpu.digest(zeros[:size]) for size in range(PIECE - 70, PIECE + 70)}) == 140
    data = random_bytes(100)
    longer = np.concatenate([data, zeros[:28]])
    assert len({_cpu.digest(longer[:size]) for size in range(100, 129)}) == 29


@pytest.mark.parametrize("size", SIZES)
def test_same_for_any_number_of_threads_and_any_alignment(size):
    data = random_bytes(size)
    before = _cpu.threads()
    room = np.empty(size + 8, np.uint8)
    try:
        seen = set()
        for count in (1, 2, 3, 7):
            _cpu.set_threads(count)
            for offset in (0, 1, 5):
                room[offset : offset + size] = data
                seen.add(_cpu.digest(room[offset : offset + size]))
        assert len(seen) == 1
    finally:
        _cpu.set_threads(before)


def test_takes_read_only_arrays_and_matrices():
    data = random_bytes(640)
    expected = _cpu.digest(data)
    data.flags.writeable = False
    assert _cpu.digest(data) == _cpu.digest(data.reshape(10, 64)) == expected
    assert 0 <= expected < 1 << 64


@pytest.mark.parametrize("wrong", [np.zeros(8, np.int32), np.zeros((8, 8), np.uint8)[:, ::2], [1, 2, 3]])
def test_refuses_anything_but_contiguous_bytes(wrong):
    with pytest.raises(TypeError):
        _cpu.digest(wrong)
