"""Kind: the few axes that a kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from billfish.core.errors import FormatError, complaint

COURSE, BRICK = 16, 128  # rows of a course, k of a brick
GROUPS = {128: 1, 64: 2, 32: 4, 16: 8}  # group size -> groups in a brick
ELEMENTS = ("Int4", "Int8", "E2M1", "E4M3", "Table4", "Half")  # Half: plain weights
SCALES = ("ScaleF16", "ScaleF32", "ScaleE5M2", "ScaleE5M3")
OFFSETS = ("NONE", "ZERO", "MINIMUM")


@dataclass(frozen=True)
class Kind:
    """Weights in the words of decode.cuh."""

    element: str  # of ELEMENTS
    scale: str  # of SCALES
    offset: str  # of OFFSETS
    groups: int  # of scales in a brick: 1, 2, 4 or 8
    middle: int = 0  # element = stored number + middle; other than 0 only with an offset
    table: tuple[int, ...] = ()  # of Table4: 16 bytes that mean byte - 128
    one_zero: bool = False  # code 8 of E2M1 is +0, as ggml has it, and not -0
    narrow: bool = False  # powers of two of ScaleE5M2 are close enough to each other for gemm_bytes.cu (describe.py)

    def __post_init__(self) -> None:
        """Raises unless decode.cuh has these words: files name them, and they become source text."""
        words = self.element in ELEMENTS and self.scale in SCALES and self.offset in OFFSETS
        table = len(self.table) in (0, 16) and all(type(byte) is int and 0 <= byte < 256 for byte in self.table)
        if not words or not table or self.groups not in GROUPS.values() or type(self.middle) is not int:
            takes = f"{', '.join(ELEMENTS)} with {', '.join(SCALES)} and {', '.join(OFFSETS)}"
            raise FormatError(complaint("Kind", "kind", repr(self), takes))

    @property
    def words(self) -> int:
        """32-bit words of codes for each lane and 16 x 16 fragment."""
        return {"Int8": 2, "E4M3": 2, "Half": 4}.get(self.element, 1)

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        return np.dtype({"ScaleF16": np.float16, "ScaleF32": np.float32}.get(self.scale, np.uint8))

    @property
    def code_bytes(self) -> int:
        """Of a brick."""
        return 1024 * self.words

    @property
    def group_bytes(self) -> int:
        """Of a brick's scales. Its offsets have the same type and take as many."""
        return COURSE * self.groups * self.scale_dtype.itemsize

    @property
    def brick_bytes(self) -> int:
        return self.code_bytes + self.group_bytes * (1 if self.offset == "NONE" else 2)

    def macros(self) -> dict[str, str]:
        """For the compiler. `one_zero` concerns dequantize.cu alone: products of +0 and -0 are the same; `narrow`
        concerns none."""
        names = {"ELEMENT": self.element, "SCALE": self.scale, "OFFSET": self.offset, "GROUPS": str(self.groups)}
        if self.middle:
            names["MIDDLE"] = f"({self.middle})"
        if self.table:
            words = np.asarray(self.table, np.uint8).view("<u4")
            names["TABLE"] = ",".join(f"{word:#x}u" for word in words)
        return names

    def spelled(self) -> str:
        """All of it as one word, for operators, which take strings and no objects."""
        numbers = f"{self.groups}:{self.middle}:{int(self.one_zero)}:{int(self.narrow)}"
        return f"{self.element}:{self.scale}:{self.offset}:{numbers}:{bytes(self.table).hex()}"


@lru_cache(maxsize=256)
def read_kind(word: str) -> Kind:
    """The kind that `Kind.spelled` spelled."""
    element, scale, offset, groups, middle, one_zero, narrow, table = word.split(":")
    sizes = int(groups), int(middle), tuple(bytes.fromhex(table))
    return Kind(element, scale, offset, *sizes, one_zero == "1", narrow == "1")
