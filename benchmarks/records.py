"""The records in benchmarks/results: read, written whole or not at all, and added to by later runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from billfish.core.files import write_atomically

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


def read(name: str) -> Any:
    """What benchmarks/results/`name` holds."""
    return json.loads((RESULTS / name).read_text())


def write(path: Path | None, content: Any) -> None:
    """Write a record, with the date unless it has one; None, which is --json by default, is no file."""
    if path is not None:
        dated = any("date" in content.get(key, ()) for key in ("machine", "about"))
        content = content if dated else content | {"date": time.strftime("%Y-%m-%d")}
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def merged(old: Record, new: Record) -> Record:
    """The new results by `what` and `who`, and the old records and peers that they do not have."""
    measured = {(record["what"], record["who"]) for record in new["records"]}
    kept = [record for record in old["records"] if (record["what"], record["who"]) not in measured]
    about = new["about"] | {"peers": old["about"]["peers"] | new["about"]["peers"]}
    return {"about": about, "records": kept + new["records"]}


class Growing:
    """A record that is written after each step, so that the same command goes on where it was stopped."""

    def __init__(self, path: Path, **empty: Any) -> None:
        self._path = path
        self.content: Record = empty | (json.loads(path.read_text()) if path.exists() else {})

    def lacks(self, kind: str, case: Record) -> bool:
        return not any(case.items() <= record.items() for record in self.content[kind])

    def add(self, kind: str, record: Record) -> None:
        self.content[kind].append(record)
        self.save()

    def save(self) -> None:
        write(self._path, self.content)
