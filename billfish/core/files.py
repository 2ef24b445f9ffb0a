"""Files: which ones are read, how much memory they may cost, and that they are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import CheckpointError, DataError, DTypeError, bad_argument, failure, type_of

KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
MAX_MEMBERS = 8  # of an .npz file; ours have three
MAX_DIRECTORY = 4096  # bytes of the list of members; theirs take some 60 each
MOST_TEXT = 1 << 28  # bytes of a text to evaluate or to calibrate with
MAX_WHOLE = 200_000_000  # bytes of a small file, such as a tokenizer.json of 30 MB
# Bytes of memory that JSON costs at most, by its punctuation: a list or an object with what is in it, and a value.
CONTAINER_COST, VALUE_COST = 240, 64
NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][a-zA-Z][0-9]+)', 'fortran_order': False, "
    rb"'shape': \(([0-9, ]{0,200})\), \} *\n",  # no more axes than NumPy has: their product takes time
    re.DOTALL,
)


def path_of(call: str, path: object) -> Path:
    """What a user gave for a path; raises unless it is one."""
    if not isinstance(path, (str, os.PathLike)):
        raise DTypeError(bad_argument(call, "path", type_of(path), "a string or a path"))
    return Path(path)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, to be read. A pipe or a device, which could make us wait for ever, is an OSError.

    Models, packed weights and texts of a user are opened here. Links are followed.
    """
    # Without O_NONBLOCK, opening a pipe waits for somebody who writes to it. Regular files do not care.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a name with a zero byte, or with a lone surrogate
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"{KINDS.get(stat.S_IFMT(mode), 'a device')}, not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_whole(path: str | os.PathLike[str], most: int = MAX_WHOLE) -> bytes:
    """The content of a regular file of at most so many bytes. A larger one is an OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, and the limit is {most}")
        return file.read(size)


def read_text(call: str, argument: str, path: str | os.PathLike[str]) -> str:
    """The content of a file, or of a pipe, in UTF-8."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_TEXT + 1)
        if len(data) > MOST_TEXT:
            raise OSError(f"more than {MOST_TEXT >> 20} MB")
        return data.decode()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a zero byte
        raise DataError(failure(call, f"cannot read {argument} {str(path)!r}: {error}", "Pass a UTF-8 file.")) from None


def is_affordable(cost: int, size: int) -> bool:
    """Whether reading files of `size` bytes may cost so much memory: 64 MB, and 8 times the files.

    A tiny file that lies about its sizes must not take the machine's memory, so costs are known before they are paid.
    """
    return cost <= (64 << 20) + 8 * size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(failure("load", f"{path} is not valid JSON: {error}")) from None
    if not isinstance(value, dict):
        raise CheckpointError(failure("load", f"{path} holds {type_of(value)}, not a JSON object"))
    return value


def read_json_list(path: Path) -> list[Any]:
    """A JSON list; [] if there is no such file."""
    if not path.is_file():
        return []
    try:
        value = parse_json(read_whole(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(failure("load", f"{path} is not valid JSON: {error}")) from None
    if not isinstance(value, list):
        raise CheckpointError(failure("load", f"{path} holds {type_of(value)}, not a JSON list"))
    return value


def parse_json(text: bytes) -> Any:
    """A JSON value. Raises ValueError for what is none, and for what would take far more memory than the text has."""
    containers = text.count(b"[") + text.count(b"{")
    cost = CONTAINER_COST * containers + VALUE_COST * (text.count(b",") + text.count(b":")) + 4 * len(text)
    if not is_affordable(cost, len(text)):
        raise ValueError(f"{containers} lists and objects in {len(text)} bytes are too many")
    return json.loads(text)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file that np.savez wrote, read-only. Raises ValueError or OSError for any other file.

    np.load would believe what a member says about its size, compressed or not.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if _directory_bytes(file, size) > MAX_DIRECTORY:  # all of which zipfile would list, whatever their number says
            raise ValueError(f"more than {MAX_MEMBERS} members")
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if len(members) > MAX_MEMBERS:
                    raise ValueError(f"more than {MAX_MEMBERS} members")
                stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
                if not stored or sum(member.file_size for member in members) > size:
                    raise ValueError("compressed members")
                return {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise ValueError(str(error)) from None


def _directory_bytes(file: IO[bytes], size: int) -> int:
    """The size of a zip file's list of members, from the place where zipfile looks for it: the end of the file, or a
    record of 64 bits before that. A comment or a gap, where zipfile would look elsewhere, is a ValueError."""
    file.seek(max(0, size - 98))
    tail = file.read()
    record, locator, end = tail[-98:-42], tail[-42:-22], tail[-22:]
    if not end.startswith(b"PK\5\6") or end[20:] != b"\0\0":
        raise ValueError("not a zip file: no end record")
    if not locator.startswith(b"PK\6\7"):
        return int.from_bytes(end[12:16], "little")
    if not record.startswith(b"PK\6\6") or int.from_bytes(locator[8:16], "little") != size - 98:
        raise ValueError("damaged zip file: no 64-bit end record")
    return int.from_bytes(record[40:48], "little")


def _array(content: bytes) -> NDArray[Any]:
    """What an .npy file of version 1 holds, as NumPy writes it: its header has one form."""
    header = NPY.match(content)
    if header is None:
        raise ValueError("not an .npy array of version 1")
    kind, sizes = (part.decode() for part in header.groups())
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    try:
        dtype = np.dtype(kind)
    except TypeError as error:
        raise ValueError(str(error)) from None
    data = content[header.end() :]
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} of shape {shape}")
    return np.ndarray(shape, dtype, data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A temporary file beside `path` that takes its place at the end, unless something was raised.

    A new file gets the permissions that the umask leaves, a replaced one keeps its own. A device or a pipe cannot be
    replaced, so it is written to.
    """
    target = Path(path).absolute()
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found):
        with target.open("wb") as file:
            yield file
        return
    mode = 0o666 if found is None else found & 0o777
    temporary = target.with_name(f".billfish-{os.urandom(8).hex()}.tmp")
    try:
        # The permissions are there before the first byte: nobody reads the new file who may not read the old one.
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if found is not None:
                with contextlib.suppress(OSError):  # some file systems have no permissions
                    os.chmod(temporary, mode)  # what the umask took
            yield file
            sync(file)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that counts is the first one
            os.unlink(temporary)
        raise


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """These bytes as a file."""
    with replacing(path) as file:
        file.write(content)


def sync(file: IO[bytes]) -> None:
    """Everything written so far to the disk."""
    file.flush()
    os.fsync(file.fileno())
