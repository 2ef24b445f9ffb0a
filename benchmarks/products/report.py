"""`python -m benchmarks.products --backend metal --report FILE`: a file to send from a Mac.

checks   products of small matrices, through MLX and through torch, beside exact ones
times    as without --report
counts   what the kernels execute for the same problems, from the emulator, with the times that its model estimates

Without a Metal GPU all of it comes from the emulator, and the file says so: `"emulated": true`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from benchmarks import machine, products, records
from benchmarks.metal_profile.counts import LARGEST_WHOLE, count_product
from benchmarks.peers import Case
from benchmarks.products.engines import check_metal
from benchmarks.timing import timed
from billfish.backends import emulator
from billfish.backends.metal import MLX, Kernels, lay_out
from billfish.core.errors import BackendUnavailable
from billfish.core.tables import print_table
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize, quantized_linear

FORM = 1  # of the file: another number if its fields change
CHECKED_ROWS = (1, 4, 20)  # one row, a few, tiles
CHECKED_SHAPE = (96, 512)  # N, K
EMULATED = "no Metal GPU was found: kernels ran in the emulator, and times are not those of a GPU"

Multiply = Callable[[NDArray[Any], QuantizedTensor], NDArray[Any]]


def has_metal() -> bool:
    """Whether MLX, which times are taken with, finds an Apple GPU."""
    if importlib.util.find_spec("mlx") is None:
        return False
    import mlx.core as mx

    return bool(mx.metal.is_available())


def half(m: int, k: int, seed: int = 1) -> NDArray[Any]:
    """x [m, k] in float16."""
    return np.random.default_rng(seed).standard_normal((m, k), np.float32).astype(np.float16)


# ---- checks -------------------------------------------------------------------------------------------------------


def bridges(emulated: bool) -> dict[str, Multiply]:
    """How x [M, K] float16 is multiplied, by whose arrays."""

    def by_mlx(x: NDArray[Any], q: QuantizedTensor) -> NDArray[Any]:
        if emulated:
            return np.asarray(Kernels(emulator.metal_kernel).multiply(x, lay_out(q)))
        import mlx.core as mx

        return MLX.to_numpy(quantized_linear(mx.array(x), q, backend="metal"))

    def by_torch(x: NDArray[Any], q: QuantizedTensor) -> NDArray[Any]:
        from billfish.nn.torch import emulated_mps  # with torch

        device: AbstractContextManager[None] = emulated_mps.mps() if emulated else nullcontext()
        with device:
            y = quantized_linear(torch.from_numpy(x).to("mps"), q, backend="mps")
            return np.asarray(y.cpu().numpy())

    found: dict[str, Multiply] = {"mlx": by_mlx}
    if importlib.util.find_spec("torch") is not None:
        import torch

        if emulated or torch.backends.mps.is_available():
            found["torch"] = by_torch
    return found


def check(name: str, multiply: Multiply, case: Case, m: int) -> dict[str, Any]:
    """One product: its relative error, and that of a dense product of float16 numbers, of which it may have twice."""
    n, k = CHECKED_SHAPE
    q, x = replace(case, n=n, k=k, group_size=min(case.group_size, k)).distinct, half(m, k, seed=m)
    record: dict[str, Any] = {"bridge": name, "format": case.label, "m": m}
    try:
        y = multiply(x, q)
    except Exception as error:  # of Metal's compiler, MLX or torch: what it says is what the file is for
        return record | {"right": False, "failed": f"{type(error).__name__}: {error}"}
    w = dequantize(q)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    dense = (x.astype(np.float32) @ w.astype(np.float16).astype(np.float32).T).astype(np.float16)

    def error_of(y: NDArray[Any]) -> float:
        return float(np.sqrt(np.square(y.astype(np.float64) - exact).mean() / np.square(exact).mean()))

    ours, allowed = error_of(y), 2 * error_of(dense)
    return record | {"right": ours <= allowed, "error": ours, "allowed": allowed}


# ---- times and counts ---------------------------------------------------------------------------------------------


def emulated_times(cases: list[Case], rows: list[int], notes: list[str]) -> Iterator[dict[str, Any]]:
    """Seconds of the emulator. They say that the kernels ran."""
    kernels = Kernels(emulator.metal_kernel)
    for case in cases:
        weights = lay_out(case.tensor())
        for m in rows:
            if m * case.n * case.k > LARGEST_WHOLE:
                notes.append(f"{case.label} {case.k}x{case.n} M={m}: too large to run all of it in the emulator")
                continue
            x, sizes = half(m, case.k), {"format": case.label, "m": m, "k": case.k, "n": case.n}
            seconds = timed(lambda x=x, weights=weights: kernels.multiply(x, weights))
            yield {"backend": "metal-emulator", **sizes, "seconds": seconds, "peers": {}}


def counted(cases: list[Case], rows: list[int]) -> Iterator[dict[str, Any]]:
    """As the records of `python -m benchmarks.metal_profile`."""
    kernels = Kernels(emulator.metal_kernel)
    for case in cases:
        q = case.tensor()
        for m in rows:
            yield from map(asdict, count_product(kernels, q, half(m, case.k)))


@dataclass
class MacReport:
    """What the file holds."""

    emulated: bool
    machine: dict[str, object]
    versions: dict[str, str]
    notes: list[str]
    checks: list[dict[str, Any]]
    times: list[dict[str, Any]]
    counts: list[dict[str, Any]]
    limits: dict[str, float] | None = None
    complete: bool = False


# ---- the run ------------------------------------------------------------------------------------------------------


def run(settings: argparse.Namespace, out: TextIO) -> MacReport:
    """Check, time and count; the file is written whatever happens on the way."""
    for case in settings.cases:
        check_metal(case)
    emulated = not has_metal()
    about, versions = machine.machine() | machine.today(), machine.versions("numpy", "mlx", "torch", "ziglang")
    report = MacReport(emulated, about, versions, [EMULATED] if emulated else [], [], [], [])
    try:
        for name, multiply in bridges(emulated).items():
            report.checks += [check(name, multiply, case, m) for case in settings.cases for m in CHECKED_ROWS]
        print_checks(report, out)
        if emulated:
            report.times += emulated_times(settings.cases, settings.m, report.notes)
            rows = [["format", "KxN", "M", "seconds of the emulator"]]
            rows += [[t["format"], f"{t['k']}x{t['n']}", str(t["m"]), f"{t['seconds']:.3g}"] for t in report.times]
            print_table(rows, out, left=2, keys=3)
        timed_all = emulated or _take_times(report, settings, out)
        try:
            for record in counted(settings.cases, settings.m):
                report.counts.append(record)
        except BackendUnavailable as error:  # no compiler for the emulator
            report.notes.append(f"nothing was counted: {error}")
        report.complete = timed_all and all(record["right"] for record in report.checks)
    finally:
        records.write(settings.report, {"report": FORM, **vars(report)})
    print(*report.notes, sep="\n", end="\n" if report.notes else "", file=sys.stderr)
    print(f"report: {settings.report}", file=out)
    return report


def _take_times(report: MacReport, settings: argparse.Namespace, out: TextIO) -> bool:
    """On the GPU; whether all were taken. What goes wrong there is a note."""
    bench = products.Bench(settings)
    report.times, report.limits = bench.report.records, asdict(bench.report.limits)
    report.machine |= bench.report.machine
    try:
        bench.run()
    except Exception as error:  # as in `check`
        bench.report.notes.append(f"times end here: {type(error).__name__}: {error}")
    report.notes += bench.report.notes
    products.print_report(bench.report, out)
    return bench.report.complete


def print_checks(report: MacReport, out: TextIO) -> None:
    rows = [["through", "format", "M", "error", "allowed", ""]]
    for record in report.checks:
        numbers = [f"{record[name]:.1e}" if name in record else "-" for name in ("error", "allowed")]
        verdict = "right" if record["right"] else str(record.get("failed", "wrong")).splitlines()[0]
        rows.append([record["bridge"], record["format"], str(record["m"]), *numbers, verdict])
    print_table(rows, out, left=2, keys=3)
