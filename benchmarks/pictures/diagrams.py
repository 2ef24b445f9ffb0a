"""Diagrams: from a file to an output, the life of a request, and the rooms of the package."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from benchmarks import records
from benchmarks.pictures.svg import Drawing
from billfish.serving.engine.kv_slots import SMALLEST, Cuts
from billfish.serving.engine.scheduler import share_out

ROOT = records.RESULTS.parents[1]

# ---- from a file to an output -----------------------------------------------------------------------------------

FILES = {
    "GGUF": "q4_0 to q8_1, k-quants, iq4_nl",
    "GPTQ, AWQ": "u4b8, u4, u8b128; act-order",
    "compressed-tensors": "u4b8, u4, nvfp4, mxfp4, fp8",
    "ModelOpt, FP8 folders": "nvfp4, fp8, mxfp8",
    "MLX": "affine4, affine8, mxfp4, nvfp4",
    "bitsandbytes": "nf4",
    "BF16, F16, F32": "bf.quantize: rtn, mse, gptq",
}
ENGINES = {  # edge, packed weights, kernels
    "CPU": (
        "blue",
        ("stream: tiles of rows,", "scales, then codes,", "in register order"),
        ("NEON, AVX2, AVX-VNNI,", "AVX-512 VNNI, portable;", "int8, int16 or float32"),
    ),
    "CUDA": (
        "green",
        ("bricks: 16 rows x 128 k,", "the A operand of mma", "and wgmma"),
        ("gemm_small (mma),", "gemm_large (wgmma),", "gemm_bytes (FP8, int8)"),
    ),
    "Metal": (
        "pink",
        ("panels of 16 columns,", "runs of 32 k, for", "simdgroup matrices"),
        ("gemv, gemm; run in an", "emulator only, not yet", "timed on a Mac"),
    ),
}
TENSOR = (
    "The file's own bytes,",
    "memory-mapped, read-",
    "only: not a bit changes.",
    "",
    "Format, group size,",
    "shape, permutation.",
    "",
    "Saved as GGUF, GPTQ,",
    "AWQ, MLX ... without",
    "loss where they can.",
)
USERS = (
    "quantized_linear,",
    "expert_linear;",
    "layers for torch",
    "and MLX;",
    "billfish run and",
    "billfish serve;",
    "vLLM",
)


def data_path() -> Drawing:
    title = "From a file to an output"
    about = "Files, their bytes in memory, the packed weights of three engines, kernels, outputs."
    drawing = Drawing(1020, 520, title, about)
    drawing.text(20, 32, title, size=18, bold=True)
    words = "Weights stay in 2 to 8 bits on the whole way."
    words += " A kernel decodes them in registers, or in the L1 cache for many rows."
    drawing.text(20, 54, words, fill="dim")
    for x, heading in ((20, "file"), (284, "storage"), (466, "packed, once"), (674, "kernels"), (876, "output")):
        drawing.text(x, 88, heading, fill="dim", size=12)
    for i, (name, formats) in enumerate(FILES.items()):
        y = 98 + 57 * i
        drawing.box(20, y, 240, 50, name, (formats,), edge="orange" if name.startswith("BF16") else "line")
        drawing.arrow((260, y + 25), (272, y + 25), (272, 278), (284, 278))
    drawing.box(284, 180, 160, 196, "QuantizedTensor")
    drawing.lines(294, 220, TENSOR, size=12, fill="dim", leading=16)
    for i, (name, (hue, packed, kernel)) in enumerate(ENGINES.items()):
        y = 98 + 124 * i
        drawing.box(466, y, 186, 96, name, packed, edge=hue)
        drawing.box(674, y, 180, 96, f"{name} kernels", kernel, edge=hue)
        drawing.arrow((444, 278), (455, 278), (455, y + 48), (466, y + 48))
        drawing.arrow((652, y + 48), (674, y + 48))
        drawing.arrow((854, y + 48), (865, y + 48), (865, 278), (876, 278))
    drawing.box(876, 180, 130, 196, "y = x W^T")
    drawing.lines(886, 222, USERS, size=12, fill="dim")
    drawing.rect(466, 470, 388, 32, "panel", stroke="grey", radius=6, dash="4 3")
    drawing.text(660, 491, "reference: decodes in NumPy, multiplies in float64", size=12, fill="dim", anchor="middle")
    drawing.arrow((364, 376), (364, 486), (466, 486), dash="4 3")
    drawing.arrow((854, 486), (941, 486), (941, 376), dash="4 3")
    drawing.text(951, 491, "in tests", size=12, fill="dim")
    return drawing


# ---- the life of a request --------------------------------------------------------------------------------------

CHUNK, SLOTS, STEPS = 256, 3, 15  # the CPU's chunk; slots and steps that are shown
HUES = ("blue", "orange", "green", "pink")


@dataclass(eq=False)
class Request:
    """As much of a job of the engine as the scheduler asks for."""

    name: str
    arrives: int
    prompt: int
    answer: int
    read: int = 0

    @property
    def left(self) -> int:
        return self.prompt - self.read

    @property
    def decodes(self) -> bool:
        return self.left == 0

    def part(self, share: int) -> int:
        return Cuts(CHUNK, SMALLEST).part(self.read, self.prompt, share)


def simulate() -> list[tuple[Request, list[str]]]:
    """What each request does in each step, by the engine's own scheduler and bounds: so many tokens of its prompt, "+1"
    for one of its answer, "wait" or nothing."""
    requests = [Request("A", 0, 420, 6), Request("B", 1, 30, 11), Request("C", 3, 330, 6), Request("D", 4, 60, 4)]
    story: dict[Request, list[str]] = {request: [] for request in requests}
    running: list[Request] = []
    for step in range(STEPS):
        arrived = [r for r in requests if r.arrives <= step and r.answer > 0 and r not in running]
        running += arrived[: SLOTS - len(running)]
        decoding = sum(r.decodes for r in running)
        bound = min(CHUNK // 4 if decoding else CHUNK, CHUNK - SMALLEST - decoding)
        parts = share_out(running, bound, SMALLEST)  # type: ignore[arg-type]
        for request in requests:
            if request in running:
                fed = 0 if request.decodes else parts.get(request, 0)  # type: ignore[call-overload]
                going_on = fed == request.left
                request.read += fed
                request.answer -= going_on
                story[request].append(str(fed) if fed else "+1" if going_on else "")
            else:
                story[request].append("wait" if request in arrived else "")
        running = [r for r in running if r.answer > 0]
    return list(story.items())


def request() -> Drawing:
    title = "The life of a request in billfish serve"
    drawing = Drawing(1000, 560, title, "The threads a request passes, and how prefill and decode share steps.")
    drawing.text(20, 32, title, size=18, bold=True)
    stages = (
        ("front", ("event loop: HTTP,", "key, limits (401,", "413, 415)")),
        ("front", ("threads: body,", "chat template,", "tokenizer")),
        ("queue", ("--queue 64;", "full: 429 and", "Retry-After")),
        ("KV slot", ("one of --streams:", "with the longest", "common prefix")),
        ("engine thread", ("steps of the model:", "prefill and decode", "in one pass")),
        ("front", ("tokens to text,", "stop strings,", "events (SSE)")),
    )
    for i, (name, lines) in enumerate(stages):
        x = 20 + 163 * i
        drawing.box(x, 56, 150, 90, f"{i + 1}. {name}", lines, edge="orange" if i == 4 else "line")
        if i:
            drawing.arrow((x - 13, 101), (x, 101))
    drawing.text(
        20, 186, f"Steps of the engine thread, with {SLOTS} slots: continuous batching, chunked prefill", bold=True
    )
    left, top, width, height = 150, 226, 55, 42
    for step in range(STEPS):
        drawing.text(left + width * step + width / 2, top - 8, str(step), size=11, fill="dim", anchor="middle")
    drawing.text(left - 10, top - 8, "step", size=11, fill="dim", anchor="end")
    story = simulate()
    for i, (each, cells) in enumerate(story):
        y, hue = top + height * i, HUES[i]
        drawing.text(20, y + 18, f"request {each.name}", bold=True)
        drawing.text(20, y + 33, f"prompt of {each.prompt}", size=11, fill="dim")
        for step, cell in enumerate(cells):
            x = left + width * step
            if cell == "wait":
                drawing.rect(x + 1, y + 4, width - 2, height - 8, "paper", stroke="line", dash="3 3")
                drawing.text(x + width / 2, y + 25, "queue", size=11, fill="dim", anchor="middle")
            elif cell == "+1":
                drawing.rect(x + 1, y + 4, width - 2, height - 8, hue, opacity=0.25)
                drawing.text(x + width / 2, y + 25, "+1", size=12, anchor="middle")
            elif cell:
                drawing.rect(x + 1, y + 4, width - 2, height - 8, hue, opacity=0.65)
                drawing.text(x + width / 2, y + 25, cell, size=12, anchor="middle", bold=True)
    bottom = top + height * len(story)
    sums = [
        sum(int(cells[step].strip("+")) for _, cells in story if cells[step].strip("+").isdecimal())
        for step in range(STEPS)
    ]
    drawing.text(left - 10, bottom + 18, "rows of the pass", size=11, fill="dim", anchor="end")
    for step, rows in enumerate(sums):
        if rows:
            drawing.text(left + width * step + width / 2, bottom + 18, str(rows), size=11, fill="dim", anchor="middle")
    y = bottom + 48
    drawing.rect(20, y - 11, 24, 14, "blue", opacity=0.65)
    drawing.text(52, y, "prefill: this many tokens of the prompt", size=12)
    drawing.rect(320, y - 11, 24, 14, "blue", opacity=0.25)
    drawing.text(352, y, "decode: one token of the answer", size=12)
    lines = (
        f"Without answers, {CHUNK - SMALLEST} tokens of prompts are prefilled a step. Beside answers it is about "
        f"{CHUNK // 4} on a CPU, so that decoding goes on.",
        "Prompts are read first come, first served. The rows of a step share one pass over the weights.",
        "A prompt that shares a prefix with one in prefill waits for it, then starts from that KV cache: its pages on "
        "a GPU, else a copy.",
        "Fronts are processes of their own with --fronts N, the default on a GPU. Else they are part of the engine's.",
        "The numbers are those of the engine's own scheduler (serving/engine/scheduler.py).",
    )
    drawing.lines(20, y + 32, lines, size=12, fill="dim", leading=19)
    return drawing


# ---- rooms ------------------------------------------------------------------------------------------------------

ROOMS = {
    "cli": "the command billfish: run, serve, eval, quantize, convert, inspect ...",
    "serving": "OpenAI API over HTTP, scheduler, KV slots, grammars",
    "nn": "layers and whole models for torch and MLX, transformers, PEFT, vLLM, tensor parallelism",
    "quantizing": "whole checkpoints: calibration, GPTQ, a format per matrix by KL divergence",
    "llm": "decoder, KV cache, sampler, chat template, perplexity",
    "statistics": "activation statistics: imatrix, Hessians",
    "checkpoints": "GGUF, GPTQ, AWQ, compressed-tensors, MLX ...: read, write, convert; tokenizers",
    "models": "architectures, a file each: names, hyperparameters, blocks",
    "ops": "quantize, dequantize, quantized_linear, expert_linear",
    "backends": "cpu (C++), cuda, metal, emulator, reference: packing and kernels",
    "core": "formats, elements, QuantizedTensor, search of scales, errors",
}


def layers() -> list[list[str]]:
    """The floors of the import-linter contract in pyproject.toml, top to bottom, each with its rooms."""
    contract = re.search(
        r'name = "No room imports.*?layers = \[(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    assert contract
    return [re.findall(r"billfish\.(\w+)", floor) for floor in re.findall(r'"(.*?)"', contract[1])]


IMPORTS = re.compile(
    r"""^ *(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?$)|\brequire\("(\w+)""", re.MULTILINE
)


