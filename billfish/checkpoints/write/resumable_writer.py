"""Writing large files so that being killed costs nothing: what is there is kept, and the end result is the same bytes.

Everything goes to a folder beside the output, `OUT.partial`. When all of it is there, that folder's `output`, or the
one file in it, is renamed to OUT. A file is its header and then its pieces in order, and nothing is ever written but at
the end. When a piece is written, its digest is noted. A later run keeps the pieces that have their digests, up to the
first that has not, if `plan.json` in the folder tells the same plan as ours: the same input by content, the same
settings, the same headers to the byte. One process at a time has the output (lock.py).

plan.json    what the output is to be
digests      of the pieces that are written, 32 bytes each, in order
output       the unfinished files
replaced     an earlier OUT, from the moment at which all is written until the new one has its name
states       what a calibration needs to go on

A folder of that name may be somebody else's. It is ours if `plan.json` is a plan as we write it, and nothing is in the
folder but what the plan names. Any other folder, a file or a link is neither written to nor removed.

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
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from billfish.checkpoints.safetensors_files import MappedFile, damaged
from billfish.checkpoints.write.lock import lock_path, only_writer
from billfish.checkpoints.write.target import OutputFile, Piece
from billfish.core.errors import CheckpointError, readable
from billfish.core.files import sync
from billfish.core.progress import Advance, OnProgress, follow

FULL = (errno.ENOSPC, errno.EDQUOT)
READ_BYTES = 1 << 20  # of a piece that is read again, at a time
MARKER = {"billfish": "plan of an unfinished output"}
NOBODYS = ".DS_Store"  # macOS puts one into each folder that somebody looks at
KINDS = {
    "plan.json": stat.S_ISREG,
    "digests": stat.S_ISREG,
    "output": stat.S_ISDIR,
    "replaced": stat.S_ISDIR,
    "states": stat.S_ISDIR,
    NOBODYS: stat.S_ISREG,
}
MAX_PLAN_BYTES = 100_000_000  # a plan has some hundred bytes for each file of the output
DIGEST_BYTES = 32
MAX_DIGEST_BYTES = DIGEST_BYTES << 20  # of a million pieces

Note = Callable[[bytes], object]  # called with the digest of each piece when it is written
HEAD_BYTES = 1 << 22  # the header of most files
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # evenly over the rest, 1 MiB in all: small files are read whole

Identity = list[tuple[str, int, int, str]]


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


def write(
    call: str, out: Path, output: Output, progress: bool | OnProgress = False, overwrite: bool | None = None
) -> None:
    """Write `output` to `out`. `progress` is told of the bytes that were left to write.

    overwrite: whether an `out` that exists is replaced, when the new one is whole; None: no, and nobody can ask for it.
    """
    out = Path(os.path.abspath(out))
    check_free(call, out, output.folder, overwrite)
    try:
        with only_writer(call, out) as scratch:
            _write_alone(call, out, output, progress, Partial(call, out, scratch), overwrite)
    except OSError as error:
        raise _refused(call, out, error, "Choose an output that can be written to.") from None


def check_free(call: str, out: Path, folder: bool, overwrite: bool | None = None) -> None:
    """Raises if `out` exists, and nothing of ours is to end or to clear up, where we might not be allowed to lock."""
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        if overwrite:
            _check_replaceable(call, out, folder)
        elif not any(map(os.path.lexists, (partial_path(out), lock_path(out)))):
            raise _exists(call, out, overwrite)


def _check_replaceable(call: str, out: Path, folder: bool) -> None:
    """Raises unless `out` is a file, or a folder of a model, where one is to be written: no more is ever removed."""
    mode = out.lstat().st_mode
    kind = "folder" if folder else "file"
    if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
        raise CheckpointError(f"{call}: {readable(out)} is not a {kind}, so it is not replaced. Choose another output.")
    if folder:
        inside = sorted(out.iterdir())
        odd = next((path for path in inside if not path.is_file()), None)
        if odd is not None:
            what = f"{readable(odd)} is not a file of a model"
            raise CheckpointError(f"{call}: {what}, so {readable(out)} is not replaced. Remove it yourself.")
        if inside and not any(path.suffix == ".safetensors" or path.name == "config.json" for path in inside):
            what = f"{readable(out)} is not a model's folder, so it is not replaced"
            raise CheckpointError(f"{call}: {what}. Choose another output.")


def _write_alone(
    call: str, out: Path, output: Output, progress: bool | OnProgress, partial: Partial, overwrite: bool | None
) -> None:
    plan = output.plan()
    known = partial.known_plan()
    partial.give_back()
    if os.path.lexists(out):
        if known == plan and _is_written(out, output, partial.digests()):  # killed between the renaming and the end
            partial.discard()
            return
        if not overwrite:
            raise _exists(call, out, overwrite)
        _check_replaceable(call, out, output.folder)
    with _errors(call, out, output, partial, resumes=known == plan):
        if known != plan:
            partial.discard()
            partial.create(plan)
        _fill(call, output, progress, partial)
        if not output.is_current():
            raise _changed(call)
        if os.path.lexists(out):  # perhaps somebody made it since
            if not overwrite:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
            _check_replaceable(call, out, output.folder)
        partial.publish(partial.output if output.folder else partial.output / output.files[0].name)
    partial.discard()


@contextlib.contextmanager
def _errors(call: str, out: Path, output: Output, partial: Partial, resumes: bool) -> Iterator[None]:
    """What an error leaves behind: see the top of this module."""
    try:
        yield
    except OSError as error:
        if not output.is_current():  # such as a bad address, where a mapped file has become shorter
            _discard(partial)
            raise _changed(call) from None
        present = sum(_present(partial.output / file.name, file) for file in output.files)
        whole = min(present, len(partial.digests())) if output.continues else 0
        hint = "Free some space." if error.errno in FULL else "Choose an output that can be written to."
        if whole:
            pieces = sum(len(file.pieces) for file in output.files)
            kept = f"{whole} of {pieces} tensors are kept in {readable(partial.path)}"
            hint += f" {kept}, and the same command continues."
        else:
            _discard(partial)
        raise _refused(call, out, error, hint) from None
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


def _refused(call: str, out: Path, error: OSError, hint: str) -> CheckpointError:
    what = f"{readable(out)} cannot be written: {error.strerror or error} ({readable(error.filename or out)})"
    return CheckpointError(f"{call}: {what}. {hint}")


def _changed(call: str) -> SourceChanged:
    return SourceChanged(f"{call}: files of the input changed while they were read. Start again when they stay.")


def _exists(call: str, out: Path, overwrite: bool | None) -> CheckpointError:
    replace = "" if overwrite is None else ", or replace it with overwrite=True (--force)"
    return CheckpointError(f"{call}: {readable(out)} exists. Choose another output{replace}.")


def _is_written(out: Path, output: Output, digests: Sequence[bytes]) -> bool:
    """Whether `out` is this output, to the byte."""
    large = {out / file.name if output.folder else out: file for file in output.files}
    small = {out / name: content for name, content in output.small.items()}
    sizes = {path: file.ends()[-1] for path, file in large.items()}
    sizes |= {path: len(content) for path, content in small.items()}
    return (
        all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
        and all(path.read_bytes() == content for path, content in small.items())
        and _whole_pieces(output, list(large), digests) == sum(len(file.pieces) for file in output.files)
    )


def _whole_pieces(output: Output, paths: Sequence[Path], digests: Sequence[bytes]) -> int:
    """How many pieces of all files are there to the byte. Pieces behind the first that is not are not counted."""
    left, whole = list(reversed(digests)), 0
    for path, file in zip(paths, output.files, strict=True):
        if not path.is_file():
            return whole
        with path.open("rb") as content:
            if content.read(len(file.header)) != file.header:
                return whole
            for piece in file.pieces:
                if not left or _digest_of_next(content, file.length(piece)) != left.pop():
                    return whole
                whole += 1
    return whole


def _digest_of_next(file: BinaryIO, size: int) -> bytes:
    """Of so many bytes, or of those that are there."""
    digest = hashlib.sha256()
    while size > 0 and (content := file.read(min(size, READ_BYTES))):
        digest.update(content)
        size -= len(content)
    return digest.digest()


def _fill(call: str, output: Output, progress: bool | OnProgress, partial: Partial) -> None:
    """All files of the output, in the partial folder."""
    partial.output.mkdir(exist_ok=True)
    paths = [partial.output / file.name for file in output.files]
    whole = _whole_pieces(output, paths, partial.digests())
    kept: list[int] = []  # pieces of each file
    for file in output.files:
        kept.append(min(len(file.pieces), whole - sum(kept)))
    starts = [file.ends()[count] if count else 0 for file, count in zip(output.files, kept, strict=True)]
    left = output.nbytes - sum(starts)
    _check_space(call, partial.path, left)
    pieces = [(file, piece) for file, count in zip(output.files, kept, strict=True) for piece in file.pieces[count:]]
    work = left + sum(file.work(piece) - file.length(piece) for file, piece in pieces)
    with follow(progress, left, work) as advance, partial.noting_digests(whole) as note:
        for path, file, count, start in zip(paths, output.files, kept, starts, strict=True):
            _write_file(path, file, count, start, note, advance)
        for name, content in output.small.items():
            write_small(partial.output / name, content)
            advance(len(content), name)
    sync_folder(partial.output)


def _check_space(call: str, partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if needed > free:
        room = f"{_size(free)} are free, and the output needs {_size(needed)}"
        problem = f"no space left in {readable(partial.parent)}: {room}"
        raise CheckpointError(f"{call}: {problem}. Free some, or choose another output.")


def _size(nbytes: int) -> str:
    """In the largest unit of which there is one; rounded down, so that what does not fit does not look as if it did."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes * 100 // size / 100:.2f} {unit}"
    return f"{nbytes} bytes"


