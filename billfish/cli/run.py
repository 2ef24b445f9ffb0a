"""`billfish run`: an answer or a chat in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from billfish.cli.model_arguments import (
    add_draft_arguments,
    add_lora_argument,
    add_model_arguments,
    load_adapters,
    load_draft,
    load_model,
    set_threads,
)
from billfish.core.errors import DataError, ModelError, readable
from billfish.core.files import read_text
from billfish.core.terminal import Style
from billfish.llm.chat_answer import EFFORT_NAMES, ChatAnswer
from billfish.llm.chat_template import Message, start_process
from billfish.llm.conversation.reader import PlainReader
from billfish.llm.generation import Generation
from billfish.llm.kv_cache import Cache
from billfish.llm.model import Model
from billfish.llm.sampling_defaults import sampling_defaults, with_defaults

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, option="; then a positional argument is the PROMPT")
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the same as -p TEXT (default: start a chat)")
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="prompt; -f FILE and piped standard input are appended to it (default: start a chat)",
    )
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="prompt in a text file, appended to -p if both are given (default: none)",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: that of the chat template, if any)")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat template (default: off)"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=512, metavar="N", help="longest answer, in tokens (default: 512)"
    )
    parser.add_argument(
        "-c",
        "--context",
        type=int,
        metavar="N",
        help="longest prompt and answer together, in tokens (default: the context length of the model)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before TEXT would appear in the answer; may be repeated (default: none)",
    )
    parser.add_argument(
        "--reasoning-effort",
        choices=EFFORT_NAMES,
        help="reasoning effort, where the chat template knows it; none and minimal turn thoughts off (default: that of "
        "the model)",
    )
    parser.add_argument(
        "--reasoning-budget",
        type=int,
        metavar="N",
        help="most tokens of thoughts; behind them the model goes on with its answer; below 0 is no limit "
        "(default: -1)",
    )
    add_draft_arguments(parser)
    add_lora_argument(parser, "name of it; the last one answers")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else (default: off)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 is greedy decoding (default: what the model's files recommend, else 0.8)",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="keep the K most likely tokens; 0 is all (default: the model's recommendation, else 0)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="nucleus sampling: keep the smallest set of tokens with total probability P (default: the model's "
        "recommendation, else 0.95, or 1 with --temperature)",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens less than P times as likely as the most likely one (default: the model's recommendation, "
        "else 0)",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="lower the logits of tokens that occurred before by the factor R; 1 is off (default: the model's "
        "recommendation, else 1)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="random seed; the same seed gives the same answer; no effect at temperature 0 (default: a random one)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer one prompt, or hold a chat."""
    started = time.perf_counter()
    set_threads("run", arguments.threads)
    path, given = model_and_prompt(arguments)
    if path is not None and " " in path and not os.path.lexists(path):
        order = "the first argument is the model and the second the prompt"
        raise DataError(f"run: no such file or folder: {readable(path)}. Without -m or -p, {order}.")
    chat = given is None and arguments.file is None and sys.stdin.isatty()
    if chat and arguments.json:
        raise DataError("run: A chat has no --json. Pass a prompt: -p TEXT, -f FILE or standard input.")
    for option in ("reasoning_effort", "reasoning_budget"):
        if arguments.raw and getattr(arguments, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise DataError(
                f"run: {name} has no effect with --raw, which uses no chat template. Leave one of them out."
            )
    for option, text in (("the prompt", given), ("--system", arguments.system)):
        _check_text(option, text or "")
    prompt = "" if chat else _prompt(given, arguments.file)
    if not arguments.raw:
        start_process()
    model = load_model("run", arguments, path)
    model.decoder.check_answers("run")
    load_adapters(model, arguments.lora)
    if not arguments.raw and model.template is None:
        raise ModelError(f"run: {readable(model.config.name)} has no chat template. Pass --raw to continue the prompt.")
    if arguments.context is not None and not 1 <= arguments.context <= model.config.context:
        most = f"the context length of {readable(model.config.name)} is {model.config.context} tokens"
        raise DataError(f"run: --context {arguments.context} does not fit: {most}.")
    arguments.draft = load_draft("run", arguments, model)
    if chat:
        Chat(model, arguments).talk()
        return
    conversation = prompt if arguments.raw else [*_system(arguments), {"role": "user", "content": prompt}]
    answer = _answer(model, arguments, conversation)
    first_token = 0.0
    printer = Printer()
    try:
        for delta in answer:
            first_token = first_token or time.perf_counter() - started
            if not arguments.json:
                printer.show(delta)
    except KeyboardInterrupt:
        if not arguments.json:
            printer.end(" …")
        raise
    first_token = first_token or time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_record(answer, first_token, model)))
    else:
        printer.end()
        print_rates(answer.generation, model, arguments.context, first_token)


