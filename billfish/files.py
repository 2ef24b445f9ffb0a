"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A temporary file beside `path` that takes its place at the end, unless something was raised."""
    import tempfile  # here, because few write files and it takes a while to import

    target = Path(path).absolute()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp's files are for the owner only
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """These bytes as a file."""
    with replacing(path) as file:
        file.write(content)
