"""quantize(importance=): no group is worse for it in the weighted error, and all together are much better."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import diagonal
from common import assert_same_planes, gaussian, options_of, student_t
from device_array_support import assert_as_good, fetched, on_device, storable_weights_of
from foreign_formats import FOREIGN
from vectors.make_ggml_vectors import reference_imatrix, reference_matrices

import billfish as bf
from billfish.core.format import Format
from billfish.core.search import Search

GGML = json.loads((Path(__file__).parents[1] / "support" / "vectors" / "ggml.json").read_text())["formats"]
FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)
SEARCHES = ("rtn", "mse")
METHODS = pytest.mark.parametrize("method", SEARCHES)


def importance_of(k: int, seed: int = 0) -> np.ndarray:
    """As inputs are: a few columns are much larger than the others, and a few are always zero."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(k) < 0.05, 0, np.exp(2 * rng.standard_normal(k))).astype(np.float32)


def weighted_errors(w: np.ndarray, tensor: bf.QuantizedTensor, importance: np.ndarray) -> np.ndarray:
    """Of each group that is quantized on its own, in float64: [N, groups]."""
    run = tensor.format.quantization_run(tensor.group_size)
    wrong = w.astype(np.float64) - bf.dequantize(tensor)
    return np.add.reduceat(wrong * wrong * importance, np.arange(0, w.shape[1], run), axis=1)


def assert_never_worse(w: np.ndarray, format: Format | str, method: str, **arguments: object) -> None:
    importance = importance_of(w.shape[1])
    before = weighted_errors(w, bf.quantize(w, format, method=method, **arguments), importance)
    after = weighted_errors(w, bf.quantize(w, format, method=method, importance=importance, **arguments), importance)
    assert (after <= before).all()


@FORMATS
@METHODS
def test_no_group_is_worse(format, method):
    for options in options_of(format):
        assert_never_worse(student_t((24, 1024)), format, method, **options)
        assert_never_worse(gaussian((24, 512), 1) * np.float32(1e-5), format, method, **options)


@METHODS
@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8b128"])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_other_group_sizes_and_partial_groups(name, group_size, method):
    assert_never_worse(student_t((24, 200), 6), name, method, group_size=group_size)


@FORMATS
def test_all_together_are_better(format):
    w, importance = student_t((64, 1024), 2), importance_of(1024, 3)
    plain, searched, fitted, weighted = (
        weighted_errors(w, bf.quantize(w, format, **settings), importance).sum()
        for settings in (
            {"method": "rtn"},
            {"method": "mse"},
            {"method": "rtn", "importance": importance},
            {"method": "mse", "importance": importance},
        )
    )
    if "e8m0" in format.scale:  # powers of two: nothing to fit
        assert fitted < plain
        # Floats of 8 bits are as precise with any power of two that saturates none, and each search finds such.
        assert weighted <= searched if format.element.bits == 8 else weighted < 0.99 * searched
    else:
        assert weighted < 0.8 * searched
        assert weighted < 0.95 * fitted < 0.95 * plain


@pytest.mark.parametrize("name", ["fp4", "q4_0", "iq4_nl", "u4b8"])
def test_nearly_the_best_of_all_scales(name):
    """The oracle tries 2,000 scales of both signs for each group, one after the other."""
    format = bf.get_format(name)
    w, importance = student_t((40, 32), 4), importance_of(32, 5)
    found = weighted_errors(w, bf.quantize(w, format, group_size=32, importance=importance), importance)[:, 0]
    best = np.full(len(w), np.inf)
    largest = np.abs(w).max(axis=1, keepdims=True)
    for factor in np.linspace(0.3, 2, 1000) / format.element.high:
        for sign in (1, -1) if name in ("q4_0", "iq4_nl") else (1,):  # the others' scales have the sign of E2M1's
            scale = (sign * factor * largest).astype(np.float16).astype(np.float32)
            wrong = format.element.round(w / scale) * scale - w
            best = np.minimum(best, (wrong.astype(np.float64) ** 2 * importance).sum(axis=1))
    assert found.mean() <= 1.25 * best.mean()
    assert np.median(found / best) <= 1.25


WITH_IMATRIX = {name: entry["mean_weighted_error"] for name, entry in GGML.items() if "values" in entry}


@pytest.mark.parametrize(("name", "label"), diagonal(2, WITH_IMATRIX, ("gaussian", "student_t4")))
def test_no_more_error_than_ggml_with_the_same_imatrix(name, label):
    w, imatrix = reference_matrices()[label], reference_imatrix()
    found = weighted_errors(w, bf.quantize(w, name, importance=imatrix), imatrix).sum() / w.size
    assert found < WITH_IMATRIX[name][label]


