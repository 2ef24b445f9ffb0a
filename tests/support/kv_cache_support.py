"""What tests of kv_cache share with others."""

from __future__ import annotations

import numpy as np

from billfish.backends.cpu import _cpu
from billfish.llm.cpu import CpuCache


def by_position(cache: CpuCache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [layers, heads, positions, head size] from the order of kernels, as kernel_table.h tells it."""
    keys, values = (
        np.stack([read(i) for i in range(cache.config.layers)]) for read in (cache.state.keys, cache.state.values)
    )
    (layers, heads, blocks, size), block = keys.shape, _cpu.CACHE_BLOCK
    columns, shape = size // block, (layers, heads, blocks * block, size // block)
    keys = keys.reshape(layers, heads, blocks, block // 16, columns, 16).swapaxes(4, 5)
    values = values.reshape(layers, heads, blocks, columns // 16, block, 16).swapaxes(3, 4)
    return keys.reshape(shape), values.reshape(shape)


def int8_by_position(cache: CpuCache, level: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of keys and of values of the first layer, scales [heads, positions] and codes [heads, positions, head size]."""
    block, found = _cpu.CACHE_BLOCK, []
    for stored, keys in ((cache.state.keys(0), True), (cache.state.values(0), False)):
        heads, blocks, size = stored.shape
        columns = size // block - 4
        scales = np.ascontiguousarray(stored[..., : 4 * block]).view(np.float32).reshape(heads, blocks * block)
        codes = stored[..., 4 * block :].astype(np.int64)
        codes = codes - 128 if level in ("amx", "avx512_vnni") else np.where(codes > 127, codes - 256, codes)
        if keys:
            codes = codes.reshape(heads, blocks, block // 16, columns // 4, 16, 4).transpose(0, 1, 2, 4, 3, 5)
        else:
            codes = codes.reshape(heads, blocks, columns // 16, block // 4, 16, 4).transpose(0, 1, 3, 5, 2, 4)
        found.append((scales, codes.reshape(heads, blocks * block, columns)))
    return found
