"""The matrix units of an M5: whether there are any, and whether what they compute is right.

Metal has no question for them. macOS and the generation of the GPU say where they are, as in MLX. Then two matmuls with
known results are computed in them, one of 16 x 16 and one by our kernel: some versions of Metal's compiler made wrong
code for these units.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from billfish.backends.metal.kernels import SAFE, Kernels, source
from billfish.backends.metal.layout import lay_out
from billfish.core.arrays import MlxArrays, bfloat16
from billfish.core.tensor import QuantizedTensor

MLX = MlxArrays()
OLDEST_MACOS, OLDEST_GENERATION, OLDEST_OF_PHONES = (26, 2), 17, 18
TYPES = (np.dtype(np.float16), bfloat16)
PROBE = {
    "name": "marlin_probe_units",
    "input_names": ["x", "w"],
    "output_names": ["y"],
    "source": source("probe_units.metal"),
    # Only the #include lines: the rest of the file needs the kernel's own headers.
    "header": source("matrix_units.metal").split("namespace billfish")[0],
    "compile_options": SAFE,
}


def missing(architecture: str, macos: str) -> str:
    """Why there are none, as far as names say it; "" if there may be. architecture: such as applegpu_g17s."""
    version = tuple(int(number) for number in re.findall(r"\d+", macos)[:2])
    if version < OLDEST_MACOS:
        return f"macOS is {macos or 'not found'}; they need {'.'.join(map(str, OLDEST_MACOS))}"
    found = re.fullmatch(r"applegpu_g(\d+)([a-z])", architecture)
    if found is None or int(found[1]) < (OLDEST_OF_PHONES if found[2] == "p" else OLDEST_GENERATION):
        return f"the GPU is {architecture}, older than M5"
    return ""


def fault(kernels: Kernels, to: Callable[[Any], Any] = np.asarray, back: Callable[[Any], Any] = np.asarray) -> str:
    """What is wrong with matmuls in them; "" if nothing. `to` makes arrays of a library, `back` NumPy's."""
    for dtype in TYPES:
        for what, product in (("a tile of 16 x 16", _smallest), ("gemm_tensor", _whole)):
            try:
                right = product(kernels, dtype, to, back)
            except Exception as error:  # of Metal's compiler: whatever it is, there is another kernel
                first = next(iter(str(error).strip().splitlines()), "")
                return f"{what} in {dtype.name}: {type(error).__name__}: {first}"
            if not right:
                return f"{what} in {dtype.name} gives wrong numbers"
    return ""


def _integers(shape: tuple[int, int], dtype: np.dtype[Any], seed: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def _smallest(kernels: Kernels, dtype: np.dtype[Any], to: Any, back: Any) -> bool:
    x, w = _integers((16, 16), dtype, 0), _integers((16, 16), dtype, 1)
    x_there = to(x)
    (y,) = kernels.get(("probe_units",), lambda: PROBE)(
        inputs=[x_there, to(w)],
        template=[("T", x_there.dtype)],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(16, 16)],
        output_dtypes=[to(np.zeros(1, np.float32)).dtype],
    )
    return np.array_equal(back(y), x.astype(np.float32) @ w.astype(np.float32).T)


def _whole(kernels: Kernels, dtype: np.dtype[Any], to: Any, back: Any) -> bool:
    """More than a tile in each direction, and no multiple of one."""
    rows, columns, k = 67, 72, 72
    x = _integers((rows, k), dtype, 2)
    codes = np.random.default_rng(3).integers(125, 132, (columns, k)).astype(np.uint8)
    q = QuantizedTensor.from_planes("u8b128", {"codes": codes, "scale": np.ones((columns, 1), np.float16)}, -1)
    y = kernels.multiply(to(x), lay_out(q).converted(to), None, "tensor")
    exact = x.astype(np.float32) @ (codes.astype(np.float32) - 128).T
    return np.array_equal(back(y), exact.astype(dtype))


def without_matrix_units(kernels: Kernels) -> str:
    """Why MLX's GPU has none that can be used; "" if it has."""
    import mlx.core as mx

    about = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    reason = missing(str(about.get("architecture", "")), platform.mac_ver()[0])
    return reason or fault(kernels, MLX.from_numpy, MLX.to_numpy)
