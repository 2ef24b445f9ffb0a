"""What is to be written, and what a target must know: which formats it holds, and how its arrays are called."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Tensor
from billfish.checkpoints.safetensors_files import KINDS
from billfish.core.format import Format, Planes
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

SHARD_BYTES = 5_000_000_000
QUANTIZING = 100  # bytes that could be copied while a weight is quantized, roughly: the fastest method takes as long

Spec = tuple[np.dtype[Any], tuple[int, ...]]
ExpertNames = Literal["as they are", "one by one", "mlx stacks", "transformers stacks"]
# Embeddings, the LM head, norms, convolutions and routers: usually not quantized.
SENSITIVE = (
    r"(^|\.)(lm_head|output|\w*embe?d\w*|wte|wpe|token_types|\w*norm\w*"
    r"|router|router\.layer|router\.proj|gate|shared_expert_gate|ffn_gate_inp|ffn_gate_inp_shexp"
    r"|ssm_conv1d|shortconv\.conv)(\.weight)?$"
)


def is_sensitive(name: str) -> bool:
    """Whether a tensor is one of those that are usually not quantized."""
    return re.search(SENSITIVE, name) is not None  # compiled here: those who only read need not wait for it


class Item(NamedTuple):
    """One tensor of the output. Nothing is read before `load` is called."""

    name: str
    format: Format | None  # None: a plain array
    shape: tuple[int, ...]
    group_size: int  # 0 for plain arrays
    dtypes: Mapping[str, np.dtype[Any]]  # of the storage arrays; of a plain array, under ""
    act_order: bool
    load: Callable[[], Tensor]
    order: Callable[[], NDArray[np.int64] | None]
    quantizes: bool = False  # whether `load` rounds weights, which takes longer than all else

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """As that of a Description."""
        if self.format is None:
            return KINDS[self.dtypes[""]].lower()
        return f"{self.format.name}, act-order" if self.act_order else self.format.name

    @property
    def experts(self) -> tuple[int, ...]:
        """(E,) of a stack [E, N, K] of matrices, () of one matrix."""
        return self.shape[:-2]

    @property
    def n(self) -> int:
        return self.shape[-2]

    @property
    def k(self) -> int:
        return self.shape[-1]

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def bits(self) -> int:
        assert self.format is not None
        return self.format.element.bits


@dataclass(frozen=True)
class Piece:
    """Arrays that are made together and written one after the other."""

    label: str
    sizes: tuple[int, ...]  # bytes of each, without padding
    make: Callable[[], Sequence[Array]]
    work: int = 0  # how long it takes, where that is longer than copying it; in bytes that could be copied


@dataclass(frozen=True)
class OutputFile:
    """A header, and the pieces behind it."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    alignment: int = 1  # arrays are padded with zeros to a multiple of this

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def length(self, piece: Piece) -> int:
        """Bytes of a piece in the file."""
        return sum(map(self.padded, piece.sizes))

    def work(self, piece: Piece) -> int:
        """How long a piece takes, in bytes that could be copied meanwhile."""
        return max(piece.work, self.length(piece))

    def ends(self) -> list[int]:
        """Where the header ends, and where each piece does."""
        return list(accumulate(map(self.length, self.pieces), initial=len(self.header)))


class Misplaced(NamedTuple):
    """Why an item cannot be beside the others, and what it would have to be."""

    reason: str
    format: Format
    group_size: int


def storage_specs(item: Item) -> dict[str, Spec]:
    """Types and shapes of the storage arrays of a quantized item; of a stack, with an axis for its experts."""
    assert item.format is not None
    specs = item.format.storage_spec(item.n, item.k, item.group_size)
    return {name: (item.dtypes[name], (*item.experts, *spec.shape)) for name, spec in specs.items()}


def stored_types(format: Format, k: int, planes: Planes) -> dict[str, np.dtype[Any]]:
    """The types of the storage arrays for these planes (all but the codes), from packing the first row."""
    row = {name: plane if plane.ndim == 0 else plane[:1] for name, plane in planes.items()}
    packed = format.pack({"codes": np.zeros((1, k), np.uint8), **row})
    return {name: array.dtype for name, array in packed.items()}


