"""SmolLM2 for eight clients: `billfish serve` beside the decoder's own eight streams, and llama.cpp's server.

    python -m benchmarks.serving_speed [--threads 2] [--rounds 3] [--llama-server FILE] [--json FILE]

Each client streams 128 tokens; the figure is the tokens of all per second, from the first request to the last token.
The decoder's own streams are `generate_batch` of the same prompts. Then the time to the first token of a prompt of 20
tokens, on an idle server and while seven other clients generate. x is in q8. Servers run in processes of their own, one
of them busy at a time, and take turns; figures are medians. llama.cpp's server is the program that --llama-server
names, with eight slots, or else that of the package llama-cpp-python; without both, it is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import billfish
from benchmarks.products.limits import cpu_name
from benchmarks.serving_client import billfish_server, events, free_port, other_server, posted
from billfish.backends.cpu import _cpu
from billfish.core.files import write_atomically
from billfish.llm import Model, default_model, load

CLIENTS, TOKENS, PROMPT_TOKENS = 8, 128, 20
OURS, THEIRS, DECODER = "billfish serve", "llama.cpp's server", "the decoder"
OPENING = "Once upon a time there was a king of {} who had three daughters, and the youngest of them"
LANDS = ["Spain", "France", "Norway", "Poland", "Greece", "Egypt", "Persia", "India"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server", metavar="FILE", help="llama.cpp's program of that name")
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    path, threads = default_model(), arguments.threads
    _cpu.set_threads(threads)
    model = load(path, device="cpu", progress=False)
    rates: dict[str, list[float]] = {}
    first: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        servers = {OURS: stack.enter_context(ours(path, threads))}
        command = peer_command(arguments.llama_server, path, threads)
        if command is None:
            print(f"{THEIRS} is left out: there is neither --llama-server nor the package llama_cpp.server")
        else:
            servers[THEIRS] = stack.enter_context(other_server(*command))
        for round_ in range(arguments.rounds + 1):  # the first warms up
            found = {DECODER: decoder_rate(model)}
            waits: dict[tuple[str, str], float] = {}
            for name, server in servers.items():
                found[name] = clients_rate(server.url)
                waits[name, "idle"] = first_token_seconds(server.url, model, 2 * round_)
                with others_generating(server.url):
                    waits[name, "busy"] = first_token_seconds(server.url, model, 2 * round_ + 1)
            if round_:
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
                for key, seconds in waits.items():
                    first.setdefault(key, []).append(seconds)
    report(arguments, path, model, rates, first)


def ours(path: Path, threads: int) -> Any:
    words = ("--device", "cpu", "--activations", "q8", "--threads", str(threads), "--streams", str(CLIENTS))
    return billfish_server(str(path), *words, "--context", "512")


def peer_command(program: str | None, path: Path, threads: int) -> tuple[list[str], int] | None:
    """How llama.cpp's server is started, and its port."""
    port = free_port()
    if program is not None:
        words = f"-t {threads} -tb {threads} -np {CLIENTS} -c {512 * CLIENTS} --port {port}".split()
        return [program, "-m", str(path), *words], port
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    words = f"--n_threads {threads} --n_threads_batch {threads} --n_ctx 512 --port {port}".split()
    return [sys.executable, "-m", "llama_cpp.server", "--model", str(path), *words], port


def decoder_rate(model: Model) -> float:
    """Tokens per second of eight streams without a server."""
    prompts = [OPENING.format(land) for land in LANDS]
    started = time.perf_counter()
    texts = model.generate_batch(prompts, max_tokens=TOKENS, activations="q8", raw=True)
    seconds = time.perf_counter() - started
    if min(len(model.tokenizer.encode(text)) for text in texts) < 0.8 * TOKENS:  # a text may take fewer than it had
        raise SystemExit("an answer ended early: its tokens cannot be counted")
    return len(texts) * TOKENS / seconds


def clients_rate(url: str) -> float:
    """Tokens per second of eight clients that come at once."""
    counts: list[int] = []
    threads = [threading.Thread(target=lambda land=land: counts.append(generated(url, land))) for land in LANDS]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if len(counts) < CLIENTS:
        raise SystemExit("a client got no answer")
    return sum(counts) / seconds


def generated(url: str, land: str) -> int:
    """Tokens that one client gets, which must be all that it asked for."""
    body = {"prompt": OPENING.format(land), "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with posted(url, "/v1/completions", body) as answer:
        reasons = [event["choices"][0]["finish_reason"] for event in events(answer) if event["choices"]]
    if reasons[-1] != "length":
        raise SystemExit(f"an answer ended early: {reasons[-1]}")
    return TOKENS


class others_generating:
    """While seven other clients get answers, one after another."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self._threads = [threading.Thread(target=self._generate, args=(land,)) for land in LANDS[1:]]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        time.sleep(1)  # all are past their prompts

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _generate(self, land: str) -> None:
        body = {"prompt": OPENING.format(land), "max_tokens": 400, "temperature": 0, "stream": True}
        while not self._over.is_set():
            with posted(self._url, "/v1/completions", body) as answer:
                for _ in events(answer):
                    if self._over.is_set():
                        break


def first_token_seconds(url: str, model: Model, number: int) -> float:
    """Until the first text of an answer: the median of five prompts, none of which was there before."""
    waits = []
    for prompt in fresh_prompts(model, number, 5):
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
        started = time.perf_counter()
        with posted(url, "/v1/completions", body) as answer:
            for event in events(answer):
                if event["choices"] and event["choices"][0]["text"]:
                    waits.append(time.perf_counter() - started)
                    break
    return statistics.median(waits)


def fresh_prompts(model: Model, number: int, count: int) -> Iterator[str]:
    """Texts of 20 tokens that begin differently."""
    for each in range(count):
        tokens = model.tokenizer.encode(f"{number * count + each} " + OPENING.format(LANDS[each]) * 2)
        yield model.tokenizer.decode(tokens[:PROMPT_TOKENS])


def report(
    arguments: argparse.Namespace,
    path: Path,
    model: Model,
    rates: dict[str, list[float]],
    first: dict[tuple[str, str], list[float]],
) -> None:
    """Print the medians, and write them down."""
    records: list[dict[str, Any]] = []
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in middle.items():
        records.append({"what": "8 streams", "who": name, "tokens_per_s": rate, "ratio": rate / middle[DECODER]})
        print(f"{name:20} {rate:8.1f} tok/s   {rate / middle[DECODER]:.2f} of the decoder's")
    if THEIRS in middle:
        print(f"{OURS} is {middle[OURS] / middle[THEIRS]:.2f} times {THEIRS}")
    waits = {key: statistics.median(values) for key, values in first.items()}
    for (name, state), seconds in waits.items():
        ratio = seconds / waits[name, "idle"]
        records.append({"what": f"first token, {state}", "who": name, "seconds": seconds, "ratio": ratio})
        print(f"{name:20} {1000 * seconds:8.1f} ms to the first token, {state}   {ratio:.2f} of idle")
    if arguments.json:
        about = {
            "cpu": f"{platform.machine()} {cpu_name()}",
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "kernels": model.decoder.kernels,
            "billfish": billfish.__version__,
            "peer": "llama_cpp.server" if arguments.llama_server is None else "llama-server",
            "model": path.name,
        }
        text = json.dumps({"about": about, "records": records}, indent=1) + "\n"
        write_atomically(Path(arguments.json), text.encode())


if __name__ == "__main__":
    main()
