"""method="mse": never worse than plain rounding in any group, and better overall by the margins we claim."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from cases import diagonal
from common import gaussian, group_errors, options_of, student_t
from vectors.make_ggml_vectors import reference_matrices

import billfish as bf

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "quantization_error.json"
FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)

MATRICES = {
    "gaussian": gaussian((64, 1024)),
    "student_t": student_t((64, 1024)),
    "tiny": gaussian((32, 512), 1) * np.float32(1e-6),
    "large": student_t((32, 512), 2) * np.float32(1000),
    "spikes": np.where(np.random.default_rng(3).random((32, 512)) < 0.02, 10, gaussian((32, 512), 4)).astype(
        np.float32
    ),
    "lattice": np.round(gaussian((32, 512), 5) * 2) / np.float32(2),
}


def assert_never_worse(w: np.ndarray, format, **arguments) -> None:
    plain = group_errors(w, bf.quantize(w, format, method="rtn", **arguments))
    searched = group_errors(w, bf.quantize(w, format, method="mse", **arguments))
    assert (searched <= plain).all()


@FORMATS
@pytest.mark.parametrize("name", MATRICES)
def test_no_group_is_worse(format, name):
    for options in options_of(format):
        assert_never_worse(MATRICES[name], format, **options)


@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8b128"])
@pytest.mark.parametrize("group_size", [64, 128, -1])
def test_no_group_is_worse_for_other_group_sizes_and_partial_groups(name, group_size):
    assert_never_worse(student_t((32, 200), 6), name, group_size=group_size)


@FORMATS
def test_no_group_of_real_weights_is_worse(format, real_weights):
    tried = 0
    for w in real_weights.values():
        if w.shape[1] % format.block_size == 0:
            assert_never_worse(w[:96], format)
            tried += 1
    assert tried >= 1


def mean_squared_error(w: np.ndarray, approximation: np.ndarray) -> float:
    return float(np.mean((w - approximation).astype(np.float64) ** 2))


@pytest.mark.parametrize(("make", "margin"), [(gaussian, 0.10), (student_t, 0.07)])
def test_q4_0_gains_on_ggml(make, margin):
    w = make((512, 1024), 7)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    theirs = mean_squared_error(w, gguf.quants.dequantize(gguf.quants.quantize(w, q4_0), q4_0))
    ours = mean_squared_error(w, bf.dequantize(bf.quantize(w, "q4_0", method="mse")))
    assert ours <= (1 - margin) * theirs


@pytest.mark.parametrize(("make", "margin"), [(gaussian, 0.21), (student_t, 0.14)])
def test_fp4_gains_on_amax_over_six(make, margin):
    w = make((512, 1024), 8)
    groups = w.reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 6
    rounded = (groups / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    plain = mean_squared_error(w, rounded.reshape(w.shape))
    ours = mean_squared_error(w, bf.dequantize(bf.quantize(w, "fp4", group_size=32, method="mse")))
    assert ours <= (1 - margin) * plain


def test_rows_do_not_depend_on_their_neighbours():
    """Slices and threads must not show: a row alone gives the bytes that it has inside a matrix."""
    w = gaussian((300, 512), 9)
    for name in ("q4_0", "q4_k", "fp4"):
        whole = bf.quantize(w, name, method="mse").planes
        alone = bf.quantize(w[177:178], name, method="mse").planes
        for plane, rows in alone.items():
            np.testing.assert_array_equal(whole[plane][177:178], rows)


@pytest.mark.parametrize("format", diagonal(3, bf.FORMATS.values()))
def test_gains_are_those_of_the_documentation(format):
    """benchmarks/results/quantization_error.json holds them; a search that looks less far would lose some."""
    recorded = {record["format"]: record for record in json.loads(RECORDS.read_text())["records"]}[format.name]
    for label, w in reference_matrices().items():
        error = mean_squared_error(w, bf.dequantize(bf.quantize(w, format, method="mse")))
        plain = mean_squared_error(w, bf.dequantize(bf.quantize(w, format, method="rtn")))
        expected = recorded[label]["mse"] / recorded[label]["rtn"]
        assert error / plain == pytest.approx(expected, abs=0.001)


# ---- one default ----------------------------------------------------------------------------------------------------


def test_the_better_method_is_the_default_everywhere():
    """Except where a function promises ggml's very bits."""
    from billfish.cli.main import parser_of
    from billfish.nn import mlx, torch
    from billfish.nn.transformers import BillfishConfig

    calls = {name: getattr(bf, name) for name in bf.__all__ if inspect.isfunction(getattr(bf, name))}
    calls |= {
        "torch": torch.MarlinLinear.from_linear,
        "mlx": mlx.MarlinLinear.from_linear,
        "config": BillfishConfig,
    }
    defaults = {
        name: inspect.signature(call).parameters["method"].default
        for name, call in calls.items()
        if "method" in inspect.signature(call).parameters
    }
    assert {"quantize", "quantize_model", "pack_fp4_weights", "torch", "mlx", "config"} <= defaults.keys()
    for name, default in defaults.items():
        assert default == ("rtn" if name.startswith("quantize_q") else "mse"), name
    assert parser_of("quantize").parse_args(["in", "out", "--format", "q4_0"]).method == "mse"


def test_what_is_said_to_be_the_default_is_done():
    w = student_t((8, 256), 7)
    assert group_errors(w, bf.quantize(w, "q4_0")).sum() < group_errors(w, bf.quantize(w, "q4_0", method="rtn")).sum()
    np.testing.assert_array_equal(
        bf.quantize_q4_0(w), bf.quantize(w, "q4_0", method="rtn").storage["blocks"].reshape(8, -1)
    )
