"""QuantizedTensor: a matrix in some format, held as the bytes that checkpoints store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from billfish.errors import BillfishError, DataError, complaint
from billfish.format import Format, Planes, Storage, check_array, get_format


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """W [N, K], quantized. Make one with :func:`billfish.quantize` or :meth:`from_storage`.

    It holds the storage arrays as they are (they may be views of a memory-mapped file); planes, which take a byte
    for each code, are computed when asked for.
    """

    format: Format
    shape: tuple[int, int]
    group_size: int
    storage: Storage
    _prepacked: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_storage(
        cls, format: str | Format, storage: Storage, group_size: int | None = None, *, call: str = "from_storage"
    ) -> QuantizedTensor:
        """Wrap arrays in a format's own layout; nothing is copied or re-quantized.

        `group_size` matters where the format leaves a choice; -1 means one group for all of K.
        """
        format = get_format(format, call)
        n, k, group_size = format.check_storage(call, storage, group_size)
        return cls(format, (n, k), group_size, dict(storage))

    @classmethod
    def from_planes(cls, format: str | Format, planes: Planes, group_size: int | None = None) -> QuantizedTensor:
        """Pack planes. What the format cannot hold, such as a code too large, is an error: all must come back."""
        call = "from_planes"
        format = get_format(format, call)
        codes = check_array(call, "codes", planes.get("codes"), np.uint8, 2)
        format.check_k(call, codes.shape[1])
        try:
            tensor = cls.from_storage(format, format.pack(planes), group_size, call=call)
        except (KeyError, ValueError) as error:
            if isinstance(error, BillfishError):
                raise
            got = f"planes {sorted(planes)} that do not fit together ({error})"
            raise DataError(complaint(call, "planes", got, f"those of {format.name}")) from None
        held = tensor.planes
        for name, plane in planes.items():
            other = held.get(name)
            if other is None or other.dtype != plane.dtype or other.tobytes() != plane.tobytes():
                takes = "no such plane" if other is None else f"{other.dtype} values that {format.name} can store"
                raise DataError(complaint(call, name, f"{plane.dtype} values up to {plane.max()}", takes))
        return tensor

    @property
    def planes(self) -> Planes:
        """Codes uint8 [N, K], scales and offsets [N, groups], unpacked anew at each call."""
        return self.format.unpack(self.storage)

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(array.nbytes for array in self.storage.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each weight."""
        return 8 * self.nbytes / max(1, self.shape[0] * self.shape[1])

    def prepacked_for(self, backend: str, prepack: Callable[[QuantizedTensor], Any]) -> Any:
        """The weights as a backend wants them, made at the first call and kept."""
        if backend not in self._prepacked:
            self._prepacked[backend] = prepack(self)
        return self._prepacked[backend]

    def __repr__(self) -> str:
        n, k = self.shape
        return f"QuantizedTensor({self.format.name}, [{n}, {k}], group_size={self.group_size}, {self.nbytes} bytes)"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("a QuantizedTensor is not an array; billfish.dequantize(tensor, dtype=...) makes one")