class Target(ABC):
    """A kind of checkpoint that can be written."""

    name: str
    formats: tuple[str, ...]  # those it holds, in the order in which they are tried
    quantizes: tuple[str, ...] = ()  # those that weights can be quantized to, if not all
    takes_dtype: bool = False  # whether a type can be asked for, in which matrices are written as numbers
    casts_vectors: bool = True  # to that type, where it loses nothing
    suffixes: tuple[str, ...] = ("",)  # of what it is written to: "" is a folder, others are of one file
    expert_names: ExpertNames = "as they are"  # how it has the experts of a layer: see `export`

    def own(self, format: Format) -> Format:
        """The format that the target means by a format's name."""
        return format

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        """Raises Misfit if a tensor in one of the formats has something else that the target cannot hold.

        `planes` are all but the codes.
        """
        return

    def check_plain(self, dtype: np.dtype[Any]) -> None:
        """Raises Misfit if the target has no such type."""
        return

    def preferred(self, format: Format, planes: Planes, config: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
        """Storage arrays to be written in another type than the planes', where that loses nothing."""
        return {}

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        """Whether a matrix is written as numbers and never quantized; `dtype` is the type that was asked for."""
        return False

    def adapt(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Weights that were quantized for this target, moved to what it can store."""
        return tensor

    def odd_ones(self, items: Sequence[Item]) -> Mapping[str, Misplaced]:
        """Items that cannot be in one checkpoint with the others, by name."""
        return {}

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        """What config.json says of the weights."""
        return {}

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        """What the header of each safetensors file says of the weights."""
        return {"format": "pt"}

    def further_files(self, items: Sequence[Item]) -> dict[str, bytes]:
        """Small files of the folder beside config.json."""
        return {}

    @abstractmethod
    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        """The format and group size for weights that do not fit and may be quantized again."""

    @abstractmethod
    def specs(self, item: Item) -> dict[str, Spec]:
        """Arrays of a quantized item: name, type, shape."""

    @abstractmethod
    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        """The same, made of the storage of a matrix or a stack. Types may differ from the specs where a cast loses
        nothing."""

    # ---- the same for all --------------------------------------------------------------------------------------

    def all_specs(self, item: Item) -> dict[str, Spec]:
        return {item.name: (item.dtypes[""], item.shape)} if item.format is None else self.specs(item)

    def make(self, item: Item) -> list[Array]:
        """The arrays of an item in the order and the types of its specs."""
        loaded, specs = item.load(), self.all_specs(item)
        arrays = {item.name: loaded} if isinstance(loaded, np.ndarray) else self.arrays(item, loaded.storage)
        return [arrays[name].astype(dtype, copy=False).reshape(shape) for name, (dtype, shape) in specs.items()]

    def piece(self, item: Item, release: Callable[[], None]) -> Piece:
        def make() -> list[Array]:
            release()  # of what the pieces before have read
            return self.make(item)

        sizes = (math.prod(shape) * dtype.itemsize for dtype, shape in self.all_specs(item).values())
        return Piece(item.name, tuple(sizes), make, QUANTIZING * math.prod(item.shape) if item.quantizes else 0)


def safetensors_files(
    target: Target, items: Iterable[Item], metadata: Mapping[str, str], release: Callable[[], None]
) -> tuple[list[OutputFile], dict[str, bytes]]:
    """Files of at most SHARD_BYTES (or one tensor), and the index if there are several."""
    shards: list[list[Item]] = [[]]
    size, total = 0, 0
    for item in items:
        nbytes = sum(target.piece(item, release).sizes)
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size, total = size + nbytes, total + nbytes
    files, weight_map = [], dict[str, str]()
    for i, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        files.append(safetensors_file(target, name, shard, metadata, release))
        weight_map |= {key: name for item in shard for key in target.all_specs(item)}
    if len(shards) == 1:
        return files, {}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return files, {"model.safetensors.index.json": json_bytes(index)}


def safetensors_file(
    target: Target, name: str, items: Iterable[Item], metadata: Mapping[str, str], release: Callable[[], None]
) -> OutputFile:
    """One file of these items."""
    shard = list(items)
    specs = {key: spec for item in shard for key, spec in target.all_specs(item).items()}
    pieces = tuple(target.piece(item, release) for item in shard)
    return OutputFile(name, safetensors_header(specs, metadata), pieces)


def safetensors_header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded so that the data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in specs.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def model_type(config: Mapping[str, Any]) -> str:
    """The type that a model computes in, such as "bfloat16", as its configuration says."""
    return str(config.get("torch_dtype", config.get("dtype", "")))


def json_bytes(value: Any) -> bytes:
    # A lone surrogate, which JSON can hold and UTF-8 cannot, is written as JSON writes it: \ud800.
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
