"""method="gptq": the codes of the textbook's algorithm, in every format, and no row worse than by the search alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from cases import diagonal
from common import assert_same_planes, gaussian, options_of, student_t
from device_array_support import on_device

import billfish as bf
from billfish.core.format import Format
from billfish.core.gptq_solver import DAMPING, DOUBT, SWEEPS, has_plain_scales
from billfish.ops.quantization import quantize_matrix

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


def hessian_of(k: int, rank: int | None = None, seed: int = 0) -> np.ndarray:
    """X^T X of inputs whose columns depend on each other and are of very different sizes."""
    rng = np.random.default_rng(seed)
    rank = rank or 2 * k
    mixed = rng.standard_normal((rank, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k))
    x = mixed * np.exp(rng.standard_normal(k))
    return (x.T @ x / rank).astype(np.float32)


def row_errors(w: np.ndarray, approximation: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    wrong = w.astype(np.float64) - approximation
    return np.einsum("nk,kj,nj->n", wrong, hessian.astype(np.float64), wrong)


def textbook(format: Format, w: np.ndarray, searched: bf.QuantizedTensor, hessian: np.ndarray) -> np.ndarray:
    """GPTQ one column after the other, by the inverse of the Hessian, then sweeps: the values [N, K] that it finds."""
    scale, zero, minimum = format.group_values(searched.planes)
    scale = scale.copy()
    zero, minimum = (np.zeros_like(scale) if plane is None else plane for plane in (zero, minimum))
    diagonal = np.diagonal(hessian).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")
    damped = hessian.astype(np.float64) + np.diag(DOUBT * diagonal + DAMPING * diagonal.mean())
    levels, values = np.empty_like(w), np.empty_like(w)

    def set_nearest(k: int, target: np.ndarray) -> None:
        at = k // searched.group_size
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(scale[:, at] == 0, 0, (target.astype(np.float32) - minimum[:, at]) / scale[:, at])
        levels[:, k] = format.element.round((level + zero[:, at]).astype(np.float32))
        values[:, k] = (levels[:, k] - zero[:, at]) * scale[:, at] + minimum[:, at]

    def fit_scale(row: int, at: int) -> None:
        columns = slice(at * searched.group_size, (at + 1) * searched.group_size)
        factors = np.zeros(w.shape[1])
        factors[columns] = levels[row, columns] - zero[row, at]
        if factors.any():
            change = factors @ damped @ (w[row].astype(np.float64) - values[row]) / (factors @ damped @ factors)
            found = (scale[row, at] + change).astype(searched.planes["scale"].dtype)
            if found * scale[row, at] > 0:
                scale[row, at] = found
        values[row, columns] = factors[columns].astype(np.float32) * scale[row, at] + minimum[row, at]

    factor = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left = w.astype(np.float64)[:, order]
    for j, k in enumerate(order):
        set_nearest(k, left[:, j])
        error = (left[:, j] - values[:, k]) / factor[j, j]
        left[:, j:] -= error[:, None] * factor[j, j:]
    for _ in range(SWEEPS):
        for k in order:
            slope = (w.astype(np.float64) - values) @ damped[k]
            set_nearest(k, values[:, k] + slope / damped[k, k])
        if has_plain_scales(searched.planes["scale"], scale):
            for row, at in np.ndindex(scale.shape):
                fit_scale(row, at)
    return values


@pytest.mark.parametrize("format", diagonal(4, bf.FORMATS.values()))
def test_the_values_of_the_textbook(format):
    k = 512
    w, hessian = student_t((20, k), 1), hessian_of(k)
    for options in options_of(format):
        searched = bf.quantize(w, format, importance=np.diagonal(hessian), **options)
        found = bf.quantize(w, format, method="gptq", hessian=hessian, **options)
        expected = textbook(format, w, searched, hessian)
        before = bf.dequantize(searched)
        better = row_errors(w, expected, hessian) < row_errors(w, before, hessian)
        expected = np.where(better[:, None], expected, before)
        # A target in the middle between two values may be rounded either way, and the rest of its row follows.
        same = np.isclose(bf.dequantize(found), expected, rtol=1e-5, atol=1e-6).all(axis=1)
        assert same.sum() >= 18
        np.testing.assert_allclose(
            row_errors(w, bf.dequantize(found), hessian), row_errors(w, expected, hessian), rtol=0.2
        )


@pytest.mark.parametrize("format", diagonal(4, bf.FORMATS.values()))
def test_no_row_is_worse_and_all_together_are_better(format):
    w, hessian = student_t((70, 768), 2), hessian_of(768, seed=3)
    for options in options_of(format):
        searched = bf.quantize(w, format, importance=np.diagonal(hessian), **options)
        found = bf.quantize(w, format, method="gptq", hessian=hessian, **options)
        for name, plane in searched.planes.items():
            fitted = name == "scale" and has_plain_scales(plane, format.group_values(searched.planes).scale)
            if name not in ("codes", "sum") and not fitted:
                np.testing.assert_array_equal(found.planes[name], plane)
        before, after = (row_errors(w, bf.dequantize(q), hessian) for q in (searched, found))
        assert (after <= before * (1 + 1e-9)).all()
        assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize(("name", "group_size"), [("fp4", 32), ("u4", 64), ("u4b8", -1), ("u8b128", 128)])
def test_partial_groups_and_tiles(name, group_size):
    for k in (8, 40, 200):
        w, hessian = student_t((11, k), 4), hessian_of(k)
        settings = {"group_size": group_size}
        searched = bf.quantize(w, name, importance=np.diagonal(hessian), **settings)
        found = bf.quantize(w, name, method="gptq", hessian=hessian, **settings)
        before, after = (row_errors(w, bf.dequantize(q), hessian).sum() for q in (searched, found))
        assert after < before


def test_near_the_best_of_all_codes():
    """Eight columns: all 3^8 choices of codes that are next to the weights, one after the other."""
    w, hessian = gaussian((30, 8), 5), hessian_of(8, seed=6)
    searched = bf.quantize(w, "u4b8", group_size=-1, importance=np.diagonal(hessian))
    found = bf.quantize(w, "u4b8", group_size=-1, method="gptq", hessian=hessian)
    scale = searched.planes["scale"].astype(np.float64)
    nearest = np.rint(w / scale)
    best = np.full(len(w), np.inf)
    for step in itertools.product((-1, 0, 1), repeat=8):
        best = np.minimum(best, row_errors(w, np.clip(nearest + step, -8, 7) * scale, hessian))
    before, after = (row_errors(w, bf.dequantize(q), hessian) for q in (searched, found))
    assert best.sum() <= after.sum() * (1 + 1e-6)
    assert after.sum() - best.sum() <= 0.5 * (before.sum() - best.sum())


@pytest.mark.parametrize("name", ["u4", "mxfp4", "iq4_nl"])
def test_sweeps_lessen_the_error(name, monkeypatch):
    w, hessian = student_t((40, 256), 7), hessian_of(256, seed=8)
    errors = []
    for sweeps in (0, 1, SWEEPS):
        monkeypatch.setattr("billfish.core.gptq_solver.SWEEPS", sweeps)
        found = bf.quantize(w, name, method="gptq", hessian=hessian)
        errors.append(row_errors(w, bf.dequantize(found), hessian).sum())
    assert errors[0] > errors[1] > errors[2]


def test_sums_follow_the_codes():
    w, hessian = gaussian((6, 128)), hessian_of(128)
    planes = bf.quantize(w, "q8_1", method="gptq", hessian=hessian).planes
    totals = planes["codes"].view(np.int8).reshape(6, 4, 32).sum(axis=2, dtype=np.int32)
    np.testing.assert_array_equal(planes["sum"], (planes["scale"].astype(np.float32) * totals).astype(np.float16))


SCRIPT = """
import hashlib
import numpy as np
import billfish as bf
rng = np.random.default_rng(0)
x, w = rng.standard_normal((500, 320)), rng.standard_normal((500, 320)).astype(np.float32)
digest = hashlib.sha256()
for name in ("u4", "fp4", "iq4_nl"):
    q = bf.quantize(w, name, method="gptq", hessian=np.einsum("ti,tj->ij", x, x))
    for array in q.storage.values():
        digest.update(np.ascontiguousarray(array).tobytes())
