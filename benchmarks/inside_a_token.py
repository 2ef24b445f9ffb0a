"""Time where one token goes: the picture and the table of docs/inside-a-token.md.

SmolLM2-135M-Instruct; the parts are timed by the decoder itself, all that they leave is Python (embedding, calls).
"""

from __future__ import annotations

import platform
import time
from typing import Any

import numpy as np

from benchmarks import command, machine, records, tables
from billfish.backends.cpu import _cpu
from billfish.llm import load

CASES = (("q8", 0), ("q16", 0), ("exact", 0), ("q8", 1024))
TOKENS = 48


def measure(model: Any, activations: str, context: int) -> dict[str, float]:
    """Milliseconds of each part of a token, with so many tokens before it."""
    decoder, rng = model.decoder, np.random.default_rng(0)
    cache = model.decoder.cache(context + 2 * TOKENS)
    for _ in range(context // 256):
        decoder.run([(cache, rng.integers(100, 40000, 256).tolist())], activations)
    tokens = rng.integers(100, 40000, 2 * TOKENS).tolist()
    for i, token in enumerate(tokens):
        if i == TOKENS:  # the first half warms up
            before, started = decoder.seconds, time.perf_counter()
        decoder.logits(decoder.run([(cache, [token])], activations), activations)
    whole = time.perf_counter() - started
    parts = {name: (after - before[name]) / TOKENS * 1e3 for name, after in decoder.seconds.items()}
    return {**parts, "Python": whole / TOKENS * 1e3 - sum(parts.values())}


def measured(threads: int) -> dict[str, Any]:
    """The records of this machine."""
    _cpu.set_threads(threads)
    model = load(device="cpu")
    level = _cpu.levels()[0]
    least = model.decoder.nbytes / _cpu.read_rate(level, 256) * 1e3
    found = [
        {"activations": activations, "context": context, "milliseconds": measure(model, activations, context)}
        for activations, context in CASES
    ]
    about = {"machine": platform.machine(), "cpu": machine.cpu_name(), "threads": threads}
    about |= {"kernels": model.decoder.kernels, **machine.versions("numpy"), "python": platform.python_version()}
    about |= machine.today() | {"weight_bytes": model.decoder.nbytes, "least_milliseconds": least}
    return {"about": about, "records": found}


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2)
    flags = parser.parse_args()
    results = measured(flags.threads)
    print(tables.token(results) + tables.least(results))
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
