"""`billfish run`: an answer or a chat in the terminal."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import stat
import sys
import time
from typing import TextIO

from billfish.cli.model_arguments import add_model_arguments, load_model, set_threads
from billfish.core.errors import DataError, ModelError, complaint
from billfish.core.terminal import Style
from billfish.llm.chat_template import Message, start_process
from billfish.llm.generation import Generation
from billfish.llm.kv_cache import Cache
from billfish.llm.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "-p", "--prompt", metavar="TEXT", help="answer this, and what standard input adds; without it, chat"
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=512, metavar="N", help="the longest answer, in tokens (default: 512)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 is greedy decoding (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus sampling: keep the smallest set of tokens with total probability P (default: 1)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less than P times as likely as the best one (default: 0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="divide the logits of tokens already seen by R (default: 1, off)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (default: 0, all)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON: the answer and all about it")


def run(arguments: argparse.Namespace) -> None:
    """Answer one prompt, or hold a chat."""
    started = time.perf_counter()
    set_threads("run", arguments.threads)
    chat = arguments.prompt is None and sys.stdin.isatty()
    if chat and arguments.json:
        raise DataError(complaint("run", "--json", "a chat", "a prompt: -p TEXT, or standard input"))
    for option, text in (("--prompt", arguments.prompt), ("--system", arguments.system)):
        _check_text(option, text or "")
    prompt = "" if chat else _prompt(arguments.prompt)
    if not arguments.raw:
        start_process()
    model = load_model("run", arguments, arguments.model)
    if not arguments.raw and model.template is None:
        takes = "one with a chat template, or --raw, which continues the prompt as it is"
        raise ModelError(complaint("run", "MODEL", f"{model.config.name}, which has no chat template", takes))
    if chat:
        Chat(model, arguments).talk()
        return
    conversation = prompt if arguments.raw else [*_system(arguments), {"role": "user", "content": prompt}]
    answer = _generate(model, arguments, conversation)
    pieces, first_token = [], 0.0
    try:
        for text in answer:
            first_token = first_token or time.perf_counter() - started
            pieces.append(text)
            if not arguments.json:
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not arguments.json:
            print(" …")
        raise
    first_token = first_token or time.perf_counter() - started
    if arguments.json:
        print(json.dumps(_record("".join(pieces), answer, first_token, model)))
    else:
        print()
        print_rates(answer, model, sys.stderr, first_token)


def _prompt(given: str | None) -> str:
    """-p TEXT, standard input, or both with an empty line between them: a question, and the text that it is about."""
    text = _read_input() if given is None or _is_piped(sys.stdin) else ""
    if given is None and not text.strip():
        takes = "a prompt: -p TEXT, or a text in standard input. In a terminal, `billfish run` is a chat"
        raise DataError(complaint("run", "standard input", "no text", takes))
    return "\n\n".join(part for part in (given, text) if part)


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
        raise DataError(complaint("run", "standard input", error, "a text in UTF-8")) from None
    return _check_text("standard input", text)


def _check_text(argument: str, text: str) -> str:
    """Raises for what has bytes that are no UTF-8: Python makes lone surrogates of them, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(complaint("run", argument, error, "a text in UTF-8")) from None
    return text


def _system(arguments: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": arguments.system}] if arguments.system is not None else []


def _generate(
    model: Model, arguments: argparse.Namespace, prompt: str | list[Message], cache: Cache | None = None
) -> Generation:
    a = arguments
    return model.stream(
        prompt,
        max_tokens=a.max_tokens,
        temperature=a.temperature,
        top_k=a.top_k,
        top_p=a.top_p,
        min_p=a.min_p,
        repetition_penalty=a.repetition_penalty,
        seed=a.seed,
        activations=a.activations,
        raw=a.raw,
        cache=cache,
    )


def _record(text: str, answer: Generation, first_token: float, model: Model) -> dict[str, object]:
    return {
        "text": text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "generated_tokens": len(answer.tokens),
        "prompt_tok_per_s": round(answer.prompt_rate, 2),
        "generation_tok_per_s": round(answer.generation_rate, 2),
        "time_to_first_token_s": round(first_token, 4),
        "model": model.config.name,
        "kernels": model.decoder.kernels,
    }


def print_rates(answer: Generation, model: Model, out: TextIO, first_token: float | None = None) -> None:
    """One line: how fast it was, and on which kernels."""
    facts = [
        f"prompt {answer.prompt_tokens} tokens, {answer.prompt_rate:.0f}/s",
        f"answer {len(answer.tokens)} tokens, {answer.generation_rate:.0f}/s",
    ]
    if first_token is not None:
        facts.append(f"first token after {first_token:.2f} s")
    facts.append(model.decoder.about)
    if answer.context_full:
        facts.append(f"stopped: the context of {model.config.context} tokens is full")
    print(Style(out)(" · ".join(facts), "dim"), file=out)


HELP = """\
/clear          forget the conversation
/system TEXT    tell the model this before the conversation, which starts anew
/exit           end the chat, as Ctrl-D does
Ctrl-C stops an answer. Anything else is said to the model."""


class Chat:
    """A conversation in the terminal. Ctrl-C stops an answer, /exit or Ctrl-D ends the chat, /help tells the rest."""

    def __init__(self, model: Model, arguments: argparse.Namespace) -> None:
        self._model, self._arguments = model, arguments
        self._start: list[Message] = _system(arguments)
        self._messages = self._start
        self._cache = model.cache()

    def talk(self) -> None:
        importlib.import_module("readline")  # input() then has history and editing
        print(f"{self._model.config.name}. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists the commands.")
        while True:
            try:
                said = _check_text("what was typed", input("> ").strip())
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
            print("The conversation starts anew.")
        elif word == "/system":
            self._start = [{"role": "system", "content": rest}] if rest else []
            self._messages = self._start
            print("The conversation starts anew.")
        elif word == "/help":
            print(HELP)
        else:
            print(f"There is no command {word}. /help lists the commands.")

    def answer(self, said: str) -> None:
        """Print the answer to one message and remember both."""
        messages = [*self._messages, {"role": "user", "content": said}]
        prompt = said if self._arguments.raw else messages
        try:
            answer = _generate(self._model, self._arguments, prompt, cache=self._cache)
        except ModelError as error:  # such as a history that has outgrown the context
            print(f"billfish: {error} The conversation starts anew.", file=sys.stderr)
            self._messages = self._start
            return
        pieces = []
        try:
            for text in answer:
                pieces.append(text)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        except ModelError as error:  # such as a GPU without memory for more
            print(f"\nbillfish: {error}", file=sys.stderr)
        print()
        print_rates(answer, self._model, sys.stderr)
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
