"""MLX: quantized_matmul with integers and an offset (`affine`), MXFP4 or NVFP4.

On the CPU x stays in float32, and its kernels use the threads that they use: there is nothing to set. On Apple GPUs x
and the scales are float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.base import Case, Floats, Peer, Prepared, Rotated, copies_for, load_package
from billfish.core.elements import Integer, Signed
from billfish.core.format import get_format

# The FP4 formats and their mode.
MODES = {"mxfp4": "mxfp4", "mxfp4_gguf": "mxfp4", "nvfp4": "nvfp4", "nvfp4_gguf": "nvfp4"}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


class Together(Rotated):
    """Copies on a GPU: all their products are queued, and then waited for once."""

    def __init__(self, mx: Any, copies: Any, multiply: Callable[[Any, Any], Any], factor: Any = 1) -> None:
        def give(y: Any) -> Any:
            return np.array(y.astype(mx.float32)) * factor

        super().__init__(copies, multiply, lambda x: mx.array(x).astype(mx.float16), give)
        self._mx = mx

    def bind(self, x: Floats) -> Callable[[], object]:
        taken = self._take(x)
        self._mx.eval(taken)

        def run() -> None:
            products = [self._multiply(taken, copy) for copy in self._weights]
            self._mx.eval(products)
            self._y = products[-1]

        return run


class Mlx(Peer):
    name = family = "mlx"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.install = "mlx[cpu]" if device == "cpu" else "mlx"

    def load(self) -> None:
        self.mx = load_package("mlx.core", self.install)

    def version(self) -> str:
        return str(self.mx.__version__)

    def can_run(self, case: Case) -> tuple[bool, str]:
        if case.format.name in MODES or self._restates(case):
            return True, ""
        element = case.format.element
        if not isinstance(element, (Integer, Signed)) or element.bits not in AFFINE_BITS:
            return False, f"quantized_matmul has no {element.name}"
        if case.group_size not in AFFINE_GROUPS or case.k % case.group_size:
            return False, f"quantized_matmul takes groups of {', '.join(map(str, AFFINE_GROUPS))} that divide K"
        return True, ""

    def _restates(self, case: Case) -> bool:
        """MLX has no E2M1 with float16 scales; on a GPU, where it is the only peer, it gets MXFP4 instead."""
        return self.device == "gpu" and case.format.name == "fp4" and case.k % 32 == 0

    def label(self, case: Case) -> str:
        return f"{self.name}:mxfp4" if self._restates(case) else self.name

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        mx = self.mx
        if self._restates(case):
            case = case.restated("mxfp4", 32)
        mode = MODES.get(case.format.name, "affine")
        arrays = _affine(case) if mode == "affine" else _fp4(case, mode)
        if self.device == "gpu":
            arrays = [array.astype(np.float16) if array.dtype == np.float32 else array for array in arrays]
        weights = [case.repeated(array) for array in arrays]
        copies = copies_for(sum(array.nbytes for array in weights), cold_bytes)
        rotation = [tuple(mx.array(array) for array in weights) for _ in range(copies)]
        mx.eval(rotation)
        # GGUF's and NVIDIA's one scale for the tensor is a factor of y; nobody's time depends on it.
        factor = np.float32(case.planes.get("global_scale", 1))
        bits, group = case.format.element.bits, case.group_size

        stream = getattr(mx, self.device)

        def multiply(x: Any, w: Any) -> Any:
            return mx.quantized_matmul(x, *w, transpose=True, group_size=group, bits=bits, mode=mode, stream=stream)

        def multiply_now(x: Any, w: Any) -> Any:
            y = multiply(x, w)
            mx.eval(y)
            return y

        if self.device == "gpu":
            return Together(mx, rotation, multiply, factor)
        return Rotated(rotation, multiply_now, take=mx.array, give=lambda y: np.array(y) * factor)


def _affine(case: Case) -> list[np.ndarray[Any, Any]]:
    """w = code * scale + bias. Codes are a stream of bits in uint32 words, the lowest first."""
    codes, bits, element = case.planes["codes"], case.format.element.bits, case.format.element
    if isinstance(element, Signed):
        codes, zero = codes ^ np.uint8(0x80), 128
    else:
        assert isinstance(element, Integer)
        zero = element.bias
    stream = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little").reshape(len(codes), -1)
    words = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    group = case.format.group_values(case.planes)
    offset = np.float32(zero) if group.zero is None else group.zero + np.float32(zero)
    bias: Floats = -offset * group.scale
    return [words, group.scale, bias if group.minimum is None else bias + group.minimum]


def _fp4(case: Case, mode: str) -> list[np.ndarray[Any, Any]]:
    """GGUF's FP4 has the same codes and scales as ours, in another order of bytes; ours is MLX's."""
    storage = get_format(mode).pack(case.planes)
    return [np.ascontiguousarray(storage["packed"]).view(np.uint32), storage["scales"]]