@pytest.mark.parametrize("importance", [None, importance_of(512)], ids=["squared", "weighted"])
def test_values_of_q4_1_are_exact_in_q5_1(importance):
    """Half the scale, and even codes: llama.cpp finds them, too."""
    w = bf.dequantize(bf.quantize(student_t((32, 512), 8), "q4_1", method="rtn"))
    np.testing.assert_array_equal(bf.dequantize(bf.quantize(w, "q5_1", importance=importance)), w)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_the_best_of_all_powers_of_two(name):
    format, w, importance = bf.get_format(name), student_t((40, 32), 4), importance_of(32, 5)
    found = weighted_errors(w, bf.quantize(w, format, importance=importance), importance)[:, 0]
    scales = np.float32(2) ** np.arange(-30, 30, dtype=np.float32)[:, None, None]
    wrong = format.element.round(w / scales) * scales - w.astype(np.float64)
    np.testing.assert_allclose(found, (wrong * wrong * importance).sum(axis=2).min(axis=0), rtol=1e-6)


def test_a_search_by_importance_knows_the_one_without():
    w, importance = student_t((50, 32)), importance_of(32)[None].repeat(50, axis=0)
    element = bf.get_format("q4_0").element
    start = np.abs(w).max(axis=1) / np.float32(8)
    (alone,) = Search().scale(w, element, start, np.copy)
    first, second = Search(importance).scale(w, element, start, np.copy)
    np.testing.assert_array_equal(first, alone)
    assert (first != second).any()
    assert len(Search(importance, thorough=False).scale(w, element, start, np.copy)) == 1


@FORMATS
@METHODS
def test_importance_has_no_unit(format, method):
    w, importance = student_t((8, 512)), importance_of(512).astype(np.float64)
    expected = bf.quantize(w, format, method=method, importance=importance).planes
    for factor in (2.0**-900, 2.0**-60, 2.0**60, 2.0**900):
        assert_same_planes(bf.quantize(w, format, method=method, importance=importance * factor).planes, expected)


@FORMATS
@METHODS
def test_no_importance_at_all_is_as_without(format, method):
    w = student_t((8, 512))
    expected = bf.quantize(w, format, method=method).planes
    assert_same_planes(bf.quantize(w, format, method=method, importance=np.zeros(512)).planes, expected)


@FORMATS
def test_columns_without_importance_are_harmless(format):
    """Half of each group, and all groups of the second half: at worst, a weight is clipped to the others' range."""
    w, importance = gaussian((8, 512)), np.ones(512, np.float32)
    importance[::2] = 0
    importance[256:] = 0
    wrong = bf.dequantize(bf.quantize(w, format, importance=importance)) - w
    assert np.abs(wrong).max() <= 0.6 * np.abs(w).max()


def test_rows_do_not_depend_on_their_neighbours():
    w, importance = gaussian((300, 512), 9), importance_of(512)
    for name in ("q4_0", "q4_k", "fp4"):
        whole = bf.quantize(w, name, importance=importance).planes
        alone = bf.quantize(w[177:178], name, importance=importance).planes
        for plane, rows in alone.items():
            np.testing.assert_array_equal(whole[plane][177:178], rows)


@pytest.mark.parametrize(
    ("format", "method"), diagonal(2, [*bf.FORMATS.values(), *(format() for format in FOREIGN)], SEARCHES)
)
def test_on_a_device(format, method):
    w = storable_weights_of(format)[14:]
    importance = importance_of(w.shape[1])
    group_size = format.default_group_size
    for options in options_of(format):
        expected = format.quantize(w, group_size, method, importance, **options)
        found = fetched(format.quantize(on_device(w), group_size, method, importance, **options))
        errors = (
            np.sqrt(((format.decode(planes, group_size).astype(np.float64) - w) ** 2 * importance).sum(axis=1))
            for planes in (found, expected)
        )
        assert_as_good(*errors, len(w))


def test_arrays_of_other_libraries():
    w, importance = gaussian((8, 64)), importance_of(64)
    expected = bf.quantize(w, "q4_0", importance=importance).planes
    for given in (torch.from_numpy(importance), importance.astype(np.float64)):
        assert_same_planes(bf.quantize(w, "q4_0", importance=given).planes, expected)


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (np.ones(63, np.float32), bf.ShapeError, r"importance.*\(63,\).*\(64,\)"),
        (np.ones((64, 1), np.float32), bf.ShapeError, r"importance.*\(64, 1\)"),
        (np.ones(64, np.int32), bf.DTypeError, "importance.*int32.*float32 or float64"),
        ([1.0] * 64, bf.DTypeError, "importance.*list"),
        (np.where(np.arange(64) == 5, np.nan, 1), bf.DataError, r"importance.*nan at \[5\].*finite"),
        (np.where(np.arange(64) == 6, np.inf, 1), bf.DataError, r"importance.*inf at \[6\]"),
        (np.where(np.arange(64) == 7, -1.0, 1), bf.DataError, r"importance\[7\].*-1.0.*0 or more"),
    ],
)
@METHODS
def test_what_is_no_importance_is_refused(importance, error, message, method):
    with pytest.raises(error, match=message):
        bf.quantize(gaussian((4, 64)), "q4_0", method=method, importance=importance)
