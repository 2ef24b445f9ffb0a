"""safetensors files and folders of them, memory-mapped. The header is the `safetensors` library's to check.

That library tells names, types and shapes, and that the tensors fill the rest of the file without gaps, in the order
that `offset_keys` gives. From this follows where each one begins, so its bytes are views of the mapped file.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from billfish.core.errors import CheckpointError, failure
from billfish.core.extras import require
from billfish.core.files import is_affordable, open_regular, read_json
from billfish.core.storage import Array
from billfish.models.fields import section

CALL = "load"
MAX_ELEMENTS = 1 << 58  # of an array, where extents of 0 count as 1: NumPy has none of 2^63 bytes
TENSOR_COST = 1000  # bytes of memory for all that is known about one tensor

# safetensors' names of types: bits, and the NumPy type where there is one.
TYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (8, np.bool_),
    "U8": (8, np.uint8),
    "I8": (8, np.int8),
    "U16": (16, np.uint16),
    "I16": (16, np.int16),
    "U32": (32, np.uint32),
    "I32": (32, np.int32),
    "U64": (64, np.uint64),
    "I64": (64, np.int64),
    "F16": (16, np.float16),
    "BF16": (16, ml_dtypes.bfloat16),
    "F32": (32, np.float32),
    "F64": (64, np.float64),
    "C64": (64, np.complex64),
    "F8_E4M3": (8, ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": (8, ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": (8, ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": (8, ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": (8, ml_dtypes.float8_e8m0fnu),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}
KINDS = {np.dtype(dtype): kind for kind, (_, dtype) in reversed(TYPES.items()) if dtype is not None}


def check_count(tensors: int, size: int) -> None:
    """Raise ValueError if a file of `size` bytes lists too many tensors for its size."""
    if not is_affordable(tensors * TENSOR_COST, size):
        raise ValueError(f"{tensors} tensors in {size} bytes are too many")


def damaged(path: Path, problem: str, fix: str = "") -> CheckpointError:
    """The error for a file that cannot be read: "load: PATH has a damaged header." """
    return CheckpointError(failure(CALL, f"{path} {problem}", fix))


class MappedFile:
    """A file mapped to memory, read-only. Pages come in when they are touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise damaged(path, f"cannot be mapped into memory: {error}") from None
        self.size = len(self._map)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def view(self, offset: int, nbytes: int, dtype: Any, shape: tuple[int, ...]) -> Array:
        """An array whose bytes begin at `offset`; a copy only where the file has it at an odd address."""
        array = self._bytes[offset : offset + nbytes].view(dtype).reshape(shape)
        if not array.flags.aligned:
            array = array.copy()
            array.setflags(write=False)
        return array

    def release(self) -> None:
        """Let go of the pages read so far; they come in again when touched. Views stay valid."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Stored:
    """One array in a file."""

    name: str
    file: MappedFile
    kind: str  # as the container calls its type: "BF16"
    dtype: np.dtype[Any] | None  # None: NumPy has no such type
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def array(self) -> Array:
        """A read-only view of the file."""
        if self.dtype is None:
            raise damaged(self.file.path, f"holds {self.name} of type {self.kind}, which NumPy does not have")
        return self.file.view(self.offset, self.nbytes, self.dtype, self.shape)

    def rows_of_bytes(self, rows: int) -> Array:
        """The same as uint8 [rows, ...]: a view even where the file has it at an odd address, as MLX's often have."""
        return self.file.view(self.offset, self.nbytes, np.uint8, (rows, self.nbytes // max(1, rows)))


def open_safetensors(path: Path) -> tuple[MappedFile, dict[str, Stored], dict[str, str]]:
    """The file, its arrays by name, and its metadata."""
    safetensors = require("safetensors", "checkpoints")
    file = MappedFile(path)
    stored: dict[str, Stored] = {}
    try:
        # Metadata and names may hold what is no UTF-8, which the library reports as one of several errors.
        with safetensors.safe_open(path, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
            offset = 8 + int(file.view(0, 8, "<u8", ())[()])
            names = opened.offset_keys()
            check_count(len(names), file.size)
            for name in names:
                about = opened.get_slice(name)
                kind, shape = about.get_dtype(), tuple(about.get_shape())
                if kind not in TYPES:
                    raise damaged(path, f"holds {name} of type {kind}", f"Supported are {', '.join(TYPES)}.")
                if math.prod(extent or 1 for extent in shape) >= MAX_ELEMENTS:
                    raise damaged(path, f"holds {name} of the impossible shape {shape}")
                bits, dtype = TYPES[kind]
                nbytes = math.prod(shape) * bits // 8
                stored[name] = Stored(name, file, kind, dtype and np.dtype(dtype), shape, offset, nbytes)
                offset += nbytes
    except (safetensors.SafetensorError, OSError, ValueError, OverflowError) as error:
        raise damaged(path, f"has a damaged safetensors header: {error}") from None
    if offset != file.size:
        raise damaged(path, f"is damaged: its tensors end at byte {offset} of {file.size}")
    return file, stored, metadata


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with what older tools wrote into files of their own merged in."""
    config = read_json(folder / "config.json")
    if "quantization_config" not in config:
        gptq, modelopt = read_json(folder / "quantize_config.json"), read_json(folder / "hf_quant_config.json")
        if gptq:
            config["quantization_config"] = {"quant_method": "gptq", **gptq}
        elif modelopt:
            config["quantization_config"] = {"quant_method": "modelopt", **section(modelopt, "quantization")}
    return config


def shards(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder, each with the names that the index wants from it (None: all of them)."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if not indexes:
        return dict.fromkeys(sorted(folder.glob("*.safetensors")))
    if len(indexes) > 1:
        raise damaged(folder, f"holds {len(indexes)} indexes: {', '.join(i.name for i in indexes)}", "Keep one.")
    index = indexes[0]
    wanted: dict[Path, set[str] | None] = {}
    for name, shard in section(read_json(index), "weight_map").items():
        # Only names of files in this very folder: an index must not reach for other files of the reader.
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or "\\" in shard
            or not shard.endswith(".safetensors")
        ):
            raise damaged(index, f"lists {shard!r} for {name}", "Expected a .safetensors file in the same folder.")
        names = wanted.setdefault(folder / shard, set())
        assert names is not None
        names.add(name)
    for path in wanted:
        if not path.is_file():
            raise damaged(index, f"lists {path.name}, which is missing", "Download it, or copy it into the folder.")
    if not wanted:
        raise damaged(index, "lists no tensors")
    return wanted


def open_shards(files: Mapping[Path, set[str] | None]) -> tuple[list[MappedFile], dict[str, Stored], dict[str, str]]:
    """All arrays of several files, by name."""
    mapped, stored, metadata = [], dict[str, Stored](), dict[str, str]()
    for path, wanted in files.items():
        file, here, about = open_safetensors(path)
        missing = (wanted or set()) - here.keys()
        if missing:
            raise damaged(path, f"does not hold {min(missing)}, which the index lists")
        for name in here if wanted is None else sorted(wanted):
            if name in stored:
                raise damaged(path, f"holds {name}, which another file of the checkpoint also holds")
            stored[name] = here[name]
        mapped.append(file)
        metadata.update(about)
    return mapped, stored, metadata
