"""The level amx has the bits of avx512_vnni. test_levels.py runs it emulated where a machine has no AMX."""

import numpy as np
import pytest
from common import assert_same_bits, gaussian, multiply, options_of, random_storage

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif("amx" not in _cpu.levels(), reason="no AMX")
ROWS = (16, 31, 32, 33, 39, 64, 260)  # below the limit, with much padding and little, and more than a panel


def backends() -> tuple[CpuBackend, CpuBackend]:
    amx, vnni = CpuBackend(), CpuBackend()
    amx.level, vnni.level = "amx", "avx512_vnni"
    return amx, vnni


def tensors(format: bf.Format, n: int, k: int) -> list[bf.QuantizedTensor]:
    found = [bf.quantize(gaussian((n, k)), format, **options) for options in options_of(format)]
    for group_size in format.group_sizes:
        storage = random_storage(format, n, k, np.random.default_rng(4), group_size)
        found.append(bf.QuantizedTensor.from_storage(format, storage, group_size))
    return found


@pytest.mark.parametrize("name", bf.FORMATS)
def test_products_have_the_bits_of_avx512(name):
    amx, vnni = backends()
    for q in tensors(bf.FORMATS[name], 37, 1024 + 256):  # parts of a tile and of a slice
        by_amx, by_vnni = amx.pack(q), vnni.pack(q)
        assert np.array_equal(by_amx.data, by_vnni.data)  # as PackedWeights.load relies on
        for m in ROWS:
            x, bias = gaussian((m, q.shape[1]), m), gaussian((q.shape[0],), 3)
            for activations in ("q8", "q16"):
                y = multiply(amx, x, by_amx, bias, activations)
                assert_same_bits(y, multiply(vnni, x, by_vnni, bias, activations))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "iq4_nl", "u4b8", "u4", "nvfp4"])
def test_short_and_odd_rows_of_weights(name):
    amx, vnni = backends()
    for group_size in [size for size in bf.FORMATS[name].group_sizes if 0 < size <= 128]:
        for blocks in (1, 3, 5, 17):
            for n in (1, 16, 33):
                k = blocks * max(group_size, 32)
                q = bf.quantize(gaussian((n, k)), name, group_size=group_size)
                x = gaussian((48, k), blocks)
                for activations in ("q8", "q16"):
                    y = multiply(amx, x, amx.pack(q), None, activations)
                    assert_same_bits(y, multiply(vnni, x, vnni.pack(q), None, activations))


@pytest.mark.parametrize("k", [544, 576, 608])
def test_one_scale_for_each_row(k):
    """Blocks of x go in eights, of which the last have one, two or three."""
    amx, vnni = backends()
    q = bf.quantize(gaussian((48, k)), "u4b8", group_size=-1)
    x = gaussian((64, k))
    y = multiply(amx, x, amx.pack(q), None, "q8")
    assert_same_bits(y, multiply(vnni, x, vnni.pack(q), None, "q8"))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_thread_has_tile_registers(count):
    amx, vnni = backends()
    q = bf.quantize(gaussian((300, 512)), "q4_k")
    x = gaussian((64, 512))
    expected = multiply(vnni, x, vnni.pack(q), None, "q8")
    before = _cpu.threads()
    try:
        _cpu.set_threads(count)
        for _ in range(20):
            assert_same_bits(multiply(amx, x, amx.pack(q), None, "q8"), expected)
    finally:
        _cpu.set_threads(before)


def test_experts_have_the_bits_of_avx512():
    tokens, count, k = 160, 4, 256
    x, ids = gaussian((tokens, k)), np.arange(2 * tokens, dtype=np.int32).reshape(tokens, 2) % count
    stack = bf.quantize(gaussian((count, 96, k)), "q4_0")
    for activations in ("q8", "q16"):
        by_amx, by_vnni = (
            bf.expert_linear(x, backend.pack_experts(stack), ids, activations=activations) for backend in backends()
        )
        assert_same_bits(by_amx, by_vnni)
