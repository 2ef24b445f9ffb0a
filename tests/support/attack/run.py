"""The attack: `python tests/support/attack/run.py --cases N [--journal FILE] [--only NAME]`; `make attack` runs it all.

Each generator makes a case of a seed alone. Workers, processes that do one case after another, are watched: a case may
not end its worker, nor take 5 s twice, nor 64 MB and 8 times its files of memory. It is accepted, or refused by an
error of ours. A case that breaks a rule is printed with its seed; `--only NAME --seed SEED` runs it alone.

With `--processes`, the attacks on whole processes (kills, failing disks, races, HTTP requests) run in parts of their
own, beside the cases.

With `--journal`, each range of seeds that is done is a line of the file, with the commit that it ran at. The same
command goes on behind the last line after an interrupt, and a larger number of cases adds to those that are there.
`--seconds` begins no range after so long; `--report FILE ...` makes one table of several journals.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

SECONDS = 5.0
PATIENCE = 60.0  # for the first case, which waits for its worker to begin
ROOM, TIMES = 64 << 20, 8  # memory that a case may take: so many bytes, and so many times its files
ADDRESS_SPACE = 2 << 30  # beyond what a worker has: what is asked for at once and never touched fails, too
CHUNK = 1000  # cases that one worker does
CHEAP, CHEAP_CHUNK = "mutated files", 10_000  # they cost less than a worker's start
# Generators by name: their module, and how many of a thousand cases they make.
GENERATORS = {
    "mutated files": ("mutated_files", "mutated", 901),
    "gguf headers": ("gguf_files", "headers", 23),
    "gguf models": ("gguf_files", "models", 17),
    "gguf splits": ("gguf_files", "splits", 2),
    "safetensors headers": ("safetensors_files", "headers", 17),
    "safetensors layouts": ("safetensors_files", "layouts", 13),
    "model folders": ("folders", "models", 9),
    "tokenizers": ("folders", "tokenizers", 7),
    "places": ("places", "places", 2),
    "plans": ("places", "plans", 1),
    "packed files": ("packed_files", "packed", 4),
    "calls": ("calls", "calls", 4),
}
# Attacks on whole processes, each a function of the module of its name: how many rounds they have at least, with a
# million cases, and in one part.
PROCESSES = {
    "races": (100, 500, 50),
    "kills": (100, 1000, 50),
    "faults": (100, 500, 25),
    "server": (5000, 100_000, 2500),
}
PART_SECONDS = 900.0  # for one part


Chunk = tuple[str, int, int]  # a generator, the first seed, and the one behind the last


@dataclass
class Row:
    """What came of the cases of one generator."""

    generator: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    worst_seconds: float = 0.0
    worst_memory: int = 0  # bytes beyond 8 times the files
    failed: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # what went wrong, and one command that shows it

    def include(self, other: Row) -> None:
        """Add what came of other cases of the same generator."""
        for name in ("cases", "accepted", "refused", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst_seconds = max(self.worst_seconds, other.worst_seconds)
        self.worst_memory = max(self.worst_memory, other.worst_memory)
        self.failures = {**other.failures, **self.failures}

    def add(self, result: dict[str, Any]) -> None:
        self.cases += 1
        self.accepted += result["outcome"] == "accepted"
        self.refused += result["outcome"] == "refused"
        self.worst_seconds = max(self.worst_seconds, result["seconds"])
        self.worst_memory = max(self.worst_memory, result["memory"] - TIMES * result["size"])
        if result["failure"]:
            self.failed += 1
            self.failures.setdefault(result["failure"], f"--only {self.generator!r} --seed {result['seed']}")


# ---- in a worker ---------------------------------------------------------------------------------------------------


def status(*names: str) -> list[int]:
    """Numbers of /proc/self/status, in bytes."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        said = file.read(8192)
    found = [said.partition(b"\n%s:" % name.encode())[2] for name in names]
    return [1024 * int(told.split(maxsplit=1)[0]) if told else 0 for told in found]


