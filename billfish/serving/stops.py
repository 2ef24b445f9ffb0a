"""Texts that end an answer: none of their text goes out, and what may begin one waits."""

from __future__ import annotations


class HeldText:
    """The text of an answer on its way out. `stopped` when a stop text has come."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What goes out after this text has come."""
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        out = len(held) - max((_begun(held, stop) for stop in self._stops), default=0)
        self._held = held[out:]
        return held[:out]

    def rest(self) -> str:
        """What was held back for a stop text that did not come."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text may begin a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
