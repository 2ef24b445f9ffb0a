"""Writing large files so that being killed costs nothing: what is there is kept, and the end result is the same bytes.

Everything goes to a folder beside the output, `OUT.partial`. When all of it is there, that folder's `output`, or the
one file in it, is renamed to OUT. A file is its header and then its pieces in order, and nothing is ever written but at
the end, so the length of an unfinished file says which pieces are whole. They are kept if `plan.json` in the folder
tells the same plan as ours: the same input files, untouched since, the same settings, the same headers to the byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from billfish.errors import CheckpointError, complaint
from billfish.storage import Array

Made = Sequence[Array]


@dataclass(frozen=True)
class Piece:
    """Arrays that are made together and written one after the other."""

    label: str
    sizes: tuple[int, ...]  # bytes of each, without padding
    make: Callable[[], Made]


@dataclass(frozen=True)
class OutputFile:
    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    alignment: int = 1  # arrays are padded with zeros to a multiple of this

    def padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def ends(self) -> list[int]:
        """Where the header ends, and where each piece does."""
        at = [len(self.header)]
        for piece in self.pieces:
            at.append(at[-1] + sum(map(self.padded, piece.sizes)))
        return at


@dataclass(frozen=True)
class Output:
    """A checkpoint to be written: a folder, or one file of its own."""

    files: Sequence[OutputFile]
    small: Mapping[str, bytes]  # further files of the folder
    folder: bool
    settings: Mapping[str, Any]  # what the content depends on, beside headers; JSON

    def plan(self) -> str:
        headers = [[f.name, hashlib.sha256(f.header).hexdigest(), f.ends()[-1]] for f in self.files]
        small = {name: hashlib.sha256(content).hexdigest() for name, content in self.small.items()}
        return json.dumps({"settings": dict(self.settings), "files": headers, "small": small}, sort_keys=True)

    @property
    def nbytes(self) -> int:
        return sum(f.ends()[-1] for f in self.files) + sum(map(len, self.small.values()))


Advance = Callable[[int, str], None]


def write(call: str, out: Path, output: Output, start: Callable[[int], Advance]) -> None:
    """Write `output` to `out`, which must not exist.

    `start` is told how many bytes are left to write, and returns what is told of each: how many, and of what.
    """
    out = Path(os.path.abspath(out))
    partial, plan = Path(f"{out}.partial"), output.plan()
    known = _known_plan(partial)
    if out.exists() or out.is_symlink():
        if known == plan and not _files_in(partial / "output"):  # killed between the renaming and the end
            shutil.rmtree(partial)
            return
        raise CheckpointError(complaint(call, str(out), "a path that exists", "one to create"))
    with _errors(call, out, partial, resumes=known == plan):
        if known != plan:
            if known is not None:
                with _lock(call, partial):  # what another process is still writing is not ours to remove
                    pass
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write_whole(partial / "plan.json", plan.encode())
        (partial / "output").mkdir(exist_ok=True)
        with _lock(call, partial):
            left = output.nbytes - sum(_kept(partial / "output" / file.name, file)[0] for file in output.files)
            _check_space(call, partial, left)
            advance = start(left)
            for file in output.files:
                _write_file(partial / "output" / file.name, file, advance)
            for name, content in output.small.items():
                _write_whole(partial / "output" / name, content)
            finished = partial / "output" if output.folder else partial / "output" / output.files[0].name
            finished.rename(out)
        shutil.rmtree(partial)


@contextlib.contextmanager
def _errors(call: str, out: Path, partial: Path, resumes: bool) -> Iterator[None]:
    """An error leaves nothing behind; an interruption leaves what can be continued."""
    try:
        yield
    except Busy:
        raise
    except CheckpointError:
        if not resumes:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        got = f"{error.strerror or error} ({error.filename or out})"
        raise CheckpointError(complaint(call, str(out), got, "a place with room that can be written to")) from None
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class Busy(CheckpointError):
    """Another process is writing the same output."""


@contextlib.contextmanager
def _lock(call: str, partial: Path) -> Iterator[None]:
    with (partial / "plan.json").open("rb") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                takes = "one that no other process is writing"
                raise Busy(complaint(call, str(partial), "a folder in use", takes)) from None
        yield


def _known_plan(partial: Path) -> str | None:
    try:
        return (partial / "plan.json").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _check_space(call: str, partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        got = f"{free / 1e9:.2f} GB free"
        raise CheckpointError(complaint(call, str(partial.parent), got, f"room for {needed / 1e9:.2f} GB"))


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        _flush(file)
    temporary.rename(path)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _kept(path: Path, output: OutputFile) -> tuple[int, int]:
    """How many bytes of an unfinished file are whole, and how many of its pieces."""
    ends, size = output.ends(), path.stat().st_size if path.exists() else 0
    whole = sum(1 for end in ends if end <= size)  # the header, and so many pieces less one
    return (ends[whole - 1], whole - 1) if whole else (0, 0)


def _write_file(path: Path, output: OutputFile, advance: Advance) -> None:
    kept, pieces = _kept(path, output)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(kept)
        file.seek(kept)
        if kept == 0:
            file.write(output.header)
            advance(len(output.header), "")
        for piece in output.pieces[pieces:]:
            advance(0, piece.label)
            _write_piece(file, output, piece)
            file.flush()
            advance(sum(map(output.padded, piece.sizes)), piece.label)
        _flush(file)


def _write_piece(file: BinaryIO, output: OutputFile, piece: Piece) -> None:
    made = piece.make()
    sizes = tuple(array.nbytes for array in made)
    if sizes != piece.sizes:
        raise AssertionError(f"{piece.label}: made {sizes} bytes, planned {piece.sizes}")
    for array in made:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.write(b"\0" * (output.padded(array.nbytes) - array.nbytes))
