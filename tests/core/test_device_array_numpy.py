"""Arrays on a device beside NumPy's: the same answer, of the same type, or an error that says what is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from common import assert_same_bits
from device_array_support import on_device

import billfish as bf
from billfish.core.device_array import DeviceArray

BYTES = np.array([[3, 200, 0], [1, 255, 7]], np.uint8)
WIDE = np.array([[3, 40000, 65535], [1, 2, 50000]], np.uint16)
SIGNS = np.array([[True, False, True], [False, True, True]])
HALVES = np.array([[0.5, -2.0, 8e-20], [np.nan, 1.75, 4.0]], np.float32)
ARRAYS = (BYTES, WIDE, SIGNS, HALVES)
# 1.5 * 2^-1000 is rounded once by 2^-60, and 2^-1074 by 2^2097 is finite.
DOUBLES = np.array([8e-20, -8e-20, 1.1, 0.0, -0.0, np.inf, 5e-324, 1.7e308, 1.7654321e-301, 3e-310])
EXPONENTS = [-5000, -2098, -1100, -1075, -1074, -1023, -1022, -60, 0, 1023, 1024, 1100, 2046, 2097, 2098, 5000]

# Each takes bytes, numbers of 16 bits, truths and float32, [2, 3] each, of NumPy or of a device.
SAME: dict[str, Callable[..., Any]] = {
    "clip below": lambda u, w, t, f: np.clip(f, None, 3),
    "clip above": lambda u, w, t, f: f.clip(1, None),
    "clip to halves": lambda u, w, t, f: np.clip(u, 0.5, 3.5),
    "clip to float64": lambda u, w, t, f: np.clip(f, np.float64(-0.1), np.float64(0.1)),
    "clip between arrays": lambda u, w, t, f: np.clip(f, f - 1, f[0]),
    "bytes as rows": lambda u, w, t, f: f[np.array([1, 0, 1], np.uint8)],
    "a number beside rows": lambda u, w, t, f: f[None, ...][:, 0, np.array([1, 0])],
    "truths of NumPy": lambda u, w, t, f: f[SIGNS],
    "bytes there as rows": lambda u, w, t, f: f[u[:, 2] & 1],
    "16 bits as rows": lambda u, w, t, f: np.repeat(f.T, 15000, axis=0)[w[0, 1:2]],
    "16 bits along an axis": lambda u, w, t, f: np.take_along_axis(np.repeat(f, 20000, axis=1), w[:, :2], axis=1),
    "from the end": lambda u, w, t, f: np.take_along_axis(f, -(u[:, 2:] & 1).astype(np.int64), axis=1),
    "argmax of 16 bits": lambda u, w, t, f: w.argmax(axis=1),
    "argmin of 16 bits": lambda u, w, t, f: np.argmin(w, axis=0),
    "argmax of truths": lambda u, w, t, f: np.argmax(t, axis=1),
    "int of 16 bits": lambda u, w, t, f: np.int64(int(w[0, 1])),
    "float of 16 bits": lambda u, w, t, f: np.float64(float(w[0, 2])),
    "einsum of two types": lambda u, w, t, f: np.einsum("rk,rk->rk", u.astype(np.int32), f),
    "einsum of bytes": lambda u, w, t, f: np.einsum("rk,rk->r", u, u),
    "einsum of 16 bits": lambda u, w, t, f: np.einsum("rk,k->r", w, w[0]),
    "sum that keeps axes": lambda u, w, t, f: t.sum(axis=1, keepdims=True),
    "sum to bytes": lambda u, w, t, f: u.sum(dtype=np.uint8),
    "max that keeps all axes": lambda u, w, t, f: u.max(keepdims=True),
    "any that keeps axes": lambda u, w, t, f: np.any(t, axis=0, keepdims=True),
    "where of truths": lambda u, w, t, f: np.where(f > 1, True, False),
    "float32 by far": lambda u, w, t, f: np.ldexp(f, np.int32(-1100)),
}


@pytest.mark.parametrize("computed", SAME.values(), ids=SAME)
def test_the_answer_is_that_of_numpy(computed):
    found = computed(*map(on_device, ARRAYS))
    assert_same_bits(
        np.asarray(found.numpy() if isinstance(found, DeviceArray) else found), np.asarray(computed(*ARRAYS))
    )


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_ldexp_rounds_once_at_every_exponent(exponent):
    for x in (DOUBLES, HALVES, HALVES.astype(np.float16)):
        with np.errstate(all="ignore"):
            expected = np.ldexp(x, np.int32(exponent))
        assert_same_bits(np.ldexp(on_device(x), np.int32(exponent)).numpy(), expected)


REFUSED: dict[str, Callable[..., Any]] = {
    "256 beside uint8": lambda u, w, t, f: u < 256,
    "-1 beside uint8": lambda u, w, t, f: np.where(t, u, -1),
    "65536 beside uint16": lambda u, w, t, f: w == 65536,
    "clip of uint16": lambda u, w, t, f: w.clip(0, 3),
    "clip of float32 to None, None": lambda u, w, t, f: f.clip(None, None),
    "an index of type float32": lambda u, w, t, f: u[f[:, 2]],
    "a slice between a number and an array": lambda u, w, t, f: f[None][0, :, np.array([1, 0])],
    "numpy.take_along_axis of shapes [2, 3] and [1, 1]": lambda u, w, t, f: np.take_along_axis(f, u[1:, :1], axis=1),
    "sum of uint8 without dtype=": lambda u, w, t, f: u.sum(axis=1),
    "amax of float32, initial=": lambda u, w, t, f: f.max(initial=0),
    "sum of float32, where=": lambda u, w, t, f: np.sum(f, where=t),
    "numpy.argmax (": lambda u, w, t, f: np.argmax(f),
    "numpy.where (": lambda u, w, t, f: np.where(t),
    "numpy.einsum of 'rk,rk'": lambda u, w, t, f: np.einsum("rk,rk", f, f),
    "numbers of type uint64": lambda u, w, t, f: f.view(np.uint64),
    "numbers of type complex128": lambda u, w, t, f: f * 1j,
    "numpy.ldexp into": lambda u, w, t, f: np.ldexp(f, 2, out=f),
    "numpy.add into an array that is not uint16 [2, 3]": lambda u, w, t, f: np.add(w, w, out=f),
    "numpy.add into an array that is not float32 [2, 3]": lambda u, w, t, f: np.add(f, f, out=f[0]),
    "numpy.frexp into": lambda u, w, t, f: np.frexp(f, out=(f, u)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_is_not_that_of_numpy_is_refused(name):
    with pytest.raises(bf.FormatError, match=re.escape(name)):
        REFUSED[name](*map(on_device, ARRAYS))


@pytest.mark.parametrize("position", [3, -4])
def test_a_position_beyond_the_axis_is_an_error(position):
    with pytest.raises(RuntimeError, match="out of bounds"):  # torch's: whoever asks before would fetch each index
        np.take_along_axis(on_device(HALVES), on_device(np.full((2, 1), position)), axis=1)


def test_an_array_in_cpu_memory_is_copied():
    there = on_device(HALVES)
    there.numpy()[:] = 7
    assert_same_bits(there.numpy(), HALVES)