def _present(path: Path, output: OutputFile) -> int:
    """How many pieces an unfinished file is long enough for."""
    size = path.stat().st_size if path.exists() else 0
    return sum(1 for end in output.ends()[1:] if end <= size)


def _write_file(path: Path, output: OutputFile, kept: int, start: int, note: Note, advance: Advance) -> None:
    """Write a file from byte `start` on, behind the pieces that are kept."""
    on_disk = start  # so many bytes for sure: some file systems tell late, and once, that they had no room for others
    try:
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(start)
            file.seek(start)
            try:
                if start == 0:
                    file.write(output.header)
                    advance(len(output.header), "")
                for piece in output.pieces[kept:]:
                    advance(0, piece.label)
                    digest = _write_piece(file, output, piece)
                    file.flush()
                    note(digest)
                    advance(output.length(piece), piece.label, output.work(piece))
            except OSError:
                os.fsync(file.fileno())
                on_disk = os.fstat(file.fileno()).st_size
                raise
            sync(file)
    except OSError:
        if path.exists():
            os.truncate(path, on_disk)  # after closing, which writes what is buffered
        raise


def _write_piece(file: BinaryIO, output: OutputFile, piece: Piece) -> bytes:
    """Returns the digest of what is written."""
    made = piece.make()
    sizes = tuple(array.nbytes for array in made)
    if sizes != piece.sizes:
        raise AssertionError(f"{piece.label}: made {sizes} bytes, planned {piece.sizes}")
    digest = hashlib.sha256()
    for array in made:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for part in (content, b"\0" * (output.padded(array.nbytes) - array.nbytes)):
            file.write(part)
            digest.update(part)
    return digest.digest()


