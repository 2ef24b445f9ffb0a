"""Which format the arrays of a layer are in, as one more array among them, `about`: so that a state dict can say it.

It is JSON in bytes, `{"format": "fp4", "group_size": 128}`, filled up with spaces. Layers of equal shape then have an
`about` of equal shape, and whoever compares shapes first, as MLX does, leaves the comparison of formats to us.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import FormatError, bad_argument, failure

ABOUT = "about"  # the array's name, beside `packed`, `scales`, ...
UNIT = 64  # its length is a multiple of this,
LIMIT = 1024  # and no format has so long a name that it would exceed this


class About(NamedTuple):
    """What a layer's arrays are."""

    format: str
    group_size: int

    def array(self) -> NDArray[np.uint8]:
        """It in bytes: uint8 [64], or a multiple of that for formats with long names."""
        text = json.dumps(self._asdict()).encode()
        return np.frombuffer(text.ljust(-(-len(text) // UNIT) * UNIT), np.uint8)

    @classmethod
    def read(cls, call: str, array: NDArray[Any]) -> About:
        """What the bytes say; raises if they say nothing."""
        try:
            said = json.loads(array.reshape(-1)[:LIMIT].astype(np.uint8, casting="no").tobytes())
            format, group_size = said["format"], said["group_size"]
            if isinstance(format, str) and type(group_size) is int:
                return cls(format, group_size)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        expected = f"JSON in uint8, such as {json.dumps(cls('fp4', 128)._asdict())}"
        raise FormatError(bad_argument(call, ABOUT, f"a {array.dtype} array of shape {array.shape}", expected))

    def check(self, call: str, array: NDArray[Any]) -> None:
        """Raises unless the bytes say the same."""
        said = About.read(call, array)
        if said != self:
            raise FormatError(failure(call, f"{ABOUT}: the weights are {said}, and the layer is {self}"))

    def __str__(self) -> str:
        return f"{self.format}, group_size={self.group_size}"