def model_and_prompt(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The model and the prompt: two arguments, or the prompt alone behind -m MODEL, or options."""
    words = [word for word in (arguments.model, arguments.text) if word is not None]
    model = arguments.model_option if arguments.model_option is not None or not words else words.pop(0)
    if len(words) > (arguments.prompt is None):
        twice = "the model as MODEL or with -m, and the prompt as PROMPT or with -p"
        raise DataError(f"run: There is one argument too many: {readable(repr(words[-1]))}. Pass {twice}.")
    return model, words[0] if words else arguments.prompt


def _prompt(given: str | None, file: str | None) -> str:
    """The prompt of the command line, a file and standard input, with an empty line between them: a question, and the
    text that it is about."""
    parts = [given, None if file is None else read_text("run", "--file", file).removesuffix("\n")]
    if parts == [None, None] or _is_piped(sys.stdin):
        parts.append(_read_input())
    text = "\n\n".join(part for part in parts if part)
    if given is None and not text.strip():
        raise DataError(
            "run: There is no prompt: standard input is empty. Pass -p TEXT or -f FILE; in a terminal, it is a chat."
        )
    return text


def _is_piped(stream: TextIO) -> bool:
    """Whether somebody sends a text: a pipe or a file, and no terminal, /dev/null or service's socket."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_input() -> str:
    """All of standard input. The newline at its end is `echo`'s, or the editor's: a model would take it for a part of
    the question."""
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"run: standard input is no text in UTF-8 ({error}).") from None
    return _check_text("standard input", text)


def _check_text(argument: str, text: str) -> str:
    """Raises for what has bytes that are no UTF-8: Python makes lone surrogates of them, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"run: {argument} is no text in UTF-8 ({error}).") from None
    return text


def _system(arguments: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": arguments.system}] if arguments.system is not None else []


def _answer(
    model: Model, arguments: argparse.Namespace, prompt: str | list[Message], cache: Cache | None = None
) -> ChatAnswer:
    """The answer to a conversation, or to a text that is continued as it is. Nothing is decoded yet."""
    a = arguments
    settings: dict[str, Any] = {
        "max_tokens": a.max_tokens,
        "seed": secrets.randbits(32) if a.seed is None else a.seed,
        "stop": a.stop,
        "draft": a.draft,
        "draft_length": a.draft_length,
        "activations": a.activations,
        "cache": cache,
        "adapter": a.lora[-1][0] if a.lora else None,
        **with_defaults(sampling_defaults(model), {name: getattr(a, name) for name in SETTINGS}),
    }
    if isinstance(prompt, str):
        answer = ChatAnswer(model.stream(prompt, raw=True, **settings), PlainReader())
    else:
        effort, budget = a.reasoning_effort, a.reasoning_budget
        answer = model.chat_stream(prompt, reasoning_effort=effort, reasoning_budget=budget, **settings)
    if a.context is not None:
        if answer.generation.prompt_tokens > a.context:
            got = f"The prompt has {answer.generation.prompt_tokens} tokens, and the context {a.context}"
            fix = f"Shorten the prompt, or raise --context: the model has {model.config.context}"
            raise ModelError(f"run: {got}. {fix}.")
        answer.generation.limit_context(a.context)
    return answer


class Printer:
    """Prints an answer as it comes: its text on standard output, what the model thinks on standard error."""

    def __init__(self) -> None:
        self._style, self._thinks = Style(sys.stderr), False

    def show(self, delta: Mapping[str, Any]) -> None:
        """The next piece, as OpenAI's streams have it."""
        if thought := delta.get("reasoning_content"):
            print(self._style(thought, "dim"), end="", file=sys.stderr, flush=True)
        elif self._thinks:
            print("\n", file=sys.stderr, flush=True)
        self._thinks = bool(thought)
        print(delta.get("content") or "", end="", flush=True)

    def end(self, mark: str = "") -> None:
        """mark: of an answer that was stopped. It stands where the answer has ended, in a thought or behind it."""
        print(mark, file=sys.stderr if self._thinks else sys.stdout)


def _record(said: ChatAnswer, first_token: float, model: Model) -> dict[str, object]:
    answer = said.generation
    return {
        "text": said.content,
        "reasoning_content": said.reasoning_content,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": len(answer.tokens),
        "prompt_tok_per_s": round(answer.prompt_rate, 2),
        "generation_tok_per_s": round(answer.generation_rate, 2),
        "time_to_first_token_s": round(first_token, 4),
        "drafted_tokens": answer.drafts.drafted,
        "accepted_tokens": answer.drafts.accepted,
        "tokens_per_step": round((len(answer.tokens) - 1) / answer.drafts.steps, 3) if answer.drafts.steps else None,
        "model": model.config.name,
        "kernels": model.decoder.kernels,
    }


