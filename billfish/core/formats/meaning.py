"""What the numbers of a group mean to the kernels, told by the very method that says so and never by a name.

A subclass that leaves `group_values` alone means what its base means, whatever it is called; one that overrides it is
none of these, and a backend takes the float32 that `group_values` gives.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from billfish.core.format import Format
from billfish.core.formats.affine import AffineFormat, ZeroPointFormat
from billfish.core.formats.fp4 import Mxfp4, Nvfp4
from billfish.core.formats.fp8 import FloatScaled
from billfish.core.formats.ggml import MinimumBlock, Mxfp4Gguf, Nvfp4Gguf, ScaledBlock
from billfish.core.formats.kquants import TwoLevelMinimum, TwoLevelScaled
from billfish.core.formats.word_packing import ScaledWordFormat

# Planes "scale" and perhaps "zero" or "minimum" are the numbers themselves.
PLAIN = (
    ScaledWordFormat.group_values,
    ZeroPointFormat.group_values,
    AffineFormat.group_values,
    ScaledBlock.group_values,
    MinimumBlock.group_values,
    FloatScaled.group_values,
)
# Small integers of a group times the float16 of a block.
TWO_LEVELS = (TwoLevelMinimum.group_values, TwoLevelScaled.group_values)
# One byte, and what each byte means. ggml's scales are half of the standards', as its elements are doubled.
E8M0 = (Mxfp4.group_values, Mxfp4Gguf.group_values)
E4M3 = (Nvfp4.group_values, Nvfp4Gguf.group_values)
HALVED = (Mxfp4Gguf.group_values, Nvfp4Gguf.group_values)
WITH_MINIMUM = (MinimumBlock.group_values, TwoLevelMinimum.group_values)


def meaning(format: Format) -> object:
    """The method that decodes the format's scales, to look up in the tuples above."""
    return type(format).group_values


def decodes_plainly(format: Format) -> bool:
    """Whether value = (element[code] - zero) * scale + minimum, which is all that kernels compute."""
    return type(format).decode is Format.decode


@cache
def offsets_of(format: Format) -> tuple[bool, bool]:
    """Whether groups have a zero point, and whether they have a minimum: seen in a row of zero bytes."""
    specs = format.storage_spec(1, format.block_size, format.default_group_size)
    planes = format.unpack_scales({name: spec.zeros() for name, spec in specs.items()})
    with np.errstate(all="ignore"):
        _, zero, minimum = format.group_values(planes)
    return zero is not None, minimum is not None