def packages(room: str) -> list[str]:
    """The other packages that a room imports anywhere, most of them only when they are needed."""
    found: set[str] = set()
    for path in (ROOT / "billfish" / room).rglob("*.py"):
        found |= {name for names in IMPORTS.findall(path.read_text()) for name in names}
    return sorted(found - {*sys.stdlib_module_names, "billfish", "typing_extensions", ""}, key=str.lower)


def rooms() -> Drawing:
    floors = layers()
    title = "The rooms of the package: imports go down"
    drawing = Drawing(
        1000,
        92 + 46 * len(floors),
        title,
        "The layers of the import-linter contract, with what each room does and imports.",
    )
    drawing.text(20, 32, title, size=18, bold=True)
    drawing.text(
        20,
        54,
        "A room imports only rooms below it (import-linter, pyproject.toml). Right: other packages that it uses.",
        fill="dim",
    )
    for i, floor in enumerate(floors):
        y = 76 + 46 * i
        for j, room in enumerate(floor):
            x = 50 + 470 * j
            width = 930 if len(floor) == 1 else 460
            drawing.rect(x, y, width, 40, "blue", opacity=0.1 + 0.03 * i, stroke="line", radius=5)
            drawing.text(x + 12, y + 17, room, bold=True)
            drawing.text(x + 12, y + 33, ROOMS[room], size=12)
            used = ", ".join(name for name in packages(room) if name != "numpy")
            drawing.text(x + width - 10, y + 17, used, size=11, fill="dim", anchor="end")
    drawing.arrow((32, 80), (32, 76 + 46 * len(floors) - 8))
    return drawing
