"""What tests of device_array share with others."""

from __future__ import annotations

import numpy as np
import torch  # noqa: F401  (DeviceArray looks for it among the imported modules)
from common import gaussian

from billfish.core.arrays import bfloat16
from billfish.core.device_array import DeviceArray, to_device
from billfish.core.format import Format, Planes

PECULIAR = 14  # rows of weights_of(), before the ordinary ones


def weights_of(format: Format) -> np.ndarray:
    """37 rows: what can be rounded in two ways, zeros of both signs, and numbers of very different sizes."""
    k, rng = 256 + format.block_size, np.random.default_rng(0)
    w = gaussian((37, k)) * np.float32(0.02)
    w[1] = 0
    w[2] = -0.0
    w[3] = np.where(rng.random(k) < 0.5, 0.0, -0.0)
    w[4] = np.where(rng.random(k) < 0.3, -0.0, np.abs(w[4]))
    w[5] = np.where(rng.random(k) < 0.3, 0.0, -np.abs(w[5]))
    w[6, :200] = 0
    w[7] = np.abs(w[7])
    w[8] = 2.0 ** -rng.integers(0, 30, k)
    w[9] = np.nextafter(w[8], np.float32(0))  # an ulp below powers of two
    w[10] = np.round(w[10] * 200) / 2  # ties
    w[11] *= 1e-6
    w[12] *= 1e-38
    w[13] *= 1e4
    return w


def assert_as_good(found: np.ndarray, expected: np.ndarray, ordinary: int) -> None:
    """Errors of rows. Where two scales are equally good, one row may fare better with one of them: not many rows do."""
    assert (found <= 1.02 * expected).all()
    norm, least = (np.sqrt((errors[-ordinary:] ** 2).sum()) for errors in (found, expected))
    assert norm <= 1.001 * least


def storable_weights_of(format: Format) -> np.ndarray:
    """Without groups that have nothing below zero, whose scale is infinite in two of the foreign formats."""
    return weights_of(format)[PECULIAR:] if format.name in ("two_bit_words", "scaled_u4") else weights_of(format)


def on_device(w: np.ndarray) -> DeviceArray:
    return to_device(w.view(np.int16), "cpu").view(bfloat16) if w.dtype == bfloat16 else to_device(w, "cpu")


def fetched(planes: Planes) -> Planes:
    return {name: plane.numpy() if isinstance(plane, DeviceArray) else plane for name, plane in planes.items()}


def error_of(format: Format, planes: Planes, group_size: int, w: np.ndarray) -> np.ndarray:
    """Of each row: a foreign format may have a row that it cannot hold."""
    with np.errstate(all="ignore"):
        return np.sqrt(((format.decode(planes, group_size).astype(np.float64) - w) ** 2).sum(axis=1))
