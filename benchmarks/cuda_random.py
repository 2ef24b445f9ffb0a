"""Random products on the GPU, each against float64: python -m benchmarks.cuda_random [how many] [seed]."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

import billfish as bf
from billfish.core.format import FORMATS

PER_WEIGHT = 20  # products with the same weights


def random_weights(rng: np.random.Generator) -> bf.QuantizedTensor:
    """Any format, group size and option; sizes that are a multiple of nothing but the format's block."""
    format = FORMATS[rng.choice(sorted(FORMATS))]
    sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
    options = {name: str(rng.choice(allowed)) for name, allowed in format.options.items()}
    n = int(rng.integers(1, 400))
    k = format.block_size * int(rng.integers(-(-160 // format.block_size), max(2, 1000 // format.block_size) + 1))
    w = rng.standard_normal((n, k)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-3, 0))
    return bf.quantize(w, format, group_size=int(rng.choice(sizes)), **options)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    rng = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    worst, wrong, done, started = 0.0, 0, 0, time.time()
    while done < count:
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
            ratio = float((y - exact).norm() / allowed)
            worst = max(worst, ratio)
            if not ratio <= 1:
                wrong += 1
                print(f"mismatch: {q.format.name} [{n}, {k}] group {q.group_size}, M={m}, {dtype}: {ratio:.3g}")
            done += 1
    seconds = time.time() - started
    print(f"{done} products, {wrong} mismatches, largest error {worst:.2f} of what is allowed, {seconds:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
