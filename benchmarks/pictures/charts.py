"""Charts of records: rooflines, the time of a token, and KL divergence by format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from benchmarks import records
from benchmarks.machine import GpuLimits, Limits
from benchmarks.pictures.svg import Axis, Drawing
from benchmarks.random_model import SHAPES
from benchmarks.tables import PARTS, source

Record = dict[str, Any]

# ---- rooflines --------------------------------------------------------------------------------------------------

OURS = "billfish"
STYLES = ("blue", "green", "pink", "yellow", "sky", "grey")
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 470, 330, 2
FLOAT16_BITS = 16


def roofline(
    found: list[Record], limits: Limits, machine: Mapping[str, Any], *, title: str, float_bits: float = 0
) -> Drawing:
    """A panel for each format, kind of activations and K x N. Across: operations per byte of our weights, so that all
    contenders of one M stand above one another.

    float_bits: of a weight in our format, to draw a second roof: that of peers that read float16 weights.
    """
    panels: dict[tuple[str, str, int, int], list[Record]] = {}
    for record in found:
        panels.setdefault((record["format"], record["activations"], record["k"], record["n"]), []).append(record)
    down = -(-len(panels) // COLUMNS)
    drawing = Drawing(
        20 + PANEL_WIDTH * min(COLUMNS, len(panels)),
        108 + PANEL_HEIGHT * down,
        title,
        "Speed over arithmetic intensity beside the measured limits of memory and arithmetic, for billfish and peers.",
    )
    drawing.text(20, 32, title, size=18, bold=True)
    drawing.text(20, 54, source({"machine": dict(machine)}), fill="dim")
    peers = dict.fromkeys(name.partition(":")[0] for record in found for name in record["peers"])
    styles = dict(zip(peers, STYLES, strict=False))
    x = 20.0
    for name, fill in {OURS: "orange", **styles}.items():
        mark(drawing, x + 6, 76, name, fill)
        drawing.text(x + 18, 80, PEER_NAMES.get(name, name), size=12)
        x += 44 + 7 * len(PEER_NAMES.get(name, name))
    for i, ((format, activations, k, n), group) in enumerate(panels.items()):
        place = 20 + PANEL_WIDTH * (i % COLUMNS), 96 + PANEL_HEIGHT * (i // COLUMNS)
        heading = f"{format}, {ACTIVATIONS[activations]} activations, {k} x {n}"
        _panel(drawing, place, heading, group, limits, activations, styles, float_bits)
    return drawing


PEER_NAMES = {"cublas": "cuBLAS, float16 weights", "humming": "humming-kernels", "ggml-repack": "ggml, repacked"}
ACTIVATIONS = {"q8": "int8", "q16": "int16", "exact": "float"}


def mark(drawing: Drawing, x: float, y: float, name: str, fill: str) -> None:
    """Ours is a ring: a peer that is level with it shows inside."""
    if name == OURS:
        drawing.circle(x, y, 6, stroke=fill, width=2.2)
    else:
        drawing.circle(x, y, 3.2, fill)


def _panel(
    drawing: Drawing,
    place: tuple[float, float],
    heading: str,
    group: list[Record],
    limits: Limits,
    activations: str,
    styles: Mapping[str, str],
    float_bits: float,
) -> None:
    left, top = place
    read, peak = limits.read_bytes_per_second / 1e9, limits.peak(activations) / 1e9
    points = [
        (who, r["m"], r["gops"] / r["weight_gbps"], r["gops"] * r["seconds"] / seconds)
        for r in group
        for who, seconds in {OURS: r["seconds"], **r["peers"]}.items()
    ]
    ridge = peak / read
    xs, ys = [ridge, *(p[2] for p in points)], [peak, *(p[3] for p in points)]
    across = Axis(min(xs) / 1.7, max(xs) * 1.7, left + 58, left + PANEL_WIDTH - 24, log=True)
    up = Axis(min(ys) / 2.2, max(ys) * 2, top + PANEL_HEIGHT - 58, top + 34, log=True)
    drawing.text(left, top + 20, heading, bold=True)
    drawing.rect(across.start, up.end, across.end - across.start, up.start - up.end, "panel")
    for value in up.ticks():
        if value < peak:
            drawing.line([(across.start, up(value)), (across.end, up(value))], "line", width=0.7)
        label = f"{value / 1000:g} TOP/s" if value >= 1000 else f"{value:g} GOP/s"
        drawing.text(across.start - 6, up(value) + 4, label, size=11, fill="dim", anchor="end")
    for value in across.ticks():
        drawing.text(across(value), up.start + 32, f"{value:g}", size=11, fill="dim", anchor="middle")
    drawing.text(across.end, up.start + 48, "operations per byte of weights", size=11, fill="dim", anchor="end")
    for x in dict.fromkeys(p[2] for p in points):
        drawing.line([(across(x), up.start), (across(x), up.end)], "line", width=0.7, dash="2 3")
    steps = sorted({(p[2], p[1]) for p in points})
    shown = float("-inf")
    for x, m in steps:
        if across(x) - shown > 44:
            drawing.text(across(x), up.start + 15, f"M = {m}" if m == steps[0][1] else str(m), size=11, anchor="middle")
            shown = across(x)
    if float_bits:
        shift = float_bits / FLOAT16_BITS
        low = max(across.low, up.low / (read * shift))
        roof = [(low, low * read * shift), (ridge / shift, peak)]
        if ridge / shift <= across.high:
            roof.append((across.high, peak))
        drawing.line([(across(x), up(y)) for x, y in roof if x <= across.high], "grey", width=1.2, dash="5 4")
    roof = [(max(across.low, up.low / read), max(across.low, up.low / read) * read), (ridge, peak), (across.high, peak)]
    drawing.line([(across(x), up(y)) for x, y in roof], "ink", width=1.6)
    limit = f"{read:.3g} GB/s" if read < 1000 else f"{read / 1000:.2g} TB/s"
    top_speed = f"{peak:,.0f} GOP/s" if peak < 1000 else f"{peak / 1000:,.3g} TOP/s"
    drawing.text(
        across.end - 4,
        up(peak) - 7,
        f"{limits.arithmetic(activations)}: {top_speed}",
        size=11,
        fill="dim",
        anchor="end",
    )
    drawing.text(across.start + 6, up.end + 14, f"memory: {limit}", size=11, fill="dim")
    for who, _, x, y in sorted(points, key=lambda point: point[0] == OURS):
        name = who.partition(":")[0]
        mark(drawing, across(x), up(y), name, "orange" if name == OURS else styles[name])


def cpu_roofline(name: str, formats: Collection[str], title: str) -> Drawing:
    results = records.read(name)
    found = [r for r in results["records"] if r["format"] in formats]
    return roofline(found, Limits(**results["limits"]), results["machine"], title=title)


def gpu_roofline() -> Drawing:
    """The limits are what the record has: a kernel that only reads the weights, and cuBLAS's best float16 GEMM."""
    results = records.read("cuda_h200.json")
    own = [r for r in results["records"] if r["format"] == "u4b8:128"]
    read = max(r["weight_gbps"] * r["seconds"] / r["seconds_reading_weights"] for r in own if r["m"] == 1)
    peak = max(r["gops"] * r["seconds"] / r["peers"]["cublas:f16"] for r in own)
    limits = GpuLimits(1e9 * read, 1e9 * peak, 1e9 * peak)
    shapes = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
    found = [r for r in own if (r["k"], r["n"]) in shapes]
    bits = 8 * found[0]["weight_gbps"] * 1e9 * found[0]["seconds"] / (found[0]["k"] * found[0]["n"])
    title = "4-bit matmul on an H200 beside its roofline and peers"
    drawing = roofline(found, limits, results["machine"], title=title, float_bits=bits)
    drawing.text(520, 80, "Dashed: the roof of float16 weights.", size=12, fill="dim")
    return drawing


