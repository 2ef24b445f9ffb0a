"""Random products on the GPU, each against float64. A thousand, or as many as the first argument says:

python tests/backends/cuda/test_random_products.py [how many] [seed]
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import torch

import billfish as bf
from billfish.core.format import FORMATS

PER_WEIGHT = 20  # products with the same weights


def random_weights(rng: np.random.Generator) -> bf.QuantizedTensor:
    """Any format, group size and option; sizes that are a multiple of nothing but the format's block."""
    format = FORMATS[rng.choice(sorted(FORMATS.keys() - {"nf4"}))]  # which no CUDA kernel decodes
    sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
    options = {name: str(rng.choice(allowed)) for name, allowed in format.options.items()}
    n = int(rng.integers(1, 400))
    k = format.block_size * int(rng.integers(-(-160 // format.block_size), max(2, 1000 // format.block_size) + 1))
    w = rng.standard_normal((n, k)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-3, 0))
    return bf.quantize(w, format, group_size=int(rng.choice(sizes)), **options)


def errors(count: int, seed: int) -> list[tuple[float, str]]:
    """The error of each product as a part of what is allowed, and what it was."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        q = random_weights(rng)
        n, k = q.shape
        exact_weights = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda()
        for _ in range(PER_WEIGHT):
            m = int(2 ** rng.uniform(0, 9.3))
            dtype = torch.bfloat16 if rng.random() < 0.5 else torch.float16
            x = torch.randn((m, k), device="cuda").to(dtype)
            bias = torch.randn(n, device="cuda").to(dtype) if rng.random() < 0.5 else None
            y = bf.quantized_linear(x, q, bias=bias).double()
            exact = x.double() @ exact_weights.double().T + (0 if bias is None else bias.double())
            dense = torch.nn.functional.linear(x, exact_weights.to(dtype), bias).double()
            # Of few numbers, a lucky dense product may have no error at all: allow an eighth of a last place besides.
            allowed = 2 * (dense - exact).norm() + torch.finfo(dtype).eps / 8 * exact.norm() + 1e-30
            what = f"{q.format.name} [{n}, {k}] group {q.group_size}, M={m}, {dtype}"
            found.append((float((y - exact).norm() / allowed), what))
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_random_products():
    assert [what for error, what in errors(1000, 0) if not error <= 1] == []


if __name__ == "__main__":
    started = time.time()
    found = errors(int((sys.argv[1:2] or ["1000"])[0]), int((sys.argv[2:3] or ["0"])[0]))
    wrong = [f"mismatch: {what}: {error:.3g}" for error, what in found if not error <= 1]
    print(*wrong, sep="\n")
    worst = max(error for error, _ in found)
    print(f"{len(found)} products, {len(wrong)} mismatches, largest error {worst:.2f} of what is allowed")
    print(f"{time.time() - started:.0f} s")
    sys.exit(bool(wrong))
