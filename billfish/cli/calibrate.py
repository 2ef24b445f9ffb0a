"""What `billfish calibrate` prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from billfish.cli.run import set_threads
from billfish.llm.model import default_model
from billfish.quantizing.calibrate_checkpoint import DEFAULT_NAME, calibrate_checkpoint


def calibrate(arguments: argparse.Namespace) -> None:
    """Statistics of a model, to a file; one line about them."""
    set_threads(arguments)
    if arguments.text is None:
        print(f"calibrating with {DEFAULT_NAME}; --text FILE takes another", file=sys.stderr)
    statistics = calibrate_checkpoint(
        arguments.model or default_model(),
        arguments.out,
        text=arguments.text,
        hessian=arguments.hessian,
        tokens=arguments.tokens,
        window=arguments.window,
    )
    out = Path(arguments.out)
    about = f"{len(statistics)} matrices, {statistics.tokens} tokens in windows of {statistics.window}, on the CPU"
    print(f"{out.name}: {about}; {out.stat().st_size / 1e6:.1f} MB")
