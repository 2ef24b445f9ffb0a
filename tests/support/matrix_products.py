"""neon_i8mm beside neon_dotprod, for every format: a script, because where a machine cannot run it, an emulator may."""

import numpy as np
from common import assert_same_bits, gaussian, multiply, options_of, random_storage

import billfish as bf
from billfish.backends.cpu.backend import CpuBackend

N, K = 37, 1024 + 256  # parts of a tile and of a slice


def main() -> None:
    """Sums are exact, and roundings come in the same order: so do the bits, whatever the scales."""
    dot, matrix = CpuBackend(), CpuBackend()
    dot.level, matrix.level = "neon_dotprod", "neon_i8mm"
    for format in bf.FORMATS.values():
        tensors = [bf.quantize(gaussian((N, K)), format, **options) for options in options_of(format)]
        for group_size in format.group_sizes:
            storage = random_storage(format, N, K, np.random.default_rng(4), group_size)
            tensors.append(bf.QuantizedTensor.from_storage(format, storage, group_size))
        for q in tensors:
            by_dot, by_matrix = dot.pack(q), matrix.pack(q)
            assert np.array_equal(by_dot.data, by_matrix.data)  # as PackedWeights.load relies on
            for m in (3, 8, 17):
                x, bias = gaussian((m, K), m), gaussian((N,), 3)
                for activations in ("q8", "q16"):
                    y = multiply(matrix, x, by_matrix, bias, activations)
                    assert_same_bits(y, multiply(dot, x, by_dot, bias, activations))
        print(format.name)


if __name__ == "__main__":
    main()
