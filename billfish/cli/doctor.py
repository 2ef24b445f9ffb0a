"""`billfish doctor`: check this machine's kernels against NumPy and its devices against each other, in one report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS
from billfish.backends.metal import MLX
from billfish.backends.metal.layout import lay_out
from billfish.cli import metal_checks
from billfish.cli.info import found
from billfish.core.errors import BillfishError, DataError, MissingPackage, bad_argument
from billfish.core.format import FORMATS
from billfish.core.tables import print_table
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize, quantized_linear
from billfish.ops.quantization import quantize

SHAPE, ROWS = (96, 256), (1, 4, 20)  # of the matmuls that every backend is asked for
TIMED, TIMED_ROWS, ROUNDS = (4096, 4096), (1, 8, 512), 5
OUT_OF_CACHE = 2**28  # bytes of weights to read in turn: more than the cache of any Apple GPU
MLX_FORMATS = {  # MLX's nearest format in bits per weight: mode, group size, bits of a code
    "q4_0": ("affine", 64, 4),
    "q4_k": ("affine", 64, 4),
    "fp4": ("affine", 64, 4),
    "mxfp4": ("mxfp4", 32, 4),
    "nvfp4": ("nvfp4", 16, 4),
    "q8_0": ("affine", 64, 8),
    "mxfp8": ("mxfp8", 32, 8),
}
LIMIT = 1e-2  # allowed error, relative to the largest logit: activations are float16
COLUMNS = ("backend", "kernel", "format", "type", "rows", "error", "allowed", "verdict")  # of a table of matmuls
PROMPT, ANSWER = "What is the capital of France?", 16
# Backends that are not asked unless they are named: the reference is the judge, and the emulator is slow.
UNASKED = ("reference", "metal-emulator")
THROUGH_TORCH = ("mps", "cuda")  # backends that multiply its tensors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="GGUF file or model folder that every device answers a prompt with (default: none)",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="check this backend alone; may be repeated (default: all that `billfish info` lists as usable)",
    )
    parser.add_argument("--report", metavar="FILE", help="also write everything to a JSON file (default: none)")


def run(arguments: argparse.Namespace) -> int:
    """Print what was checked. Returns 1 if anything is wrong."""
    names = arguments.backend or _usable()
    for name in names:
        if name not in BACKENDS:
            raise DataError(bad_argument("doctor", "--backend", repr(name), f"one of {', '.join(BACKENDS)}"))
        if name in THROUGH_TORCH and importlib.util.find_spec("torch") is None:
            raise MissingPackage(
                f"doctor: torch, through which {name} is checked, is not installed. Run: pip install torch"
            )
    report: dict[str, Any] = {"machine": found(), "matmuls": [], "times": [], "answers": []}
    for name in names:
        report["matmuls"] += _followed(checks(name), f"{name}: matmuls beside NumPy")
    _print("matmuls", report["matmuls"], COLUMNS, wrong_alone=True)
    if "metal" in names:
        reason = metal_checks.device_of("metal").kernels.without_units
        report["matrix_units"] = reason or "used"
        print(f"matrix units: not used: {reason}." if reason else "matrix units: used.")
        report["times"] = _followed(times("metal"), "metal: times beside MLX's")
        columns = ("format", "ours_bits", "mlx_format", "mlx_bits", "rows", "ours", "mlx")
        _print("microseconds of a matmul", report["times"], columns)
    if arguments.model:
        report["answers"] = _followed(answers(arguments.model, names), "the model on each device")
        _print("answers", report["answers"], ("device", "tokens_per_second", "error", "gap", "verdict", "text"))
    wrong = [each for part in ("matmuls", "answers") for each in report[part] if each["verdict"] != "right"]
    print(f"{len(wrong)} wrong." if wrong else "Everything is right.")
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(report, indent=1))
        print(f"Wrote {arguments.report}.")
    return 1 if wrong else 0


def _usable() -> list[str]:
    """What can be checked here. A backend that cannot is told."""
    names = [name for name in BACKENDS if name not in UNASKED and BACKENDS[name].usable()[0]]
    if importlib.util.find_spec("torch") is None:
        for name in set(names) & set(THROUGH_TORCH):
            print(f"{name} is not checked: that takes torch, which is not installed.")
            names.remove(name)
    return names


def checks(name: str) -> Iterator[dict[str, Any]]:
    """Every kernel of an Apple GPU by name; then matmuls of any backend in every format, as a user calls them. An error
    may be twice that of a dense matmul of float16."""
    if name in metal_checks.NAMES:
        yield from metal_checks.checks(name, FORMATS)
    generator = np.random.default_rng(0)
    w = generator.standard_normal(SHAPE).astype(np.float32)
    for format in FORMATS:
        q = quantize(w, format, method="rtn")
        for rows in ROWS:
            x = generator.standard_normal((rows, SHAPE[1])).astype(np.float16)
            record: dict[str, Any] = {"backend": name, "format": format, "rows": rows}
            try:
                y = _multiplier(name)(x, q)
            except BillfishError as error:
                if name != "cpu" and "no kernels" in str(error):
                    continue
                yield record | {"verdict": str(error)}
            except Exception as error:  # of a compiler or a driver: what it says is what the report is for
                yield record | {"verdict": f"{type(error).__name__}: {error}"}
            else:
                yield record | metal_checks.judged(x, dequantize(q), y)


def _multiplier(name: str) -> Callable[[NDArray[Any], QuantizedTensor], NDArray[Any]]:
    """How a backend multiplies NumPy's arrays."""

    def through_mlx(x: NDArray[Any], q: QuantizedTensor) -> NDArray[Any]:
        import mlx.core as mx

        return np.array(quantized_linear(mx.array(x), q, backend=name))

    def through_torch(x: NDArray[Any], q: QuantizedTensor) -> NDArray[Any]:
        import torch

        device = "mps" if name == "mps" else "cuda"
        return np.asarray(quantized_linear(torch.from_numpy(x).to(device), q, backend=name).cpu().numpy())

    def through_numpy(x: NDArray[Any], q: QuantizedTensor) -> NDArray[Any]:
        return np.asarray(quantized_linear(x, q, backend=name))

    return through_mlx if name == "metal" else through_torch if name in THROUGH_TORCH else through_numpy


