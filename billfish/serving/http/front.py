"""A front process: HTTP, chat templates and tokenizers. It asks the engine of the process that has started it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from billfish.core.log_line import logging_to_stderr
from billfish.llm.chat_template import start_process
from billfish.llm.text_model import TextModel
from billfish.serving.api.models import OneModel
from billfish.serving.api.service import EngineFacts, Service
from billfish.serving.http.keys import Keys
from billfish.serving.http.server import FrontServer
from billfish.serving.ipc import messages
from billfish.serving.ipc.client import EngineClient
from billfish.serving.ipc.link import SocketLink, receive_one

IGNORED = ("SIGINT", "SIGTERM", "SIGHUP")  # which a terminal or a service manager sends to all processes at once


class Front(FrontServer):
    """Serves until the engine's process says so, or has ended."""

    def __init__(self, told: messages.Configure, end: socket.socket) -> None:
        """end: of the pair to the engine's process."""
        model = TextModel.open(Path(told.path))
        model.adapters = {name: number for number, name in enumerate(told.adapters)}
        facts = EngineFacts(told.streams, told.context, told.queue, told.nbytes)
        client = EngineClient(model.tokenizer)
        asking: dict[str, Any] = {"effort": told.effort, "budget": told.budget, "verbose": told.verbose}
        _ = model.tokenizer.encoder  # made before the first of many texts
        service = Service(client, model, facts, told.name, strict_fields=told.strict_fields, **asking)
        service.warm_up()
        super().__init__(
            OneModel(service),
            Keys.of_digests(told.keys),
            access_log=told.access_log,
            hosts=told.hosts,
            origins=told.origins,
            share_prefixes=told.share_prefixes,
            fronts=told.fronts,
        )
        self.service, self._end = service, end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        link = SocketLink(self._end, messages.ToFront, self._told, self._lost)
        self.service.client.connect(link.send)
        await super().startup(sockets)
        link.send(messages.Ready())

    def _told(self, message: messages.ToFront) -> None:
        if isinstance(message, messages.Rotate):
            self.keys.replace(Keys.of_digests(message.keys))
        elif isinstance(message, messages.Closing):
            self.models.closing = True
        elif isinstance(message, messages.Exit):
            self.should_exit = True
        else:
            self.service.client.receive(message)

    def _lost(self) -> None:
        """The engine's process has ended. Clients are told before this one ends, too."""
        self.service.client.lose()
        self.should_exit = True


def main() -> None:
    """Arguments: numbers of the listening socket and of the end of the pair to the engine's process."""
    for name in IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    listening, end = (socket.socket(fileno=int(number)) for number in sys.argv[-2:])
    end.set_inheritable(False)  # processes of this one must not keep the pair open
    listening.set_inheritable(False)
    with logging_to_stderr():
        start_process()
        try:
            told = receive_one(end, messages.Configure)
        except EOFError:
            return
        front = Front(told, end)
        asyncio.run(front.serve([listening]))
        front.service.close()
