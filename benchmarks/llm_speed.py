"""SmolLM2-135M-Instruct: billfish beside its peers, in one process and in turns; medians.

    export CMAKE_ARGS=-DGGML_NATIVE=ON         (for this machine: the wheel of ik_llama.cpp on PyPI has no VNNI)
    pip install --no-binary :all: ik-llama-cpp-python llama-cpp-python
    pip install openvino-genai                 (x86_64)

The tables of docs/performance.md. A cold start goes from the start of a process to the first token of a 20-token prompt
on its output, with the file in the page cache and Python's modules compiled, as pip leaves them. With --json, records
of the file that are not measured anew stay there: a peer that is not installed keeps its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, machine, records
from benchmarks.peers.instructions import instructions_of
from benchmarks.peers.llama_cpp import Contender, IkLlamaCpp, LlamaCpp, Ours, Peer
from benchmarks.peers.openvino import OpenVino
from benchmarks.timing import timed
from billfish.backends.cpu import _cpu
from billfish.llm import default_model, load

ACTIVATIONS = ("q8", "q16", "exact")
SHORT_PROMPT, LONG_PROMPT, DEEP_PROMPT = 512, 4096, 16384
CONTEXTS = (4096, 1024)
STREAMS = (1, 2, 4, 8, 16)
FIRST_TOKENS, TOKENS = 128, 32  # that are generated: from nothing; after a context, or in each stream
GROUPS = ("short", "long", "deep", "streams", "cold start")
USUAL = tuple(name for name in GROUPS if name != "deep")  # deep takes minutes
PROMPT = "One two three four five six seven eight nine ten one two three four five six seven eight nine ten"
COLD_OURS = f"from billfish.cli.main import main; main(['run', '--raw', '-n', '1', '-p', {PROMPT!r}])"
COLD_THEIRS = """
import sys, llama_cpp
threads = int(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
llama.eval(llama.tokenize(sys.argv[3].encode(), add_bos=False))
print(llama.detokenize([llama.sample(temp=0)]).decode(), flush=True)
"""
COLD_IK = """
import sys
from ik_llama_cpp import IkLlama
llama = IkLlama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), verbose=False)
print(llama.detokenize(llama.generate(llama.tokenize(sys.argv[3], add_bos=False), max_tokens=1)), flush=True)
"""

Timing = tuple[str, int, float]  # what, how many tokens, seconds


def generate(contender: Contender, tokens: list[int], streams: int = 1) -> float:
    """Seconds for all tokens, so many streams at a time."""
    steps = [tokens[i : i + streams] for i in range(0, len(tokens), streams)]
    return timed(lambda: [contender.step(step) for step in steps])


def short_texts(contender: Contender, tokens: list[int]) -> Iterator[Timing]:
    contender.forget(0)
    yield "generation", FIRST_TOKENS, generate(contender, tokens[:FIRST_TOKENS])
    contender.forget(0)
    yield f"prompt of {SHORT_PROMPT}", SHORT_PROMPT, timed(lambda: contender.feed(tokens[:SHORT_PROMPT]))


def long_texts(contender: Contender, tokens: list[int]) -> Iterator[Timing]:
    contender.forget(0)
    yield f"prompt of {LONG_PROMPT}", LONG_PROMPT, timed(lambda: contender.feed(tokens[:LONG_PROMPT]))
    for context in CONTEXTS:
        contender.forget(context)
        yield f"generation after {context}", TOKENS, generate(contender, tokens[:TOKENS])


def deep_texts(contender: Contender, tokens: list[int]) -> Iterator[Timing]:
    """Past the 8,192 positions that the model was made for: how fast it runs does not depend on what it says."""
    contender.forget(0)
    yield f"prompt of {DEEP_PROMPT}", DEEP_PROMPT, timed(lambda: contender.feed(tokens[:DEEP_PROMPT]))
    yield f"generation after {DEEP_PROMPT}", TOKENS, generate(contender, tokens[:TOKENS])


def many_texts(contender: Contender, tokens: list[int]) -> Iterator[Timing]:
    for streams in STREAMS:
        contender.forget(0)
        count = streams * TOKENS
        yield f"streams: {streams}", count, generate(contender, tokens[:count], streams)


MEASUREMENTS = {"short": short_texts, "long": long_texts, "deep": deep_texts, "streams": many_texts}


def whole_answers(peer: OpenVino, group: str, tokens: list[int]) -> Iterator[Timing]:
    """The same of a peer that gives whole answers, as far as it can: of one text."""
    if group == "short":
        yield "generation", FIRST_TOKENS, FIRST_TOKENS * peer.answer(tokens[:1], FIRST_TOKENS)[1]
    for length in {"short": (SHORT_PROMPT,), "long": CONTEXTS, "deep": (DEEP_PROMPT,)}.get(group, ()):
        first, each = peer.answer(tokens[:length], TOKENS)
        yield f"prompt of {length}", length, first
        yield f"generation after {length}", TOKENS, TOKENS * each


def timings(contender: Contender | OpenVino, group: str, tokens: list[int]) -> Iterator[Timing]:
    if isinstance(contender, OpenVino):
        return whole_answers(contender, group, tokens)
    return MEASUREMENTS[group](contender, tokens)


def cold_starts(path: Path, threads: int, compiled: str) -> Iterator[tuple[str, Timing]]:
    """Of those that are installed."""
    commands = {
        LlamaCpp.name: [COLD_THEIRS, str(path), str(threads), PROMPT],
        IkLlamaCpp.name: [COLD_IK, str(path), str(threads), PROMPT],
        "billfish q16": [COLD_OURS],
    }
    for name, words in commands.items():
        elapsed = seconds_to_first_output(words, compiled)
        if elapsed is not None:
            yield name, ("cold start", 1, elapsed)


def seconds_to_first_output(arguments: list[str], compiled: str) -> float | None:
    """Of a Python process; `compiled` is a folder for its modules. None if it fails without output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    words = [sys.executable, "-c", *arguments]
    started = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - started
        process.stdout.read()
    return elapsed if first and process.returncode == 0 else None


