"""What an input is, told by content, so that no output is made of two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from billfish.checkpoints.safetensors_files import MappedFile, damaged
from billfish.core.errors import CheckpointError

HEAD_BYTES = 1 << 22  # the header of most files
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # evenly over the rest, 1 MiB in all: small files are read whole

Identity = list[tuple[str, int, int, str]]


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
