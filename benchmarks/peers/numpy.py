"""NumPy: a dense FP32 product with the dequantized weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.peers.base import Case, Floats, Peer, Prepared, Rotated, copies_for
from billfish.core.errors import BackendUnavailable
from billfish.core.machine import available_cores

# What OpenBLAS calls this in NumPy's own wheels, and elsewhere.
SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads")


class Numpy(Peer):
    name = family = "numpy"
    install = "numpy"

    def load(self) -> None:
        """It always is: billfish is written with it."""

    def version(self) -> str:
        return np.__version__

    def can_run(self, case: Case) -> tuple[bool, str]:
        return True, ""  # float arithmetic serves every kind of activations

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        if not set_blas_threads(threads):
            raise BackendUnavailable(f"its BLAS cannot be told to use {threads} threads")
        w = case.dense()
        copies = [w, *(w.copy() for _ in range(copies_for(w.nbytes, cold_bytes) - 1))]
        return Rotated([copy.T for copy in copies], multiply=_multiply_into(case.n))


def _multiply_into(n: int) -> Callable[[Floats, Floats], Floats]:
    """x @ w into an array that is there already: a fresh one would cost page faults."""
    y = np.empty((0, n), np.float32)

    def multiply(x: Floats, w: Floats) -> Floats:
        nonlocal y
        if len(y) != len(x):
            y = np.empty((len(x), n), np.float32)
        return np.matmul(x, w, out=y)

    return multiply


def set_blas_threads(threads: int) -> bool:
    """Tell the OpenBLAS inside NumPy's wheel; False if there is none, and NumPy uses some other number."""
    root = Path(np.__file__).parent
    folders = (root.parent / "numpy.libs", root / ".dylibs")
    for library in (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*openblas*"))):
        loaded = ctypes.CDLL(str(library))  # the one that is in memory already
        for name in SETTERS:
            if hasattr(loaded, name):
                getattr(loaded, name)(ctypes.c_int(threads))
                return True
    return threads == available_cores()
