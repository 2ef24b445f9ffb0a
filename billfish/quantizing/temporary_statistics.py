"""Statistics for one output, that are gone when it is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.core.errors import BillfishError, DataError, complaint
from billfish.quantizing.calibration import TOKENS, Calibration
from billfish.statistics.inputs import CALL
from billfish.statistics.statistics import Statistics


@contextlib.contextmanager
def calibrated(
    checkpoint: Checkpoint, out: Path, text: bool | str | os.PathLike[str], hessian: bool, progress: bool
) -> Iterator[Statistics]:
    """Statistics of the model of a checkpoint, in a file beside `out`. They stay there while the output may be
    continued: after Ctrl-C, or an error of the system.

    text: a file, or a bool for the text that the package carries.
    """
    if not checkpoint.files:
        raise DataError(complaint(CALL, "calibrate", "tensors in memory", "a model in files; or bf.calibrate for it"))
    calibration = Calibration.of(checkpoint.path, None if isinstance(text, bool) else text, hessian, TOKENS, None)
    path = Path(f"{os.path.abspath(out)}.partial-statistics.safetensors")  # a name that nobody else has
    if not path.exists() or Statistics.load(path).run != calibration.run:
        path.unlink(missing_ok=True)
        calibration.write(path, progress)
    try:
        yield Statistics.load(path)
    except BillfishError as error:
        if not isinstance(error.__context__, OSError):  # nothing that the same command continues
            path.unlink(missing_ok=True)
        raise
    path.unlink()
