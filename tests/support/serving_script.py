"""A server whose model says what a script says: all but the model's arithmetic is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chat_templates import TEMPLATES
from llm_models import Small, write_model
from serving_http import Running, serving

from billfish.llm.grammar import Grammar
from billfish.serving.engine.requests import Chosen, Request
from billfish.serving.ipc.client import Answers, EngineClient, Take

Script = Callable[[str], str]  # from a rendered prompt to the answer


class ScriptedClient(EngineClient):
    """Answers each request by a script, token by token, instead of asking the engine.

    A grammar is not applied, and the script is told nothing of it.
    """

    script: Script

    async def ask(self, requests: Sequence[Request], grammar: Grammar | None, take: Take) -> Answers:
        first = self._ids(len(requests))
        answers = Answers(self, first, requests, take, self._tokenizer)
        self._playing = [
            asyncio.ensure_future(self._play(answers, first + index, request)) for index, request in enumerate(requests)
        ]
        return answers

    async def _play(self, answers: Answers, id: int, request: Request) -> None:
        said = self.script(self._tokenizer.decode(request.prompt))
        for token in self._tokenizer.encode(said, special=False, start=False)[: request.max_tokens]:
            answers.took(id, Chosen(token))
            await asyncio.sleep(0)
        answers.took(id, Chosen(None, (), "stop"))


class ClientAtOnce(EngineClient):
    """All tokens of an answer come before the first one is written, as where the loop is busy."""

    async def ask(self, requests: Sequence[Request], grammar: Grammar | None, take: Take) -> Answers:
        first = self._ids(len(requests))
        answers = Answers(self, first, requests, take, self._tokenizer)
        for id in range(first, first + len(requests)):
            for token in self._tokenizer.encode("abba", special=False, start=False):
                answers.took(id, Chosen(token))
            answers.took(id, Chosen(None, (), "stop"))
        return answers


@contextmanager
def scripted(folder: Path, script: Script, template: str = "qwen3", **options: Any) -> Iterator[Running]:
    """A server on a free port. template: a name of TEMPLATES. Its context holds the prompts of any agent."""
    file = folder / "scripted.gguf"
    write_model(file, Small(template=TEMPLATES[template], context=2**20))
    made = type("Client", (ScriptedClient,), {"script": staticmethod(script)})
    with serving(file, streams=2, context=2**20, client=made, **options) as running:
        yield running
