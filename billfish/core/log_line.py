"""What the library logs, as lines on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from billfish.core.terminal import Style


class LogLine(logging.Formatter):
    """A line on standard error. Warnings say so; requests that a server has answered have the time."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        start = f"{self.formatTime(record)} " if record.name == "billfish.access" else "billfish: "
        text = super().format(record)
        return (
            Style(sys.stderr)(f"{start}warning: {text}", "yellow")
            if record.levelno >= logging.WARNING
            else start + text
        )


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show what the library logs, from INFO on, on standard error while a command runs."""
    logger, handler = logging.getLogger("billfish"), logging.StreamHandler()
    handler.setFormatter(LogLine())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
