"""Time quantized matmuls beside other libraries, on weights that no cache holds, and beside the machine's limits.

For each format, shape and M, all contenders take turns in one process, so that whatever else the machine does falls on
all of them alike; the median of each counts. Up to 16 rows of x, a product is as fast as its weights come from memory,
so there are enough copies of them, used in turn, that they do come from memory every time.

example: python -m benchmarks.products --formats q4_0,fp4:128 --m 1,16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks import command, machine, records
from benchmarks.machine import Limits
from benchmarks.peers import Case, Peer, Prepared, select
from benchmarks.pictures.charts import roofline
from benchmarks.products.engines import OUTLIER, CpuEngine, MetalEngine, errors
from benchmarks.timing import take_turns
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import check_threads
from billfish.core.activations import ACTIVATIONS
from billfish.core.errors import BillfishError
from billfish.core.format import parse_format
from billfish.core.tables import print_table

OURS = "billfish"
ENGINES = {engine.name: engine for engine in (CpuEngine, MetalEngine)}
COLD_ROWS = 16  # up to this M, weights are rotated
PATIENCE = 10.0  # seconds: a peer that would take longer for one pass is left out
INTERRUPTED = 130  # what a shell expects after Ctrl-C


def parser() -> command.Parser:
    made = command.parser(__spec__, __doc__)
    made.add_argument("--backend", choices=ENGINES, default="cpu", help="whose kernels (default: cpu)")
    made.listed("--formats", "formats, with a group size if it is not the usual one: u4b8:128", "q4_0,fp4")
    made.listed("--shapes", "KxN of the weights", "4096x4096", command.shapes)
    made.listed("--m", "rows of x", "1,16,256", command.positives)
    kinds = f"{', '.join(ACTIVATIONS)} (default: q8 on the CPU, exact on Metal)"
    made.add_argument("--activations", type=command.words, metavar="LIST", help=kinds)
    threads = "CPU threads of all contenders (default: all cores)"
    made.add_argument("--threads", type=command.positive, metavar="N", help=threads)
    made.option("--peers", "all, none, or names such as ggml,numpy", "all", str, "LIST")
    made.add_argument("--plot", type=command.new_file, metavar="FILE.svg", help="roofline to draw (default: none)")
    report = "with --backend metal: file for checks, times and counts, to be sent"
    made.add_argument("--report", type=command.new_file, metavar="FILE", help=report)
    # Seconds for each contender of a measurement; bytes of weights that no cache holds, by default as the engine says.
    made.set_defaults(budget=0.7, cold_bytes=None)
    return made


def parse(made: command.Parser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command line, with the cases to measure. Raises BillfishError."""
    flags = made.parse_args(words)
    kinds = flags.activations or [ENGINES[flags.backend].activations]
    for kind in kinds:
        if kind not in ACTIVATIONS:
            made.error(f"--activations: unknown kind {kind!r}. Known: {', '.join(ACTIVATIONS)}.")
    if flags.report is not None and flags.backend != "metal":
        made.error(f"--report needs --backend metal, not {flags.backend}.")
    flags.cases = [_case(format, k, n, kind) for kind in kinds for k, n in flags.shapes for format in flags.formats]
    flags.threads = check_threads("benchmark", "--threads", flags.threads or _cpu.threads())
    return flags


def _case(format: str, k: int, n: int, activations: str) -> Case:
    found, group_size = parse_format(format, "--formats")
    found.check_k("--shapes", k)
    return Case(found, found.check_group_size("--formats", group_size, k), k, n, activations)


# ---- the run ----------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was measured, where and with what. `records` is one dictionary for each measurement."""

    machine: dict[str, object]
    versions: dict[str, str]
    limits: Limits
    complete: bool
    notes: list[str]
    records: list[dict[str, Any]]

    def write(self, path: Path | None) -> None:
        records.write(path, asdict(self))


