"""`billfish bench`: our kernels beside other libraries, on weights that no cache holds, and the limits of the machine.

For each format, shape and M, all contenders take turns in one process, so that whatever else the machine does falls on
all of them alike; the median of each counts. Up to 16 rows of x, a product is as fast as its weights come from memory,
so there are enough copies of them, used in turn, that they do come from memory every time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import billfish
from benchmarks.products.cuda import CudaEngine
from benchmarks.products.engines import CpuEngine, Engine, MetalEngine
from benchmarks.products.errors import OUTLIER, errors
from benchmarks.products.limits import Limits, machine
from benchmarks.products.peers import Case, Peer, Prepared
from benchmarks.products.peers.turns import take_turns
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import check_threads
from billfish.cli import pictures
from billfish.core import tables
from billfish.core.activations import ACTIVATIONS
from billfish.core.errors import BackendUnavailable, BillfishError, DataError, FormatError, ShapeError, complaint
from billfish.core.files import write_atomically
from billfish.core.format import parse_format

OURS = "billfish"
ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (CpuEngine, MetalEngine, CudaEngine)}
COLD_ROWS = 16  # up to this M, weights are rotated
PATIENCE = 10.0  # seconds: a peer that would take longer for one pass is left out


@dataclass(frozen=True)
class Settings:
    """What to measure. :meth:`parse` makes it of the words of the command line."""

    cases: list[Case]
    m: list[int]
    threads: int
    peers: str = "all"
    json: Path | None = None
    plot: Path | None = None
    budget: float = 0.7  # seconds for each contender in each measurement
    cold_bytes: int | None = None  # None: what the engine says
    backend: str = "cpu"
    report: Path | None = None  # of a Mac, see benchmarks.products.report

    @classmethod
    def parse(
        cls,
        *,
        backend: str = "cpu",
        formats: str = "q4_0,fp4",
        shapes: str = "4096x4096",
        m: str = "1,16,256",
        activations: str | None = None,
        threads: str | None = None,
        peers: str = "all",
        json: str | None = None,
        plot: str | None = None,
        report: str | None = None,
    ) -> Settings:
        """Comma-separated lists, checked. A format may carry its group size, such as u4b8:128."""
        if backend not in ENGINES:
            raise BackendUnavailable(complaint("bench", "--backend", repr(backend), ", ".join(ENGINES)))
        activations = activations or ENGINES[backend].activations
        for name in activations.split(","):
            if name not in ACTIVATIONS:
                raise FormatError(complaint("bench", "--activations", repr(name), ", ".join(ACTIVATIONS)))
        cases = [
            _case(format, shape, name)
            for name in activations.split(",")
            for shape in shapes.split(",")
            for format in formats.split(",")
        ]
        count = _cpu.threads() if threads is None else _positive("--threads", threads, "a positive integer")
        check_threads("bench", "--threads", count)
        rows = [_positive("--m", text, "positive integers, such as 1,16,256") for text in m.split(",")]
        files = _destination("--json", json), _destination("--plot", plot)
        if report is not None and backend != "metal":
            raise BackendUnavailable(complaint("bench", "--report", f"--backend {backend}", "--backend metal"))
        return cls(cases, rows, count, peers, *files, backend=backend, report=_destination("--report", report))


def _case(format: str, shape: str, activations: str) -> Case:
    sizes = shape.split("x")
    if len(sizes) != 2:
        raise ShapeError(complaint("bench", "--shapes", repr(shape), "KxN, such as 4096x14336"))
    k, n = (_positive("--shapes", size, "KxN, such as 4096x14336", shape) for size in sizes)
    found, group_size = parse_format(format, "bench")
    found.check_k("bench", k)
    return Case(found, found.check_group_size("bench", group_size, k), k, n, activations)


def _positive(flag: str, text: str, takes: str, got: str | None = None) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ShapeError(complaint("bench", flag, repr(text if got is None else got), takes))
    return int(text)


def _destination(flag: str, name: str | None) -> Path | None:
    """Checked before the work: nobody wants to learn it after ten minutes."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise DataError(complaint("bench", flag, repr(name), "a file in a folder that exists"))
    return path


