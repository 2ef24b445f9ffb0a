"""Time drafting beside plain decoding of the same model, in turns, on three kinds of answers.

SmolLM2-135M-Instruct, greedy. Every drafted answer is compared with the plain one: they must be the same. --peer also
times llama.cpp with and without the n-gram drafts of llama-cpp-python, in the same turns.

With --device cuda it also times decode steps of a random model with the sizes of Llama-3-8B, by the rows that a
sequence has in them, with CUDA events. A random model has no answers: how many drafts are right comes from SmolLM2, and
is replayed with these times: up to the first draft a step takes the time of a token of a plain answer, then that of a
batch-invariant step. --steps times these steps alone; --replay FILE replays with the steps of such a record.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command, machine, records
from benchmarks.peers.llama_lookup import DRAFTED, LlamaLookup
from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.backends.cuda.driver import check, current, driver
from billfish.core.typing import Activations
from billfish.llm import default_model, load
from billfish.llm.cuda import CudaDecoder
from billfish.llm.drafting.drafter import MOST_DRAFTED, Controller
from billfish.llm.drafting.ngram import NgramDrafter
from billfish.llm.generation import Generation
from billfish.llm.model import Model
from billfish.llm.sampler import Sampling

SETTINGS = """\
[server]
host = 127.0.0.1
port = 8080
workers = 4
timeout = 30

[database]
url = postgres://localhost/shop
pool = 10
timeout = 5

[cache]
kind = redis
host = 127.0.0.1
port = 6379
seconds = 3600

