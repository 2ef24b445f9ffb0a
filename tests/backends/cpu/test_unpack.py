"""Packed weights give back the storage they were packed from, bit for bit, on every level of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_same_bits, gaussian

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.core.tensor import QuantizedTensor

SHAPES = [(37, 256), (5, 768), (64, 1024)]


def packable(name: str, shape: tuple[int, int], group_size: int | None) -> QuantizedTensor | None:
    try:
        return bf.quantize(gaussian(shape), name, group_size=group_size, method="rtn")
    except bf.BillfishError:
        return None


@pytest.mark.parametrize("name", list(bf.FORMATS))
@pytest.mark.parametrize("level", _cpu.levels())
def test_every_format_comes_back(name, level):
    cpu = CpuBackend()
    cpu.level = level
    for i, shape in enumerate(SHAPES):
        for group_size in (None, (64, 128, -1)[i]):
            tensor = packable(name, shape, group_size)
            if tensor is None or not cpu.can_run(problem(tensor))[0]:
                continue
            tensors, about = cpu.to_tensors(cpu.pack(tensor))
            packed = cpu.from_tensors(tensors, about)
            for part, array in cpu.unpack(packed, tensor.format, tensor.shape, tensor.group_size).items():
                assert_same_bits(array, tensor.storage[part])
            alone = QuantizedTensor.packed_only(
                tensor.format, tensor.shape, tensor.group_size, {("cpu", "cpu"): packed}
            )
            for dtype in ("float32", "bfloat16"):
                assert_same_bits(bf.dequantize(alone, dtype), bf.dequantize(tensor, dtype, backend="reference"))


def problem(tensor: QuantizedTensor) -> bf.backends.Problem:
    float32 = np.dtype(np.float32)
    return bf.backends.Problem("matmul", tensor.format, tensor.group_size, 1, *tensor.shape, float32)


@pytest.mark.parametrize(("name", "scale"), [("q4_0", np.inf), ("u4b8", np.nan), ("nvfp4", None), ("q8_1", None)])
def test_what_the_stream_does_not_tell_is_kept_beside_it(name, scale):
    cpu, tensor = bf.BACKENDS["cpu"], bf.quantize(gaussian((9, 512)), name)
    storage = {part: np.array(array) for part, array in tensor.storage.items()}
    if scale is not None:
        scales = storage["blocks"][:, :2].view(np.float16) if "blocks" in storage else storage["scales"]
        scales.reshape(-1)[3] = scale
    odd = QuantizedTensor.from_storage(name, storage)
    for part, array in cpu.unpack(cpu.pack(odd), odd.format, odd.shape, odd.group_size).items():
        assert_same_bits(array, storage[part])


@pytest.mark.parametrize("name", ["fp4", "q4_k", "nvfp4", "affine8"])
def test_stacks_come_back(name):
    cpu, stack = bf.BACKENDS["cpu"], bf.quantize(gaussian((3, 24, 256)), name)
    tensors, about = cpu.to_tensors(cpu.pack_experts(stack))
    packed = cpu.from_tensors(tensors, about)
    for part, array in cpu.unpack(packed, stack.format, stack.shape, stack.group_size).items():
        assert_same_bits(array, stack.storage[part])


def test_a_stream_without_the_rest_says_so(tmp_path):
    bf.prepack(bf.quantize(gaussian((8, 64)), "fp4")).save(tmp_path / "w.npz")
    loaded = bf.PackedWeights.load(tmp_path / "w.npz")
    with pytest.raises(bf.DataError, match="weights"):
        bf.BACKENDS["cpu"].unpack(loaded, loaded.format, loaded.shape, loaded.group_size)
