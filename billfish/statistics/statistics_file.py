"""Files of statistics: our own layout, a .safetensors file, and which layout a name or the first bytes tell.

For each input, under the name of the first matrix that multiplies it:
NAME.squares   F64 [K], or [E, K] for E experts: sums of x^2
NAME.counts    I64 [], or [E]: how many x
NAME.outer     F32 [K, K], or [E, K, K]: sums of x x^T, with --hessian
The header's metadata has `matrices`, JSON: for each matrix its shape and the name that its input is under; `digest`, of
these names and shapes; `architecture`, `window`, `texts` and `run`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from billfish.checkpoints.gguf_header import ALIGNMENT
from billfish.checkpoints.safetensors_files import MappedFile, Stored, open_safetensors, parse_json
from billfish.checkpoints.write.target import OutputFile, Piece, Spec, safetensors_header
from billfish.core.errors import CheckpointError, DataError, complaint
from billfish.core.files import path_of, replacing
from billfish.core.storage import Array
from billfish.statistics import imatrix
from billfish.statistics.inputs import CALL, InputStatistics
from billfish.statistics.statistics import Statistics, model_digest

MARKER, VERSION = "billfish.statistics", "1"
PARTS: dict[str, np.dtype[Any]] = {
    "squares": np.dtype(np.float64),
    "counts": np.dtype(np.int64),
    "outer": np.dtype(np.float32),
}
SUFFIXES = (".safetensors", ".gguf", ".dat")


class Inputs(NamedTuple):
    """Inputs that are known by the names of the matrices that multiply them."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of their squares: [K], or [E, K]


class Part(NamedTuple):
    """Statistics that are made together."""

    label: str
    inputs: tuple[Inputs, ...]
    make: Callable[[], Sequence[InputStatistics]]


class About(NamedTuple):
    """What a file says beside the sums."""

    architecture: str
    shapes: dict[str, tuple[int, ...]]
    window: int
    texts: tuple[str, ...]
    run: str
    tokens: int
    outer: bool


# ---- writing ------------------------------------------------------------------------------------------------------


def output_file(name: str, parts: Sequence[Part], about: About) -> OutputFile:
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
    header = safetensors_header(_specs(every, about.outer), metadata)
    return OutputFile(name, header, tuple(_piece(part, about.outer) for part in parts))


def _specs(inputs: Iterable[Inputs], outer: bool) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for names, shape in inputs:
        shapes = {"squares": shape, "counts": shape[:-1], "outer": (*shape, shape[-1])}
        specs |= {f"{names[0]}.{p}": (t, shapes[p]) for p, t in PARTS.items() if outer or p != "outer"}
    return specs


def _piece(part: Part, outer: bool) -> Piece:
    def make() -> list[Array]:
        arrays = [array for known in part.make() for array in (known.squares, known.counts, known.outer)]
        return [array for array in arrays if array is not None]

    sizes = tuple(int(np.prod(shape)) * dtype.itemsize for dtype, shape in _specs(part.inputs, outer).values())
    return Piece(part.label, sizes, make)