class Bench:
    """A run: `run()` measures until it is done or interrupted, and leaves `report`."""

    def __init__(
        self, settings: argparse.Namespace, limits: Limits | None = None, progress: TextIO | None = None
    ) -> None:
        self.engine, self.settings = ENGINES[settings.backend](), settings
        self.progress = sys.stderr if progress is None else progress
        self.cold_bytes = settings.cold_bytes or self.engine.cold_bytes()
        self.peers, notes = select(settings.peers, self.engine.peers)
        _cpu.set_threads(settings.threads)
        versions = machine.versions() | {"python": sys.version.split()[0], "numpy": np.__version__}
        versions |= {peer.name: peer.version() for peer in self.peers}
        about = machine.machine() | self.engine.about() | {"threads": settings.threads} | machine.today()
        measured = limits or self.engine.limits(self.cold_bytes)
        self.report = Report(about, versions, measured, False, notes, [])
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
            what = f"{case.label} {case.activations} {case.k}x{case.n}"
            for peer in self.peers:
                self._draw(f"{len(self.report.records)}/{total} {what}: {peer.name} prepares")
                contender = self._prepare(peer, case, cold_bytes)
                if contender is not None:
                    stack.callback(contender.close)
                    prepared[peer.label(case)] = contender
            for m in rows:
                self._draw(f"{len(self.report.records)}/{total} {what} M={m}")
                seconds, found = self._time(case, m, prepared)
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
                    raise BillfishError(what)
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
        """Where it is, only where there is a terminal to redraw its line; empty text takes it away."""
        if self.progress.isatty():
            self.progress.write(f"\r\x1b[K{text}")
            self.progress.flush()


# ---- the command ------------------------------------------------------------------------------------------------


def run(settings: argparse.Namespace, limits: Limits | None = None, out: TextIO | None = None) -> Report:
    """Measure, print the table, write the files. `limits` are measured unless given."""
    before = _cpu.threads()
    try:
        bench = Bench(settings, limits)
        report = bench.report
        try:
            bench.run()
        finally:  # even if a peer or we ourselves break down halfway
            if report.records or report.complete:
                report.write(settings.json)
    finally:
        _cpu.set_threads(before)
    print(*report.notes, sep="\n", end="\n" if report.notes else "", file=sys.stderr)
    print_report(report, sys.stdout if out is None else out)
    if settings.plot is not None and report.records:
        drawing = roofline(report.records, report.limits, report.machine, title="Matmul beside its roofline and peers")
        settings.plot.write_text(str(drawing))
    return report


ABOUT_ERRORS = (
    "error: against float64, in root mean squares; behind the stroke, with one value of x that is "
    f"{OUTLIER:.0f} times the others, of what these give"
)


def print_report(report: Report, out: TextIO) -> None:
    """Times in milliseconds, and behind each peer's how many times ours it is: above 1, we are faster. Then errors."""
    names = list(dict.fromkeys(name for record in report.records for name in record["peers"]))
    beside = [column for name in names for column in (name, "error")]
    rows = [["format", "x", "KxN", "M", "GOP/s", "GB/s", "limit", f"{OURS} ms", "error", *beside, "best peer"]]
    for record in report.records:
        peers, ours, found = record["peers"], record["seconds"], record["peer_errors"]
        times = {name: f"{seconds * 1e3:.4g} ({seconds / ours:.2f})" for name, seconds in peers.items()}
        rows.append(
            [
                *(record["format"], record["activations"], f"{record['k']}x{record['n']}", str(record["m"])),
                *(f"{record['gops']:.4g}", f"{record['weight_gbps']:.3g}", f"{record['limit_fraction']:.0%}"),
                *(f"{ours * 1e3:.4g}", _error_cell(record["error"])),
                *(cell for name in names for cell in (times.get(name, "-"), _error_cell(found.get(name)))),
                f"{min(peers.values()) / ours:.2f}" if peers else "-",
            ]
        )
    print_table(rows, out, left=3, keys=4)
    print(ABOUT_ERRORS, report.limits, sep="\n", file=out)


def _error_cell(found: tuple[float, float] | None) -> str:
    return "-" if found is None else " / ".join(f"{each:.2g}" for each in found)


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    with command.errors_end(made):
        settings = parse(made, words)
        if settings.report is not None:
            from benchmarks.products import report

            status = 0 if report.run(settings, sys.stdout).complete else 1
        else:
            try:
                status = 0 if run(settings).complete else INTERRUPTED
            except KeyboardInterrupt:  # before the first measurement
                status = INTERRUPTED
    if status:
        sys.exit(status)