# ---- language models beside peers -------------------------------------------------------------------------------

CONTENDERS = {"llama.cpp": "green", "ik_llama.cpp": "blue", OURS: "orange"}


def cpu_speeds(results: Record) -> dict[str, dict[str, float]]:
    """tok/s of llama.cpp, ik_llama.cpp and ours with int8 activations, by case."""
    cases = {
        "generation": "decode, one sequence",
        "prompt of 512": "prefill, 512 tokens",
        "streams: 16": "decode, batch of 16",
    }
    speeds: dict[str, dict[str, float]] = {label: {} for label in cases.values()}
    for record in results["records"]:
        who = {"billfish q8": OURS}.get(record["who"], record["who"])
        if record["what"] in cases and who in CONTENDERS:
            speeds[cases[record["what"]]][who] = record["tokens"] / record["seconds"]
    return speeds


def gpu_speeds(results: Record) -> dict[str, dict[str, float]]:
    cases = {
        "generate": "decode, one sequence",
        "prompt_512": "prefill, 512 tokens",
        "streams_16": "decode, batch of 16",
    }
    found = {r["case"]: r for r in results["records"] if r["shape"] == "8b"}
    return {
        label: {"llama.cpp": found[case]["peers"]["llama.cpp"], OURS: found[case]["tok_per_s"]}
        for case, label in cases.items()
    }