# ---- the run ----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was measured, where and with what. `records` is one dictionary for each measurement."""

    records: list[dict[str, Any]]
    limits: Limits
    machine: dict[str, object]
    versions: dict[str, str]
    notes: list[str]
    complete: bool = False

    def write_json(self, path: Path) -> None:
        """All at once: a reader never sees half a file, and an older one stays until this one is there."""
        content = {
            "machine": self.machine,
            "versions": self.versions,
            "limits": self.limits.as_json(),
            "complete": self.complete,
            "notes": self.notes,
            "records": self.records,
        }
        write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


class Bench:
    """A run: `run()` measures until it is done or interrupted, and leaves `report`."""

    def __init__(self, settings: Settings, limits: Limits | None = None, progress: TextIO | None = None) -> None:
        self.engine, self.settings = ENGINES[settings.backend](), settings
        self.engine.require()
        self.progress = sys.stderr if progress is None else progress
        self.cold_bytes = settings.cold_bytes or self.engine.cold_bytes()
        self.peers, notes = self.engine.peers(settings.peers)
        _cpu.set_threads(settings.threads)
        measured = limits or self.engine.limits(self.cold_bytes)
        versions = {OURS: billfish.__version__, "python": sys.version.split()[0], "numpy": np.__version__}
        versions |= {peer.name: peer.version() for peer in self.peers}
        about = machine() | self.engine.about()
        about |= {"threads": settings.threads, "date": time.strftime("%Y-%m-%d")}
        self.report = Report([], measured, about, versions, notes)
        self.row_seconds: dict[tuple[Case, str], float] = {}

    def run(self) -> Report:
        """Ctrl-C ends it early; what was measured until then stays."""
        total = len(self.settings.cases) * len(self.settings.m)
        try:
            for case in map(replace, self.settings.cases):  # a copy, which takes the weights that it caches with it
                for cold, rows in groupby(self.settings.m, key=lambda m: m <= COLD_ROWS):
                    for record in self._measure(case, list(rows), self.cold_bytes if cold else 0, total):
                        self.report.records.append(record)
            self.report.complete = True
        except KeyboardInterrupt:
            self._note(f"stopped after {len(self.report.records)} of {total} measurements")
        finally:
            self._draw("")
        return self.report

    def _measure(self, case: Case, rows: list[int], cold_bytes: int, total: int) -> Iterator[dict[str, Any]]:
        """A record for each M."""
        with ExitStack() as stack:
            ours, nbytes = self.engine.prepare(case, cold_bytes)
            prepared: dict[str, Prepared] = {OURS: ours}
            for peer in self.peers:
                what = f"{case.label} {case.k}x{case.n}: {peer.name} prepares"
                self._draw(_bar(len(self.report.records), total, what))
                contender = self._prepare(peer, case, cold_bytes)
                if contender is not None:
                    stack.callback(contender.close)
                    prepared[peer.label(case)] = contender
            for m in rows:
                what = f"{case.label} {case.activations} {case.k}x{case.n} M={m}"
                self._draw(_bar(len(self.report.records), total, what))
                seconds, found = self._time(case, m, prepared)
                remark = self.engine.remark(case, m)
                if remark:
                    self._note(f"{what}: {remark}")
                record = self._record(case, m, nbytes, seconds.pop(OURS), seconds)
                yield record | {"error": found.pop(OURS), "peer_errors": found}

    def _prepare(self, peer: Peer, case: Case, cold_bytes: int) -> Prepared | None:
        able, reason = peer.can_run(case)
        if not able:
            self._note(f"{peer.name}: not for {case.label} {case.activations}: {reason}")
            return None
        try:
            return peer.prepare(case, cold_bytes, self.settings.threads)
        except Exception as error:  # theirs, of whatever kind; one broken peer must not end the run
            reason = (str(error) or repr(error)).splitlines()[0]
            self._note(f"{peer.name}: failed for {case.label} {case.activations}: {reason}")
            return None

    def _time(
        self, case: Case, m: int, prepared: dict[str, Prepared]
    ) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        """Seconds, and the errors of those who multiply with the weights of the case itself."""
        x = np.random.default_rng(1).standard_normal((m, case.k), dtype=np.float32)
        chosen = {}
        for name, contender in prepared.items():
            seconds = self.row_seconds.get((case, name), 0.0) * m * contender.copies
            if name != OURS and seconds > PATIENCE:
                self._note(f"{name}: left out for {case.label} M={m}, {case.k}x{case.n}: about {seconds:.0f} s a pass")
            else:
                chosen[name] = contender
        times = take_turns(chosen, x, self.settings.budget)
        # A benchmark of wrong results is worth nothing. Even 2-bit weights stay well below this.
        expected = x @ case.rows[:64].T
        for name, contender in chosen.items():
            error = contender.result()[:, : expected.shape[1]] - expected
            if not np.square(error).mean() < 0.36 * np.square(expected).mean():
                what = f"{name} computes something else for {case.label} {case.activations} {case.k}x{case.n}, M={m}"
                if name == OURS:
                    raise BillfishError(f"[bench] {what}")
                self._note(what)
                del times[name]
            elif m >= COLD_ROWS:  # where time grows with M
                self.row_seconds[case, name] = times[name] / m
        alike = [name for name in times if ":" not in name]
        return times, {name: errors(case, x, chosen[name]) for name in alike}

    def _record(self, case: Case, m: int, nbytes: int, seconds: float, peers: dict[str, float]) -> dict[str, Any]:
        operations = 2 * m * case.k * case.n
        return {
            "backend": self.engine.name,
            "format": case.label,
            "activations": case.activations,
            "m": m,
            "k": case.k,
            "n": case.n,
            "seconds": seconds,
            "gops": operations / seconds / 1e9,
            "weight_gbps": nbytes / seconds / 1e9,
            "limit_fraction": self.report.limits.least_seconds(case.activations, nbytes, operations) / seconds,
            "peers": peers,
        }

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def _draw(self, text: str) -> None:
        """The progress bar, only where there is a terminal to redraw its line; empty text takes it away."""
        if self.progress.isatty():
            self.progress.write(f"\r\x1b[K{text}")
            self.progress.flush()


