"""The tables and figures that pages take from benchmarks/results, by name.

`python -m benchmarks.pages` writes them between the markers of README and docs; `python -m benchmarks.tables NAME`
prints one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks import records

Results = dict[str, Any]


class Table(NamedTuple):
    """A table, or words of a sentence, made from one record."""

    results: str  # the record's name in benchmarks/results
    write: Callable[[Results], str]
    command: str | None = None  # that measures a table again; "" in a short one, None for words of a sentence

    def text(self) -> str:
        """Markdown. A table is followed by where and when it was measured, and by its command."""
        results = records.read(self.results)
        body = self.write(results)
        if self.command is None:
            return body
        again = f" Measure again: `{self.command}`." if self.command else ""
        return f"{body}{source(results)}{again}\n"


def source(results: Results) -> str:
    """The machine, its threads, the date and the versions of a record, as far as it has them."""
    about = results.get("about", {})
    found = {**results, **about}
    place = found.get("machine", {})
    found |= place if isinstance(place, dict) else {"architecture": place}
    where = next((str(found[key]) for key in ("gpu", "cpu", "architecture") if found.get(key)), "")
    kind = found.get("isa") or found.get("arch") or ""
    count = f"{found['threads']} threads" if found.get("threads") else ""
    if "compiler" in found:
        where, kind, count = f"counted in emulation, compiled by {found['compiler']}", "", ""
    return ", ".join(filter(None, (where, str(kind), count, found["date"]))) + "."


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


# ---- language models --------------------------------------------------------------------------------------------

PEERS = ("llama.cpp", "ik_llama.cpp", "OpenVINO GenAI")
FLOAT_GPTQ = "`gptq`, float inputs"  # --no-sequential
ROWS = {
    "generation": "decode, 128 tokens from an empty context",
    "generation after 1024": "decode, 32 tokens after 1024",
    "generation after 4096": "decode, 32 tokens after 4096",
    "generation after 16384": "decode, 32 tokens after 16384",
    "prompt of 512": "prefill, 512 tokens",
    "prompt of 4096": "prefill, 4096 tokens",
    "prompt of 16384": "prefill, 16384 tokens",
    "streams: 1": "decode, one sequence",
    **{f"streams: {n}": f"decode, batch of {n}" for n in (2, 4, 8, 16)},
    "cold start": "process start to first token, prompt of 20 tokens",
}


def speed(results: Results, rows: Iterable[str] = ROWS) -> str:
    """tok/s beside the peers that ran; in brackets, speed-up over the best of them."""
    about, found = results["about"], {(r["what"], r["who"]): r for r in results["records"]}
    beside = [name for name in PEERS if name in about["peers"]]
    kinds = [name for name in ("q8", "q16", "exact") if any(who == f"billfish {name}" for _, who in found)]
    who = [*beside, *(f"billfish {name}" for name in kinds)]
    lines = [["SmolLM2-135M, Q4_1", *beside, *(f"billfish, {name}" for name in kinds)]]
    for what in rows:
        cells, theirs = [], [found[what, name]["seconds"] for name in beside if (what, name) in found]
        if not theirs:  # not measured on this machine
            continue
        best = min(theirs)
        for name in who:
            record = found.get((what, name))
            if record is None:
                cells.append("")
                continue
            seconds = record["seconds"]
            cell = f"{seconds:.2f} s" if what == "cold start" else f"{record['tokens'] / seconds:.0f} tok/s"
            cells.append(cell if name in PEERS else f"{cell} ({best / seconds:.2f})")
        lines.append([ROWS[what], *cells])
    return table(lines)


def hybrid(results: Results) -> str:
    """tok/s of Qwen3.5-0.8B's shape on every machine; in brackets, speed-up over llama.cpp."""
    names = {"generation": "decode, 64 tokens after 16", "prompt of 512": ROWS["prompt of 512"]}
    lines = [["Qwen3.5-0.8B's shape, q4_0", "CPU", "llama.cpp", "billfish, q8"]]
    for what, row in names.items():
        for each in results["machines"]:
            rate = {r["who"]: r["tokens"] / r["seconds"] for r in each["records"] if r["what"] == what}
            theirs, ours = rate["llama.cpp"], rate["billfish q8"]
            place = f"{each['cpu']}, {each['threads']} threads"
            lines.append([row, place, f"{theirs:.0f} tok/s", f"{ours:.0f} tok/s ({ours / theirs:.2f})"])
    return table(lines)


def isa_levels(results: Results) -> str:
    """tok/s of prompts under two ISA levels; in brackets, the median speed-up of neighbours."""
    first, second = results["records"][0]["tok_per_s"]
    lines = [["1B shape, q4_0", "activations", f"`{second}`", f"`{first}`"]]
    for each in results["records"]:
        theirs, ours = (f"{each['tok_per_s'][name]:,.0f} tok/s" for name in (second, first))
        lines.append(
            [f"prefill, {each['tokens']} tokens", each["activations"], theirs, f"{ours} ({each['ratio']:.2f})"]
        )
    return table(lines)


def drafting(results: Results) -> str:
    """tok/s of SmolLM2 without and with n-gram drafts; in brackets, the median speed-up of runs in turns."""
    lines = [["SmolLM2-135M, greedy", "activations", "plain", "`--draft ngram`", "accepted", "tokens a step"]]
    for each in results["records"]:
        plain, drafted = (f"{each[f'{name}_tok_per_s']:.0f} tok/s" for name in ("plain", "ngram"))
        share, count = f"{each['acceptance']:.0%}", f"{each['tokens_per_step']:.2f}"
        lines.append([each["workload"], each["activations"], plain, f"{drafted} ({each['ratio']:.2f})", share, count])
    return f"{table(lines)}Kernels: {results['about']['kernels']}.\n\n"


def drafting_peer(results: Results) -> str:
    """tok/s of llama.cpp beside billfish, without and with n-gram drafts; in brackets, times its own plain decoding."""
    records = [each for each in results["records"] if "llama.cpp_tok_per_s" in each]
    counts = [count for count in records[0]["llama.cpp_tok_per_s"] if count != "0"]
    ours = [f"billfish {records[0]['activations']}", "`--draft ngram`"]
    lines = [["SmolLM2-135M, greedy", *ours, "llama.cpp", *(f"look-up, {count} tokens" for count in counts)]]
    for each in records:
        plain, theirs = each["plain_tok_per_s"], each["llama.cpp_tok_per_s"]
        rates = [f"{plain:.0f} tok/s", f"{each['ngram_tok_per_s']:.0f} tok/s ({each['ngram_tok_per_s'] / plain:.2f})"]
        rates += [
            f"{theirs['0']:.0f} tok/s",
            *(f"{theirs[n]:.0f} tok/s ({theirs[n] / theirs['0']:.2f})" for n in counts),
        ]
        lines.append([each["workload"], *rates])
    return f"{table(lines)}{results['about']['llama.cpp']}.\n\n"


def drafting_steps(results: Results) -> str:
    """Steps of an 8B model by their rows of one sequence, and what drafts would gain with such steps."""
    kinds = {"batch_invariant": "`batch_invariant`", "fastest": "fastest"}
    rows = [str(count) for count in (1, 2, 4, 8)]
    lines = [["8B, q4_0", *(f"{count} rows" if count != "1" else "1 row" for count in rows)]]
    for kind, name in kinds.items():
        seconds, ratios = (results["8b"][kind][what] for what in ("device_seconds", "of_one_row"))
        lines.append([name, *(f"{seconds[count] * 1e6:.0f} us ({ratios[count]:.3f})" for count in rows)])
    replayed = results["8b"]["replayed"]
    gains = [["n-gram drafts, times plain decoding", *replayed["fastest"]]]
    said = {
        "first answer": "the model's first answer; plain with the fastest steps",
        "fastest": "later answers; plain with the fastest steps",
        "batch_invariant": "later answers; plain with `batch_invariant` steps",
    }
    gains += [[name, *(f"{gain:.2f}" for gain in replayed[case].values())] for case, name in said.items()]
    return f"{table(lines)}{table(gains)}"