def before_a_case() -> int:
    """The memory that there is. The peak begins anew where an earlier one could hide another; that takes a while."""
    held, peak = status("VmRSS", "VmHWM")
    if peak - held > ROOM // 4:
        Path("/proc/self/clear_refs").write_text("5")
    return held


def one_case(generator: str, seed: int, scratch: Path) -> dict[str, Any]:
    """Make a case, and say what came of it."""
    module, function, _ = GENERATORS[generator]
    make = getattr(importlib.import_module(f"attack.{module}"), function)
    return {"seed": seed, **attempted(make(random.Random(f"{generator} {seed}")), scratch)}


def attempted(case: Any, scratch: Path) -> dict[str, Any]:
    """What came of a case, whose files are written below `scratch`."""
    import billfish as bf

    folder = scratch / "case"
    folder.mkdir()
    for path, content in case.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    before, started, failure = before_a_case(), time.perf_counter(), ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".* encountered in cast")  # numbers of a file that no type of ours has
            case.attempt(folder)
        outcome = "accepted"
    except bf.BillfishError as error:
        outcome = "refused"
        if len(str(error)) > 4000 or not str(error).isprintable():
            failure = f"a message that is not readable: {str(error)[:200]!r}"
    except BaseException as error:
        outcome = "failed"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {str(error)[:200]!r} at {Path(frame.filename).name}:{frame.lineno}"
    seconds, memory = time.perf_counter() - started, max(0, status("VmHWM")[0] - before)
    size = sum(len(content) for content in case.files.values())
    if memory > ROOM + TIMES * size:
        failure = f"{memory >> 20} MB for {size} bytes"
    shutil.rmtree(folder)
    return {
        "name": case.name,
        "outcome": outcome,
        "failure": failure,
        "seconds": seconds,
        "memory": memory,
        "size": size,
    }


