"""Random orthogonal matrices of any size, as products of small ones, so that they cost little to make and to apply.

R = diag(signs) (A ⊗ B) spreads each number of a vector over all of them. For n = 2^k m with m odd, A is the Hadamard
matrix of size 2^(k - k // 2), and B that of size 2^(k // 2) ⊗ Q, where Q [m, m] is random and orthogonal. Of a power of
two, R is the randomized Hadamard matrix.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Rotation:
    """R [size, size], the same for the same size and seed."""

    def __init__(self, size: int, seed: int) -> None:
        rng = np.random.default_rng([seed, size])
        self.size = size
        self._signs = rng.choice((-1.0, 1.0), size)
        twos = (size & -size).bit_length() - 1
        self._left, right = _hadamard(twos - twos // 2), _hadamard(twos // 2)
        self._right = np.kron(right, _orthogonal(size >> twos, rng)).astype(np.float64)

    def apply(self, rows: Floats) -> Floats:
        """x R for each run x [size] of the last axis."""
        a, b = len(self._left), len(self._right)
        runs = rows.reshape(-1, self.size) * self._signs
        spread = self._left @ (runs.reshape(-1, b) @ self._right).reshape(-1, a, b)  # which is symmetric
        return spread.reshape(rows.shape)


def _hadamard(twos: int) -> Floats:
    """Orthogonal and symmetric, [2^twos, 2^twos]."""
    matrix: Floats = np.ones((1, 1))
    for _ in range(twos):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix


def _orthogonal(size: int, rng: np.random.Generator) -> Floats:
    """Uniformly random: of QR, with the signs that make R's diagonal positive."""
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    return q * np.sign(np.diag(r))
