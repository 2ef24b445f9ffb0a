"""One of several models: whether it is loaded, and who uses it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from billfish.serving.api.service import Service
from billfish.serving.models.catalog import Named
from billfish.serving.models.engine_process import EngineProcess


class Entry:
    """One model. users: requests that run, or wait for its load. leaving: it is unloaded once these are over; requests
    that come then wait for the next load. size: bytes that it takes, or about takes; 0: not known yet."""

    def __init__(self, named: Named) -> None:
        self.named, self.name = named, named.name
        self.users = self.waiting = self.used = self.loads = self.size = 0
        self.leaving = False
        self.free, self.left = asyncio.Event(), asyncio.Event()  # no users; not leaving
        self.engine: EngineProcess | None = None
        self.service: Service | None = None
        self.loading: asyncio.Future[None] | None = None
        self.failed: tuple[float, str] | None = None  # until when it is not tried again, and why
        self.shown: dict[str, Any] | None = None  # what Ollama's clients are told

    @property
    def state(self) -> str:
        """In a word."""
        if self.service is not None:
            return "loaded"
        if self.loading is not None:
            return "loading"
        return "failed" if self.failed is not None and time.monotonic() < self.failed[0] else "unloaded"
