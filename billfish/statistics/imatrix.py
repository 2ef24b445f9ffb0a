"""llama.cpp's files of mean squares, "imatrix": GGUF, and the older .dat.

GGUF: general.type = "imatrix", imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size; for each matrix, by GGUF's
name, NAME.in_sum2 F32 [E, K] (sums of x^2) and NAME.counts F32 [E, 1]; E is 1 for all that are no experts.
.dat: entries i32; for each a name (length i32, bytes), calls i32, numbers i32, F32 numbers: mean squares times calls;
then, perhaps, chunks i32 and the name of the text. Experts' numbers follow one another, and their count is not told.

The GGUF header is written by hand: a layer's sums are written when they are there, and the library `gguf` would want
all tensors first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from billfish.checkpoints.gguf_header import ARRAY, STRING, UINT32, Fields, header_bytes
from billfish.checkpoints.layouts.gguf import Metadata, open_gguf
from billfish.checkpoints.names.expert_stacks import stacks_in
from billfish.checkpoints.names.gguf_names import gguf_name, is_gguf_name
from billfish.checkpoints.safetensors_files import MappedFile, check_count
from billfish.core.errors import DataError, failure
from billfish.core.storage import Array
from billfish.statistics.inputs import CALL, InputStatistics, Recorded

DEFAULT_WINDOW = 512  # tokens in a chunk, where a file does not say
SUMS, COUNTS = ".in_sum2", ".counts"
TYPE, TEXTS, CHUNKS, CHUNK = "general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


def matrix_names(name: str) -> list[str]:
    """GGUF's names of a matrix: one, or two for a stack of gate and up; raises if it has none."""
    if is_gguf_name(name):
        return [name]
    stacks, expert = stacks_in(name)
    found = [gguf_name(own) for own in (stacks if expert is None and stacks else (name,))]
    known = [own for own in found if own is not None]
    if len(known) != len(found):
        raise DataError(
            failure(
                CALL,
                f"llama.cpp has no name for {name}, so an imatrix file cannot hold it",
                "Save to a .safetensors file.",
            )
        )
    return known


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def tensor_shapes(matrix: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors for a matrix whose squares are [K] or [E, K]."""
    experts = shape[0] if len(shape) > 1 else 1
    shapes: dict[str, tuple[int, ...]] = {}
    for name in matrix_names(matrix):
        shapes |= {f"{name}{SUMS}": (experts, shape[-1]), f"{name}{COUNTS}": (experts, 1)}
    return shapes


def tensors_of(matrix: str, known: InputStatistics) -> list[Array]:
    """The tensors for a matrix, in that order."""
    k = known.squares.shape[-1]
    tensors = [known.squares.reshape(-1, k).astype(np.float32), known.counts.reshape(-1, 1).astype(np.float32)]
    return tensors * len(matrix_names(matrix))


def gguf_header(shapes: Mapping[str, tuple[int, ...]], texts: Sequence[str], chunks: int, chunk: int) -> bytes:
    """All before the data of an imatrix file with these tensors."""
    if max(chunks, chunk) >= 1 << 32:
        raise too_many(max(chunks, chunk))
    named = [text.encode(errors="replace").decode() for text in texts]
    fields: Fields = {
        TYPE: ("imatrix", STRING, None),
        TEXTS: (named, ARRAY, STRING),
        CHUNKS: (chunks, UINT32, None),
        CHUNK: (chunk, UINT32, None),
    }
    return header_bytes(fields, [(name, "F32", shape) for name, shape in shapes.items()])


def read_gguf(path: Path) -> Recorded:
    """What an imatrix file holds."""
    files, entries, fields = open_gguf(path)
    if fields.get(TYPE) != "imatrix":
        problem = f"{path} is not an imatrix file: its {TYPE} is {fields.get(TYPE)!r}"
        raise DataError(failure(CALL, problem, "Make one with `billfish calibrate`."))
    inputs = {}
    for tensor in entries:
        name, found, _ = tensor.rpartition(SUMS)
        if not found:
            continue
        if f"{name}{COUNTS}" not in entries:
            raise DataError(failure(CALL, f"{path} is damaged: {name} has sums without counts"))
        sums, counts = (_numbers(entries[f"{name}{part}"].read(None, None), name) for part in (SUMS, COUNTS))
        experts = counts.size
        if sums.size == 0 or experts == 0 or sums.size % experts:
            raise DataError(failure(CALL, f"{path} is damaged: {name} has {sums.size} sums for {experts} counts"))
        shape = (experts,) if experts > 1 else ()
        if not ((counts >= 0) & (counts < 2.0**63)).all():
            raise DataError(failure(CALL, f"{path} is damaged: {name} has counts that are negative or not finite"))
        with np.errstate(invalid="ignore"):  # a signaling NaN, which `check` refuses
            wide = sums.reshape(*shape, -1).astype(np.float64)
        known = InputStatistics(wide, np.rint(counts).astype(np.int64).reshape(shape))
        known.check(name)
        inputs[name] = known
    if not inputs:
        raise DataError(failure(CALL, f"{path} has no entries"))
    return Recorded(inputs, files[0], _chunk(fields), _texts(fields))


def _numbers(array: object, name: str) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise DataError(failure(CALL, f"the sums or counts of {name} are not F32"))
    return array


def _chunk(fields: Metadata) -> int:
    size = fields.get(CHUNK)
    return size if isinstance(size, int) and size > 0 else DEFAULT_WINDOW


def _texts(fields: Metadata) -> tuple[str, ...]:
    texts = fields.get(TEXTS)
    return tuple(map(str, texts)) if isinstance(texts, list) else ()


# ---- .dat ---------------------------------------------------------------------------------------------------------


def dat_content(
    inputs: Mapping[str, InputStatistics], texts: Sequence[str], chunks: int, window: int
) -> Iterator[bytes]:
    """The pieces of a .dat file, matrices by name. Of experts that saw no token, numbers are the mean of the others':
    the file has no place for their counts."""
    pairs = [(own, known) for name, known in inputs.items() for own in matrix_names(name)]
    if max(chunks, *(-(-int(known.counts.max()) // window) for _, known in pairs)) >= 1 << 31:
        raise too_many(chunks)
    names = sorted(pairs, key=lambda pair: pair[0])
    yield struct.pack("<i", len(names))
    for name, known in names:
        calls = -(-int(known.counts.max()) // window)
        numbers = (known.importance() * np.float32(calls)).ravel()
        text = name.encode()
        yield struct.pack(f"<i{len(text)}sii", len(text), text, calls, numbers.size) + numbers.tobytes()
    text = (texts[-1] if texts else "").encode(errors="replace")
    yield struct.pack(f"<ii{len(text)}s", chunks, len(text), text)


def too_many(count: int) -> DataError:
    """The error for counts too large for llama.cpp's files."""
    return DataError(f"{CALL}: an imatrix file cannot count {count} chunks of text. Save to a .safetensors file.")


def read_dat(file: MappedFile) -> Recorded:
    """What a .dat file holds. Counts are those of its calls: how many tokens a call has, the file does not say."""
    data = memoryview(file.view(0, file.size, np.uint8, (file.size,)).data)
    inputs, at = {}, 0

    def take(size: int) -> memoryview:
        nonlocal at
        if size < 0 or at + size > len(data):
            raise ValueError(f"it is truncated at byte {at} of {len(data)}")
        at += size
        return data[at - size : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    try:
        count = number()
        if count < 1:
            raise ValueError(f"{count} entries")
        check_count(min(count, len(data) // 12), len(data))
        for _ in range(count):
            name = str(take(number()), "utf-8")
            calls, size = number(), number()
            if name in inputs or size < 1:
                raise ValueError(f"{size} numbers for {name!r}" if size < 1 else f"{name!r} occurs twice")
            with np.errstate(invalid="ignore"):  # a signaling NaN, which `check` refuses
                sums = np.frombuffer(take(4 * size), "<f4").astype(np.float64)
            inputs[name] = InputStatistics(sums, np.array(calls, np.int64))
        texts = []
        if at < len(data):
            number()
            texts.append(str(take(number()), "utf-8", "replace"))
    except ValueError as error:  # also of names that are no UTF-8
        problem = f"{file.path} is not an imatrix file, or damaged: {error}"
        fix = "Expected a .safetensors file of `billfish calibrate`, or a .gguf or .dat file of llama.cpp."
        raise DataError(failure(CALL, problem, fix)) from None
    for name, known in inputs.items():
        known.check(name)
    return Recorded(inputs, file, DEFAULT_WINDOW, tuple(texts))
