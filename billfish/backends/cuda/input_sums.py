"""Sums over the inputs of a product, in the memory of a GPU: squares, X^T X and X^T Y."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.driver import Buffer, check, copy_out, current, driver
from billfish.backends.cuda.launcher import Launcher

OUTER_THREADS, OUTER_TILE = 256, 128  # of add_outer.cu
SQUARES_THREADS, SQUARES_COLUMNS = 256, 64  # of add_squares.cu


class DeviceRows(NamedTuple):
    """Inputs [rows, k], of 16 bits, at an address of a GPU's memory."""

    at: int
    rows: int
    k: int

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.k


class DeviceSums:
    """Sums over inputs [k], in float64, and with `outer` and `cross` matrices [k, k] of products in float32. k is a
    multiple of 8. The order of additions is that of the calls. The device is current, but where sums are made."""

    def __init__(self, k: int, outer: bool, cross: bool, ordinal: int) -> None:
        self.k, self.ordinal = k, ordinal
        self._squares = _zeros(8 * k, ordinal)
        self.outer_buffer = _zeros(4 * k * k, ordinal) if outer else None
        self.cross_buffer = _zeros(4 * k * k, ordinal) if cross else None

    def add(self, launcher: Launcher, stream: int, x: DeviceRows) -> None:
        """Squares, and X^T X where it is wanted."""
        grid, macros = (-(-self.k // SQUARES_COLUMNS),), {"TYPE": launcher.type}
        arguments = x.at, self._squares.pointer, x.rows, self.k
        launcher.launch(stream, "add_squares", macros, grid, SQUARES_THREADS, *arguments)
        if self.outer_buffer is not None:
            self._add_products(launcher, stream, x, x.at, self.outer_buffer)

    def add_cross(self, launcher: Launcher, stream: int, x: DeviceRows, y: int) -> None:
        """X^T Y, with as many inputs at the address y."""
        assert self.cross_buffer is not None
        self._add_products(launcher, stream, x, y, self.cross_buffer)

    def _add_products(self, launcher: Launcher, stream: int, x: DeviceRows, y: int, sums: Buffer) -> None:
        tiles = -(-self.k // OUTER_TILE)
        arguments = x.at, y, sums.pointer, x.rows, self.k, self.k
        launcher.launch(stream, "add_outer", {"TYPE": launcher.type}, (tiles, tiles), OUTER_THREADS, *arguments)

    def squares(self, stream: int) -> NDArray[np.float64]:
        return _fetched(self._squares, stream, np.float64, (self.k,))

    def outer(self, stream: int) -> NDArray[np.float32] | None:
        return None if self.outer_buffer is None else _fetched(self.outer_buffer, stream, np.float32, (self.k, self.k))

    def cross(self, stream: int) -> NDArray[np.float32] | None:
        return None if self.cross_buffer is None else _fetched(self.cross_buffer, stream, np.float32, (self.k, self.k))


def _zeros(nbytes: int, ordinal: int) -> Buffer:
    buffer = Buffer(nbytes, ordinal)
    with current(ordinal):
        check(driver().cuMemsetD8Async(buffer.pointer, 0, max(16, nbytes), 0), "clearing")
        check(driver().cuStreamSynchronize(0), "clearing")
    return buffer


def _fetched(buffer: Buffer, stream: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(shape, dtype)
    copy_out(array, buffer.pointer, stream)
    return array
