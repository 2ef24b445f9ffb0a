"""What bind.cpp offers."""

from typing import Any

from numpy.typing import NDArray

class Description:
    def __init__(
        self, n: int, k: int, codes: int, scales: int, bias: int, group: int, factor: float, table: list[int]
    ) -> None: ...

def levels() -> list[str]: ...
def packed_bytes(level: str, description: Description) -> int: ...
def prepack(
    level: str,
    description: Description,
    codes: NDArray[Any],
    chunk_fields: list[NDArray[Any]],
    group_fields: list[NDArray[Any]],
    out: NDArray[Any],
) -> None: ...
def multiply(
    level: str,
    description: Description,
    stream: NDArray[Any],
    x: NDArray[Any],
    planes: int,
    bias: NDArray[Any] | None,
    y: NDArray[Any],
) -> None: ...
def multiply_codes(
    level: str,
    description: Description,
    stream: NDArray[Any],
    codes: NDArray[Any],
    scale: NDArray[Any],
    y: NDArray[Any],
) -> None: ...
def read_rate(level: str, megabytes: int) -> float: ...
def dot_rate(level: str) -> float: ...
def fma_rate(level: str) -> float: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def dequantize(
    level: str,
    data: NDArray[Any],
    words: bool,
    about: dict[str, Any],
    scale: NDArray[Any] | None,
    minimum: NDArray[Any] | None,
    zero: NDArray[Any] | None,
    out: NDArray[Any],
    kind: int,
) -> None: ...