def drafted_answers(results: Results) -> str:
    """Words: how many answers with drafts were compared with those without, and how many differ."""
    formats = len(results["formats"])
    kinds = f"{results['prompts']} prompts, {f'{formats} formats' if formats > 1 else results['formats'][0]}"
    many = f"{results['answers']:,} answers ({kinds})"
    return f"{results['differing']:,} of {many} differ" if results["differing"] else f"none of {many} differs"


def peers(results: Results) -> str:
    """Whose figures the peers' columns are."""
    found = {name: about for name, about in results["about"]["peers"].items() if name in PEERS}
    whose = []
    for about in found.values():
        contains = f" with {', '.join(about['instructions'])}" if about.get("instructions") else ""
        whose.append(f"{about['version']}{contains} ({about['date']})")
    return ", ".join(whose)


# Matmuls first, then what lies between them: the names in records, and the field's.
PARTS = {
    "q, k, v": "QKV",
    "attention output": "attention output",
    "gate and up": "gate and up",
    "down": "down",
    "head": "LM head",
    "norms": "RMSNorm",
    "rotation and cache": "RoPE, KV cache",
    "attention": "attention",
    "gate": "SwiGLU",
    "Python": "Python",
}


def token(results: Results) -> str:
    """Milliseconds of one token, by part."""
    found = results["records"]
    rows = [["ms", *(f"{r['activations']}, context {r['context']}" for r in found)]]
    parts = [part for part in PARTS if part in found[0]["milliseconds"]]
    rows += [[PARTS[part], *(f"{r['milliseconds'][part]:.2f}" for r in found)] for part in parts]
    return table([*rows, ["sum", *(f"{sum(r['milliseconds'].values()):.2f}" for r in found)]])


def least(results: Results) -> str:
    about = results["about"]
    size, milliseconds = about["weight_bytes"] / 1e6, about["least_milliseconds"]
    return f"Reading {size:.0f} MB of weights takes at least {milliseconds:.2f} ms."


def served(results: Results) -> str:
    """Whether vLLM gives the tokens of transformers."""
    folders = {"llama, in numbers, billfish": "llama, unquantized, billfish"}
    rows = [[folders.get(r["folder"], r["folder"]), f"`{r['arguments']}`", r["verdict"]] for r in results["records"]]
    return table([["folder", "arguments of `vllm.LLM`", "tokens"], *rows])


def served_speed(results: Results) -> str:
    """How fast, beside vLLM's own kernels."""
    speeds = results["tokens per second"]
    names = {"float32": "float32", "w4a8": "W4A8", "billfish": "billfish, q8"}
    kinds = {"prompts": "prefill, 512 tokens", "1": "decode, one sequence"}
    rows = [["tok/s in vLLM", *(names[engine] for engine in speeds)]]
    for kind in speeds["billfish"]:
        rows.append([kinds.get(kind, f"decode, batch of {kind}"), *(f"{own[kind]:.0f}" for own in speeds.values())])
    return table(rows)


def eight_clients(results: Results) -> str:
    """How fast `billfish serve` is, beside the decoder without a server and llama.cpp's server."""
    found = {(r["who"], r["what"]): r for r in results["records"]}
    whats = [f"first token, {state}" for state in ("idle", "busy")]
    names = {"the decoder": "decoder without a server, batch of 8"}
    rows = [["", "8 clients", "time to first token, idle", "time to first token, 8 clients busy"]]
    for who in dict.fromkeys(r["who"] for r in results["records"]):
        waits = [found.get((who, what)) for what in whats]
        cells = [f"{1000 * wait['seconds']:.0f} ms" if wait else "" for wait in waits]
        rows.append([names.get(who, who), f"{found[who, '8 streams']['tokens_per_s']:.0f} tok/s", *cells])
    return table(rows)


# What tells cases of waves apart in most records, and what is measured. Anything else is part of a case's name.
WAVE_KEYS = {"clients", "prompt", "common", "answer", "wave", "tok_per_s", "cached_tokens", "of_decoder"}
WAVE_KEYS |= {f"{what}_p{part}_ms" for what in ("first_token", "gap") for part in (50, 99)}
WAVE_KEYS |= {"others_tok_per_s", "others_of_plain"}


def waves(results: Results) -> str:
    """tok/s of the first and the last wave of each case; times and cached tokens are those of the last."""
    cases: dict[tuple[str, ...], list[Results]] = {}
    for record in results["records"]:
        more = [f"{value} {key.replace('_', ' ')}" for key, value in record.items() if key not in WAVE_KEYS and value]
        common = f" ({record['common']:,} common)" if record.get("common") else ""
        asked = f"{record['prompt']:,}{common} / {record['answer']}"
        cases.setdefault((", ".join([str(record["clients"]), *more]), asked), []).append(record)
    rows = [["clients", "prompt / answer, tokens", "tok/s, first wave", "third wave", "first token p50 / p99, ms"]]
    rows[0] += ["between tokens p50 / p99, ms", "of `generate_batch`", "cached tokens of a prompt"]
    for (clients, asked), found in cases.items():
        first, last = found[0], found[-1]
        times = [f"{last[f'{what}_p50_ms']:,.{d}f} / {last[f'{what}_p99_ms']:,.{d}f}" for what, d in TIMES.items()]
        ratio = f"{last['of_decoder']:.2f} x" if "of_decoder" in last else ""
        rates = [f"{record['tok_per_s']:,.0f}" for record in (first, last)]
        rows.append([clients, asked, *rates, *times, ratio, f"{last['cached_tokens']:,.0f}"])
    return table(rows)


TIMES = {"first_token": 0, "gap": 1}  # digits
SHORT = {"clients": 64, "prompt": 200, "answer": 128}


def waves_short(results: Results) -> str:
    """Words: the last wave of 64 clients with prompts of 200 tokens."""
    found = [record for record in results["records"] if record.items() >= SHORT.items()]
    last = found[-1]
    asked = f"prompts of {last['prompt']} tokens, answers of {last['answer']}"
    return (
        f"{last['tok_per_s']:,.0f} tok/s for {last['clients']} clients at once ({asked}; time to first token"
        f" {last['first_token_p50_ms']:.0f} ms in the median, {last['first_token_p99_ms']:.0f} ms at p99)"
    )


def attack(results: Results) -> str:
    """What came of an attack, by generator. The megabytes of "server" are what the server has grown by."""
    lines = [["generator", "cases", "accepted", "refused", "failed", "worst s", "worst MB"]]
    for row in results["rows"]:
        counts = [f"{row[name]:,}" for name in ("cases", "accepted", "refused", "failed")]
        lines.append([row["generator"], *counts, f"{row['worst_seconds']:.2f}", f"{row['worst_memory'] / 2**20:.1f}"])
    return table(lines)


