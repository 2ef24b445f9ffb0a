"""Chat templates: a list of messages to the text that a model was trained on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from billfish.core.errors import DataError, ModelError, bad_argument, failure, type_of
from billfish.core.extras import folder_of
from billfish.llm import chat_template_process

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else the model's template reads
RESERVED = {"messages", "tools"}  # variables of a template that have arguments of their own
# What an interpreter may need to start, and the time zone. All else, such as tokens and keys, is none of a template's.
ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ")


# A day that Llama 3's templates want, else they tell one of 2024, and one that Firefunction's cannot do without.
DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}


class TemplateFailed(Exception):
    """What a template raised, or why its process ended."""


class ChatTemplate:
    """A template as model files carry it. It is a program from a stranger, so it runs in a process of its own, whose
    time, memory and output are limited (chat_template_process.py). The process lives as long as the template; threads
    take turns, and a fork starts its own."""

    def __init__(self, source: str, **tokens: str) -> None:
        """tokens: what the template may want to write, such as bos_token="<s>"."""
        self.source, self._tokens = source, tokens
        self._process: TemplateProcess | None = None
        # Firefunction's reads no tools, but their JSON.
        self._wants_functions = isinstance(source, str) and bool(re.search(r"\+ *functions\b", source))
        try:
            if not isinstance(source, str):
                raise TemplateFailed(f"it is {type_of(source)}, not a text")
            self._running()
        except TemplateFailed as error:
            problem = f"the model's jinja2 template (tokenizer.chat_template) cannot be used: {error}"
            raise ModelError(failure("llm.load", problem)) from None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """Return the text of a conversation, up to where the model's next answer begins.

        tools: functions that the model may call, as OpenAI describes them; templates that know none ignore them.
        variables: others that the template reads, such as enable_thinking.
        """
        others = [message for message in messages if not isinstance(message, Mapping)]
        if others:
            raise DataError(
                bad_argument("llm.chat", "an item of messages", type_of(others[0]), "a dict with role and content")
            )
        given = {"messages": [dict(message) for message in messages]}
        names = {"add_generation_prompt": True, **self._tokens, **variables, **given}
        if tools:
            names["tools"] = [dict(tool) for tool in tools]
        if self._wants_functions:
            names["functions"] = json.dumps(names["tools"], indent=2, ensure_ascii=False) if tools else ""
        try:
            while True:
                process = self._running()
                with process.turn:
                    if process.is_ours():  # else another thread's text has ended it
                        return process.ask(names)
        except TemplateFailed as error:
            roles = [message.get("role") for message in messages]
            problem = f"the model's chat template failed for messages with the roles {roles}: {error}"
            raise ModelError(failure("llm.chat", problem)) from None

    def dates(self) -> dict[str, str]:
        """Today, in the variables that the template wants it in."""
        return {name: f"{date.today():{form}}" for name, form in DATES.items() if name in self.source}

    def _running(self) -> TemplateProcess:
        """A process of this one that has compiled the template."""
        if self._process is None or not self._process.is_ours():
            process = _next_process()
            process.ask(self.source)
            self._process = process
        return self._process


class TemplateProcess:
    """A process for one template. It answers one request at a time: whoever asks holds `turn`."""

    def __init__(self) -> None:
        folders = [str(folder_of(package, "llm").parent) for package in ("jinja2", "markupsafe")]
        # Isolated from settings, folders and packages of the user: it starts faster, and nothing else is imported.
        command = [sys.executable or "", "-I", "-S", *map(os.path.abspath, (chat_template_process.__file__, *folders))]
        self.turn, self._owner = threading.Lock(), os.getpid()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=os.sep,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # Ctrl-C at the terminal is for us alone
            )
        except OSError as error:
            raise TemplateFailed(f"its process does not start ({error})") from None
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def is_ours(self) -> bool:
        """Whether it runs, and was not started before a fork."""
        return self._owner == os.getpid() and self._end.alive

    def ask(self, request: Any) -> str:
        """The text that the process answers; raises TemplateFailed for anything else."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateFailed(f"the messages are not JSON: {error}") from None
        answer = b""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with contextlib.suppress(OSError):  # it has ended
                self._process.stdin.write(line)
                self._process.stdin.flush()
                line = self._process.stdout.readline()
                answer = line if line.endswith(b"\n") else b""
        finally:
            if not answer:  # it has ended, or we were interrupted and nobody will wait for its answer
                self._end()
        if not answer:
            raise TemplateFailed(self._why_ended())
        found = json.loads(answer)
        if "error" in found:
            raise TemplateFailed(found["error"])
        return str(found["text"])

    def _why_ended(self) -> str:
        status = self._process.returncode
        if sys.platform != "win32" and status == -signal.SIGPROF:
            return f"it ran for more than {chat_template_process.SECONDS} s"
        return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Nothing is left of it. A fork leaves it to the one that started it."""
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # so that Popen does not look for it
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not sent
                pipe.close()


_started: list[TemplateProcess] = []


def _next_process() -> TemplateProcess:
    """The process that was started early, unless another thread has it or a fork has left it behind."""
    with contextlib.suppress(IndexError):
        early = _started.pop()
        if early.is_ours():
            return early
    return TemplateProcess()


def start_process() -> None:
    """Start the process of the next template. Its imports take longer than anything else, and a model can load
    meanwhile."""
    with contextlib.suppress(TemplateFailed):  # which the template will tell
        _started[:] = [TemplateProcess()]