def worker(generator: str, first: int, last: int, scratch: Path) -> None:
    """Cases one after another, each a line on standard output when it is done."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody else prints is not a result
    for module in ("tokenizers", "safetensors", "billfish.llm", "numpy.random"):
        importlib.import_module(module)
    limit = status("VmSize")[0] + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for seed in range(first, last):
        print(json.dumps(one_case(generator, seed, scratch)), file=results)
        if seed % 100 == 0:
            gc.collect()


# ---- in the process that watches ------------------------------------------------------------------------------------


def watched(generator: str, first: int, last: int) -> Iterator[dict[str, Any]]:
    """The results of a range of cases. A case that ends its worker, or takes too long, is a result too."""
    while first < last:
        failure = ""
        with started(generator, first, last) as (process, lines, errors):
            patience = PATIENCE
            while first < last and not failure:
                try:
                    line = lines.get(timeout=patience)
                except queue.Empty:
                    failure = f"no end after {patience:g} s"
                    break
                if not line:
                    errors.seek(0)
                    said = errors.read()[-300:].decode("utf-8", "replace")
                    failure = f"the worker ended with {process.wait()}: {said}"
                    break
                result = json.loads(line)
                if result["seconds"] > SECONDS:
                    result["failure"] = f"{result['seconds']:.1f} s"
                yield result
                first, patience = result["seed"] + 1, 2 * SECONDS
        if failure:
            about = {"seconds": 0.0, "memory": 0, "size": 0, "name": "", "outcome": "failed"}
            yield {"seed": first, "failure": failure, **about}
            first += 1


@contextlib.contextmanager
def started(generator: str, first: int, last: int) -> Iterator[tuple[subprocess.Popen[bytes], queue.Queue[bytes], Any]]:
    """A worker, the lines that it prints (an empty one at the end), and what it says on standard error."""
    lines: queue.Queue[bytes] = queue.Queue()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="attack-", dir=memory) as scratch, tempfile.TemporaryFile() as errors:
        command = [sys.executable, __file__, "--worker", generator, str(first), str(last), scratch]
        quiet = {**os.environ, "RUST_BACKTRACE": "0"}  # to look up names for a panic would cost more than the case
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=TESTS, env=quiet) as process:

            def pump() -> None:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.put(line)
                lines.put(b"")

            reader = threading.Thread(target=pump)
            reader.start()
            try:
                yield process, lines, errors
            finally:
                process.kill()
                reader.join()


def chunk_of(chunk: Chunk) -> Row:
    """What came of a range of seeds. A case that took too long gets a second chance: the machine may have been busy."""
    generator, first, last = chunk
    row = Row(generator)
    for result in watched(generator, first, last):
        slow = result["seconds"] > SECONDS or result["failure"].startswith("no end")
        again = watched(generator, result["seed"], result["seed"] + 1) if slow else iter([result])
        row.add(next(again))
    return row


def chunks_of(cases: int, only: str | None = None, first: int = 0) -> list[Chunk]:
    """About `cases` cases of all generators, or of one, in ranges that start at multiples of their size behind `first`.
    All generators come forward together."""
    chosen = {name: about[2] for name, about in GENERATORS.items() if only in (None, name)}
    total, found = sum(chosen.values()), list[tuple[float, Chunk]]()
    for name, share in chosen.items():
        count, size = max(1, cases * share // total), CHEAP_CHUNK if name == CHEAP else CHUNK
        for start in range(0, count, size):
            found.append((start / count, (name, first + start, first + min(start + size, count))))
    return [chunk for _, chunk in sorted(found)]


def parts_of(cases: int) -> list[Chunk]:
    """The attacks on whole processes, in parts that come forward together."""
    found = list[tuple[float, Chunk]]()
    for name, (least, most, size) in PROCESSES.items():
        count = max(least, cases * most // 10**6)
        found += [(start / count, (name, start, min(start + size, count))) for start in range(0, count, size)]
    return [chunk for _, chunk in sorted(found)]


def part_of(part: Chunk) -> Row:
    """What came of one part, in a process of its own."""
    name, first, last = part
    command = [sys.executable, __file__, "--part", name, str(first), str(last)]
    again = f"--part {name} {first} {last}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False, timeout=PART_SECONDS)
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Row(name, failed=1, failures={f"no end after {PART_SECONDS:g} s": again})
    except (IndexError, ValueError):
        return Row(name, failed=1, failures={f"ended with {done.returncode}: {done.stderr[-500:]}": again})


def done_before(*journals: Path | None) -> dict[Chunk, tuple[Row, str]]:
    """The ranges of journals, with their commits. A line that was cut by an interrupt counts for nothing."""
    found = dict[Chunk, tuple[Row, str]]()
    for journal in journals:
        for line in journal.read_text().splitlines() if journal is not None and journal.exists() else ():
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                found[told["generator"], told["first"], told["last"]] = Row(**told["row"]), told["commit"]
    return found


def attack(
    cases: int,
    jobs: int,
    only: str | None = None,
    first: int = 0,
    journal: Path | None = None,
    parts: bool = False,
    seconds: float = float("inf"),
) -> list[Row]:
    """About `cases` cases of all generators, or of one. parts: attacks on whole processes, too."""
    end = time.monotonic() + seconds
    chunks, done = chunks_of(cases, only, first), done_before(journal)
    if parts:
        chunks = merged(parts_of(cases), chunks)
    rows = {name: Row(name) for name, _, _ in chunks}
    for chunk in chunks:
        if chunk in done:
            rows[chunk[0]].include(done[chunk][0])

    def one(chunk: Chunk) -> Row | None:
        if time.monotonic() > end:
            return None
        return part_of(chunk) if chunk[0] in PROCESSES else chunk_of(chunk)

    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(one, chunk): chunk for chunk in chunks if chunk not in done}
        for future in as_completed(started):
            (name, start, last), row = started[future], future.result()
            if row is None:
                continue
            rows[name].include(row)
            if journal is not None:
                about = {"generator": name, "first": start, "last": last, "commit": commit(), "row": asdict(row)}
                with journal.open("a") as file:
                    print(json.dumps(about), file=file)
    return list(rows.values())


def merged(one: list[Chunk], other: list[Chunk]) -> list[Chunk]:
    """Both lists in their order, so that they come to their ends together."""
    places = [(i / len(many), chunk) for many in (one, other) for i, chunk in enumerate(many)]
    return [chunk for _, chunk in sorted(places, key=lambda place: place[0])]


def report(journals: list[Path]) -> dict[str, Any]:
    """All that journals hold: rows with the ranges of their seeds, and the commits."""
    done = done_before(*journals)
    rows = {name: Row(name) for name in (*GENERATORS, *PROCESSES)}
    seeds: dict[str, list[list[int]]] = {name: [] for name in rows}
    for (name, first, last), (row, _) in sorted(done.items()):
        rows[name].include(row)
        if seeds[name] and seeds[name][-1][1] == first:
            seeds[name][-1][1] = last
        else:
            seeds[name].append([first, last])
    commits = sorted({commit for _, commit in done.values()})
    return {
        "commits": commits,
        "rows": [asdict(row) | {"seeds": seeds[name]} for name, row in rows.items() if row.cases],
    }


def commit() -> str:
    """The one that is checked out."""
    if known := os.environ.get("ATTACK_COMMIT"):  # where there is no git
        return known
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=TESTS, check=False)
    return asked.stdout.strip()[:12]


def of_processes(name: str, first: int, last: int) -> Row:
    """One part of the attacks on whole processes. `first` is its seed, too."""
    rounds = getattr(importlib.import_module(f"attack.{name}"), name)(last - first, first)
    failures = dict.fromkeys(rounds.failures, f"--part {name} {first} {last}")
    numbers = rounds.cases, rounds.accepted, rounds.refused, rounds.worst_seconds, rounds.worst_memory
    return Row(name, *numbers, len(rounds.failures), failures)


def table(rows: list[Row]) -> str:
    head = f"{'generator':<22}{'cases':>8}{'accepted':>10}{'refused':>9}{'failed':>8}{'worst s':>9}{'worst MB':>10}"
    lines = [head]
    for row in rows:
        numbers = f"{row.cases:>8}{row.accepted:>10}{row.refused:>9}{row.failed:>8}"
        lines.append(f"{row.generator:<22}{numbers}{row.worst_seconds:>9.2f}{row.worst_memory / 2**20:>10.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=GENERATORS)
    parser.add_argument("--seed", type=int, help="one case alone, in this process")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--journal", type=Path, help="where finished ranges are kept, to go on after an interrupt")
    parser.add_argument("--json", type=Path, help="where the table goes, too")
    parser.add_argument(
        "--processes", action="store_true", help="races, kills, failing disks and HTTP requests as well"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--report", type=Path, nargs="+", help="run nothing; print what these journals hold as JSON")
    parser.add_argument("--part", nargs=3, help="one part of an attack on whole processes: name, first, last")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)  # generator, first and last seed, folder
    arguments = parser.parse_args()
    if arguments.worker:
        name, first, last, scratch = arguments.worker
        return worker(name, int(first), int(last), Path(scratch))
    if arguments.part:
        name, first, last = arguments.part
        return print(json.dumps(asdict(of_processes(name, int(first), int(last)))))
    if arguments.report:
        return print(json.dumps(report(arguments.report), indent=1))
    if arguments.seed is not None:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(one_case(arguments.only, arguments.seed, Path(scratch)), indent=1))
        return None
    if arguments.journal:
        arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    rows = attack(
        arguments.cases,
        arguments.jobs,
        arguments.only,
        arguments.first,
        arguments.journal,
        arguments.processes,
        arguments.seconds,
    )
    print(table(rows))
    for row in rows:
        for failure, command in list(row.failures.items())[:20]:
            print(f"{command}: {failure}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return sys.exit(any(row.failed for row in rows))


if __name__ == "__main__":
    main()
