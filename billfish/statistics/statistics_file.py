"""Files of statistics: our own layout, a .safetensors file, and which layout a name or the first bytes tell.

For each input, under the name of the first matrix that multiplies it:
NAME.squares   F64 [K], or [E, K] for E experts: sums of x^2
NAME.counts    I64 [], or [E]: how many x
NAME.outer     F32 [K, K], or [E, K, K]: sums of x x^T, of inputs that have them (--hessian)
NAME.cross     F32 [K, K]: sums of x y^T, of inputs of a model that is quantized layer by layer; see InputStatistics
For each matrix that is quantized as it is calibrated, under its name: the arrays of its format, of a stack with an axis
for its experts. Its inputs have neither X^T X nor X^T Y then.
The header's metadata has `matrices`, JSON: for each matrix its shape and the name that its input is under; `digest`, of
these names and shapes; `architecture`, `window`, `texts` and `run`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from billfish.checkpoints.gguf_header import ALIGNMENT
from billfish.checkpoints.safetensors_files import MappedFile, Stored, open_safetensors
from billfish.checkpoints.write.target import Item, OutputFile, Piece, Spec, safetensors_header, storage_specs
from billfish.core.errors import CheckpointError, DataError, failure
from billfish.core.files import parse_json, path_of, replacing
from billfish.core.storage import Array
from billfish.statistics import imatrix
from billfish.statistics.inputs import CALL, InputStatistics, Recorded

MARKER, VERSION = "billfish.statistics", "1"
PARTS: dict[str, np.dtype[Any]] = {
    "squares": np.dtype(np.float64),
    "counts": np.dtype(np.int64),
    "outer": np.dtype(np.float32),
    "cross": np.dtype(np.float32),
}
SUFFIXES = (".safetensors", ".gguf", ".dat")


class Inputs(NamedTuple):
    """Inputs that are known by the names of the matrices that multiply them."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of their squares: [K], or [E, K]
    outer: bool  # whether there is X^T X
    cross: bool = False  # and products with the float model's inputs


class StatisticsPart(NamedTuple):
    """Statistics that are made together, and matrices that are quantized with them: `make` comes first."""

    label: str
    inputs: tuple[Inputs, ...]
    make: Callable[[], Sequence[InputStatistics]]
    quantized: tuple[Item, ...] = ()


class About(NamedTuple):
    """What a file says beside the sums."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]
    window: int
    texts: tuple[str, ...]
    run: str
    tokens: int


# ---- writing ------------------------------------------------------------------------------------------------------


def output_file(name: str, parts: Sequence[StatisticsPart], about: About) -> OutputFile:
    """The file of these parts, in the layout that its name says: .safetensors or .gguf."""
    every = [inputs for part in parts for inputs in part.inputs]
    if name.endswith(".gguf"):
        header = imatrix.gguf_header(_gguf_specs(every), about.texts, about.tokens // about.window, about.window)
        return OutputFile(name, header, tuple(map(_gguf_piece, parts)), ALIGNMENT)
    matrices = {n: {"shape": about.shapes[n], "input": i.names[0]} for i in every for n in i.names}
    metadata = {
        MARKER: VERSION,
        "architecture": about.architecture,
        "matrices": json.dumps(matrices),
        "digest": model_digest(about.shapes),
        "window": str(about.window),
        "texts": json.dumps(about.texts),
        "run": about.run,
    }
    header = safetensors_header({name: spec for part in parts for name, spec in _specs(part).items()}, metadata)
    return OutputFile(name, header, tuple(map(_piece, parts)))


def _specs(made: StatisticsPart) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for names, shape, outer, cross in made.inputs:
        square = (*shape, shape[-1])
        shapes = {"squares": shape, "counts": shape[:-1], "outer": square, "cross": square}
        absent = {part for part, there in (("outer", outer), ("cross", cross)) if not there}
        specs |= {f"{names[0]}.{p}": (t, shapes[p]) for p, t in PARTS.items() if p not in absent}
    for item in made.quantized:
        specs |= {f"{item.name}.{name}": spec for name, spec in storage_specs(item).items()}
    return specs


def _piece(part: StatisticsPart) -> Piece:
    def make() -> list[Array]:
        sums = [array for known in part.make() for array in (known.squares, known.counts, known.outer, known.cross)]
        return [array for array in sums if array is not None] + [a for i in part.quantized for a in _storage(i)]

    sizes = tuple(int(np.prod(shape)) * dtype.itemsize for dtype, shape in _specs(part).values())
    return Piece(part.label, sizes, make)


def _storage(item: Item) -> list[Array]:
    tensor = item.load()
    assert not isinstance(tensor, np.ndarray)
    return [tensor.storage[name].astype(dtype, copy=False) for name, (dtype, _) in storage_specs(item).items()]


def _gguf_specs(inputs: Iterable[Inputs]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in an imatrix file, which has the sums again for each matrix."""
    shapes: dict[str, tuple[int, ...]] = {}
    for names, shape, _, _ in inputs:
        for name in names:
            shapes |= imatrix.tensor_shapes(name, shape)
    return shapes


