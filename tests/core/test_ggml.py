"""ggml formats against gguf-py, on random bytes and every scale pattern, and against ggml's C code, as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from cases import diagonal
from common import ALL_HALVES, GGUF_NAMES, assert_same_bits, gaussian, student_t
from vectors.make_ggml_vectors import reference_matrices

import billfish as bf
from billfish.core.formats.ggml import BlockFormat

VECTORS = json.loads((Path(__file__).parents[1] / "support" / "vectors" / "ggml.json").read_text())

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:gguf")


def tensor_of(name: str, blocks: np.ndarray) -> bf.QuantizedTensor:
    storage = {"blocks": blocks}
    if name == "nvfp4_gguf":
        storage["global_scale"] = np.ones((), np.float32)
    return bf.QuantizedTensor.from_storage(name, storage)


def gguf_dequantize(name: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[GGUF_NAMES[name]])


def test_gguf_knows_no_type_that_we_forgot():
    ours = {f.name for f in bf.FORMATS.values() if isinstance(f, BlockFormat)}
    assert ours == GGUF_NAMES.keys() | {"q8_1"}  # gguf cannot decode q8_1


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_block_sizes_are_those_of_gguf(name):
    format = bf.FORMATS[name]
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[GGUF_NAMES[name]]]
    assert (format.block_size, format.struct.itemsize) == expected


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_dequantize_equals_gguf_on_random_bytes(name):
    format = bf.FORMATS[name]
    blocks = np.random.default_rng(3).integers(0, 256, (4096, 3 * format.struct.itemsize), dtype=np.uint8)
    assert_same_bits(bf.dequantize(tensor_of(name, blocks)), gguf_dequantize(name, blocks))


@pytest.mark.parametrize("name", diagonal(3, GGUF_NAMES))
def test_dequantize_equals_gguf_for_every_scale_pattern(name):
    """Each scale field takes all its patterns: NaN, infinities, subnormals, both zeros."""
    format = bf.FORMATS[name]
    rng = np.random.default_rng(4)
    for field in format.fields:
        patterns = (
            ALL_HALVES if format.struct[field].base == np.float16 else np.arange(256).astype(format.struct[field].base)
        )
        blocks = rng.integers(0, 256, (len(patterns), format.struct.itemsize), dtype=np.uint8).view(format.struct)
        blocks[field] = patterns.reshape(len(patterns), *([1] * blocks[field][0].ndim))
        rows = blocks.view(np.uint8).reshape(len(patterns), -1)
        assert_same_bits(bf.dequantize(tensor_of(name, rows)), gguf_dequantize(name, rows))


HARD_ROWS = {
    "gaussian": gaussian((64, 512)),
    "heavy": student_t((64, 512)),
    "zeros": np.zeros((4, 512), np.float32),
    "constant": np.full((4, 512), 0.3, np.float32),
    "negative": -np.abs(gaussian((16, 512), 5)),
    "tiny": gaussian((16, 512), 6) * np.float32(1e-7),
    "large": gaussian((16, 512), 7) * np.float32(5000),
    "ties": np.round(gaussian((64, 512), 8) * 8) / np.float32(8),
    "powers": np.ldexp(np.float32(1), np.random.default_rng(9).integers(-12, 12, (64, 512))).astype(np.float32),
    "below_half": np.where(np.arange(512) % 32, np.nextafter(np.float32(0.5), np.float32(0)), np.float32(127))[None],
    "half": gaussian((64, 512), 10).astype(np.float16).astype(np.float32),
    "below_powers": np.nextafter(np.ldexp(np.float32(1), np.arange(-8, 8)), np.float32(0))[:, None]
    * np.ones((16, 512), np.float32),
}


@pytest.mark.parametrize("rows", HARD_ROWS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4_gguf"])
def test_quantize_equals_gguf(name, rows):
    w = HARD_ROWS[rows]
    expected = gguf.quants.quantize(w, gguf.GGMLQuantizationType[GGUF_NAMES[name]])
    np.testing.assert_array_equal(bf.quantize(w, name, method="rtn").storage["blocks"], expected)


def test_mxfp4_and_its_gguf_blocks_hold_the_same_codes_and_scales():
    w = gaussian((32, 512))
    ours, theirs = (bf.quantize(w, name, method="rtn") for name in ("mxfp4", "mxfp4_gguf"))
    for plane in ("codes", "scale"):
        np.testing.assert_array_equal(ours.planes[plane], theirs.planes[plane])
    np.testing.assert_array_equal(bf.dequantize(ours), bf.dequantize(theirs))


# ---- ggml's C code, recorded by tests/support/vectors/make_ggml_vectors.py ----

ROWS = np.frombuffer(bytes.fromhex(VECTORS["rows"]), np.float32).reshape(VECTORS["shape"])


def recorded_blocks(name: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(VECTORS["formats"][name]["blocks"]), np.uint8).reshape(len(ROWS), -1)


@pytest.mark.parametrize("name", [name for name, entry in VECTORS["formats"].items() if "values" in entry])
def test_dequantize_equals_ggml_in_c(name):
    expected = np.frombuffer(bytes.fromhex(VECTORS["formats"][name]["values"]), np.float32).reshape(ROWS.shape)
    assert_same_bits(bf.dequantize(tensor_of(name, recorded_blocks(name))), expected)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4_gguf"])
def test_quantize_equals_ggml_in_c(name):
    np.testing.assert_array_equal(bf.quantize(ROWS, name, method="rtn").storage["blocks"], recorded_blocks(name))


@pytest.mark.parametrize("label", ["gaussian", "student_t4"])
@pytest.mark.parametrize("name", [name for name, entry in VECTORS["formats"].items() if "values" in entry])
def test_mse_is_below_the_error_of_ggml_in_c(name, label):
    """Also where ggml searches itself, as in the k-quants."""
    w = reference_matrices()[label]
    error = np.mean((w - bf.dequantize(bf.quantize(w, name, method="mse"))).astype(np.float64) ** 2)
    assert error < VECTORS["formats"][name]["mean_squared_error"][label]