def _bar(done: int, total: int, what: str, width: int = 24) -> str:
    full = width * done // max(1, total)
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total} {what}"


# ---- the command ------------------------------------------------------------------------------------------------


def run(settings: Settings, limits: Limits | None = None, out: TextIO | None = None) -> Report:
    """Measure, print the table, write the files. `limits` are measured unless given."""
    if settings.plot is not None:
        from benchmarks.products import plot

        pictures.require()  # before the work, not after it
    before = _cpu.threads()
    try:
        bench = Bench(settings, limits)
        report = bench.report
        try:
            bench.run()
        finally:  # even if a peer or we ourselves break down halfway
            if settings.json is not None and (report.records or report.complete):
                report.write_json(settings.json)
    finally:
        _cpu.set_threads(before)
    for note in report.notes:
        print(f"billfish: {note.removeprefix('[bench] ')}", file=sys.stderr)
    print_table(report, sys.stdout if out is None else out)
    if settings.plot is not None and report.records:
        drawn = plot.roofline(report.records, report.limits, report.machine, report.versions)
        write_atomically(settings.plot, pictures.png(drawn))
    return report


ABOUT_ERRORS = (
    "error: against float64, in root mean squares; behind the stroke, with one value of x that is "
    f"{OUTLIER:.0f} times the others, of what these give"
)


def print_table(report: Report, out: TextIO) -> None:
    """Times in milliseconds, and behind each peer's how many times ours it is: above 1, we are faster. Then errors."""
    names = list(dict.fromkeys(name for record in report.records for name in record["peers"]))
    beside = [column for name in names for column in (name, "error")]
    rows = [["format", "x", "KxN", "M", "GOP/s", "GB/s", "limit", f"{OURS} ms", "error", *beside, "best peer"]]
    for record in report.records:
        peers, ours, found = record["peers"], record["seconds"], record["peer_errors"]
        times = {name: f"{seconds * 1e3:.4g} ({seconds / ours:.2f})" for name, seconds in peers.items()}
        rows.append(
            [
                record["format"],
                record["activations"],
                f"{record['k']}x{record['n']}",
                str(record["m"]),
                f"{record['gops']:.4g}",
                f"{record['weight_gbps']:.3g}",
                f"{record['limit_fraction']:.0%}",
                f"{ours * 1e3:.4g}",
                _error_cell(record["error"]),
                *(cell for name in names for cell in (times.get(name, "-"), _error_cell(found.get(name)))),
                f"{min(peers.values()) / ours:.2f}" if peers else "-",
            ]
        )
    tables.print_table(rows, out, left=3, keys=4)
    print(ABOUT_ERRORS, file=out)
    print(report.limits, file=out)


def _error_cell(found: tuple[float, float] | None) -> str:
    return "-" if found is None else " / ".join(f"{each:.2g}" for each in found)