def attack_counts(results: Results) -> str:
    """Words: how large an attack was, and how many failed."""
    rows = {row["generator"]: row for row in results["rows"]}
    processes = {name: rows.pop(name)["cases"] for name in ("server", "races", "kills", "faults")}
    cases, failed = sum(row["cases"] for row in rows.values()), sum(row["failed"] for row in results["rows"])
    kinds = {"server": "HTTP requests", "races": "races between processes", "kills": "kills", "faults": "failing calls"}
    parts = [f"{cases:,} files and calls", *(f"{processes[name]:,} {kind}" for name, kind in kinds.items())]
    said = f"{', '.join(parts[:-1])} and {parts[-1]}, of which {failed or 'none'} failed"
    return f"{said}, in {results['about']['seconds']} s"


def attack_neighbor(results: Results) -> str:
    """How long an ordinary client waits beside clients that attack in one way. Medians: it gets few answers."""
    usual = ("alone", "beside as many ordinary clients")
    lines = [["sent", "requests", "its answers", "median ms", *usual]]
    for name, each in results["neighbor"].items():
        attacked, ratios = each["attacked"], [f"{each[f'ratio to {what}']['median']:.2f}" for what in usual]
        counts = f"{each['requests']:,}", str(attacked["answers"]), f"{1000 * attacked['median']:.0f}"
        lines.append([name.replace("_", " "), *counts, *ratios])
    return table(lines)


def waves_mixed(results: Results) -> str:
    """Words: what other clients keep of their tokens per second beside one that asks for much."""
    found = [record for record in results["records"] if "others_of_plain" in record]
    least = min(record["others_of_plain"] for record in found)
    others = f"the other {found[0]['clients'] - 1}"
    return f"{others} generate at least {least:.0%} of the tokens per second that they have without it"


def soaked(results: Results) -> str:
    """Words: how many requests a soak had, and what came of them."""
    if results["wrong"]:
        return f"{results['wrong']} of {results['requests']:,} answers were lost or wrong"
    ends = results["ends"]
    return (
        f"of {results['requests']:,} requests none was lost or got another's answer, with {ends['cancelled']:,}"
        f" cancelled, {ends['left']:,} left by their clients and {results['preemptions']:,} preemptions"
    )


# ---- quality ----------------------------------------------------------------------------------------------------


def by_format(found: list[Results], columns: list[Results], figure: str, digits: int) -> list[list[str]]:
    """A row for each format: the figure of each column, and in brackets that figure by the better of rtn and mse."""
    formats = {(r["format"], r["group_size"]): r["bits_per_weight"] for r in found if r["format"]}
    rows = []
    for (name, group_size), bits in formats.items():
        own = [record for record in found if (record["format"], record["group_size"]) == (name, group_size)]
        best = min(record[figure] for record in own if record["method"] in ("rtn", "mse"))
        row = [f"{name}, {group_size}", f"{bits:.2f}"]
        for column in columns:
            value = next((record[figure] for record in own if column.items() <= record.items()), None)
            share = "" if column["method"] in ("rtn", "mse") or value is None else f" ({value / best:.2f})"
            row.append("" if value is None else f"{value:.{digits}f}{share}")
        rows.append(row)
    return rows


def language(results: Results) -> str:
    """KL divergence of SmolLM2, by format and method."""
    calibrated = [
        {"method": method, "calibration_text": text, "calibration_tokens": 32768}
        for text in ("mixed", "documentation")
        for method in ("weighted", "gptq")
    ]
    columns: list[Results] = [{"method": "rtn"}, {"method": "mse"}, *calibrated]
    head = ["format, group size", "bits per weight", "`rtn`", "`mse`"]
    head += [f"{method}, {text}" for text in ("mixed", "documentation") for method in ("weighted", FLOAT_GPTQ)]
    return table([head, *by_format(results["records"], columns, "divergence", 3)])


def in_order(results: Results) -> str:
    """KL divergence of GPTQ by the float model's inputs and in order, and of `tune` after it, in brackets over the
    first."""
    methods = {"gptq": FLOAT_GPTQ, "sequential": "`gptq` in order", "tune": "then `tune`"}
    rows: dict[str, dict[str, Results]] = {}
    for record in results["records"]:
        calibration = record["calibration_text"], record["calibration_tokens"]
        if calibration == ("mixed", 32768) and record["method"] != "bits-gptq":
            name = f"{record['format']}, {record['group_size']}" if record["format"] else "`--bits 4.5`"
            rows.setdefault(name, {})[record["method"].removeprefix("bits-")] = record
    cells = [["format, group size", "bits per weight", *methods.values()]]
    for name, found in rows.items():
        if "sequential" in found:
            row = [name, f"{found['sequential']['bits_per_weight']:.2f}"]
            for method in methods:
                value = found[method]["divergence"] if method in found else None
                first = found["gptq"]["divergence"] if "gptq" in found and method != "gptq" else None
                share = f" ({value / first:.2f})" if value and first else ""
                row.append("" if value is None else f"{value:.4f}{share}")
            cells.append(row)
    return table(cells)


def rotation(results: Results) -> str:
    """KL divergence of plain and rotated files, by format and method, in brackets rotated over plain."""
    known = {"rtn": "`rtn`", "mse": "`mse`", "weighted": "weighted", "gptq": "`gptq`"}
    measured = {record["method"] for record in results["records"]}
    methods = {method: name for method, name in known.items() if method in measured}
    head = ["format, group size", *(f"{name}{kind}" for name in methods.values() for kind in ("", ", rotated"))]
    found: dict[tuple[str, str], dict[tuple[str, bool], float]] = {}
    for record in results["records"]:
        if record["method"]:
            size = "row" if record["group_size"] == -1 else record["group_size"]
            own = found.setdefault((record["form"], f"{record['format'].removesuffix('_gguf')}, {size}"), {})
            own[record["method"], record["rotated"]] = record["divergence"]
    rows = [head]
    for (form, name), own in found.items():
        row = [name if form == "off the grid" else f"{name}, on the grid"]
        for method in methods:
            plain, rotated = own.get((method, False)), own.get((method, True))
            row.append("" if plain is None else f"{plain:.3f}")
            row.append("" if rotated is None or plain is None else f"{rotated:.3f} ({rotated / plain:.2f})")
        rows.append(row)
    return table(rows)


def embeddings(results: Results) -> str:
    """Distance of MiniLM's embeddings, by format and method."""
    columns = [{"method": method} for method in ("rtn", "mse", "weighted", "gptq")]
    head = ["format, group size", "bits per weight", "embeddings: `rtn`", "`mse`", "weighted", FLOAT_GPTQ]
    return table([head, *by_format(results["embeddings"], columns, "distance", 5)])


def others(results: Results) -> str:
    """What else was measured with the mixed text: llama.cpp's quantizer, few tokens, a format for each matrix."""
    rows = [["further", "bits per weight", "calibration tokens", "KL divergence", "same top-1 token", "perplexity"]]
    for record in results["records"]:
        method = {"gptq": FLOAT_GPTQ, "ggml": "llama.cpp's quantizer"}.get(record["method"], record["method"])
        by_plan = {"bits": "`--bits 4.6`, weighted", "bits-gptq": f"`--bits 4.6`, {FLOAT_GPTQ}"}
        name = by_plan.get(method, f"{record['format']}, {method}")
        if record["method"] in (*by_plan, "ggml") or 0 < record["calibration_tokens"] < 32768:
            kl = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
            perplexity = f"{record['perplexity']:.2f} ± {record['perplexity_error']:.2f}"
            bits, tokens = f"{record['bits_per_weight']:.2f}", str(record["calibration_tokens"])
            rows.append([name, bits, tokens, kl, f"{record['same_best']:.1%}", perplexity])
    return table(rows)


