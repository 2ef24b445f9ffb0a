"""Several models within a budget of memory: loaded when they are asked for, the least recently used ones unloaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from billfish.core.errors import BillfishError, explained, readable
from billfish.llm.text_model import TextModel
from billfish.serving.api import ollama
from billfish.serving.api.models import Asking, Models, Result
from billfish.serving.api.request_bodies import Refusal, refuse, shown
from billfish.serving.api.service import READERS, EngineFacts, Service
from billfish.serving.engine.engine import USUAL_CONTEXT
from billfish.serving.engine.engine_settings import EngineSettings
from billfish.serving.engine.requests import QueueFull, ServerClosing
from billfish.serving.ipc import messages
from billfish.serving.ipc.client import EngineClient, EngineGone, ServerClient
from billfish.serving.ipc.session import ServerState, StateSession
from billfish.serving.models.catalog import Named, bytes_needed, in_words
from billfish.serving.models.engine_process import ENDED, EngineProcess, LoadFailed
from billfish.serving.models.model_metrics import pool_metrics_text
from billfish.serving.models.pool_entry import Entry

LOG = logging.getLogger("billfish.serving")
ROOM_SECONDS = 300.0  # a load waits so long for the running requests of a model that must make room
TELL_SECONDS = 5.0  # the state and the counts of an engine that does not tell them are left out
RETRY_SECONDS = 10.0  # a model that could not be loaded is not tried again for so long
CLOSING = "The server is shutting down. Retry later."


class PoolClient(ServerClient):
    """For what is one for the whole server."""

    def __init__(self, pool: ModelPool) -> None:
        super().__init__()
        self._pool = pool

    async def metrics(self) -> bytes:
        """Of HTTP, and of all engines."""
        return await self._pool.metrics()


class ModelPool(Models):
    """Models by their names. It is the loop's alone.

    Each loaded model has a process with an engine; chat templates and tokenizers are in this one. One model is loaded
    at a time, in the order in which models were asked for.
    """

    def __init__(
        self,
        catalog: Sequence[Named],
        settings: EngineSettings,
        memory: int,
        *,
        on_gpu: bool,
        strict_fields: bool = False,
        effort: str | None = None,
        budget: int | None = None,
        verbose: bool = False,
    ) -> None:
        """settings: of every engine. memory: bytes of all loaded models together, weights and KV caches. effort: of
        reasoning, for requests that name none. verbose: every chat is told its prompt."""
        super().__init__(PoolClient(self), strict_fields)
        self.memory, self._settings, self._on_gpu = memory, settings, on_gpu
        self._asking: dict[str, Any] = {"effort": effort, "budget": budget, "verbose": verbose}
        self.entries = {named.name: Entry(named) for named in catalog}
        self._by_name = dict(self.entries)
        for entry in self.entries.values():
            self._by_name |= dict.fromkeys(entry.named.adapters, entry)
        self.state = ServerState()
        self._session = StateSession(self.state, self.client.receive)
        self._turn = asyncio.Lock()
        self._uses = 0
        self._since = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, "billfish-reader")

    def connect(self) -> None:
        """Called in the loop, before all else."""
        self.client.connect(self._session.handle)

    # ---- what requests ask --------------------------------------------------------------------------------------

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """By threads that no model has."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def use(self, name: str | None, asking: Asking) -> AbstractContextManager[Service]:
        """Loads it first, if need be. Raises 404 for an unknown name, and 503 where it cannot be loaded."""
        entry = self.find(name)
        if self.closing:
            raise Refusal(503, CLOSING, None, "server_closing", retry_after="5")
        service = entry.service
        if service is not None and not entry.leaving:
            self._add_user(entry)
        else:
            service = await asking(self._wait_for(entry))
        return self._using(entry, service)

    def find(self, name: str | None) -> Entry:
        """The model of a name, or of an adapter's. Raises 404."""
        names = ", ".join(map(shown, self._by_name))
        if name is None:
            raise refuse("model", f"model is missing; expected one of {names}.", "model_not_found")
        entry = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if entry is None:
            message = f"There is no model {readable(shown(name))}. This server has {names}."
            raise Refusal(404, message, "model", "model_not_found")
        return entry

    @contextmanager
    def _using(self, entry: Entry, service: Service) -> Iterator[Service]:
        try:
            yield service
        finally:
            self._remove_user(entry)

    def _add_user(self, entry: Entry) -> None:
        entry.users += 1
        self._uses += 1
        entry.used = self._uses
        entry.free.clear()

    def _remove_user(self, entry: Entry) -> None:
        entry.users -= 1
        if not entry.users:
            entry.free.set()

    async def _wait_for(self, entry: Entry) -> Service:
        """Have the model loaded, and be one of its users."""
        if entry.waiting >= self._settings.streams + self._settings.queue:
            raise QueueFull(f"{entry.waiting} requests wait for {readable(entry.name)} to be loaded. Retry later.")
        entry.waiting += 1
        try:
            while entry.leaving:
                await entry.left.wait()
            self._add_user(entry)
            try:
                if entry.service is None:
                    if entry.loading is None:
                        entry.loading = asyncio.ensure_future(self._load(entry))
                        entry.loading.add_done_callback(
                            lambda done: done.cancelled() or done.exception()
                        )  # even if nobody waits any more
                    await asyncio.shield(entry.loading)
                if entry.service is None:  # it has ended since
                    raise EngineGone("The engine has ended. Retry.")
                return entry.service
            except BaseException:
                self._remove_user(entry)
                raise
        finally:
            entry.waiting -= 1

    # ---- loading ------------------------------------------------------------------------------------------------

    async def _load(self, entry: Entry) -> None:
        try:
            async with self._turn:
                if self.closing:
                    raise ServerClosing(CLOSING)
                self._check_failed(entry)
                await self._start(entry)
        except (Refusal, ServerClosing):
            raise
        except Exception as error:
            why = str(error) if isinstance(error, BillfishError) else explained(error)
            LOG.error(
                "%s cannot be loaded: %s", readable(entry.name), why, exc_info=not isinstance(error, BillfishError)
            )
            entry.failed = (time.monotonic() + RETRY_SECONDS, why)
            self._check_failed(entry)
        finally:
            entry.loading = None

    def _check_failed(self, entry: Entry) -> None:
        """Raises 503 for a model that could not be loaded a moment ago."""
        if entry.failed is None:
            return
        left = math.ceil(entry.failed[0] - time.monotonic())
        if left > 0:
            message = f"The model {readable(shown(entry.name))} cannot be loaded: {entry.failed[1]}"
            raise Refusal(503, message, "model", "model_not_loaded", retry_after=str(left))
        entry.failed = None

    async def _start(self, entry: Entry) -> None:
        started, named = time.perf_counter(), entry.named
        model = await self.read(self._open, named.path)
        model.adapters = {name: number for number, name in enumerate(named.adapters)}
        settings = self._settings_for(model)
        estimate = partial(bytes_needed, model, settings, on_gpu=self._on_gpu)
        await self._make_room(entry, entry.size or await self.read(estimate))
        engine = EngineProcess(
            messages.StartEngine(str(named.path), named.adapters, settings), lambda: self._lose(entry, engine)
        )
        entry.engine = engine
        try:
            ready = await engine.ready()
            entry.size = ready.nbytes + ready.cache_bytes
            await self._make_room(entry, entry.size)
            if engine.ended:  # while room was made: `_lose` leaves that to the load
                raise LoadFailed(ENDED)
        except BaseException:
            entry.engine = None
            await engine.stop()
            raise
        client = EngineClient(model.tokenizer)
        local = StateSession(self.state, client.receive)

        def send(message: messages.ToEngine) -> None:
            (local.handle if isinstance(message, messages.ToServer) else engine.send)(message)

        engine.receive = client.receive
        client.connect(send)
        facts = EngineFacts(ready.streams, ready.context, ready.queue, ready.nbytes)
        entry.service = Service(client, model, facts, entry.name, **self._asking)
        entry.service.warm_up()
        entry.loads += 1
        about = f"{in_words(entry.size)}, {ready.about}, {time.perf_counter() - started:.1f} s"
        LOG.info("loaded %s: %s", readable(entry.name), about)

    @staticmethod
    def _open(path: Path) -> TextModel:
        model = TextModel.open(path)
        _ = model.tokenizer.encoder  # made before the first of many texts
        return model

    def _settings_for(self, model: TextModel) -> EngineSettings:
        context = min(self._settings.context or USUAL_CONTEXT, model.config.context)
        return replace(self._settings, context=context)

    async def _make_room(self, entry: Entry, needed: int) -> None:
        """Unload models, those without requests first, and of them the least recently used, until one that needs so
        many bytes fits."""
        if needed > self.memory:
            sizes = f"it takes {in_words(needed)} with the KV cache of its streams, and --memory is"
            advice = "Lower --streams, --context or --cache-tokens, or raise --memory."
            raise LoadFailed(f"{sizes} {in_words(self.memory)}. {advice}")
        while True:
            others = [each for each in self.entries.values() if each.engine is not None and each is not entry]
            if sum(each.size for each in others) + needed <= self.memory:
                return
            await self._unload(min(others, key=lambda each: (each.users > 0, each.used)), entry)

    async def _unload(self, entry: Entry, successor: Entry) -> None:
        """When its requests are over. Raises 503 where they go on for too long."""
        entry.leaving = True
        entry.left.clear()
        try:
            if entry.users:
                try:
                    await asyncio.wait_for(entry.free.wait(), ROOM_SECONDS)
                except asyncio.TimeoutError:
                    busy = f"{readable(shown(entry.name))} answers requests, and both do not fit into --memory"
                    message = f"The model {readable(shown(successor.name))} cannot be loaded yet: {busy}."
                    raise Refusal(503, message, "model", "model_not_loaded", retry_after="30") from None
            if entry.engine is not None:  # else it has ended meanwhile
                await self._end(entry)
                LOG.info("unloaded %s", readable(entry.name))
        finally:
            entry.leaving = False
            entry.left.set()

    async def _end(self, entry: Entry) -> None:
        engine, service = entry.engine, entry.service
        assert engine is not None
        entry.service = None
        await engine.stop()
        entry.engine = None
        if service is not None:
            service.close()

    def _lose(self, entry: Entry, engine: EngineProcess) -> None:
        """A process has ended unasked."""
        if entry.engine is not engine or entry.service is None:
            return  # it did not start, which its load tells
        LOG.error("the engine of %s has ended; its requests are lost", readable(entry.name))
        service, entry.service, entry.engine = entry.service, None, None
        service.client.lose()
        service.close()

    async def finish(self) -> None:
        """Take nothing more, and wait for all answers."""
        self.closing = self.state.closing = True
        while busy := [entry for entry in self.entries.values() if entry.users]:
            await busy[0].free.wait()

    def kill(self) -> None:
        """End all processes."""
        self.closing = True
        for entry in self.entries.values():
            if entry.engine is not None:
                entry.engine.kill()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # ---- what is told -------------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """All models, each with its adapters, and whether it is loaded, in llama.cpp's words."""
        return [self.record(name) for entry in self.entries.values() for name in (entry.name, *entry.named.adapters)]

    def record(self, name: str) -> dict[str, Any]:
        """One of them."""
        entry = self.find(name)
        made: dict[str, Any] = {"id": entry.name, "object": "model", "created": self._since, "owned_by": "billfish"}
        made["status"] = {"value": entry.state}
        return {**made, "id": name, "parent": entry.name} if name in entry.named.adapters else made

    def tags(self, *, loaded: bool = False) -> list[dict[str, Any]]:
        """A file that was not read yet has no details."""
        return [self._tag(entry) for entry in self.entries.values() if entry.service is not None or not loaded]

    def _tag(self, entry: Entry) -> dict[str, Any]:
        if entry.service is not None:
            return ollama.model_record(entry.service)
        details = (entry.shown or {}).get("details") or ollama.details_of(entry.named.path, "")
        return ollama.record_of(entry.name, entry.named.path, entry.size, details)

    async def show(self, body: ollama.ShowBody) -> dict[str, Any]:
        """Reads its files, but for the weights, and does not load it."""
        entry = self.find(body.model or body.name)
        if entry.shown is None:
            entry.shown = await self.read(self._show, entry, body)
        return entry.shown

    def _show(self, entry: Entry, body: ollama.ShowBody) -> dict[str, Any]:
        model = TextModel.open(entry.named.path)
        settings = self._settings_for(model)
        facts = EngineFacts(settings.streams, settings.context or model.config.context, settings.queue, entry.size)
        service = Service(EngineClient(model.tokenizer), model, facts, entry.name)
        with contextlib.closing(service):
            return ollama.show(service, body)

    async def health(self) -> dict[str, Any]:
        """The server is well where one of its models is not: that one is loaded again."""
        states = await self._each(lambda client: client.state())
        models = {
            name: "failed" if states.get(name, "ok") == "failed" else entry.state
            for name, entry in self.entries.items()
        }
        return {"status": "closing" if self.closing else "ok", "models": models}

    async def metrics(self) -> bytes:
        """Those of each engine have its model's name."""
        texts = await self._each(lambda client: client.metrics())
        return await self.read(pool_metrics_text, self.state, texts, list(self.entries.values()))

    async def _each(self, ask: Callable[[ServerClient], Awaitable[Any]]) -> dict[str, Any]:
        """What loaded engines say, as far as they do in time, by their names."""
        loaded = [(name, entry.service.client) for name, entry in self.entries.items() if entry.service is not None]
        asked = (asyncio.wait_for(ask(client), TELL_SECONDS) for _, client in loaded)
        found = await asyncio.gather(*asked, return_exceptions=True)
        pairs = zip((name for name, _ in loaded), found, strict=True)
        return {name: said for name, said in pairs if not isinstance(said, BaseException)}
