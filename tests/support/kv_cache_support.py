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
