"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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
