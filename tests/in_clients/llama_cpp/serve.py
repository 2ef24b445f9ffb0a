"""llama-server's options, as llama.cpp's tests give them, become those of `billfish serve`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stand_ins import sentence_model, story_model

# Of speed and memory, of logs, of random numbers, and of what is always on.
NEUTRAL = (
    "--no-jinja",
    "--jinja",
    "--offline",
    "--cont-batching",
    "--embedding",
    "--metrics",
    "--no-slots",
)
NEUTRAL_WITH_VALUE = ("--batch-size", "--ubatch-size", "--threads", "--seed", "-fa", "--cache-ram", "--hf-file")
# Templates that llama-server has built in.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
COMMAND_R = (
    "{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "<|{{ 'CHATBOT' if message.role == 'assistant' else message.role | upper }}_TOKEN|>"
    "{{ message.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA_3, "command-r": COMMAND_R}


class ServerStart(subprocess.SubprocessError):
    """The server cannot be started as a test wants it."""


def billfish_options(arguments: list[str], folder: Path) -> list[str]:
    """folder: for models that stand in for others. Raises ServerStart for an option that has no counterpart."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in NEUTRAL:
        parser.add_argument(name, action="store_true")
    for name in NEUTRAL_WITH_VALUE:
        parser.add_argument(name)
    parser.add_argument("--port", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--temp", type=float, required=True)
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--n-predict", type=int)
    parser.add_argument("--alias")
    parser.add_argument("--api-key")
    parser.add_argument("--hf-repo", default="")
    parser.add_argument("--chat-template")
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--reranking", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--reasoning", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--cors-origins", default="*")
    parser.add_argument("--pooling", choices=["mean", "last"], default="mean")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ServerStart(f"no such option: {error}") from None
    if unknown:
        raise ServerStart(f"no such option: {' '.join(unknown)}")

    wanted = f"{given.hf_repo} {given.hf_file}"
    if "stories260K" in wanted or not given.hf_repo:
        template = given.chat_template and TEMPLATES.get(given.chat_template, given.chat_template)
        if given.chat_template_file:
            template = given.chat_template_file.read_text()
        model = story_model(folder, template, given.temp)
    elif "bert-bge-small" in wanted or "jina-reranker" in wanted:
        model = sentence_model(folder, given.pooling)
    else:
        raise ServerStart(f"no such model: {wanted}")

    options = ["serve", str(model), "--host", given.host, "--port", given.port, "--streams", str(given.parallel)]
    options += ["--context", str(given.ctx_size // given.parallel), "--threads", "1", "--activations", "exact"]
    options += ["--alias", given.alias] if given.alias else []
    options += ["--api-key", given.api_key] if given.api_key else []
    options += ["--verbose"] if given.verbose else []
    options += ["--reasoning-effort", "none" if given.reasoning == "off" else "medium"]  # llama-server's default is on
    if given.api_key or given.cors_origins != "*":  # billfish refuses strangers' pages without keys
        options += ["--cors-origin", given.cors_origins]
    return options


def _serve(options: list[str], log: str) -> None:
    """Runs in a process of its own."""
    from billfish.cli.main import main  # this process of the tests needs nothing of billfish

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(main(options))


class ServerProcess:
    """`billfish serve` with what llama.cpp's tests use of subprocess.Popen.

    It is forked from a process that has imported all it needs, and a test whose server starts as that of the test
    before gets the same one: these tests start some hundred servers.
    """

    _kept: tuple[list[str], Any] | None = None  # the options of a running server, and its process

    def __init__(self, command: list[str], **_: Any) -> None:
        folder = Path(os.environ["STAND_INS"])
        options = billfish_options(command[1:], folder)
        kept, ServerProcess._kept = ServerProcess._kept, None
        if kept is not None and kept[0] == options and kept[1].exitcode is None:
            self._process = kept[1]
        else:
            if kept is not None:
                end(kept[1])
            self._process = _context().Process(target=_serve, args=(options, str(folder / "servers.log")))
            self._process.start()
        self._options, self.pid, self.returncode = options, self._process.pid, None

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        ServerProcess._kept = (self._options, self._process)

    def wait(self, timeout: float | None = None) -> int:
        return 0

    @classmethod
    def end_kept(cls) -> None:
        if cls._kept is not None:
            end(cls._kept[1])


def end(process: Any) -> None:
    process.terminate()
    process.join(10)
    if process.exitcode is None:
        process.kill()
        process.join()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["billfish.cli.main", "billfish.llm", "billfish.serving.http.server", "uvicorn"])
    return context