[mail]
host = smtp.example.org
port = 587
user = shop
sender = shop@example.org
"""
STORY = """\
The lighthouse keeper climbed one hundred and twelve steps every evening. At the top he trimmed the lamp, wound the
clockwork and wrote the weather into a book with a blue cover. "The sea forgets nothing," he used to say, "and neither
does the book." When the lamp was electrified in 1931, the company sent a letter that thanked him for his service. He
stayed, unpaid, and wrote the weather into the book until the winter of 1944.
"""


class Workload(NamedTuple):
    prompt: str
    stop: tuple[str, ...] = ()


# The beginning of each answer is given, so that a small model does what it is asked.
WORKLOADS = {
    "rewrite a file": Workload(
        f"The file shop.ini:\n```\n{SETTINGS}```\n\nThe file shop.ini again, with 8 workers instead of 4:\n```\n"
        "[server]\nhost = 127.0.0.1\nport = 8080\nworkers = 8\n",
        ("```",),
    ),
    "summarize and quote": Workload(
        f"Text:\n{STORY}\nThe most important sentences of the text, word for word:\n1. The lighthouse keeper"
    ),
    "free text": Workload("Once upon a time, in a small village at the edge of a dark forest, there lived"),
}
TOKENS, ROUNDS = 160, 5
KINDS = "batch_invariant", "fastest"  # of steps on a GPU
STEPS, CONTEXT = 16, 512  # that are timed together of each number of rows, each behind so many tokens


def answer(model: Model, workload: str, draft: str | None, activations: Activations | None) -> Generation:
    prompt, stop = WORKLOADS[workload]
    how: dict[str, Any] = {"raw": True, "max_tokens": TOKENS, "temperature": 0, "stop": stop}
    return model.generate(prompt, draft=draft, activations=activations, **how)


def measure(
    model: Model, workload: str, activations: Activations | None, rounds: int, peer: LlamaLookup | None = None
) -> dict[str, Any]:
    """Tokens a second without and with n-gram drafts, the best of several rounds in turns."""
    rates: dict[str, list[float]] = {"plain": [], "ngram": []}
    theirs: dict[int, list[float]] = {count: [] for count in (0, *DRAFTED)}
    for _ in range(rounds):
        for count in theirs if peer is not None else ():
            prompt, stop = WORKLOADS[workload]
            theirs[count].append(peer.answer(prompt, TOKENS, stop, count).tok_per_s)
        plain = answer(model, workload, None, activations)
        drafted = answer(model, workload, "ngram", activations)
        if drafted.tokens != plain.tokens:
            raise AssertionError(f"{workload}: a draft changed the answer")
        rates["plain"].append(plain.generation_rate)
        rates["ngram"].append(drafted.generation_rate)
    ratios = [b / a for a, b in zip(rates["plain"], rates["ngram"], strict=True)]
    counts = drafted.drafts
    best = {} if peer is None else {count: max(each) for count, each in theirs.items()}
    return {
        "workload": workload,
        "activations": activations,
        "tokens": len(plain.tokens),
        "plain_tok_per_s": max(rates["plain"]),
        "ngram_tok_per_s": max(rates["ngram"]),
        "ratio": statistics.median(ratios),
        "acceptance": counts.acceptance,
        "tokens_per_step": (len(drafted.tokens) - 1) / counts.steps,
        **({"llama.cpp_tok_per_s": best} if best else {}),
    }


# ---- the rows of a step ----------------------------------------------------------------------------------------------


def device_seconds(model: Model, rows: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """What a step takes on the GPU with so many rows of one sequence, by CUDA events, in turns: STEPS sequences have
    one step each, all submitted before the first has ended, so that the GPU does not wait for the host."""
    decoder = model.decoder
    assert isinstance(decoder, CudaDecoder)
    caches, samplers = [model.cache() for _ in range(STEPS)], [Sampling().sampler() for _ in range(STEPS)]
    for cache, sampler in zip(caches, samplers, strict=True):
        decoder.choose([(cache, [5 + i % 200 for i in range(CONTEXT)])], [sampler], None)
    found: dict[int, list[float]] = {count: [] for count in rows}
    with current(0):
        first, last = (driver().CUevent(int(check(driver().cuEventCreate(0), "an event"))) for _ in range(2))
    for _ in range(rounds):
        for count in rows:
            with current(0):
                check(driver().cuEventRecord(first, decoder.stream), "an event")
            pending = [
                decoder.submit([(cache, [7])], [sampler], None, [[9] * (count - 1)])
                for cache, sampler in zip(caches, samplers, strict=True)
            ]
            with current(0):
                check(driver().cuEventRecord(last, decoder.stream), "an event")
            for step in pending:
                step.choices()
            with current(0):
                check(driver().cuEventSynchronize(last), "waiting for the device")
                found[count].append(check(driver().cuEventElapsedTime(first, last), "an event") / 1e3 / STEPS)
            for cache in caches:
                cache.rollback(CONTEXT)
    return found


def answer_seconds(model: Model) -> float:
    """A token of an answer without drafts, where the next step begins before its token is read."""
    plain = model.generate([7] * CONTEXT, max_tokens=160, temperature=0)
    return plain.generation_seconds / (len(plain.tokens) - 1)


def replay(
    prompt: Sequence[int], tokens: Sequence[int], plain: float, before: float | None, seconds: Mapping[int, float]
) -> float:
    """How many times as fast as plain decoding an answer comes with n-gram drafts. plain: seconds of a plain step.
    before: of a step up to the model's first draft; None if it has drafted already. seconds: of later steps, by their
    rows."""
    drafter, known, passed, begun = NgramDrafter(), list(prompt), 0.0, before is None
    controller = Controller(MOST_DRAFTED, drafter.acceptance, watching=drafter.watched and not begun)
    whole, end = [*prompt, *tokens], len(prompt) + len(tokens)

    def take(chosen: Sequence[int]) -> None:
        for token in chosen:
            controller.watch(drafter, known, token)
            known.append(token)

    take(tokens[:1])
    while len(known) < end:
        kind = drafter.kind(known)
        most = min(controller.length(kind), end - len(known) - 1)
        draft = drafter.draft(known, most) if most > 0 else []
        behind = whole[len(known) :]
        right = next((i for i, guess in enumerate(draft) if guess != behind[i]), len(draft))
        begun = begun or bool(draft)
        step = seconds[1 + len(draft)] if begun or before is None else before
        controller.seconds.note(1 + len(draft), step)
        controller.note(len(draft), right, kind)
        passed += step
        take(behind[: right + 1])
    return (len(tokens) - 1) * plain / passed


def random_8b(device: str) -> Model:
    """A random model with the sizes of Llama-3-8B."""
    from benchmarks.random_model import SHAPES, write_random_model

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        write_random_model(path, SHAPES["8b"])
        return load(path, device=device)


def steps_of_8b(device: str, rounds: int) -> dict[str, Any]:
    """How long steps of an 8B model take by their rows; each with the bits of a row alone, and with the fastest."""
    model, found = random_8b(device), dict[str, Any]()
    for invariant in (True, False):
        BACKENDS["cuda"].batch_invariant = invariant
        model.decoder.warm(MOST_DRAFTED + 1, None)
        seconds = device_seconds(model, range(1, MOST_DRAFTED + 2), rounds)
        medians = {rows: statistics.median(times) for rows, times in seconds.items()}
        found["batch_invariant" if invariant else "fastest"] = {
            "device_seconds": medians,
            "of_one_row": {rows: each / medians[1] for rows, each in medians.items()},
            "answer_seconds": answer_seconds(model),
        }
    return found


def replayed(model: Model, steps: Mapping[str, Any], activations: Activations | None) -> dict[str, dict[str, float]]:
    """Of each workload, the gain that `replay` finds for the model's own answer: of the model's first one, and of later
    ones beside plain answers of either kind of steps."""
    seconds = {int(rows): each for rows, each in steps["batch_invariant"]["device_seconds"].items()}
    texts = {
        name: (model.tokenize(workload.prompt), answer(model, name, None, activations).tokens)
        for name, workload in WORKLOADS.items()
    }
    plain = {kind: steps[kind]["answer_seconds"] for kind in KINDS}
    cases = {"first answer": ("fastest", plain["fastest"]), **{kind: (kind, None) for kind in KINDS}}
    return {
        case: {name: replay(*text, plain[kind], before, seconds) for name, text in texts.items()}
        for case, (kind, before) in cases.items()
    }


def llama_lookup(threads: int) -> LlamaLookup:
    try:
        return LlamaLookup(default_model(), threads)
    except ImportError as error:
        sys.exit(f"--peer needs llama-cpp-python, which cannot be imported: {error}")


def measured(device: str, threads: int, rounds: int, only_steps: bool, with_peer: bool) -> dict[str, Any]:
    """The records of this machine. only_steps: those of the 8B model alone. with_peer: llama.cpp's beside q8."""
    about: dict[str, Any] = {"machine": platform.machine(), "cpu": machine.cpu_name(), "threads": threads}
    more: dict[str, Any] = {}
    kinds: tuple[Activations | None, ...] = ("q8", "q16")
    if device == "cpu":
        _cpu.set_threads(threads)
    else:
        kinds, more["8b"] = (None,), steps_of_8b(device, rounds)
        about = machine.gpu()
        BACKENDS["cuda"].batch_invariant = True
    found = list[dict[str, Any]]()
    if not only_steps:
        model, peer = load(device=device), llama_lookup(threads) if with_peer else None
        if peer is not None:
            about["llama.cpp"] = peer.version
        found = [
            measure(model, workload, kind, rounds, peer if kind == "q8" else None)
            for kind in kinds
            for workload in WORKLOADS
        ]
        if device != "cpu":
            more["8b"]["replayed"] = replayed(model, more["8b"], None)
        about["kernels"] = model.decoder.kernels
    about |= {**machine.versions("numpy"), **machine.today()}
    return {"about": about, "records": found, **more}


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run (default: cpu)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds in turns (default: {ROUNDS})")
    parser.add_argument(
        "--steps", action="store_true", help="on a GPU, time the steps of the 8B model alone (default: off)"
    )
    parser.add_argument(
        "--peer", action="store_true", help="on a CPU, also time llama-cpp-python's n-gram drafts (default: off)"
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="replay the answers of SmolLM2 on the CPU with the steps of a record of --steps, and time nothing",
    )
    flags = parser.parse_args()
    if flags.replay is not None:
        results = json.loads(flags.replay.read_text())
        results["8b"]["replayed"] = replayed(load(device="cpu"), results["8b"], "exact")
    else:
        results = measured(flags.device, flags.threads, flags.rounds, flags.steps, flags.peer)
    for record in results["records"]:
        plain, drafted = record["plain_tok_per_s"], record["ngram_tok_per_s"]
        print(
            f"{record['activations'] or '':4} {record['workload']:20} plain {plain:6.1f} tok/s, drafted {drafted:6.1f}",
            end="",
        )
        print(f", ratio {record['ratio']:.2f}, {record['tokens_per_step']:.2f} tokens a step")
        for count, rate in record.get("llama.cpp_tok_per_s", {}).items():
            print(f"     llama.cpp, {count} drafted tokens: {rate:6.1f} tok/s")
    for kind in KINDS if "8b" in results else ():
        steps = results["8b"][kind]
        print(f"8B {kind}, a token without drafts {steps['answer_seconds'] * 1e6:.0f} us")
        for rows, seconds in steps["device_seconds"].items():
            print(f"8B {kind}, {rows} rows {seconds * 1e6:.0f} us, {steps['of_one_row'][rows]:.3f} of one row")
    for kind, gains in results.get("8b", {}).get("replayed", {}).items():
        for workload, gain in gains.items():
            print(f"8B, {workload}: {gain:.2f} times plain ({kind})")
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
