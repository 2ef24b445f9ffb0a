"""What bind.cpp offers."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

class KnownFloats:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Description:
    def __init__(
        self, n: int, k: int, codes: int, scales: int, bias: int, group: int, factor: float, table: list[int]
    ) -> None: ...

# Weights, their stream, the bias, and the order of their columns.
PackedMatrix = tuple[Description, NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]

class SequenceState:
    def __init__(self, shapes: list[tuple[int, int, int, int]], type: int, capacity: int) -> None: ...  # type: of CacheType
    def reserve(self, start: int, count: int, capacity: int, message_ends: list[int], drafted: int = 0) -> None: ...
    adapter: int
    def copy(self, other: SequenceState, length: int) -> None: ...
    def restorable(self, length: int) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def checkpoints(self) -> int: ...
    def keys(self, layer: int) -> NDArray[Any]: ...
    def values(self, layer: int) -> NDArray[Any]: ...

class Decoder:
    def __init__(
        self, level: str, hidden: int, epsilon: float, logit_cap: float, ropes: list[dict[str, Any]]
    ) -> None: ...
    def add_block(self, block: dict[str, Any]) -> None: ...
    def set_per_layer_embedding(self, about: dict[str, Any]) -> None: ...
    def add_layer_inputs(self, x: NDArray[Any], rows: NDArray[Any], digits: int) -> None: ...
    def set_embedding(self, blocks: NDArray[Any], about: dict[str, Any]) -> None: ...
    def embed(self, tokens: list[int], out: NDArray[Any]) -> None: ...
    def add_adapter(self, parts: list[tuple[int, int, NDArray[Any], NDArray[Any], float]]) -> int: ...
    def set_head(self, last: dict[str, Any], matrix: PackedMatrix | None) -> None: ...
    def run(
        self,
        x: NDArray[Any],
        passages: list[tuple[SequenceState, int, int]],
        digits: int,
        layer_inputs: NDArray[Any] | None,
    ) -> None: ...
    def run_layers(
        self,
        x: NDArray[Any],
        passages: list[tuple[SequenceState, int, int]],
        digits: int,
        layer_inputs: NDArray[Any] | None,
        first: int,
        last: int,
        observe: Callable[[int, int, int, NDArray[Any]], object] | None,
    ) -> None: ...
    def normalize(self, x: NDArray[Any], out: NDArray[Any]) -> None: ...
    def finish(self, x: NDArray[Any], digits: int, out: NDArray[Any]) -> None: ...
    def seconds(self) -> dict[str, float]: ...

Field = tuple[NDArray[Any], int, int, int]

BEST_OF_16: int
CACHE_BLOCK: int
DELTA_CHUNK: int
FEW_ROWS: int

def levels() -> list[str]: ...
def packed_bytes(level: str, description: Description) -> int: ...
def prepack(
    level: str,
    description: Description,
    bytes: NDArray[Any],
    words: bool,
    about: dict[str, Any],
    chunk_fields: list[NDArray[Any]],
    group_fields: list[NDArray[Any]],
    out: NDArray[Any],
) -> None: ...
def prepack_blocks(
    level: str, matrices: list[tuple[Description, NDArray[Any], dict[str, Any], NDArray[Any]]]
) -> list[bool]: ...
def prepack_plain(level: str, description: Description, numbers: NDArray[Any], out: NDArray[Any]) -> None: ...
def unpack(
    level: str,
    description: Description,
    stream: NDArray[Any],
    flip: int,
    codes: NDArray[Any],
    chunk_fields: list[NDArray[Any]],
    group_fields: list[NDArray[Any]],
) -> None: ...

# The arguments of multiply.
ProductArrays = tuple[str, Description, NDArray[Any], NDArray[Any], int, NDArray[Any] | None, NDArray[Any]]

def multiply(
    level: str,
    description: Description,
    stream: NDArray[Any],
    x: NDArray[Any],
    digits: int,
    bias: NDArray[Any] | None,
    y: NDArray[Any],
) -> None: ...
def multiply_all(products: list[ProductArrays]) -> None: ...
def multiply_codes(
    level: str,
    description: Description,
    stream: NDArray[Any],
    codes: NDArray[Any],
    scale: NDArray[Any],
    y: NDArray[Any],
) -> None: ...

# One expert, the stream of all, how many there are, their factors and their biases.
ExpertArrays = tuple[Description, NDArray[Any], int, NDArray[Any] | None, NDArray[Any] | None]

def multiply_experts(
    level: str, stack: ExpertArrays, x: NDArray[Any], ids: NDArray[Any], digits: int, y: NDArray[Any]
) -> None: ...
def run_experts(
    level: str,
    x: NDArray[Any],
    ids: NDArray[Any],
    routing: NDArray[Any],
    gate: ExpertArrays,
    up: ExpertArrays | None,
    down: ExpertArrays,
    activation: int,
    digits: int,
    y: NDArray[Any],
) -> None: ...
def add_outer(level: str, x: NDArray[Any], sums: NDArray[Any]) -> None: ...

class SearchElement:
    def __init__(
        self,
        kind: int,
        bits: int,
        bias: float,
        values: list[float],
        first_cell: float,
        per_unit: float,
        code_of_cell: list[int],
        of_cell: list[float],
    ) -> None: ...

# Kind, numbers of the upper level, least and greatest integer, factor.
SearchRule = tuple[int, NDArray[Any] | None, float, float, float]

def search_scales(
    level: str,
    element: SearchElement,
    w: NDArray[Any],
    importance: NDArray[Any] | None,
    scale: NDArray[Any],
    minimum: NDArray[Any] | None,
    scale_rule: SearchRule,
    minimum_rule: SearchRule,
    thorough: bool,
    factors: list[float],
    further: list[float],
    found: NDArray[Any],
) -> None: ...
def encode(
    level: str,
    element: SearchElement,
    ties: int,
    w: NDArray[Any],
    scale: NDArray[Any],
    minimum: NDArray[Any] | None,
    zero: NDArray[Any] | None,
    codes: NDArray[Any],
) -> None: ...
def error_of_codes(
    level: str,
    values: NDArray[Any],
    group_size: int,
    w: NDArray[Any],
    importance: NDArray[Any] | None,
    codes: NDArray[Any],
    scale: NDArray[Any] | None,
    zero: NDArray[Any] | None,
    minimum: NDArray[Any] | None,
    error: NDArray[Any],
) -> None: ...
def extremes(level: str, w: NDArray[Any], least: NDArray[Any], greatest: NDArray[Any]) -> None: ...
def signed_extreme(level: str, w: NDArray[Any], largest: NDArray[Any]) -> None: ...
def dot(level: str, a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None: ...
def kept_bytes() -> int: ...
def string_ends(data: NDArray[Any], ends: NDArray[Any]) -> int: ...
def strings(data: NDArray[Any], ends: NDArray[Any]) -> list[str]: ...
def sip_hash(text: str, first: int, second: int) -> int: ...

class BytePairs:
    def __init__(self, pieces: Sequence[str | None], merges: list[str], ignore_merges: bool) -> None: ...
    def merges(self) -> list[tuple[str, str]]: ...
    def token(self, piece: str) -> int: ...
    def encode(self, word: str) -> list[int]: ...

def read_rate(level: str, megabytes: int) -> float: ...
def dot_rate(level: str) -> float: ...
def fma_rate(level: str) -> float: ...
def quota_cores(root: str) -> int: ...
def physical_cores(processors: list[int], root: str) -> int: ...
def available_cores(root: str) -> int: ...
def default_threads() -> int: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def parallel_for(count: int, body: Callable[[int, int], object], least: int = 1) -> None: ...
def share_threads_of(library: str) -> bool: ...
def dequantize(
    level: str,
    data: NDArray[Any],
    words: bool,
    about: dict[str, Any],
    scale: Field | None,
    minimum: Field | None,
    zero: Field | None,
    byte_values: NDArray[Any] | None,
    scaled_tables: NDArray[Any] | None,
    numbers: NDArray[Any] | None,
    out: NDArray[Any],
    kind: int,
) -> None: ...
