"""`OUT.partial`, the folder that an output grows in: `plan.json`, and the unfinished files in `output`.

A folder of that name may be somebody else's. It is ours if `plan.json` is a plan as we write it, and nothing is in the
folder but what the plan names. Any other folder, a file or a link is neither written to nor removed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from billfish.errors import CheckpointError, complaint
from billfish.files import sync

MARKER = {"billfish": "plan of an unfinished output"}
NOBODYS = ".DS_Store"  # macOS puts one into each folder that somebody looks at


def plan_text(files: list[Any], small: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """A plan as `plan.json` has it. Names are the first of each in `files`, and the keys of `small`."""
    return json.dumps({**MARKER, "files": files, "small": dict(small), "settings": dict(settings)}, sort_keys=True)


def write_small(path: Path, content: bytes) -> None:
    """These bytes to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


class Partial:
    """The folder of one output. `scratch` is a name beside it that nobody else uses."""

    def __init__(self, call: str, out: Path, scratch: Path) -> None:
        self.path, self.call, self.scratch = partial_path(out), call, scratch
        self.output = self.path / "output"

    def known_plan(self) -> str | None:
        """The plan of an earlier run, None if there is no such folder; raises CheckpointError if it is not ours."""
        if not os.path.lexists(self.path):
            return None
        if not _is_folder(self.path):
            raise self._foreign(self.path)
        plan = _read(self.path / "plan.json")
        names = _names(plan)
        if plan is None or names is None:
            raise self._foreign(self.path)
        for path in self.path.iterdir():
            if path.name not in ("plan.json", NOBODYS) and not (path == self.output and _is_folder(path)):
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


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _read(path: Path) -> str | None:
    """A file that is no link; None if it is none."""
    try:
        return path.read_text() if stat.S_ISREG(path.lstat().st_mode) else None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _names(plan: str | None) -> set[str] | None:
    """The files that a plan is about; None if we have not written it, down to the last space."""
    try:
        content = json.loads(plan or "")
        if plan != plan_text(content["files"], content["small"], content["settings"]):
            return None
        return {file[0] for file in content["files"]} | set(content["small"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
