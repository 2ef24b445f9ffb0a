"""Writing large files so that being killed costs nothing: what is there is kept, and the end result is the same bytes.

Everything goes to a folder beside the output, `OUT.partial`. When all of it is there, that folder's `output`, or the
one file in it, is renamed to OUT. A file is its header and then its pieces in order, and nothing is ever written but at
the end, so the length of an unfinished file says which pieces are whole. They are kept if `plan.json` in the folder
tells the same plan as ours: the same input by content, the same settings, the same headers to the byte. One process at
a time has the output (lock.py), and a folder that is not ours is left alone (partial.py).

What an error leaves behind is what the same command can continue, and nothing else:

being killed, Ctrl-C,       all whole pieces
out of memory
an error of the system      all whole pieces, or nothing if there are none: the command continues when, for example,
                            there is room again
the input has changed       nothing: pieces of two inputs do not make one
any other, such as a        what an earlier run left; of a first run nothing, as the same command would fail again
damaged input

An input in memory cannot be continued: whatever the error, nothing is left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from billfish.checkpoints.writers.lock import lock_path, only_writer
from billfish.checkpoints.writers.partial import Partial, partial_path, plan_text, write_small
from billfish.errors import CheckpointError, complaint
from billfish.files import sync
from billfish.progress import Advance, OnProgress, follow
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
    is_current: Callable[[], bool]  # whether the input is still what the settings say
    continues: bool = True  # whether a later run can have the same input: what was in memory is gone with its process

    def plan(self) -> str:
        headers = [[f.name, hashlib.sha256(f.header).hexdigest(), f.ends()[-1]] for f in self.files]
        small = {name: hashlib.sha256(content).hexdigest() for name, content in self.small.items()}
        return plan_text(headers, small, self.settings)

    @property
    def nbytes(self) -> int:
        return sum(f.ends()[-1] for f in self.files) + sum(map(len, self.small.values()))


class SourceChanged(CheckpointError):
    """The input is no longer what it was when writing began."""


def write(call: str, out: Path, output: Output, progress: bool | OnProgress = False) -> None:
    """Write `output` to `out`, which must not exist. `progress` is told of the bytes that were left to write."""
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and not any(map(os.path.lexists, (partial_path(out), lock_path(out)))):
        raise _exists(call, out)  # and nothing of ours to end or to clear up, where we might not be allowed to lock
    try:
        with only_writer(call, out) as scratch:
            _write_alone(call, out, output, progress, Partial(call, out, scratch))
    except OSError as error:
        raise _refused(call, out, error, "a place that can be written to") from None


def _write_alone(call: str, out: Path, output: Output, progress: bool | OnProgress, partial: Partial) -> None:
    plan = output.plan()
    known = partial.known_plan()
    if os.path.lexists(out):
        if known == plan and _is_written(out, output):  # killed between the renaming and the end
            partial.discard()
            return
        raise _exists(call, out)
    if known != plan:
        partial.discard()
        partial.create(plan)
    with _errors(call, out, output, partial, resumes=known == plan):
        _fill(call, output, progress, partial)
        if not output.is_current():
            takes = "files that stay as they are until the end; start again"
            raise SourceChanged(complaint(call, "the input", "files that changed while they were read", takes))
        if os.path.lexists(out):  # somebody made it since; renaming would put ours in its place
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
        finished = partial.output if output.folder else partial.output / output.files[0].name
        finished.rename(out)
    partial.discard()


@contextlib.contextmanager
def _errors(call: str, out: Path, output: Output, partial: Partial, resumes: bool) -> Iterator[None]:
    """What an error leaves behind: see the top of this module."""
    try:
        yield
    except OSError as error:
        whole = sum(_kept(partial.output / file.name, file)[1] for file in output.files) if output.continues else 0
        takes = "a place with room that can be written to"
        if whole:
            pieces = sum(len(file.pieces) for file in output.files)
            takes += f"; {whole} of {pieces} tensors are kept in {partial.path}, and the same command continues"
        else:
            _discard(partial)
        raise _refused(call, out, error, takes) from None
    except (MemoryError, KeyboardInterrupt, SystemExit):
        if not output.continues:
            _discard(partial)
        raise
    except Exception as error:
        if not resumes or isinstance(error, SourceChanged):
            _discard(partial)
        raise


def _discard(partial: Partial) -> None:
    """After an error, which is what the user should hear of."""
    with contextlib.suppress(OSError, CheckpointError):
        partial.discard()


def _refused(call: str, out: Path, error: OSError, takes: str) -> CheckpointError:
    return CheckpointError(complaint(call, str(out), f"{error.strerror or error} ({error.filename or out})", takes))


def _exists(call: str, out: Path) -> CheckpointError:
    return CheckpointError(complaint(call, str(out), "a path that exists", "one to create"))


def _is_written(out: Path, output: Output) -> bool:
    """Whether `out` is this output: every file with its header and its length, and the small ones to the byte."""

    def is_file(path: Path, size: int, beginning: bytes) -> bool:
        if not path.is_file() or path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning

    large = ((out / file.name if output.folder else out, file.ends()[-1], file.header) for file in output.files)
    small = ((out / name, len(content), content) for name, content in output.small.items())
    return all(is_file(*about) for about in (*large, *small))


def _fill(call: str, output: Output, progress: bool | OnProgress, partial: Partial) -> None:
    """All files of the output, in the partial folder."""
    partial.output.mkdir(exist_ok=True)
    left = output.nbytes - sum(_kept(partial.output / file.name, file)[0] for file in output.files)
    _check_space(call, partial.path, left)
    with follow(progress, left) as advance:
        for file in output.files:
            _write_file(partial.output / file.name, file, advance)
        for name, content in output.small.items():
            write_small(partial.output / name, content)
            advance(len(content), name)


def _check_space(call: str, partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        got = f"{free / 1e9:.2f} GB free"
        raise CheckpointError(complaint(call, str(partial.parent), got, f"room for {needed / 1e9:.2f} GB"))


def _kept(path: Path, output: OutputFile) -> tuple[int, int]:
    """How many bytes of an unfinished file are whole, and how many of its pieces."""
    ends, size = output.ends(), path.stat().st_size if path.exists() else 0
    whole = sum(1 for end in ends if end <= size)  # the header, and so many pieces less one
    return (ends[whole - 1], whole - 1) if whole else (0, 0)


def _write_file(path: Path, output: OutputFile, advance: Advance) -> None:
    kept, pieces = _kept(path, output)
    on_disk = (
        kept  # so many bytes for sure: some file systems tell late, and once, that they had no room for the others
    )
    try:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(kept)
            file.seek(kept)
            try:
                if kept == 0:
                    file.write(output.header)
                    advance(len(output.header), "")
                _write_pieces(file, output, pieces, advance)
            except OSError:
                os.fsync(file.fileno())
                on_disk = os.fstat(file.fileno()).st_size
                raise
            sync(file)
    except OSError:
        if path.exists():
            os.truncate(path, on_disk)  # after closing, which writes what is buffered
        raise


def _write_pieces(file: BinaryIO, output: OutputFile, first: int, advance: Advance) -> None:
    for piece in output.pieces[first:]:
        advance(0, piece.label)
        _write_piece(file, output, piece)
        file.flush()
        advance(sum(map(output.padded, piece.sizes)), piece.label)


def _write_piece(file: BinaryIO, output: OutputFile, piece: Piece) -> None:
    made = piece.make()
    sizes = tuple(array.nbytes for array in made)
    if sizes != piece.sizes:
        raise AssertionError(f"{piece.label}: made {sizes} bytes, planned {piece.sizes}")
    for array in made:
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.write(b"\0" * (output.padded(array.nbytes) - array.nbytes))
