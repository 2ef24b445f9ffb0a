"""`billfish quantize --bits`: a plan is made, or read, and the checkpoint is quantized by it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from billfish.checkpoints.checkpoint import load
from billfish.checkpoints.conversion import quantize_checkpoint
from billfish.checkpoints.reports import ConversionReport
from billfish.core.errors import DataError, complaint
from billfish.core.files import path_of
from billfish.quantizing.bit_plan import CALL, BitPlan
from billfish.quantizing.sensitivity import FORMATS, plan_bits
from billfish.quantizing.temporary_statistics import calibrated
from billfish.statistics.statistics import Statistics


def quantize_to_bits(
    source: str,
    out: str,
    bits: float,
    formats: str | None,
    plan_file: str | None,
    keep: dict[str, str],
    *,
    method: Any,
    statistics: str | None,
    calibrate: bool | str,
    group_size: int | None,
    requantize: bool,
    **options: Any,
) -> ConversionReport:
    """As :func:`billfish.quantize_checkpoint`, with a format for each matrix so that `bits` is the average.

    plan_file: read if it is there. Otherwise the plan is written to it, or printed without one.
    keep: rules of the user, which come first. The average is that of the plan, without them.
    """
    if group_size is not None:
        takes = "group sizes in --formats, such as fp4:64"
        raise DataError(complaint(CALL, "--group-size", f"{group_size} beside --bits", takes))
    path, destination = path_of(CALL, source), Path(out)
    with _statistics(path, destination, statistics, calibrate, method) as known:
        written = None if plan_file is None else Path(plan_file)
        if written is not None and written.exists():
            plan = BitPlan.load(written)
        else:
            names = FORMATS if formats is None else tuple(formats.split(","))
            text = Path(calibrate) if isinstance(calibrate, str) else None
            kept = Path(f"{os.path.abspath(destination)}.partial-damage.json")
            plan = plan_bits(path, bits, formats=names, statistics=known, text=text, requantize=requantize, kept=kept)
            if written is None:
                print(plan.text(), end="", file=sys.stderr)
            else:
                plan.save(written)
        settings = {"method": method, "statistics": known, "requantize": requantize, **options}
        format, _, group = plan.format.partition(":")
        return quantize_checkpoint(
            path, destination, format, group_size=int(group) if group else None, keep={**keep, **plan.keep}, **settings
        )


@contextlib.contextmanager
def _statistics(
    path: Path, out: Path, statistics: str | None, calibrate: bool | str, method: str
) -> Iterator[Statistics | None]:
    """Those of a file, those of a text, or none."""
    if statistics is not None:
        yield Statistics.load(statistics)
    elif calibrate or method == "gptq":
        with calibrated(load(path), out, calibrate, method == "gptq", True) as computed:
            yield computed
    else:
        yield None
