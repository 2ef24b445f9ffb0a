"""`OUT.partial`, the folder that an output grows in.

plan.json    what the output is to be
digests      of the pieces that are written, 32 bytes each, in order
output       the unfinished files
states       what a calibration needs to go on

A folder of that name may be somebody else's. It is ours if `plan.json` is a plan as we write it, and nothing is in the
folder but what the plan names. Any other folder, a file or a link is neither written to nor removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from billfish.core.errors import CheckpointError, complaint
from billfish.core.files import sync

MARKER = {"billfish": "plan of an unfinished output"}
NOBODYS = ".DS_Store"  # macOS puts one into each folder that somebody looks at
KINDS = {
    "plan.json": stat.S_ISREG,
    "digests": stat.S_ISREG,
    "output": stat.S_ISDIR,
    "states": stat.S_ISDIR,
    NOBODYS: stat.S_ISREG,
}
MAX_PLAN_BYTES = 100_000_000  # a plan has some hundred bytes for each file of the output
DIGEST_BYTES = 32
MAX_DIGEST_BYTES = DIGEST_BYTES << 20  # of a million pieces

Note = Callable[[bytes], object]  # called with the digest of each piece when it is written


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
        self.path, self.call, self.scratch = partial_path(out), call, scratch
        self.output, self._digests = self.path / "output", self.path / "digests"

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

    def discard(self) -> None:
        """Remove the folder, if it is there and still ours."""
        if self.known_plan() is not None:
            self.path.rename(self.scratch)
            shutil.rmtree(self.scratch)

    def _foreign(self, path: Path) -> CheckpointError:
        got = "what is not ours" if path == self.path else f"{path.name}, which is not ours"
        takes = "a name that is free, or what was left of an earlier run: move it away, or choose another OUT"
        return CheckpointError(complaint(self.call, str(self.path), got, takes))


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