def sweep(results: Results) -> str:
    """A model in every format: the columns that the community compares files by. Smallest first."""
    head = ["file", "GiB", "bits per weight", "perplexity", "KL divergence", "KL, 99.9 %", "same top-1 token"]
    rows = []
    for record in sorted(results["records"], key=lambda r: (r["bits_per_weight"], -r["divergence"])):
        perplexity = f"{record['perplexity']:.2f} ± {record['perplexity_error']:.2f}"
        kl = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
        method = {"gptq": "`gptq` in order", "tune": "`gptq` in order, tuned"}.get(record["method"], record["method"])
        format = f"`{record['format']}`" if record["format"].startswith("--") else record["format"]
        name = f"{format}, {method}"
        name = name if record["by"] == "billfish" else f"{record['by']}'s {name}".removesuffix(", plain")
        sizes = [f"{record['bytes'] / 2**30:.3f}", f"{record['bits_per_weight']:.2f}"]
        rows.append([name, *sizes, perplexity, kl, f"{record['divergence_999']:.2f}", f"{record['same_best']:.1%}"])
    return table([head, *rows])


def swept(results: Results) -> str:
    """The file that all others of the sweep are compared with."""
    about, tokens = results["about"], results["records"][0]["tokens"]
    perplexity = f"{about['perplexity']:.2f} ± {about['perplexity_error']:.2f}"
    return f"{perplexity} on the same {tokens:,} tokens, at {about['bits_per_weight']:.2f} bits per weight"


def mixture(results: Results) -> str:
    """Bits of the roles in a mixture, and the divergence, by the plan and by one format for all."""
    roles = list(results["records"][0]["roles"])
    rows = [["", "bits per weight", *roles, "KL divergence"]]
    for record in results["records"]:
        kl = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
        each = (f"{record['roles'][role]:.2f}" for role in roles)
        rows.append([f"`{record['name']}`", f"{record['bits_per_weight']:.2f}", *each, kl])
    return table(rows)


def plan(results: Results) -> str:
    """The plan of `--bits`, as an example of one."""
    found = next(record["plan"] for record in results["records"] if record["method"] == "bits")
    return f"```\n{found}```"


# ---- matmuls on the CPU -----------------------------------------------------------------------------------------


def by_shape(results: Results) -> dict[tuple[str, int, int], list[Results]]:
    """The records of each format and K x N, in the order of M."""
    found: dict[tuple[str, int, int], list[Results]] = {}
    for record in results["records"]:
        found.setdefault((record["format"], record["k"], record["n"]), []).append(record)
    return found


def beside_best(results: Results) -> str:
    """Speed-up over the fastest peer; in brackets, the part of the machine's limit."""
    found = {key: own for key, own in by_shape(results).items() if own[0]["peers"]}
    one_shape = len({key[1:] for key in found}) == 1
    columns = [f"M = {record['m']}" for record in next(iter(found.values()))]
    rows = [["format", *([] if one_shape else ["K x N"]), "fastest peer", *columns]]
    for (format, k, n), own in found.items():
        best = dict.fromkeys(min(record["peers"], key=record["peers"].get) for record in own)
        ratios = (min(record["peers"].values()) / record["seconds"] for record in own)
        cells = [f"{ratio:.2f} ({100 * r['limit_fraction']:.0f} %)" for ratio, r in zip(ratios, own, strict=True)]
        rows.append([format, *([] if one_shape else [f"{k} x {n}"]), ", ".join(best), *cells])
    return table(rows)


def milliseconds(results: Results, beside: str = "") -> str:
    """Of matmuls; in brackets, times those of the record `beside`."""
    other = {(r["format"], r["m"]): r["seconds"] for r in records.read(beside)["records"]} if beside else {}
    found = by_shape(results)
    rows = [["ms", *(f"M = {record['m']}" for record in next(iter(found.values())))]]
    for (format, *_), own in found.items():
        ratios = [f" ({r['seconds'] / other[format, r['m']]:.2f})" if beside else "" for r in own]
        cells = [f"{1e3 * r['seconds']:.2f}{ratio}" for r, ratio in zip(own, ratios, strict=True)]
        rows.append([format, *cells])
    return table(rows)


def rounding(results: Results) -> str:
    """Relative RMS errors of int8 activations, ours and the peers': of random activations, and with one outlier."""
    contenders = ("billfish", "ggml", "onnxruntime")
    rows = [["format", "M", *contenders]]
    for record in results["records"]:
        found = {"billfish": record["error"], **record["peer_errors"]}
        cells = [" / ".join(f"{error:.2g}" for error in found.get(who, ())) for who in contenders]
        rows.append([record["format"], str(record["m"]), *cells])
    return table(rows)


def dequantizing(results: Results) -> str:
    rows = [["format", "billfish, GB/s", "ggml, GB/s", "speed-up", "of memset's rate"]]
    for record in results["records"]:
        ours, ggml, limit = (record["gbps"].get(who) for who in ("billfish", "ggml", "memset"))
        beside = [f"{ggml:.1f}", f"{ours / ggml:.1f}"] if ggml else ["", ""]
        rows.append([record["format"], f"{ours:.1f}", *beside, f"{100 * ours / limit:.0f} %"])
    return table(rows)


def calls(results: Results) -> str:
    """Microseconds of one Python call."""
    found = {name.replace("products", "matmuls"): us for name, us in results["microseconds"].items()}
    return table([["call", "us"], *([name, f"{us:.0f}"] for name, us in found.items())])


def packing(results: Results) -> str:
    """Words: how long packing 4096 x 4096 takes."""
    found = results["packing_milliseconds"].values()
    return f"{min(found):.0f} to {max(found):.0f} ms"


def thread_pools(results: Results) -> str:
    rows = [["us", "matmul", "GELU", "alternating, two thread pools", "alternating, torch's threads alone"]]
    for own, shared in zip(results["own"]["microseconds"], results["torch"]["microseconds"], strict=True):
        times = (own["product"], own["gelu"], own["in turns"], shared["in turns"])
        rows.append([f"M = {own['m']}", *(f"{us:.0f}" for us in times)])
    return table(rows)


def experts_cpu(results: Results) -> str:
    """Milliseconds; in brackets, speed-up over ggml's mul_mat_id."""
    rows = [["format", "part", "tokens", "billfish", "ggml", "ggml, repacked"]]
    for record in results["rows"]:
        ms = record["milliseconds"]
        beside = [f"{ms[who]:.3f} ({ms[who] / ms['billfish']:.2f})" for who in ("ggml", "ggml-repack")]
        rows.append([record["format"], record["part"], str(record["tokens"]), f"{ms['billfish']:.3f}", *beside])
    return table(rows)


# ---- matmuls on the GPU -----------------------------------------------------------------------------------------

DENSE = "u4b8:128"


