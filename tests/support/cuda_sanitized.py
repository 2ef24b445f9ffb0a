"""Products with x in bytes for compute-sanitizer, one in a process, with no kernels in it but ours.

    python tests/support/cuda_sanitized.py                # how many there are
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/support/cuda_sanitized.py NUMBER

The plan is told of two multiprocessors, so that a CTA goes from tile to tile. One row of x is steep, so some tiles are
promoted often and others are not. The result is compared with float64 of the rounded x.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

import billfish as bf
from billfish.backends.cuda.device_weights import DeviceWeights, native_parts
from billfish.backends.cuda.driver import Buffer, copy_in, copy_out, current, device, native
from billfish.backends.cuda.plans import ByteShape, Gemm, Parts, launch_bytes
from billfish.core.activations import quantize_rows

M, N, K = 520, 392, 1152
PLACES = -(-N // 128)


def alone(shape: ByteShape) -> Parts:
    return ((shape, shape.places(N)),)


def shared(first: ByteShape, second: ByteShape) -> Parts:
    return ((first, 2), (second, PLACES - 2))


CASES: list[tuple[str, int, str, Parts]] = [
    *(("mxfp4", 32, "fp8", alone(ByteShape(width))) for width in (64, 128, 152, 192, 208, 256)),
    *(("u4b8", 128, "fp8", alone(ByteShape(width))) for width in (128, 176, 208)),
    ("fp4", 128, "fp8", alone(ByteShape(208))),
    ("u4b8", 128, "q8", alone(ByteShape(192))),
    *(("mxfp4", 32, "fp8", alone(ByteShape(128, teams, split))) for teams, split in ((1, 2), (1, 3), (2, 1), (2, 2))),
    ("mxfp4", 32, "fp8", shared(ByteShape(208), ByteShape(256))),
    ("u4b8", 128, "fp8", shared(ByteShape(208), ByteShape(128, split=2))),
]


def run(format: str, group_size: int, activations: str, parts: Parts) -> float:
    """The relative error of a product."""
    rng = np.random.default_rng(0)
    q = bf.quantize(rng.standard_normal((N, K)).astype(np.float32), format, group_size=group_size, method="rtn")
    x = rng.standard_normal((M, K)).astype(np.float16)
    x[7, 5] = 3000
    held = DeviceWeights.pack(q, "cpu")
    small = replace(device(), multiprocessors=2)
    plan = launch_bytes(Gemm(held.kind, M, N, K, activations=activations), small, parts)
    y = np.empty((M, N), np.float16)
    with current(0):
        memory = [Buffer(size, 0) for size in (x.nbytes, y.nbytes, plan.work_bytes)]
        x_at, y_at, work = (buffer.pointer for buffer in memory)
        copy_in(x_at, x.view(np.uint16), 0)
        native(plan.quantize, 0)(0, x_at, work, K, K, plan.stride)
        for part in native_parts(plan, held, M):
            part(0, work, plan.stride, 0, y_at)
        copy_out(y.view(np.uint16), y_at, 0)
    expected = quantize_rows(x, activations).values() @ bf.dequantize(q).astype(np.float64).T
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(len(CASES))
    else:
        case = CASES[int(sys.argv[1])]
        error = run(*case)
        print(f"{case}: error {error:.1e}")
        assert error < 1e-3