# ---- OUT.partial -----------------------------------------------------------------------------------------------------


def plan_text(files: list[Any], small: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """A plan as `plan.json` has it. Names are the first of each in `files`, and the keys of `small`."""
    return json.dumps({**MARKER, "files": files, "small": dict(small), "settings": dict(settings)}, sort_keys=True)


def write_small(path: Path, content: bytes) -> None:
    """These bytes to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


def sync_folder(path: Path) -> None:
    """The names in a folder to the disk, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # some file systems sync no folders
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Partial:
    """The folder of one output. `scratch` is a name beside it that nobody else uses."""

    def __init__(self, call: str, out: Path, scratch: Path) -> None:
        self.path, self.out, self.call, self.scratch = partial_path(out), out, call, scratch
        self.output, self._digests, self._replaced = (self.path / name for name in ("output", "digests", "replaced"))

    def known_plan(self) -> str | None:
        """The plan of an earlier run, None if there is no such folder; raises CheckpointError if it is not ours."""
        if not os.path.lexists(self.path):
            return None
        if not stat.S_ISDIR(self.path.lstat().st_mode):
            raise self._foreign(self.path)
        plan = _read(self.path / "plan.json")
        names = _names(plan)
        if plan is None or names is None:
            raise self._foreign(self.path)
        for path in self.path.iterdir():
            is_kind = KINDS.get(path.name)
            if is_kind is None or not is_kind(path.lstat().st_mode):
                raise self._foreign(path)
        for path in self.output.iterdir() if self.output.exists() else ():
            if path.name not in {*names, NOBODYS} or not stat.S_ISREG(path.lstat().st_mode):
                raise self._foreign(path)
        return plan

    def create(self, plan: str) -> None:
        """The folder with a plan in it, there at once or not at all."""
        self.scratch.mkdir()
        write_small(self.scratch / "plan.json", plan.encode())
        self.scratch.rename(self.path)

    def digests(self) -> list[bytes]:
        """Of the pieces that are written."""
        if not self._digests.exists():
            return []
        with self._digests.open("rb") as file:
            content = file.read(MAX_DIGEST_BYTES)
        return [content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES)]

    @contextlib.contextmanager
    def noting_digests(self, known: int) -> Iterator[Note]:
        """What adds a digest behind the first `known`; others that are there are dropped."""
        with self._digests.open("r+b" if self._digests.exists() else "w+b", buffering=0) as file:
            file.truncate(known * DIGEST_BYTES)
            file.seek(0, os.SEEK_END)
            yield file.write

    def publish(self, finished: Path) -> None:
        """Give what is finished the output's name. A file takes an earlier one's place; a folder cannot, so that the
        earlier one is moved aside first."""
        if self.out.is_dir():
            self.out.rename(self._replaced)
        finished.replace(self.out)

    def give_back(self) -> None:
        """Put an earlier output back that was moved aside by a run that did not come to its end."""
        if self._replaced.exists() and not os.path.lexists(self.out):
            self._replaced.rename(self.out)

    def discard(self) -> None:
        """Remove the folder, if it is there and still ours."""
        if self.known_plan() is not None:
            self.give_back()
            self.path.rename(self.scratch)
            shutil.rmtree(self.scratch)

    def _foreign(self, path: Path) -> CheckpointError:
        what = "was" if path == self.path else f"has {readable(path.name)}, which was"
        return CheckpointError(
            f"{self.call}: {readable(self.path)} {what} not written by billfish. Move it, or choose another output."
        )


