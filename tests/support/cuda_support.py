"""Tensors of every kind that the CUDA kernels know, of foreign formats too."""

from __future__ import annotations

import numpy as np
from common import options_of, random_storage
from foreign_formats import FOREIGN

import billfish as bf
from billfish.backends.cuda.axes import Kind, describe, why_not
from billfish.core.format import FORMATS

OTHERS = {format.name: format() for format in FOREIGN}
# All but those whose elements the kernels do not have.
TAKEN = {n: f for n, f in (FORMATS | OTHERS).items() if not why_not(f, f.default_group_size, 256)}


def storages() -> list:
    """Every format, group size and option, with all bytes random and with sane ones."""
    found = []
    for name, format in TAKEN.items():
        sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
        found += [(name, size, option, wild) for size in sizes for option in options_of(format) for wild in (0, 1)]
    return found


def make(name: str, size: int, option: dict[str, str], wild: int) -> bf.QuantizedTensor:
    format = TAKEN[name]
    n, k = 37, 256 + format.block_size
    rng = np.random.default_rng(0)
    if not wild:
        return bf.quantize(
            rng.standard_normal((n, k)).astype(np.float32), format, group_size=size, method="rtn", **option
        )
    storage = random_storage(format, n, k, rng, k if size == -1 else size)
    if option.get("zero_point") == "fractional":
        storage["zeros"] = rng.standard_normal(storage["zeros"].shape).astype(np.float16)
    return bf.QuantizedTensor.from_storage(format, storage, size)


def all_kinds(wild: bool = False) -> list[Kind]:
    """Of sane tensors in our own formats, or of all: scales of random bytes may be kept in other ways."""
    taken = [storage for storage in storages() if wild or not (storage[3] or storage[0] in OTHERS)]
    return sorted({describe(make(*storage)).kind for storage in taken}, key=repr)