def print_rates(answer: Generation, model: Model, context: int | None, first_token: float | None = None) -> None:
    """One line on standard error: how fast it was, and on which kernels."""
    facts = []
    for what, count, rate in (
        ("prompt", answer.prompt_tokens, answer.prompt_rate),
        ("answer", len(answer.tokens), answer.generation_rate),
    ):
        facts.append(f"{what} {count} token{'s' * (count != 1)}" + (f", {rate:.0f} tok/s" if rate else ""))
    if answer.drafts.drafted:
        facts.append(f"{answer.drafts.accepted} of {answer.drafts.drafted} drafted tokens were right")
    if first_token is not None:
        facts.append(f"first token after {first_token:.2f} s")
    facts.append(model.decoder.about)
    limit = context or model.config.context
    if answer.finish_reason == "length" and answer.prompt_tokens + len(answer.tokens) > limit:
        facts.append(f"stopped: the context of {limit} tokens is full")
    print(Style(sys.stderr)(" · ".join(facts), "dim"), file=sys.stderr)


HELP = """\
/clear          start a new conversation
/system TEXT    set the system message, and start a new conversation
/regen          answer the last message again
/save FILE      write the conversation to FILE, as JSON
/exit           end the chat, as Ctrl-D does
A line that ends with \\ goes on in the next one, and lines between two lines of \"\"\" are one message.
Ctrl-C stops an answer. Anything else is sent to the model."""
MARK = '"""'  # around a message of several lines


def _message() -> str:
    """What the user types: a line, lines that end with a backslash, or lines between marks."""
    line = input("> ")
    if line.strip() == MARK:
        lines = []
        while (line := input(". ")).strip() != MARK:
            lines.append(line)
        return "\n".join(lines).strip()
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines).strip()


class Chat:
    """A conversation in the terminal. Ctrl-C stops an answer, /exit or Ctrl-D ends the chat, /help tells the rest."""

    def __init__(self, model: Model, arguments: argparse.Namespace) -> None:
        self._model, self._arguments = model, arguments
        self._start: list[Message] = _system(arguments)
        self._messages = self._start
        self._cache = model.cache()

    def talk(self) -> None:
        with contextlib.suppress(ImportError):  # Python on Windows has none; its terminal edits lines
            importlib.import_module("readline")  # input() then has history and editing
        print(f"{self._model.config.name}. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands.")
        while True:
            try:
                said = _check_text("what was typed", _message())
            except (DataError, UnicodeDecodeError) as error:
                print(f"billfish: {error}", file=sys.stderr)
                continue
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            word, _, rest = said.partition(" ")
            if word == "/exit":
                return
            if re.fullmatch(r"/[a-z]+", word):  # a path such as /usr/bin is something to talk about
                self.obey(word, rest.strip())
            elif said:
                self.answer(said)

    def obey(self, word: str, rest: str) -> None:
        """A command of the chat itself."""
        if word == "/clear":
            self._messages = self._start
            print("Started a new conversation.")
        elif word == "/system":
            self._start = [{"role": "system", "content": rest}] if rest else []
            self._messages = self._start
            print("Started a new conversation.")
        elif word == "/regen":
            self.answer_again()
        elif word == "/save":
            self.save(rest)
        elif word == "/help":
            print(HELP)
        else:
            print(f"unknown command {word}. /help lists all.")

    def answer_again(self) -> None:
        """Another answer to the last message."""
        asked = [index for index, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            print("There is no message to answer yet.")
            return
        said = str(self._messages[asked[-1]]["content"])
        self._messages = self._messages[: asked[-1]]
        self.answer(said)

    def save(self, path: str) -> None:
        """Write the conversation to a file that does not exist yet."""
        if not path:
            print("/save needs the name of a file: /save chat.json")
            return
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump(self._messages, file, ensure_ascii=False, indent=1)
        except OSError as error:
            print(f"cannot write {readable(path)}: {error.strerror}")
            return
        print(f"Wrote {len(self._messages)} messages to {readable(path)}.")

    def answer(self, said: str) -> None:
        """Print the answer to one message and remember both."""
        messages = [*self._messages, {"role": "user", "content": said}]
        prompt = said if self._arguments.raw else messages
        try:
            answer = _answer(self._model, self._arguments, prompt, cache=self._cache)
        except ModelError as error:  # such as a history that has outgrown the context
            print(f"billfish: {str(error).rstrip('.')}. Started a new conversation.", file=sys.stderr)
            self._messages = self._start
            return
        printer = Printer()
        try:
            for delta in answer:
                printer.show(delta)
            printer.end()
        except KeyboardInterrupt:
            printer.end(" …")
        except ModelError as error:  # such as a GPU without memory for more
            printer.end()
            print(f"billfish: {error}", file=sys.stderr)
        print_rates(answer.generation, self._model, self._arguments.context)
        self._messages = [*messages, answer.message]
