"""A user's program where neither torch nor MLX is installed: what comes from NumPy is known all the same."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import billfish as bf

w: NDArray[np.float32] = np.zeros((64, 64), np.float32)
q = bf.quantize(w, "fp4")
assert_type(bf.quantized_linear(w, q), NDArray[np.float32])
assert_type(bf.dequantize(q), NDArray[np.float32])
assert_type(bf.dequantize_q4_0(bf.quantize_q4_0(w)), NDArray[np.float32])
assert_type(bf.gemm_w4a8(bf.quantize_q8_0(w), q), NDArray[np.float32])
