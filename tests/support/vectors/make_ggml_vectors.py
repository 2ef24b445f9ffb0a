"""Record what ggml's own C code does, as an outside oracle for the tests.

    pip install llama-cpp-python==0.3.36        # compiles ggml for 10 to 20 minutes
    python tests/support/vectors/make_ggml_vectors.py   # rewrites tests/support/vectors/ggml.json

For every block type: a few rows, their blocks as ggml quantizes them and the values as ggml decodes those (hex, little
endian), and the mean squared error of ggml's quantizer on the two matrices of `reference_matrices`, without and with an
imatrix.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
from pathlib import Path

import numpy as np

# name -> (ggml type number, weights in a block, bytes of a block, name in C)
TYPES = {
    "q4_0": (2, 32, 18, "q4_0"),
    "q4_1": (3, 32, 20, "q4_1"),
    "q5_0": (6, 32, 22, "q5_0"),
    "q5_1": (7, 32, 24, "q5_1"),
    "q8_0": (8, 32, 34, "q8_0"),
    "q8_1": (9, 32, 36, "q8_1"),
    "q2_k": (10, 256, 84, "q2_K"),
    "q3_k": (11, 256, 110, "q3_K"),
    "q4_k": (12, 256, 144, "q4_K"),
    "q5_k": (13, 256, 176, "q5_K"),
    "q6_k": (14, 256, 210, "q6_K"),
    "iq4_nl": (20, 32, 18, "iq4_nl"),
    "mxfp4_gguf": (39, 32, 17, "mxfp4"),
    "nvfp4_gguf": (40, 64, 36, "nvfp4"),
}


def reference_matrices() -> dict[str, np.ndarray]:
    """Gaussian and heavy-tailed weights, the same on every machine."""
    rng = np.random.default_rng(20261115)
    return {
        "gaussian": rng.standard_normal((512, 1024)).astype(np.float32),
        "student_t4": rng.standard_t(4, (512, 1024)).astype(np.float32),
    }


def reference_imatrix() -> np.ndarray:
    """Mean squares of the inputs of `reference_matrices`: a few columns are much larger than the others."""
    return np.exp(np.random.default_rng(20261119).standard_normal(1024)).astype(np.float32)


def sample_rows() -> np.ndarray:
    """Rows [4, 256] with the cases that quantizers get wrong: zeros, one spike, all equal, mixed sizes."""
    rows = np.random.default_rng(7).standard_normal((4, 256)).astype(np.float32)
    rows[1, :64] = 0
    rows[1, 64:128] = 0.25
    rows[1, 150] = 100
    rows[2] *= np.float32(1e-3)
    rows[3] = np.abs(rows[3])
    return rows


def ggml_library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("llama_cpp is missing: pip install llama-cpp-python==0.3.36")
    return ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))


class Ggml:
    def __init__(self) -> None:
        self.library = ggml_library()
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        int64, pointer = ctypes.c_int64, ctypes.c_void_p
        self.library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, int64, int64, int64, pointer]

    def quantize(self, name: str, rows: np.ndarray, imatrix: np.ndarray | None = None) -> np.ndarray:
        number, weights, size, c_name = TYPES[name]
        blocks = np.zeros((len(rows), rows.shape[1] // weights * size), np.uint8)
        if name == "q8_1":  # an activation type: it has no chunk quantizer
            row = getattr(self.library, f"quantize_row_{c_name}_ref")
            row.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
            row(rows.ctypes.data, blocks.ctypes.data, rows.size)
        else:
            weights_of_columns = None if imatrix is None else imatrix.ctypes.data
            self.library.ggml_quantize_chunk(
                number, rows.ctypes.data, blocks.ctypes.data, 0, len(rows), rows.shape[1], weights_of_columns
            )
        return blocks

    def dequantize(self, name: str, blocks: np.ndarray) -> np.ndarray | None:
        _, weights, size, c_name = TYPES[name]
        row = getattr(self.library, f"dequantize_row_{c_name}", None) if name != "q8_1" else None
        if row is None:
            return None
        values = np.zeros((len(blocks), blocks.shape[1] // size * weights), np.float32)
        row.restype = None
        row.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        row(blocks.ctypes.data, values.ctypes.data, values.size)
        return values


def main() -> None:
    ggml = Ggml()
    rows = sample_rows()
    record: dict[str, object] = {
        "made_by": "llama-cpp-python 0.3.36",
        "rows": rows.tobytes().hex(),
        "shape": list(rows.shape),
    }
    formats = record["formats"] = {}
    for name in TYPES:
        blocks = ggml.quantize(name, rows)
        values = ggml.dequantize(name, blocks)
        entry = formats[name] = {"blocks": blocks.tobytes().hex()}
        if values is not None:
            entry["values"] = values.tobytes().hex()
            entry["mean_squared_error"] = {
                label: float(np.mean((w - ggml.dequantize(name, ggml.quantize(name, w))).astype(np.float64) ** 2))
                for label, w in reference_matrices().items()
            }
            imatrix = reference_imatrix()
            entry["mean_weighted_error"] = {
                label: float(np.mean(imatrix * (w - ggml.dequantize(name, ggml.quantize(name, w, imatrix))) ** 2.0))
                for label, w in reference_matrices().items()
            }
    path = Path(__file__).with_name("ggml.json")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