def speed() -> Drawing:
    """Bars of tok/s, of one case relative to its fastest."""
    neoverse, xeon, gpu = map(records.read, ("llm_neoverse_n1.json", "llm_xeon.json", "llm_cuda_h200.json"))
    machines = {
        f"Neoverse-N1, 2 threads: SmolLM2-135M, Q4_1 ({neoverse['date']})": cpu_speeds(neoverse),
        f"Xeon, AVX-512 VNNI, 2 threads: SmolLM2-135M, Q4_1 ({xeon['date']})": cpu_speeds(xeon),
        f"H200: Llama-3-8B's shape, random weights, Q4_0 ({gpu['machine']['date']})": gpu_speeds(gpu),
    }
    title = "Tokens per second beside llama.cpp and ik_llama.cpp"
    drawing = Drawing(960, 100, title, "Bars of tokens per second on three machines, for decoding and prefill.")
    drawing.text(20, 32, title, size=18, bold=True)
    drawing.text(
        20, 54, "The same GGUF file for all. billfish with int8 activations on CPUs, float16 on the GPU.", fill="dim"
    )
    x = 20.0
    for name, fill in CONTENDERS.items():
        drawing.rect(x, 68, 14, 14, fill)
        drawing.text(x + 20, 80, name, size=12)
        x += 44 + 7 * len(name)
    y = 104
    for heading, cases in machines.items():
        drawing.text(20, y + 4, heading, bold=True)
        y += 14
        for case, speeds in cases.items():
            drawing.text(180, y + 8 * len(speeds) + 4, case, size=12, anchor="end")
            for who, fill in CONTENDERS.items():
                if who in speeds:
                    width = 640 * speeds[who] / max(speeds.values())
                    drawing.rect(190, y, width, 14, fill)
                    words = f"{speeds[who]:,.0f} tok/s"
                    words += (
                        f", {speeds[who] / max(v for k, v in speeds.items() if k != OURS):.1f}x" if who == OURS else ""
                    )
                    drawing.text(196 + width, y + 11, words, size=11, fill="ink" if who == OURS else "dim")
                    y += 16
            y += 8
        y += 22
    drawing.height = y - 10
    return drawing


# ---- the time of a token ----------------------------------------------------------------------------------------

HUES = {
    "QKV": "blue",
    "attention output": "sky",
    "gate and up": "green",
    "gate and up, SwiGLU": "green",
    "down": "yellow",
    "LM head": "pink",
    "attention": "orange",
}


def hue(part: str) -> str:
    """Matmuls and attention have colours; all else is grey."""
    return HUES.get(part, "grey")