def _gguf_specs(inputs: Iterable[Inputs]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in an imatrix file, which has the sums again for each matrix."""
    shapes: dict[str, tuple[int, ...]] = {}
    for names, shape in inputs:
        for name in names:
            shapes |= imatrix.tensor_shapes(name, shape)
    return shapes


def _gguf_piece(part: Part) -> Piece:
    def make() -> list[Array]:
        made = zip(part.inputs, part.make(), strict=True)
        return [array for inputs, known in made for name in inputs.names for array in imatrix.tensors_of(name, known)]

    sizes = tuple(4 * int(np.prod(shape)) for shape in _gguf_specs(part.inputs).values())
    return Piece(part.label, sizes, make)


def write_statistics(statistics: Statistics, path: Path) -> None:
    """See :meth:`Statistics.save`."""
    check_suffix(path, statistics.has_outer)
    if path.suffix == ".dat":
        content: Iterable[bytes] = imatrix.dat_content(statistics)
    else:
        shared: dict[int, list[str]] = {}
        for name, known in statistics.items():
            shared.setdefault(id(known), []).append(name)
        parts = [_part_of(statistics[names[0]], tuple(names)) for names in shared.values()]
        file = output_file(path.name, parts, about_of(statistics))
        content = _content(file)
    with replacing(path) as out:
        for piece in content:
            out.write(piece)


def check_suffix(path: Path, outer: bool) -> None:
    """Raises unless statistics can be written to a file of that name."""
    if path.suffix not in SUFFIXES:
        raise CheckpointError(complaint(CALL, "output", path.name, f"a name that ends in {', '.join(SUFFIXES)}"))
    if outer and path.suffix != ".safetensors":
        takes = "a name that ends in .safetensors: llama.cpp's files have no place for it"
        raise CheckpointError(complaint(CALL, "output", f"{path.name} for X^T X", takes))


def _part_of(known: InputStatistics, names: tuple[str, ...]) -> Part:
    return Part(names[0], (Inputs(names, known.squares.shape),), lambda: [known])


def about_of(statistics: Statistics) -> About:
    """What the file of these statistics says; of matrices whose N nobody knows, only K."""
    shapes = {name: statistics.shapes.get(name, (known.squares.shape[-1],)) for name, known in statistics.items()}
    return About(
        statistics.architecture,
        shapes,
        statistics.window,
        statistics.texts,
        statistics.run,
        statistics.tokens,
        statistics.has_outer,
    )


def _content(file: OutputFile) -> Iterable[bytes]:
    yield file.header
    for piece in file.pieces:
        for array in piece.make():
            yield np.ascontiguousarray(array).tobytes()
            yield b"\0" * (file.padded(array.nbytes) - array.nbytes)


# ---- reading ------------------------------------------------------------------------------------------------------


def read_statistics(path: str | os.PathLike[str]) -> Statistics:
    """See :meth:`Statistics.load`."""
    target = path_of(CALL, path)
    file = MappedFile(target)
    begin = bytes(file.view(0, min(9, file.size), np.uint8, (min(9, file.size),)))
    if begin.startswith(b"GGUF"):
        return imatrix.read_gguf(target)
    if begin[8:] == b"{":
        return _read_own(target)
    return imatrix.read_dat(file)


def _read_own(path: Path) -> Statistics:
    file, stored, metadata = open_safetensors(path)
    if metadata.get(MARKER) != VERSION:
        got = "a file of tensors, with no statistics in it"
        raise DataError(complaint(CALL, str(path), got, "what `billfish calibrate` writes, or an imatrix file"))
    try:
        matrices = _matrices(metadata["matrices"])
        texts = [str(text) for text in parse_json(metadata["texts"].encode())]
        window = int(metadata["window"])
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise DataError(complaint(CALL, str(path), f"a damaged header ({error})", "a whole file")) from None
    shapes = {name: shape for name, (shape, _) in matrices.items()}
    if metadata.get("digest") != model_digest(shapes):
        got = "names and shapes of matrices that do not belong to its digest"
        raise DataError(complaint(CALL, str(path), got, "a file as it was written"))
    inputs = {owner: _input(path, stored, owner) for owner in {owner for _, owner in matrices.values()}}
    statistics = Statistics(
        {name: inputs[owner] for name, (_, owner) in matrices.items()},
        architecture=metadata.get("architecture", ""),
        shapes={name: shape for name, shape in shapes.items() if len(shape) > 1},
        window=window,
        texts=texts,
        run=metadata.get("run", ""),
    )
    statistics.file = file
    return statistics


def _matrices(text: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and the name of the input, for each matrix."""
    content: Any = parse_json(text.encode())
    return {
        str(name): (tuple(int(size) for size in about["shape"]), str(about["input"])) for name, about in content.items()
    }


def _input(path: Path, stored: dict[str, Stored], owner: str) -> InputStatistics:
    arrays: dict[str, Array] = {}
    for part, dtype in PARTS.items():
        found = stored.get(f"{owner}.{part}")
        if found is None and part == "outer":
            continue
        if found is None or found.dtype != dtype:
            got = "no such array" if found is None else f"an array of {found.kind}"
            raise DataError(complaint(CALL, str(path), f"{got} for {owner}.{part}", f"one of {dtype.name}"))
        arrays[part] = found.array()
    known = InputStatistics(arrays["squares"], arrays["counts"], arrays.get("outer"))
    known.check(owner)
    return known