def _gguf_piece(part: StatisticsPart) -> Piece:
    def make() -> list[Array]:
        made = zip(part.inputs, part.make(), strict=True)
        return [array for inputs, known in made for name in inputs.names for array in imatrix.tensors_of(name, known)]

    sizes = tuple(4 * int(np.prod(shape)) for shape in _gguf_specs(part.inputs).values())
    return Piece(part.label, sizes, make)


def write_statistics(path: Path, inputs: Mapping[str, InputStatistics], about: About) -> None:
    """See :meth:`billfish.statistics.Statistics.save`."""
    check_suffix(path, any(known.outer is not None for known in inputs.values()))
    if path.suffix == ".dat":
        content: Iterable[bytes] = imatrix.dat_content(inputs, about.texts, about.tokens // about.window, about.window)
    else:
        shared: dict[int, list[str]] = {}
        for name, known in inputs.items():
            shared.setdefault(id(known), []).append(name)
        parts = [_part_of(inputs[names[0]], tuple(names)) for names in shared.values()]
        content = _content(output_file(path.name, parts, about))
    with replacing(path) as out:
        for piece in content:
            out.write(piece)


def check_suffix(path: Path, outer: bool, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raises unless statistics can be written to a file of that name."""
    if path.suffix not in suffixes:
        raise CheckpointError(f"{CALL}: the output {path.name!r} must end in {' or '.join(suffixes)}.")
    if outer and path.suffix != ".safetensors":
        raise CheckpointError(f"{CALL}: {path.name!r} cannot hold X^T X. The output must end in .safetensors.")


def _part_of(known: InputStatistics, names: tuple[str, ...]) -> StatisticsPart:
    inputs = Inputs(names, known.squares.shape, known.outer is not None, known.cross is not None)
    return StatisticsPart(names[0], (inputs,), lambda: [known])


def _content(file: OutputFile) -> Iterable[bytes]:
    yield file.header
    for piece in file.pieces:
        for array in piece.make():
            yield np.ascontiguousarray(array).tobytes()
            yield b"\0" * (file.padded(array.nbytes) - array.nbytes)


# ---- reading ------------------------------------------------------------------------------------------------------


def read_statistics(path: str | os.PathLike[str]) -> Recorded:
    """See :meth:`billfish.statistics.Statistics.load`."""
    target = path_of(CALL, path)
    file = MappedFile(target)
    begin = bytes(file.view(0, min(9, file.size), np.uint8, (min(9, file.size),)))
    if begin.startswith(b"GGUF"):
        return imatrix.read_gguf(target)
    if begin[8:] == b"{":
        return _read_own(target)
    return imatrix.read_dat(file)


def _read_own(path: Path) -> Recorded:
    file, stored, metadata = open_safetensors(path)
    if metadata.get(MARKER) != VERSION:
        problem = f"{path} holds tensors, not statistics"
        raise DataError(failure(CALL, problem, "Expected a file of `billfish calibrate`, or an imatrix file."))
    try:
        matrices = _matrices(metadata["matrices"])
        texts = tuple(str(text) for text in parse_json(metadata["texts"].encode()))
        window = int(metadata["window"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(failure(CALL, f"{path} has a damaged header: {error}")) from None
    shapes = {name: shape for name, (shape, _) in matrices.items()}
    if metadata.get("digest") != model_digest(shapes):
        raise DataError(failure(CALL, f"{path} was changed: its names and shapes do not match its digest"))
    inputs = {owner: _input(path, stored, owner) for owner in {owner for _, owner in matrices.values()}}
    return Recorded(
        {name: inputs[owner] for name, (_, owner) in matrices.items()},
        file,
        window,
        texts,
        metadata.get("architecture", ""),
        {name: shape for name, shape in shapes.items() if len(shape) > 1},
        metadata.get("run", ""),
    )


def _matrices(text: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and the name of the input, for each matrix."""
    content: Any = parse_json(text.encode())
    if not isinstance(content, dict):
        raise ValueError("the list of matrices is missing")
    found = {}
    for name, about in content.items():
        shape = tuple(about["shape"])
        if not all(type(size) is int for size in shape):
            raise ValueError(f"{name} has the shape {shape}")
        found[str(name)] = shape, str(about["input"])
    return found


def model_digest(shapes: Mapping[str, Sequence[int]]) -> str:
    """Of names and shapes of matrices."""
    listed = sorted((name, list(shape)) for name, shape in shapes.items())
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _input(path: Path, stored: dict[str, Stored], owner: str) -> InputStatistics:
    arrays: dict[str, Array] = {}
    for part, dtype in PARTS.items():
        found = stored.get(f"{owner}.{part}")
        if found is None and part in ("outer", "cross"):
            continue
        if found is None or found.dtype != dtype:
            problem = "no array" if found is None else f"an array of {found.kind}"
            raise DataError(failure(CALL, f"{path} has {problem} for {owner}.{part}", f"Expected {dtype.name}."))
        arrays[part] = found.array()
    known = InputStatistics(arrays["squares"], arrays["counts"], arrays.get("outer"), arrays.get("cross"))
    known.check(owner)
    return known