def microseconds(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 999.5 else f"{us:.0f}"


def by_rows(results: Results, cell: Callable[[Results], str]) -> str:
    """A row for each M and a column for each K x N, of 4-bit integers in groups of 128."""
    own = [record for record in results["records"] if record["format"] == DENSE]
    shapes = dict.fromkeys(f"{r['k']} x {r['n']}" for r in own)
    lines: dict[int, list[str]] = {}
    for record in own:
        lines.setdefault(record["m"], []).append(cell(record))
    return table([["M", *shapes], *([str(m), *cells] for m, cells in lines.items())])


def gemm_times(results: Results) -> str:
    """Microseconds: ours / cuBLAS with float16 weights / humming-kernels."""
    return by_rows(results, lambda r: " / ".join(map(microseconds, (r["seconds"], *map(r["peers"].get, GPU_PEERS)))))


def gemm_ratios(results: Results) -> str:
    """Speed-up over the faster of cuBLAS and humming-kernels."""
    return by_rows(results, lambda r: f"{min(map(r['peers'].get, GPU_PEERS)) / r['seconds']:.2f}")


GPU_PEERS = ("cublas:f16", "humming")


def beside_reading(results: Results) -> str:
    """Microseconds beside a kernel that reads the same bytes; in brackets, the part of its rate."""
    found = {(r["m"], r["k"], r["n"]): r for r in results["records"] if r["format"] == DENSE}
    rows = [["K x N", "reading alone", "M = 1", "M = 1, no overlap of launches", "M = 8"]]
    for _, k, n in (key for key in found if key[0] == 1):
        one, eight = found[1, k, n], found[8, k, n]
        alone = one["seconds_reading_weights"]
        times = one["seconds"], one["seconds_without_overlap"], eight["seconds"]
        cells = [f"{microseconds(own)} ({100 * alone / own:.0f} %)" for own in times]
        rows.append([f"{k} x {n}", microseconds(alone), *cells])
    return table(rows)


def gemm_formats(results: Results) -> str:
    """Microseconds; in brackets, times those of u4b8:128 in the same run."""
    found: dict[str, list[Results]] = {}
    for record in results["records"]:
        if record["format"] != DENSE:
            found.setdefault(record["format"], []).append(record)
    rows = [["format", *(f"M = {r['m']}" for r in next(iter(found.values())))]]
    for format, own in found.items():
        rows.append([format, *(f"{microseconds(r['seconds'])} ({r['seconds'] / r['seconds_u4b8']:.2f})" for r in own)])
    return table(rows)


GPU_MODELS = {"8b": "8B", "1b": "1B", "gpt-oss-20b": "gpt-oss-20b", "qwen3-30b-a3b": "Qwen3-30B-A3B"}


def llm_gpu(results: Results) -> str:
    """tok/s; in brackets, our speed-up over the peer."""
    peers = {"llama.cpp": "llama.cpp", "transformers fp16": "transformers, float16"}
    names = {"generate": "decode, one sequence", "prompt": "prefill, {} tokens", "streams": "decode, batch of {}"}
    rows = [["tok/s", "billfish", *peers.values()]]
    for record in results["records"]:
        ours, (kind, _, count) = record["tok_per_s"], record["case"].partition("_")
        found = ((record["peers"].get(name)) for name in peers)
        beside = [f"{theirs:,.0f} ({ours / theirs:.2f})" if theirs else "" for theirs in found]
        model = GPU_MODELS[record["shape"]] + (f" ({record['date']})" if "date" in record else "")
        rows.append([f"{model}: {names[kind].format(count)}", f"{ours:,.0f}", *beside])
    return table(rows)


def llm_gpu_peers(results: Results) -> str:
    """Versions of llama.cpp, and when they were measured, where that was in other runs."""
    versions = results["versions"]
    other = {name: version for name, version in versions.items() if name.startswith("llama.cpp, ")}
    found = dict[str, list[str]]()
    for name, version in other.items():
        found.setdefault(version, []).append(GPU_MODELS[name.removeprefix("llama.cpp, ")])
    return "; ".join(f"{version} ({', '.join(models)})" for version, models in found.items())


def token_gpu(results: Results) -> str:
    """Microseconds that each part adds to a token: from the end of the kernel ahead of it to its own end."""
    added, ahead = dict[str, list[float]](), 0.0
    for launch in results["records"]:
        added.setdefault(launch["part"], []).append(launch["end_us"] - ahead)
        ahead = launch["end_us"]
    rows = [["part", "kernels", "us", "of the token"]]
    for part, us in sorted(added.items(), key=lambda item: -sum(item[1])):
        rows.append([part, str(len(us)), f"{sum(us):.0f}", f"{100 * sum(us) / ahead:.0f} %"])
    return table(rows)


def quantizing(results: Results) -> str:
    """Seconds for the weights of an 8B model."""
    found: dict[str, dict[str, float]] = {}
    for record in results["records"]:
        found.setdefault(record["format"], {})[record["method"]] = record["seconds"]
    return table(
        [["seconds", "`rtn`", "`mse`"], *([f, f"{s['rtn']:.1f}", f"{s['mse']:.1f}"] for f, s in found.items())]
    )


def calls_gpu(results: Results) -> str:
    """Milliseconds of a token of transformers; in brackets, the speed-up over float16."""
    milli = results["token_milliseconds"]
    rows = [["ms a token", "eager", "CUDA graph"]]
    for name, written in {"float16": "float16", "quantized": DENSE, "quantized, merged": f"{DENSE}, merged"}.items():
        ratios = {way: milli["float16"][way] / milli[name][way] for way in ("eager", "graph")}
        rows.append([written, *(f"{milli[name][way]:.2f} ({ratio:.2f})" for way, ratio in ratios.items())])
    return table(rows)


def experts_gpu(results: Results) -> str:
    """Milliseconds of an expert block, beside the roofline and as many rows through one dense expert."""
    chosen = results["shape"]["chosen"]
    rows = [["tokens", "(token, expert) pairs", "roofline, ms", "measured, ms", "dense, ms"]]
    for record in results["records"]:
        times = (record[f"seconds{kind}"] for kind in ("_predicted", "", "_dense"))
        rows.append([str(record["tokens"]), str(chosen * record["tokens"]), *(f"{1e3 * s:.3f}" for s in times)])
    return table(rows)


def activation_rounding(results: Results) -> str:
    """KL divergence from float32 activations; in brackets, how often the top-1 token is the same."""
    found: dict[str, list[str]] = {}
    for record in results["records"]:
        lost = f"{record['divergence']:.3g}" if record["divergence"] > 1e-6 else f"{record['divergence']:.1e}"
        found.setdefault(record["weights"], []).append(f"{lost} ({100 * record['same_best']:.1f} %)")
    head = [
        "weights",
        *(f"{way} (GPU), one scale per row" for way in ("fp8", "q8")),
        "q8 (CPU), one scale per 32",
        "q16 (CPU)",
    ]
    return table([head, *([weights, *cells] for weights, cells in found.items())])


def cache_types(results: Results) -> str:
    """KL divergence from the reference of the device, and how often the top-1 token is the same."""
    devices = {"cpu": "CPU", "cuda": "CUDA", "emulated": "CUDA, its kernels computed in NumPy, not on a GPU"}
    lines = [["type", "reference", "on", "KL divergence", "same token"]]
    for r in results["records"]:
        lost = f"{r['divergence']:.2e} ± {r['divergence_error']:.0e}"
        lines.append([r["cache_type"], r["reference"], devices[r["device"]], lost, f"{100 * r['same_best']:.1f} %"])
    return table(lines)


def byte_products(results: Results) -> str:
    """Microseconds; in brackets, speed-up over cuBLAS in float16, and over the same weights with float16 activations.

    "float16": the plan takes the float16 kernel at this M."""
    found = {(r["format"], r["activations"], r["k"], r["n"], r["m"]): r for r in results["records"]}
    rows = sorted({m for *_, m in found})
    lines = [["weights, activations", "K x N", *(f"M = {m}" for m in rows)]]
    for format, way, k, n in dict.fromkeys(key[:-1] for key in found if key[1] != "exact"):
        line = [f"{format} {way}", f"{k} x {n}"]
        for m in rows:
            record, exact = found[format, way, k, n, m], found[format, "exact", k, n, m]
            seconds, cublas = record["seconds"], record["peers"]["cublas:f16"]
            in_bytes = record["kernel"] == "marlin_gemm_bytes"
            gain = f"{exact['seconds'] / seconds:.2f}" if in_bytes else "float16"
            line.append(f"{1e6 * seconds:.{1 if seconds < 1e-4 else 0}f} ({cublas / seconds:.2f}, {gain})")
        lines.append(line)
    return table(lines)


def prefill_fp8(results: Results) -> str:
    """Words: prefill with float16 and FP8 activations."""
    found = results["prompts"]
    rates = f"{found['float16']:,.0f} tok/s with float16 activations and {found['fp8']:,.0f} with FP8"
    return f"{rates} ({found['fp8'] / found['float16']:.2f} times, {found['tokens']} tokens)"


# ---- formats, checkpoints and layers ----------------------------------------------------------------------------


def search(results: Results) -> str:
    """Mean squared errors of method "mse" over those of "rtn" and of ggml."""
    head = ["format", "Gaussian: mse / rtn", "mse / ggml", "Student t, 4: mse / rtn", "mse / ggml", "s for 64M weights"]
    rows = [head]
    for record in results["records"]:
        cells = []
        for kind in ("gaussian", "student_t4"):
            own = record[kind]
            cells += [f"{own['mse'] / own['rtn']:.3f}", f"{own['mse'] / own['ggml']:.3f}" if own["ggml"] else ""]
        rows.append([record["format"], *cells, f"{record['seconds_64m']:.0f}"])
    return table(rows)


def memory(results: Results) -> str:
    rows = [[f"`{r['command']}`", f"{r['peak_bytes'] / 1e9:.2f} GB"] for r in results["records"]]
    return table([[f"command, on a checkpoint of {results['checkpoint_bytes'] / 1e9:.2f} GB", "peak memory"], *rows])


def cosines(results: Results) -> str:
    """Cosine between the embeddings of the quantized and the float32 model."""
    rows = [["format", "group", "bits per weight", "layers", "rtn: mean", "worst", "mse: mean", "worst"]]
    for r in results["records"]:
        found = [f"{r[method][key]:.4f}" for method in ("rtn", "mse") for key in ("mean", "worst")]
        layers = f"{r['layers']} of {r['of_layers']}"
        rows.append([r["format"], str(r["group_size"]), f"{r['bits_per_weight']:g}", layers, *found])
    return table(rows)


# ---- Metal ------------------------------------------------------------------------------------------------------

SHOWN_N = 4096
MOST_CYCLES = dict.fromkeys(["u4b8", "q4_0", "fp4", "mxfp4"], 3.5)
MOST_CYCLES |= dict.fromkeys(["nvfp4", "u4", "q4_1", "q4_k", "q8_0"], 4.5)


def decoding(results: Results) -> str:
    """What decoding a value costs."""
    kinds = ("simple", "complex", "memory")
    rows = [["element", "decoded by", *kinds, "cycles"]]
    for each in results["decode"]:
        rows.append([each["element"], each["way"], *(f"{each['issue'][kind]:.2f}" for kind in kinds)])
        rows[-1].append(f"{each['cycles']:.2f}")
    return table(rows)


MODELS_COUNTED = {"smollm2": "SmolLM2-135M", "8b": "Llama-3-8B", "8b-mixed": "Llama-3-8B, 8-bit v and down"}


def one_row(results: Results) -> str:
    """Cycles per weight of ours at M = 1."""
    rows = [["format", "at most", "4096 x 4096", "4096 x 14336", "bound on all four chips"]]
    for format, most in MOST_CYCLES.items():
        ours = [r for r in results["records"] if (r["format"], r["m"], r["owner"]) == (format, 1, "billfish")]
        bounds = sorted({bound for record in ours for bound in record["bound_by"].values()})
        rows.append([format, str(most), *(f"{r['cycles_per_weight']:.2f}" for r in ours), ", ".join(bounds)])
    return table(rows)


def few_rows(results: Results) -> str:
    """The time of a few rows in one matmul beside that of one, the larger of both shapes."""
    chips = list(results["records"][0]["estimated_us"])
    rows = [["format", "2 rows, any chip", "4 rows, any chip", *(f"8 rows, {chip}" for chip in chips)]]
    ours = {(r["format"], r["n"], r["m"]): r["estimated_us"] for r in results["records"] if r["owner"] == "billfish"}
    for format in dict.fromkeys(format for format, *_ in ours):
        sizes = [n for name, n, m in ours if (name, m) == (format, 1)]

        def beside(m: int, chip: str, format: str = format, sizes: list[int] = sizes) -> float:
            return max(ours[format, n, m][chip] / ours[format, n, 1][chip] for n in sizes)

        cells = [max(beside(m, chip) for chip in chips) for m in (2, 4)] + [beside(8, chip) for chip in chips]
        rows.append([format, *(f"{cell:.3f}" for cell in cells)])
    return table(rows)


def beside_mlx(results: Results) -> str:
    """Our time as a part of MLX's, the larger of both shapes; cycles are those of the first."""
    found: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
    for theirs, ours in pairwise(results["records"]):  # MLX's come before ours
        if theirs["owner"] == "mlx":
            found.setdefault((ours["format"], ours["m"]), []).append((ours, theirs))
    rows = [["format", "M", "ours", "MLX's", "on M1", "on M1 Max", "on M2", "on M2 Max"]]
    for (format, m), pairs in found.items():
        cycles = [f"{record['cycles_per_weight']:.2f}" for record in pairs[0]]
        times = [(ours["estimated_us"], theirs["estimated_us"]) for ours, theirs in pairs]
        largest = [f"{max(ours[chip] / theirs[chip] for ours, theirs in times):.2f}" for chip in times[0][0]]
        rows.append([format, str(m), *cycles, *largest])
    return table(rows)


def metal_products(results: Results) -> str:
    """Of the formats that MLX has, too."""
    head = ["format", "M", "kernel", "cycles per weight", "M1", "M1 Max", "M2", "M2 Max", "bound on M1 Max"]
    rows = [[*head, "threadgroup memory, B"]]
    shared = {record["format"] for record in results["records"] if record["owner"] == "mlx"}
    for record in results["records"]:
        if record["n"] == SHOWN_N and record["format"] in shared:
            kernel = "`" + record["kernel"].replace(" + ", "` + `") + "`"
            times = [f"{us:,.0f}" for us in record["estimated_us"].values()]
            cells = [record["format"], str(record["m"]), kernel, f"{record['cycles_per_weight']:.2f}", *times]
            rows.append([*cells, record["bound_by"]["M1 Max"], f"{record['threadgroup_memory']:,}"])
    return table(rows)


def metal_token(results: Results) -> str:
    """Decode steps of whole models: ours beside mlx-lm's."""
    chips = list(results["records"][0]["estimated_us"])
    head = ["model", "step of", "launches a layer", "a token", "MB a token", "of weights and cache"]
    rows = [[*head, *(f"{chip}, us" for chip in chips)]]
    for each in results["records"]:
        cells = [MODELS_COUNTED[each["model"]], each["owner"], str(len(each["layer"])), str(each["launches"])]
        cells += [f"{each['nbytes'] / 1e6:,.1f}", f"{each['nbytes'] / each['least']:.3f}"]
        rows.append([*cells, *(f"{each['estimated_us'][chip]:,.0f}" for chip in chips)])
    return table(rows)


def metal_model(results: Results) -> str:
    """Words: how a whole model ran in the emulator."""
    runs = results["records"]
    errors = " and ".join(f"{each['error']:.1e} in {each['type']}" for each in runs)
    same, count = sum(each["same_tokens"] for each in runs), sum(len(each["tokens"]) for each in runs)
    return f"{results['machine']['date']}: errors of logits {errors}, {same} of {count} tokens of answers as the CPU's"


# ---- the README -------------------------------------------------------------------------------------------------

CPUS = {"llm_xeon.json": "Xeon (AVX-512), 2 threads", "llm_neoverse_n1.json": "Neoverse-N1, 2 threads"}


def beside_peers(results: Results) -> str:
    """tok/s on three machines; in brackets, speed-up over the fastest peer of each case."""
    rows = [["tok/s", "decode", "decode, batch of 16", "prefill", "beside"]]

    def add(where: str, pairs: list[tuple[float, float]], peer: str) -> None:
        rows.append([where, *(f"{ours:,.0f} ({ours / theirs:.1f} x)" for ours, theirs in pairs), peer])

    found = {r["case"]: (r["tok_per_s"], r["peers"]["llama.cpp"]) for r in results["records"] if r["shape"] == "8b"}
    add("NVIDIA H200, 8B in q4_0", [found[case] for case in ("generate", "streams_16", "prompt_2048")], "llama.cpp")
    for name, cpu in CPUS.items():
        rates = {(r["who"], r["what"]): r["tokens"] / r["seconds"] for r in records.read(name)["records"]}
        cases = ("generation", "streams: 16", "prompt of 512")
        best = [max((rates[name, case], name) for name in PEERS if (name, case) in rates) for case in cases]
        pairs = [(rates["billfish q16", case], theirs) for case, (theirs, _) in zip(cases, best, strict=True)]
        add(f"{cpu}, 135M in q4_1", pairs, ", ".join(dict.fromkeys(name for _, name in best)))
    return table(rows)


def divergences(results: Results) -> str:
    """KL divergence of iq4_nl by llama.cpp's quantizer and by ours, calibrated on the same text."""
    found = {
        record["method"]: record["divergence"]
        for record in results["records"]
        if (record["format"], record["calibration_text"], record["calibration_tokens"]) == ("iq4_nl", "mixed", 32768)
    }
    return (
        f"{found['ggml']:.3f} by llama.cpp's quantizer with an imatrix, {found['weighted']:.3f} by `--calibrate` with"
        f" the same text, and {found['sequential']:.3f} with `--method gptq`"
    )


def tuned(results: Results) -> str:
    """KL divergence after `tune`, relative to GPTQ with the float model's inputs: least, most and mean."""
    found: dict[tuple[str, str], float] = {
        (record["format"], record["method"]): record["divergence"]
        for record in results["records"]
        if (record["calibration_text"], record["calibration_tokens"]) == ("mixed", 32768)
    }
    shares = [value / found[name, "gptq"] for (name, method), value in found.items() if method == "tune"]
    mean = sum(shares) / len(shares)
    least, most = min(shares), max(shares)
    return f"{least:.2f} to {most:.2f} of the divergence of GPTQ with the float model's inputs, {mean:.2f} on average"


def elsewhere(results: Results) -> str:
    """Perplexity of files in llama.cpp and in billfish."""
    head = ["file", "bits per weight", "billfish, exact", "llama.cpp, float32", "billfish, q8", "llama.cpp"]
    rows = [head]
    for record in results["records"]:
        cells = [f"{record[name]:.3f}" for name in ("exact", "llama_cpp_floats", "q8", "llama_cpp")]
        rows.append([record["file"], f"{record['bits_per_weight']:.2f}", *cells])
    return table(rows)


# ---- by name ----------------------------------------------------------------------------------------------------

NEOVERSE = "python -m benchmarks.products --threads 2 --json FILE --shapes 4096x4096"
ROWS_OF_M = "--m 1,4,16,64"
MOST = "q4_0,u4b8:128,q8_0,q4_k,mxfp4,fp4:32,q4_1,q5_0,q5_1,nvfp4"
XEON = f"{NEOVERSE} {ROWS_OF_M} --peers onnxruntime"
GPU = "python -m benchmarks.cuda_products --json FILE"
SWEEP = "python -m benchmarks.sweep --calibrate FILE --llama-quantize PATH --imatrix FILE"
OFF_THE_GRID = SWEEP.replace("sweep", "sweep --off-the-grid")
QUALITY = "python -m benchmarks.quality --ggml FOLDER"
METAL = "python -m benchmarks.metal_profile --json FILE"
LLM = "python -m benchmarks.llm_speed --threads 2 --json FILE"

TABLES: Mapping[str, Table] = {
    # language models
    "llm-short": Table("llm_cuda_h200.json", beside_peers),
    "llm-neoverse": Table("llm_neoverse_n1.json", speed, LLM),
    "llm-neoverse-peers": Table("llm_neoverse_n1.json", peers),
    "llm-xeon": Table("llm_xeon.json", speed, LLM),
    "llm-xeon-peers": Table("llm_xeon.json", peers),
    "llm-xeon-amx": Table("llm_xeon_amx.json", speed, LLM),
    "llm-xeon-amx-peers": Table("llm_xeon_amx.json", peers),
    "isa-levels-xeon": Table(
        "isa_levels_xeon.json", isa_levels, "python -m benchmarks.isa_levels --threads 16 --json FILE"
    ),
    "qwen35": Table("qwen35.json", hybrid, "python -m benchmarks.qwen35_speed --json FILE"),
    "drafting-xeon": Table("drafting_xeon.json", drafting, "python -m benchmarks.drafting --json FILE"),
    "drafting-peer-xeon": Table(
        "drafting_xeon.json", drafting_peer, "python -m benchmarks.drafting --peer --json FILE"
    ),
    "drafting-h200": Table(
        "drafting_h200.json", drafting_steps, "python -m benchmarks.drafting --device cuda --steps --json FILE"
    ),
    "draft-matrix-xeon": Table("draft_matrix_xeon.json", drafted_answers),
    "draft-matrix-long-xeon": Table("draft_matrix_long_xeon.json", drafted_answers),
    "draft-matrix-metal": Table("draft_matrix_metal.json", drafted_answers),
    "draft-matrix-h200": Table("draft_matrix_h200.json", drafted_answers),
    "draft-matrix-recurrent-h200": Table("draft_matrix_recurrent_h200.json", drafted_answers),
    "draft-matrix-mtp-h200": Table("draft_matrix_mtp_h200.json", drafted_answers),
    "draft-matrix-long-h200": Table("draft_matrix_long_h200.json", drafted_answers),
    "llm-h200-peers": Table("llm_cuda_h200.json", llm_gpu_peers),
    "llm-h200": Table("llm_cuda_h200.json", llm_gpu, "python -m benchmarks.llm_cuda --peers FILE --json FILE"),
    "llm-h200-prefill-fp8": Table("cuda_bytes_h200.json", prefill_fp8),
    "token-h200": Table("token_h200.json", token_gpu, "python -m benchmarks.token_cuda --json FILE"),
    "token-neoverse": Table(
        "inside_a_token.json", token, "python -m benchmarks.inside_a_token --threads 2 --json FILE"
    ),
    "token-neoverse-floor": Table("inside_a_token.json", least),
    "serving-neoverse": Table(
        "serving_neoverse_n1.json", eight_clients, "python -m benchmarks.serving_speed --json FILE"
    ),
    "serving-h200": Table(
        "serving_h200.json",
        waves,
        "python -m benchmarks.serving_waves --device cuda --models FOLDER --decoder --json FILE",
    ),
    "serving-h200-short": Table("serving_h200.json", waves_short),
    "attack": Table("attack.json", attack, "make attack CASES=1000000"),
    "attack-counts": Table("attack.json", attack_counts),
    "attack-neighbor": Table(
        "attack_neighbor.json", attack_neighbor, "python tests/support/attack/server.py --beside 3 --clients 8"
    ),
    "serving-h200-mixed": Table("serving_h200.json", waves_mixed),
    "soak": Table("serving_soak.json", soaked),
    "soak-h200": Table("serving_soak_h200.json", soaked),
    "vllm-tokens": Table("vllm_tokens.json", served, "make test-vllm"),
    "vllm-xeon": Table("vllm_xeon.json", served_speed, "build/vllm/bin/python -m benchmarks.vllm_speed --json FILE"),
    # matmuls on CPUs
    "matmul-neoverse": Table(
        "cpu_neoverse_n1.json", beside_best, f"{NEOVERSE} {ROWS_OF_M} --peers onnxruntime,ggml --formats {MOST}"
    ),
    "matmul-neoverse-kquants": Table(
        "cpu_neoverse_n1_kquants.json",
        beside_best,
        f"{NEOVERSE} {ROWS_OF_M} --peers ggml --formats q5_k,q6_k,q3_k,q2_k",
    ),
    "matmul-neoverse-512": Table(
        "cpu_neoverse_n1_512.json",
        beside_best,
        f"{NEOVERSE} --m 512 --peers onnxruntime,ggml --formats q4_0,u4b8:128,q8_0,q4_k,mxfp4",
    ),
    "matmul-neoverse-shapes": Table(
        "cpu_neoverse_n1_shapes.json",
        beside_best,
        f"{NEOVERSE.replace('4096x4096', '4096x14336,14336x4096')} {ROWS_OF_M} --peers onnxruntime,ggml"
        " --formats q4_0,q8_0,q4_k",
    ),
    "matmul-neoverse-q16": Table(
        "cpu_neoverse_n1_q16.json",
        partial(milliseconds, beside="cpu_neoverse_n1.json"),
        f"{NEOVERSE} {ROWS_OF_M} --activations q16 --peers none --formats q4_0,q8_0,mxfp4",
    ),
    "matmul-neoverse-exact": Table(
        "cpu_neoverse_n1_exact.json",
        beside_best,
        f"{NEOVERSE} {ROWS_OF_M} --activations exact --peers onnxruntime,numpy --formats q4_0,fp4:32",
    ),
    "matmul-neoverse-errors": Table(
        "cpu_neoverse_n1_errors.json",
        rounding,
        f"{NEOVERSE} --m 1,16 --peers onnxruntime,ggml --formats q4_0,u4b8:128,q8_0,q4_k",
    ),
    "matmul-xeon": Table("cpu_xeon_avx512_2_threads.json", beside_best, f"{XEON} --formats q4_0,u4b8:128,q8_0"),
    "matmul-xeon-exact": Table(
        "cpu_xeon_avx512_exact.json", beside_best, f"{XEON},numpy --activations exact --formats q4_0"
    ),
    "matmul-xeon-8-threads": Table(
        "cpu_xeon_avx512_8_threads.json",
        beside_best,
        f"{XEON.replace('--threads 2', '--threads 8')} --formats q4_0,q8_0,u4b8:128",
    ),
    "matmul-xeon-avx2": Table(
        "cpu_xeon_avx2_2_threads.json",
        milliseconds,
        f"BILLFISH_ISA=avx2 {NEOVERSE} {ROWS_OF_M} --peers none --formats q4_0,mxfp4",
    ),
    "dequantize-neoverse": Table(
        "dequantize_neoverse_n1.json",
        dequantizing,
        "BILLFISH_GGML_LIB=FOLDER python -m benchmarks.dequantize --json FILE",
    ),
    "calls-neoverse": Table("calls_neoverse_n1.json", calls, "python -m benchmarks.calls --json FILE"),
    "packing-neoverse": Table("calls_neoverse_n1.json", packing),
    "experts-neoverse": Table("experts_neoverse_n1.json", experts_cpu, "python -m benchmarks.experts --json FILE"),
    "thread-pools-xeon": Table("beside_torch_xeon.json", thread_pools, "python -m benchmarks.beside_torch --json FILE"),
    # matmuls on an H200
    "matmul-h200": Table("cuda_h200.json", gemm_times, GPU),
    "matmul-h200-ratios": Table("cuda_h200.json", gemm_ratios, GPU),
    "matmul-h200-reading": Table("cuda_h200.json", beside_reading, GPU),
    "matmul-h200-formats": Table("cuda_h200.json", gemm_formats, GPU),
    "matmul-h200-8bit": Table("cuda_bytes_h200.json", byte_products, f"{GPU} --bytes"),
    "experts-h200": Table("experts_h200.json", experts_gpu, "python -m benchmarks.experts_cuda --json FILE"),
    "quantize-h200": Table("quantize_h200.json", quantizing, "python -m benchmarks.quantize_cuda --json FILE"),
    "calls-h200": Table("calls_h200.json", calls_gpu, "python -m benchmarks.calls --device cuda --json FILE"),
    # Metal, counted in emulation
    "metal-decode": Table("metal_profile.json", decoding, METAL),
    "metal-one-row": Table("metal_profile.json", one_row, METAL),
    "metal-few-rows": Table("metal_profile.json", few_rows, METAL),
    "metal-beside-mlx": Table("metal_profile.json", beside_mlx, METAL),
    "metal-token": Table("metal_token.json", metal_token, "python -m benchmarks.metal_token --json FILE"),
    "metal-model": Table("metal_model.json", metal_model),
    "metal-matmul": Table("metal_profile.json", metal_products, METAL),
    # quality
    "quality-llm": Table("quality.json", language, QUALITY),
    "quality-llm-others": Table("quality.json", others, QUALITY),
    "quality-in-order": Table("quality.json", in_order, "python -m benchmarks.quality --methods sequential,tune"),
    "rotation": Table("rotation.json", rotation, "python -m benchmarks.rotation"),
    "quality-embeddings": Table("quality.json", embeddings, QUALITY),
    "quality-range": Table("quality.json", divergences),
    "quality-tuned": Table("quality.json", tuned),
    "quality-elsewhere": Table("in_llama_cpp.json", elsewhere, "python -m benchmarks.in_llama_cpp FILE... --json FILE"),
    "sweep": Table("sweep.json", sweep, SWEEP),
    "sweep-original": Table("sweep.json", swept),
    "sweep-off-the-grid": Table("sweep_off_the_grid.json", sweep, OFF_THE_GRID),
    "sweep-off-the-grid-original": Table("sweep_off_the_grid.json", swept),
    "quality-plan": Table("quality.json", plan),
    "mixture-bits": Table("mixture_bits.json", mixture, "python -m benchmarks.mixture_bits --json FILE"),
    "activations-kl": Table("activations.json", activation_rounding, "python -m benchmarks.activations --json FILE"),
    "cache-types-kl": Table(
        "cache_types.json", cache_types, "python -m benchmarks.cache_types --devices cpu,emulated --json FILE"
    ),
    "search-errors": Table("quantization_error.json", search, "python -m benchmarks.quantization_error --json FILE"),
    "sentence-embeddings": Table(
        "sentence_embeddings.json", cosines, "python -m benchmarks.sentence_embeddings --json FILE"
    ),
    "checkpoint-memory": Table(
        "checkpoint_memory.json", memory, "python -m benchmarks.checkpoint_memory FOLDER --json FILE"
    ),
}


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        print(f"{name}\n\n{TABLES[name].text()}")


if __name__ == "__main__":
    main()