def token_cpu() -> Drawing:
    results = records.read("inside_a_token.json")
    about, found = results["about"], results["records"]
    title = "One token on a CPU: SmolLM2-135M, Q4_1"
    drawing = Drawing(
        960, 330, title, "Milliseconds of a token by part, for three kinds of activations and two contexts."
    )
    drawing.text(20, 32, title, size=18, bold=True)
    drawing.text(20, 54, source(results), fill="dim")
    sums = [sum(r["milliseconds"].values()) for r in found]
    across = Axis(0, 1.06 * max(sums), 170, 940)
    parts = list(PARTS)
    for i, (record, total) in enumerate(zip(found, sums, strict=True)):
        y, at = 100 + 42 * i, 0.0
        drawing.text(160, y + 18, f"{record['activations']}, context {record['context']}", size=12, anchor="end")
        for j, part in enumerate(parts):
            width = record["milliseconds"][part]
            opacity = 0.55 + 0.45 * (j % 2) if hue(PARTS[part]) == "grey" else 1
            drawing.rect(across(at), y, across(width) - across(0) - 0.6, 26, hue(PARTS[part]), opacity=opacity)
            at += width
        drawing.text(across(total) + 6, y + 18, f"{total:.1f} ms", size=12)
    least = about["least_milliseconds"]
    drawing.line([(across(least), 88), (across(least), 266)], "ink", width=1.4, dash="5 4")
    drawing.text(across(least), 82, f"reading the weights: {least:.1f} ms", size=12, anchor="middle")
    x = 20.0
    for name in ("QKV", "attention output", "gate and up", "down", "LM head", "attention"):
        drawing.rect(x, 292, 14, 14, hue(name))
        drawing.text(x + 20, 304, name, size=12)
        x += 40 + 7 * len(name)
    drawing.rect(x, 292, 14, 14, "grey")
    drawing.text(x + 20, 304, "RMSNorm, RoPE, SwiGLU, Python", size=12)
    return drawing


def token_gpu() -> Drawing:
    """A decode step of an 8B model: one layer's kernels along time, then what each part adds to a token."""
    results, reading = records.read("token_h200.json"), records.read("cuda_h200.json")
    launches, shape = results["records"], SHAPES["8b"]
    end = launches[-1]["end_us"]
    title = "The kernels of one token on an H200: 8B, q4_0"
    drawing = Drawing(
        960, 640, title, "One layer's kernels along time, overlapping; and the time of a whole token by part."
    )
    drawing.text(20, 32, title, size=18, bold=True)
    rate = results["tokens_per_second"]
    drawing.text(
        20,
        54,
        f"{len(launches)} kernels in one CUDA graph, {end / 1000:.2f} ms, {rate:.0f} tok/s. {source(results)}",
        fill="dim",
    )

    layer = 16
    first, following = [i for i, launch in enumerate(launches) if launch["part"] == "QKV"][layer : layer + 2]
    own, before = launches[first:following], launches[first - 1]["end_us"]
    drawing.text(20, 92, f"Layer {layer} of {shape.layers}: a kernel starts before the one ahead of it ends", bold=True)
    start = min(launch["start_us"] for launch in own)
    across = Axis(start - 1, own[-1]["end_us"] + 1, 190, 940)
    matrices = shape.matrices()
    names = {"QKV": ("attn_q", "attn_k", "attn_v"), "attention output": ("attn_output",), "down": ("ffn_down",)}
    names["gate and up, SwiGLU"] = ("ffn_gate", "ffn_up")
    for i, launch in enumerate(own):
        y = 108 + 27 * i
        drawing.text(180, y + 15, launch["part"], size=12, anchor="end")
        begin, ready, done = launch["start_us"], max(before, launch["start_us"]), launch["end_us"]
        fill = hue(launch["part"])
        drawing.rect(across(begin), y, across(ready) - across(begin), 20, fill, opacity=0.3)
        drawing.rect(across(ready), y, across(done) - across(ready), 20, fill)
        words = f"+{done - ready:.1f} us"
        if launch["part"] in names:
            size = sum(n * k for n, k in (matrices[f"blk.{layer}.{name}.weight"] for name in names[launch["part"]]))
            words += f", {size * 4.5 / 8 / 1e6:.1f} MB"
        if across(done) + 100 < across.end:
            drawing.text(across(done) + 5, y + 15, words, size=11, fill="dim")
        else:
            drawing.text(across(begin) - 5, y + 15, words, size=11, fill="dim", anchor="end")
        before = done
    for us in range(0, int(across.high - start) + 1, 10):
        drawing.text(across(start + us), 342, f"{us} us", size=11, fill="dim", anchor="middle")
    drawing.rect(190, 354, 24, 12, "green", opacity=0.3)
    drawing.text(220, 365, "launched early: fetches its first weights, then waits for its input", size=12, fill="dim")
    drawing.rect(650, 354, 24, 12, "green")
    drawing.text(680, 365, "after the kernel ahead has ended", size=12, fill="dim")

    drawing.text(20, 408, "A whole token: what each part adds", bold=True)
    sums: dict[str, float] = {}
    last = 0.0
    for launch in launches:
        sums[launch["part"]] = sums.get(launch["part"], 0) + launch["end_us"] - last
        last = launch["end_us"]
    rows = sorted(sums.items(), key=lambda item: -item[1])
    one = [r for r in reading["records"] if r["format"] == "u4b8:128" and r["m"] == 1]
    gbps = max(r["weight_gbps"] * r["seconds"] / r["seconds_reading_weights"] for r in one)
    weights = sum(n * k for name, (n, k) in matrices.items() if name != "token_embd.weight")
    floor = weights * 4.5 / 8 / gbps / 1e3
    across = Axis(0, max(value for _, value in rows) * 1.25, 190, 940)
    for i, (part, value) in enumerate(rows[:8]):
        y = 422 + 22 * i
        drawing.text(180, y + 13, part, size=12, anchor="end")
        drawing.rect(190, y, across(value) - 190, 16, hue(part))
        drawing.text(across(value) + 6, y + 13, f"{value:.0f} us, {100 * value / end:.0f} %", size=11, fill="dim")
    matmuls = sum(value for part, value in sums.items() if part in (*names, "LM head"))
    size = f"{weights * 4.5 / 8 / 1e9:.2f} GB at {gbps / 1000:.1f} TB/s"
    words = f"Matmuls add {matmuls:.0f} us; reading their {size} takes {floor:.0f} us."
    drawing.text(20, 616, f"{words} The rest is the chain of small kernels between them.", size=12, fill="dim")
    return drawing


