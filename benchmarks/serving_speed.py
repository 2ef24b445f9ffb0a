"""Time SmolLM2 for eight clients: `billfish serve` beside the decoder's own eight streams, and llama.cpp's server.

Each client streams 128 tokens; the figure is the tokens of all per second, from the first request to the last token.
The decoder's own streams are `generate_batch` of the same prompts. Then the time to the first token of a prompt of 20
tokens, on an idle server and while seven other clients generate. x is in q8. Servers run in processes of their own, one
of them busy at a time, and take turns; figures are medians. llama.cpp's server is the program that --llama-server
names, with eight slots, or else that of the package llama-cpp-python; without both, it is left out.
"""

from __future__ import annotations

import importlib.util
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import command, machine, records
from benchmarks.serving_client import billfish_server, events, free_port, other_server, posted
from benchmarks.timing import timed
from billfish.backends.cpu import _cpu
from billfish.llm import Model, default_model, load

CLIENTS, TOKENS, PROMPT_TOKENS = 8, 128, 20
OURS, THEIRS, DECODER = "billfish serve", "llama.cpp's server", "the decoder"
OPENING = "Once upon a time there was a king of {} who had three daughters, and the youngest of them"
LANDS = ["Spain", "France", "Norway", "Poland", "Greece", "Egypt", "Persia", "India"]


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
    prompts, texts = [OPENING.format(land) for land in LANDS], []
    told = {"max_tokens": TOKENS, "activations": "q8", "raw": True}
    seconds = timed(lambda: texts.extend(model.generate_batch(prompts, **told)))
    if min(len(model.tokenizer.encode(text)) for text in texts) < 0.8 * TOKENS:  # a text may take fewer than it had
        raise SystemExit("an answer ended early: its tokens cannot be counted")
    return len(texts) * TOKENS / seconds


def completion(url: str, prompt: str, tokens: int) -> Iterator[Any]:
    """The events of a streamed answer that have a choice; whoever stops reading closes the connection."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    with posted(url, "/v1/completions", body) as answer:
        yield from (event["choices"][0] for event in events(answer) if event["choices"])


def clients_rate(url: str) -> float:
    """Tokens per second of eight clients that come at once."""

    def generate(land: str) -> None:
        reason = [choice["finish_reason"] for choice in completion(url, OPENING.format(land), TOKENS)][-1]
        if reason != "length":
            raise SystemExit(f"an answer ended early: {reason}")

    with ThreadPoolExecutor(CLIENTS) as clients:
        return CLIENTS * TOKENS / timed(lambda: list(clients.map(generate, LANDS)))


@contextmanager
def others_generating(url: str) -> Iterator[None]:
    """While seven other clients get answers, one after another."""
    over = threading.Event()

    def generate(land: str) -> None:
        while not over.is_set():
            for _ in completion(url, OPENING.format(land), 400):
                if over.is_set():
                    break

    threads = [threading.Thread(target=generate, args=(land,)) for land in LANDS[1:]]
    for thread in threads:
        thread.start()
    time.sleep(1)  # all are past their prompts
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def first_token_seconds(url: str, model: Model, number: int) -> float:
    """Until the first text of an answer: the median of five prompts of 20 tokens, none of which was there before."""
    waits = []
    for each, land in enumerate(LANDS[:5]):
        tokens = model.tokenizer.encode(f"{number * 5 + each} " + OPENING.format(land) * 2)
        prompt = model.tokenizer.decode(tokens[:PROMPT_TOKENS])
        waits.append(timed(lambda prompt=prompt: next(c for c in completion(url, prompt, 4) if c["text"])))
    return statistics.median(waits)


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=3)
    parser.add_argument("--llama-server", metavar="FILE", help="llama.cpp's program of that name")
    flags = parser.parse_args()
    path, threads = default_model(), flags.threads
    _cpu.set_threads(threads)
    model = load(path, device="cpu", progress=False)
    rates: dict[str, list[float]] = {}
    first: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        words = f"--device cpu --activations q8 --threads {threads} --streams {CLIENTS} --context 512".split()
        servers = {OURS: stack.enter_context(billfish_server(str(path), *words))}
        peer = peer_command(flags.llama_server, path, threads)
        if peer is None:
            print(f"{THEIRS} is left out: there is neither --llama-server nor the package llama_cpp.server")
        else:
            servers[THEIRS] = stack.enter_context(other_server(*peer))
        for turn in range(flags.rounds + 1):
            rates.setdefault(DECODER, []).append(decoder_rate(model))
            for name, server in servers.items():
                rates.setdefault(name, []).append(clients_rate(server.url))
                first.setdefault((name, "idle"), []).append(first_token_seconds(server.url, model, 2 * turn))
                with others_generating(server.url):
                    first.setdefault((name, "busy"), []).append(first_token_seconds(server.url, model, 2 * turn + 1))
    found: list[dict[str, Any]] = []
    middle = {name: statistics.median(values[1:]) for name, values in rates.items()}  # the first round warms up
    for name, rate in middle.items():
        found.append({"what": "8 streams", "who": name, "tokens_per_s": rate, "ratio": rate / middle[DECODER]})
        print(f"{name:20} {rate:8.1f} tok/s   {rate / middle[DECODER]:.2f} of the decoder's")
    if THEIRS in middle:
        print(f"{OURS} is {middle[OURS] / middle[THEIRS]:.2f} times {THEIRS}")
    waits = {key: statistics.median(values[1:]) for key, values in first.items()}
    for (name, state), seconds in waits.items():
        ratio = seconds / waits[name, "idle"]
        found.append({"what": f"first token, {state}", "who": name, "seconds": seconds, "ratio": ratio})
        print(f"{name:20} {1000 * seconds:8.1f} ms to the first token, {state}   {ratio:.2f} of idle")
    about = {"cpu": f"{platform.machine()} {machine.cpu_name()}", "threads": threads, "rounds": flags.rounds}
    about |= {"kernels": model.decoder.kernels, **machine.versions()}
    about |= {"peer": "llama_cpp.server" if flags.llama_server is None else "llama-server", "model": path.name}
    records.write(flags.json, {"about": about, "records": found})


if __name__ == "__main__":
    main()
