"""Time drafting beside plain decoding of the same model, in turns, on three kinds of answers.

SmolLM2-135M-Instruct, greedy. Every drafted answer is compared with the plain one: they must be the same.
"""

from __future__ import annotations

import platform
import statistics
from typing import Any

from benchmarks import command, machine, records
from billfish.backends.cpu import _cpu
from billfish.core.typing import Activations
from billfish.llm import load
from billfish.llm.generation import Generation
from billfish.llm.model import Model

CODE = """\
def read_sizes(path):
    sizes = {}
    with open(path) as file:
        for line in file:
            name, size = line.split()
            sizes[name] = int(size)
    return sizes


def largest(sizes, count):
    names = sorted(sizes, key=sizes.get, reverse=True)
    return names[:count]


def print_table(sizes, count):
    for name in largest(sizes, count):
        print(f"{name:30} {sizes[name]:12}")
"""
STORY = """\
The lighthouse keeper climbed one hundred and twelve steps every evening. At the top he trimmed the lamp, wound the
clockwork and wrote the weather into a book with a blue cover. "The sea forgets nothing," he used to say, "and neither
does the book." When the lamp was electrified in 1931, the company sent a letter that thanked him for his service. He
stayed, unpaid, and wrote the weather into the book until the winter of 1944.
"""
# The beginning of each answer is given, so that a small model does what it is asked.
WORKLOADS = {
    "rewrite a file": (
        f"```python\n{CODE}```\nThe same file with the function largest renamed to biggest:\n```python\n"
        + CODE.split("def largest")[0]
    ),
    "summarize and quote": (
        f"Text:\n{STORY}\nThe most important sentences of the text, word for word:\n1. The lighthouse keeper"
    ),
    "free text": "Once upon a time, in a small village at the edge of a dark forest, there lived",
}
TOKENS, ROUNDS = 160, 5


def answer(model: Model, prompt: str, draft: str | None, activations: Activations) -> Generation:
    return model.generate(prompt, raw=True, max_tokens=TOKENS, temperature=0, draft=draft, activations=activations)


def measure(model: Model, workload: str, activations: Activations, rounds: int) -> dict[str, Any]:
    """Tokens a second without and with n-gram drafts, the best of several rounds in turns."""
    rates: dict[str, list[float]] = {"plain": [], "ngram": []}
    for _ in range(rounds):
        plain = answer(model, WORKLOADS[workload], None, activations)
        drafted = answer(model, WORKLOADS[workload], "ngram", activations)
        if drafted.tokens != plain.tokens:
            raise AssertionError(f"{workload}: a draft changed the answer")
        rates["plain"].append(plain.generation_rate)
        rates["ngram"].append(drafted.generation_rate)
    ratios = [b / a for a, b in zip(rates["plain"], rates["ngram"], strict=True)]
    counts = drafted.drafts
    return {
        "workload": workload,
        "activations": activations,
        "tokens": len(plain.tokens),
        "plain_tok_per_s": max(rates["plain"]),
        "ngram_tok_per_s": max(rates["ngram"]),
        "ratio": statistics.median(ratios),
        "acceptance": counts.acceptance,
        "tokens_per_step": (len(drafted.tokens) - 1) / counts.steps,
    }


def measured(threads: int, rounds: int) -> dict[str, Any]:
    """The records of this machine."""
    _cpu.set_threads(threads)
    model = load(device="cpu")
    kinds: tuple[Activations, ...] = ("q8", "q16")
    found = [measure(model, workload, kind, rounds) for kind in kinds for workload in WORKLOADS]
    about = {"machine": platform.machine(), "cpu": machine.cpu_name(), "threads": threads}
    about |= {"kernels": model.decoder.kernels, **machine.versions("numpy"), **machine.today()}
    return {"about": about, "records": found}


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds in turns (default: {ROUNDS})")
    flags = parser.parse_args()
    results = measured(flags.threads, flags.rounds)
    for record in results["records"]:
        plain, drafted = record["plain_tok_per_s"], record["ngram_tok_per_s"]
        print(
            f"{record['activations']:4} {record['workload']:20} plain {plain:6.1f} tok/s, drafted {drafted:6.1f}",
            end="",
        )
        print(f", ratio {record['ratio']:.2f}, {record['tokens_per_step']:.2f} tokens a step")
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