# ---- KL divergence ----------------------------------------------------------------------------------------------

METHODS = {
    "rtn": ("rtn", "grey"),
    "mse": ("mse", "blue"),
    "ggml": ("llama.cpp's, imatrix", "green"),
    "weighted": ("--calibrate", "orange"),
    "gptq": ("gptq, float inputs", "pink"),
    "sequential": ("gptq in order", "sky"),
    "tune": ("then tune", "yellow"),
}


def kl() -> Drawing:
    """Rows of formats by their bits; KL divergence of SmolLM2 across."""
    results = records.read("quality.json")
    found = [r for r in results["records"] if r["calibration_text"] in ("", "mixed")]
    found = [r for r in found if r["calibration_tokens"] in (0, 32768) and r["method"] in (*METHODS, "bits")]
    rows: dict[tuple[float, str], list[Record]] = {}
    for record in found:
        name = "--bits 4.6" if record["method"] == "bits" else f"{record['format']}:{record['group_size']}"
        rows.setdefault((round(record["bits_per_weight"], 2), name), []).append(record)
    order = sorted(rows, key=lambda key: (key[0], -min(r["divergence"] for r in rows[key])))
    title = "KL divergence by format and method, SmolLM2-135M"
    about = "KL divergence from the original file, by format and method, with bits per weight."
    drawing = Drawing(960, 150 + 34 * len(order) + 40, title, about)
    drawing.text(20, 32, title, size=18, bold=True)
    tokens = found[0]["tokens"]
    words = f"From the Q4_1 file, on {tokens:,} predicted tokens of news; every matrix of the layers requantized."
    drawing.text(20, 54, f"{words} {results['date']}.", fill="dim")
    x = 20.0
    for label, fill in METHODS.values():
        drawing.circle(x + 6, 76, 5, fill)
        drawing.text(x + 18, 80, label, size=12)
        x += 42 + 7 * len(label)
    low, high = min(r["divergence"] for r in found), max(r["divergence"] for r in found)
    across = Axis(low / 1.15, high * 1.2, 210, 940, log=True)
    bottom = 112 + 34 * len(order)
    for value in (0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6):
        if across.low <= value <= across.high:
            drawing.line([(across(value), 104), (across(value), bottom)], "line", width=0.7)
            drawing.text(across(value), bottom + 16, f"{value:g}", size=11, fill="dim", anchor="middle")
    drawing.text(940, bottom + 34, "nats, smaller is better", size=11, fill="dim", anchor="end")
    drawing.text(20, 104, "bits per weight", size=11, fill="dim")
    for i, key in enumerate(order):
        y = 112 + 34 * i + 17
        bits, name = key
        drawing.text(20, y + 4, f"{bits:.2f}", bold=True)
        drawing.text(76, y + 4, name, mono=True, size=12)
        values = [record["divergence"] for record in rows[key]]
        drawing.line([(across(min(values)), y), (across(max(values)), y)], "line", width=2)
        for record in rows[key]:
            fill = METHODS["weighted" if record["method"] == "bits" else record["method"]][1]
            drawing.circle(across(record["divergence"]), y, 6, fill)
    return drawing