print(digest.hexdigest())
"""


def test_any_number_of_threads_gives_the_same_bits():
    def run(blas: int, ours: int) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": str(ours), "OPENBLAS_NUM_THREADS": str(blas)}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert len({run(1, 1), run(4, 2)}) == 1


# ---- Hessians -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["u4", "q4_0", "fp4", "q4_k", "iq4_nl"])
@pytest.mark.parametrize("kind", ["zero", "dead columns", "rank 3", "one column", "tiny", "huge"])
def test_hessians_that_say_little(name, kind):
    k = 256
    w, hessian = gaussian((9, k)), hessian_of(k).astype(np.float64)
    if kind == "zero":
        hessian[:] = 0
    elif kind == "dead columns":
        hessian[::3] = 0
        hessian[:, ::3] = 0
    elif kind == "rank 3":
        hessian = hessian_of(k, rank=3)
    elif kind == "one column":
        hessian[:] = 0
        hessian[7, 7] = 1
    else:
        hessian *= 2.0**-300 if kind == "tiny" else 2.0**300
    searched = bf.quantize(w, name, importance=np.diagonal(hessian))
    found = bf.quantize(w, name, method="gptq", hessian=hessian)
    before, after = (row_errors(w, bf.dequantize(q), hessian) for q in (searched, found))
    assert (after <= before * (1 + 1e-9)).all()
    plain = bf.dequantize(bf.quantize(w, name, method="rtn")) - w
    assert np.abs(bf.dequantize(found) - w).max() <= 6 * np.abs(plain).max()


def test_a_hessian_has_no_unit():
    w, hessian = gaussian((9, 256)), hessian_of(256).astype(np.float64)
    expected = bf.quantize(w, "q4_0", method="gptq", hessian=hessian).planes
    for factor in (2.0**-400, 2.0**400):
        assert_same_planes(bf.quantize(w, "q4_0", method="gptq", hessian=hessian * factor).planes, expected)


def test_importance_beside_a_hessian_is_for_the_scales():
    w, hessian, importance = gaussian((9, 256)), hessian_of(256), np.exp(gaussian((256,)))
    scales = bf.quantize(w, "nvfp4", importance=importance).planes["scale"]
    found = bf.quantize(w, "nvfp4", method="gptq", hessian=hessian, importance=importance).planes["scale"]
    np.testing.assert_array_equal(found, scales)
    assert (bf.quantize(w, "nvfp4", method="gptq", hessian=hessian).planes["scale"] != scales).any()


def test_weights_on_a_device_come_to_the_cpu():
    w, hessian = gaussian((9, 256)), hessian_of(256)
    expected = bf.quantize(w, "q4_k", method="gptq", hessian=hessian)
    found = quantize_matrix("quantize", "w", on_device(w), "q4_k", None, "gptq", {}, None, hessian)
    assert_same_planes(found.planes, expected.planes)


def changed(place: tuple[int, int], value: float) -> np.ndarray:
    hessian = hessian_of(64)
    hessian[place] = value
    return hessian


@pytest.mark.parametrize(
    ("hessian", "error", "message"),
    [
        (None, bf.FormatError, r"'gptq'.*hessian.*\[64, 64\]"),
        (hessian_of(32), bf.ShapeError, r"hessian.*\(32, 32\).*\(64, 64\)"),
        (np.ones(64, np.float32), bf.ShapeError, r"hessian.*\(64,\)"),
        (np.eye(64, dtype=np.int64), bf.DTypeError, "hessian.*int64.*float32 or float64"),
        (changed((3, 4), np.nan), bf.DataError, r"hessian.*nan at \[3, 4\].*finite"),
        (changed((3, 4), np.inf), bf.DataError, r"hessian.*inf at \[3, 4\]"),
        (changed((3, 4), 1e3), bf.DataError, "hessian.*not symmetric.*X"),
        (changed((3, 3), -1.0), bf.DataError, r"hessian\[3, 3\].*-1.0.*X"),
        (2 - 3 * np.eye(64) + 1, bf.DataError, "hessian.*not positive semidefinite.*X"),
    ],
)
def test_what_is_no_hessian_is_refused(hessian, error, message):
    with pytest.raises(error, match=message):
        bf.quantize(gaussian((4, 64)), "q4_0", method="gptq", hessian=hessian)


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_a_hessian_is_for_gptq(method):
    with pytest.raises(bf.FormatError, match=f"hessian.*'gptq'.*'{method}'"):
        bf.quantize(gaussian((4, 64)), "q4_0", method=method, hessian=hessian_of(64))


def test_a_scale_that_overflows_is_refused_as_ever():
    with pytest.raises(bf.DataError, match=r"scale.*overflows float16"):
        bf.quantize(gaussian((5, 64)) * np.float32(1e7), "q4_0", method="gptq", hessian=hessian_of(64))