def peers(path: Path, threads: int, positions: int) -> list[Peer | OpenVino]:
    """Those that are installed."""
    kinds: dict[str, Callable[[], Peer | OpenVino]] = {
        IkLlamaCpp.name: lambda: IkLlamaCpp(path, threads, positions),
        LlamaCpp.name: lambda: LlamaCpp(path, threads, positions),
        OpenVino.name: lambda: OpenVino(path, threads),
    }
    found = []
    for name, make in kinds.items():
        try:
            found.append(make())
        except ImportError as error:
            print(f"{name}: {error}; left out")
    return found


def about_peer(peer: Peer | OpenVino) -> dict[str, Any]:
    """With the instructions in its libraries, or none where it makes its kernels when it loads a model."""
    if isinstance(peer, OpenVino):
        return {"version": peer.version, "instructions": None} | machine.today()
    files = importlib.metadata.files(peer.install) or ()
    libraries = [Path(file.locate()) for file in files if ".so" in file.name]
    return {"version": peer.version, "instructions": instructions_of(libraries)} | machine.today()


def records_of(times: dict[tuple[str, str, int], list[float]]) -> list[dict[str, Any]]:
    return [
        {"what": what, "who": who, "tokens": tokens, "seconds": statistics.median(values), "rounds": len(values)}
        for (what, who, tokens), values in times.items()
    ]


def lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """Each record, and how many times as fast as the best peer it is."""
    theirs: dict[str, tuple[float, str]] = {}
    for record in records:
        if not record["who"].startswith("billfish"):
            found = record["seconds"], record["who"]
            theirs[record["what"]] = min(found, theirs.get(record["what"], found))
    for record in records:
        what, took = record["what"], record["seconds"]
        figure = f"{took:.3f} s" if what == "cold start" else f"{record['tokens'] / took:.1f} tok/s"
        ratio = f"{theirs[what][0] / took:.2f} times {theirs[what][1]}" if what in theirs else ""
        yield f"{what:24} {record['who']:16} {figure:>14}   {ratio}"


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=3)
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=USUAL, help="what to measure (default: all but deep)"
    )
    kinds = "activations of billfish (default: all)"
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS, help=kinds)
    flags = parser.parse_args()
    threads, path = flags.threads, default_model()
    _cpu.set_threads(threads)
    positions = (DEEP_PROMPT if "deep" in flags.only else LONG_PROMPT) + TOKENS
    model, found = load(path, device="cpu"), peers(path, threads, positions)
    contenders = [*found, *(Ours(model, activations, positions) for activations in flags.activations)]
    tokens = np.random.default_rng(0).integers(100, 40000, DEEP_PROMPT).tolist()
    times: dict[tuple[str, str, int], list[float]] = {}

    def note(who: str, timing: Timing) -> None:
        what, count, elapsed = timing
        times.setdefault((what, who, count), []).append(elapsed)

    for contender in contenders:  # to warm up
        list(timings(contender, "short", tokens))
    with tempfile.TemporaryDirectory() as compiled:
        if "cold start" in flags.only:
            list(cold_starts(path, threads, compiled))
        for _ in range(flags.rounds):
            for group in MEASUREMENTS:
                for contender in contenders if group in flags.only else ():
                    for timing in timings(contender, group, tokens):
                        note(contender.name, timing)
            for who, timing in cold_starts(path, threads, compiled) if "cold start" in flags.only else ():
                note(who, timing)
    measured = records_of(times)
    print("\n".join(lines(measured)))
    about: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": f"{platform.machine()} {machine.cpu_name()}",
        "threads": threads,
        "kernels": model.decoder.kernels,
        **machine.versions(),
        "peers": {peer.name: about_peer(peer) for peer in found},
        "model": path.name,
    }
    results = {"about": about, "records": measured}
    if flags.json is not None and flags.json.exists():
        results = records.merged(json.loads(flags.json.read_text()), results)
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