def partial_path(out: Path) -> Path:
    return out.parent / f"{out.name}.partial"


def _read(path: Path) -> str | None:
    """A file that is no link, of the size and the characters that plans have; None if it is another."""
    try:
        about = path.lstat()
        ours = stat.S_ISREG(about.st_mode) and about.st_size <= MAX_PLAN_BYTES
        return path.read_text(encoding="ascii") if ours else None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _names(plan: str | None) -> set[str] | None:
    """The files that a plan is about; None if we have not written it, down to the last space."""
    try:
        content = json.loads(plan or "")
        if plan != plan_text(content["files"], content["small"], content["settings"]):
            return None
        names = [name for name, _digest, _size in content["files"]] + list(content["small"])
        return set(names) if all(isinstance(name, str) for name in names) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


# ---- the input -------------------------------------------------------------------------------------------------------


def identity(files: Iterable[MappedFile]) -> Identity:
    """Name, size, time of change and digest of each. The time tells of changes between the samples."""
    return [(file.path.name, file.size, _time(file.path), digest_of(file)) for file in files]


def is_current(files: Iterable[MappedFile], known: Identity) -> bool:
    """Whether the paths still lead to these files, and they are as they were."""
    try:
        return identity(MappedFile(file.path) for file in files) == known
    except CheckpointError:  # one is gone
        return False


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise damaged(path, f"what cannot be opened ({error.strerror})", "a file that stays") from None


def digest_of(file: MappedFile) -> str:
    """Of the mapped bytes, as they are what is read: the path may lead to another file by now."""
    digest = hashlib.blake2b(digest_size=32)
    head = min(HEAD_BYTES, file.size)
    digest.update(file.view(0, head, np.uint8, (head,)).data)
    rest = file.size - head
    length = min(SAMPLE_BYTES, rest)
    for start in sorted({head + (rest - length) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        digest.update(file.view(start, length, np.uint8, (length,)).data)
    file.release()
    return digest.hexdigest()