def times(name: str) -> Iterator[dict[str, Any]]:
    """Time our matmuls on an Apple GPU beside MLX's with about as many bits per weight, in microseconds."""
    import mlx.core as mx

    (n, k), kernels = TIMED, metal_checks.device_of(name).kernels
    w = np.random.default_rng(0).standard_normal(TIMED).astype(np.float32)
    for format, (mode, size, bits) in MLX_FORMATS.items():
        q = quantize(w, format, method="rtn")
        ours, theirs = lay_out(q), mx.quantize(mx.array(w).astype(mx.float16), size, bits, mode=mode)
        bytes_of = {"ours": ours.nbytes, "mlx": sum(plane.nbytes for plane in theirs)}
        about: dict[str, Any] = {"format": format, "mlx_format": f"{mode} {bits}:{size}"}
        about |= {f"{whose}_bits": round(8 * nbytes / w.size, 2) for whose, nbytes in bytes_of.items()}
        copies = range(-(-OUT_OF_CACHE // min(bytes_of.values())))
        our_copies = [ours.converted(MLX.from_numpy) for _ in copies]
        their_copies = [[mx.array(np.array(plane)) for plane in theirs] for _ in copies]
        for rows in TIMED_ROWS:
            x = mx.random.normal((rows, k)).astype(mx.float16)
            how = {"transpose": True, "group_size": size, "bits": bits, "mode": mode}
            us = _best(partial(kernels.multiply, x, bias=None), our_copies)
            mlx = _best(partial(_multiply_planes, x, how), their_copies)
            yield about | {"rows": rows, "ours": round(us, 1), "mlx": round(mlx, 1), "shape": [n, k]}


def _multiply_planes(x: Any, how: dict[str, Any], planes: Sequence[Any]) -> Any:
    import mlx.core as mx

    return mx.quantized_matmul(x, *planes, **how)


def _best(multiply: Callable[[Any], Any], copies: Sequence[Any]) -> float:
    """Microseconds per call, the best of ROUNDS. Each call has its own copy of the weights; all run at once."""
    import mlx.core as mx

    best = np.inf
    for _ in range(ROUNDS):
        start = time.perf_counter()
        mx.eval([multiply(each) for each in copies])
        best = min(best, (time.perf_counter() - start) / len(copies))
    return 1e6 * float(best)


def answers(path: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Compare logits and an answer of a model on each device with the CPU's exact logits. Each token has to be top-1
    after those before it, up to near ties."""
    from billfish.llm.model import load

    devices = ["cpu", *(name for name in names if name in ("cuda", "metal", "metal-emulator"))]
    judge = None
    for device in devices:
        record: dict[str, Any] = {"device": device}
        try:
            model = load(path, device=device)
            judge = judge or model
            tokens = model.encode(PROMPT)
            decoder, activations = model.decoder, model.decoder.usual  # those of the answer
            logits = decoder.logits(decoder.run([(model.cache(), tokens)], activations), activations)
            start = time.perf_counter()
            answer = model.generate(tokens, max_tokens=ANSWER, temperature=0)
            record["tokens_per_second"] = round(len(answer.tokens) / (time.perf_counter() - start), 1)
            exact = judge.logits([*tokens, *answer.tokens], activations="exact")
        except Exception as problem:
            yield record | {"verdict": f"{type(problem).__name__}: {problem}"}
            continue
        largest = np.abs(exact).max()
        error = float(np.median(np.abs(logits - exact[: len(tokens)]).max(axis=1)) / largest)
        rows = exact[len(tokens) - 1 : -1]
        gaps = [row.max() - row[token] for row, token in zip(rows, answer.tokens, strict=True)]
        gap = float(max(gaps, default=0) / largest)  # two logits may be wrong by LIMIT each
        record |= {"error": error, "gap": gap, "text": answer.text.strip().replace("\n", " ")}
        yield record | {"verdict": "right" if error <= LIMIT and gap <= 2 * LIMIT else "wrong"}


def _followed(records: Iterator[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """All records; a terminal shows how many there are meanwhile."""
    made = []
    for record in records:
        made.append(record)
        if sys.stderr.isatty():
            print(f"\r{what}: {len(made)}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return made


def _print(title: str, records: list[dict[str, Any]], columns: tuple[str, ...], *, wrong_alone: bool = False) -> None:
    """A table; of many records that are right, only their number."""
    shown = [r for r in records if not wrong_alone or r["verdict"] != "right"]
    right = len(records) - len(shown)
    if right:
        largest = max(r["error"] / (r["allowed"] or 1) for r in records if r["verdict"] == "right")  # 0 of 0 is 0
        print(f"{title}: {right} right; the largest error is {largest:.2f} of the allowed one.")
    if shown:
        print(f"{title}:")
        rows = [[_cell(record.get(column, "")) for column in columns] for record in shown]
        print_table([list(columns), *rows], sys.stdout, left=2)


def _cell(value: Any) -> str:
    text = f"{value:.1e}" if isinstance(value, float) and value < 0.1 else str(value)
    return next(iter(text.splitlines()), "")