SWEEP = {
    "rtn": ("rtn", "grey"),
    "mse": ("mse", "blue"),
    "plain": ("llama.cpp", "green"),
    "imatrix": ("llama.cpp, imatrix", "sky"),
    "weighted": ("--calibrate", "orange"),
    "gptq": ("gptq in order", "pink"),
    "tune": ("gptq, tuned", "yellow"),
}


def sweep() -> Drawing:
    """KL divergence over bits per weight, both logarithmic: a point for each file, a color for each method."""
    results = records.read("sweep.json")
    found = sorted(results["records"], key=lambda r: (r["bits_per_weight"], r["divergence"]))
    # The file is in q4_1: it, and q5_1 of which most of Q5_K_M is, hold its values exactly.
    found = [r for r in found if r["format"].upper() not in ("Q4_1", "Q5_1", "Q5_K_M")]
    methods = [method for method in SWEEP if any(r["method"] == method for r in found)]
    model = results["about"]["model"]
    title = f"KL divergence over bits per weight, {model}"
    drawing = Drawing(960, 560, title, "KL divergence from the original file over bits per weight, by method.")
    drawing.text(20, 32, title, size=18, bold=True)
    about = (
        f"From the file as it is, on {found[0]['tokens']:,} predicted tokens; every matrix of the layers requantized."
    )
    drawing.text(20, 54, f"{about} {results['date']}.", fill="dim")
    x = 20.0
    for method in methods:
        label, fill = SWEEP[method]
        drawing.circle(x + 6, 76, 5, fill)
        drawing.text(x + 18, 80, label, size=12)
        x += 42 + 8 * len(label)
    bits, lost = ([record[name] for record in found] for name in ("bits_per_weight", "divergence"))
    across = Axis(min(bits) / 1.04, max(bits) * 1.04, 76, 930, log=True)
    up = Axis(min(lost) / 1.3, max(lost) * 1.3, 500, 104, log=True)
    for value in (2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8):
        if across.low <= value <= across.high:
            drawing.line([(across(value), 104), (across(value), 500)], "line", width=0.7)
            drawing.text(across(value), 518, f"{value:g}", size=11, fill="dim", anchor="middle")
    for value in (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1):
        if up.low <= value <= up.high:
            drawing.line([(76, up(value)), (930, up(value))], "line", width=0.7)
            drawing.text(68, up(value) + 4, f"{value:g}", size=11, fill="dim", anchor="end")
    drawing.text(930, 540, "bits per weight of the layers, scales included", size=11, fill="dim", anchor="end")
    drawing.text(20, 540, "KL divergence, nats: smaller is better", size=11, fill="dim")
    for method in methods:
        for record in (record for record in found if record["method"] == method):
            drawing.circle(across(record["bits_per_weight"]), up(record["divergence"]), 5, SWEEP[method][1])
    return drawing
