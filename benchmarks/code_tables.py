"""Tables that pages take from the code: formats, mixes, statistics, and what the server accepts, serves and counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from benchmarks.tables import table
from billfish.checkpoints.mixes import MIXES
from billfish.cli.formats import COLUMNS, format_rows
from billfish.core.format import FORMATS
from billfish.llm import chat_template_process, detokenizer, grammar, grammar_process
from billfish.quantizing.calibrate_checkpoint import TOKENS
from billfish.serving.api import service, settings
from billfish.serving.api.chat_completions import ChatBody
from billfish.serving.api.completions import CompletionBody
from billfish.serving.api.embeddings import MOST_TEXTS, EmbeddingBody
from billfish.serving.api.models import OneModel
from billfish.serving.api.request_bodies import Body, accepted_words
from billfish.serving.engine import grammar_compiler
from billfish.serving.engine.requests import EngineCounts
from billfish.serving.http import app, limits, metrics
from billfish.serving.ipc import session

# ---- formats ----------------------------------------------------------------------------------------------------


def formats() -> str:
    """The first columns of `billfish formats`, and other names."""
    shown = ("format", "bits/weight", "group", "element", "scale", "offset", "also called")
    places = [COLUMNS.index(name) for name in shown]
    return table([[*shown], *([row[place] for place in places] for row in format_rows())])


def format_elements() -> str:
    """Every element: its width and its values."""
    rows = [["element", "bits", "formats", "value of a code"]]
    for element in dict.fromkeys(format.element for format in FORMATS.values()):
        users = ", ".join(name for name, format in FORMATS.items() if format.element is element)
        rows.append([f"`{element.name}`", str(element.bits), users, values(element.values)])
    return table(rows)


def values(table: Any) -> str:
    """What codes mean, in short: a rule, or all of 16."""
    codes = np.arange(len(table))
    if (table == codes).all():
        return "q"
    if (table - codes == table[0]).all():
        return f"q - {-table[0]:g}"
    if (table == codes.astype(np.int8)).all():
        return "q, two's complement"
    half = len(table) // 2
    if (np.nan_to_num(table[:half]) == -np.nan_to_num(table[half:])).all():
        shown = f"0 to {np.nanmax(table):g}" if half > 8 else ", ".join(f"{value:g}" for value in table[:half])
        return f"±{{{shown}}}" + ("; codes 0x7f and 0xff are NaN" if np.isnan(table).any() else "")
    return ", ".join(f"{value:.4g}" for value in table)


# ---- mixes ------------------------------------------------------------------------------------------------------

LLAMA_3_8B = {"output.weight": (128256, 4096), "token_embd.weight": (128256, 4096)} | {
    f"blk.{layer}.{name}.weight": shape
    for layer in range(32)
    for name, shape in {
        "attn_q": (4096, 4096),
        "attn_k": (1024, 4096),
        "attn_v": (1024, 4096),
        "attn_output": (4096, 4096),
        "ffn_gate": (14336, 4096),
        "ffn_up": (14336, 4096),
        "ffn_down": (4096, 14336),
    }.items()
}


def mixes() -> str:
    """What each mix gives a model with the shapes of Llama 3 8B."""
    special = ("attn_v", "attn_output", "ffn_down", "output", "token_embd")
    rows = [["mix", "bits per weight", "most matrices", *(f"`{name}`" for name in special)]]
    weights = {name: n * k for name, (n, k) in LLAMA_3_8B.items()}
    for mix in MIXES.values():
        chosen = mix.assign(LLAMA_3_8B)
        bits = {
            name: FORMATS[format].bits_per_weight(FORMATS[format].default_group_size) for name, format in chosen.items()
        }
        mean = sum(weights[name] * bits[name] for name in bits) / sum(weights.values())
        cells = [counted(chosen[name] for name in chosen if f".{part}." in f".{name}") for part in special]
        rows.append([mix.name, f"{mean:.2f}", mix.format, *cells])
    return table(rows)


def counted(formats: Iterable[str]) -> str:
    """ "16 x q6_k, 16 x q4_k", or the only one."""
    found = Counter(formats)
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{n} x {name}" for name, n in found.most_common())


# ---- statistics -------------------------------------------------------------------------------------------------


def statistics_sizes() -> str:
    """What calibration keeps: hidden, feed-forward size, layers and experts of some models."""
    rows = [
        [
            f"{TOKENS:,} tokens",
            "mean squares",
            "X^T X, on disk",
            "X^T X of a layer, in memory",
            "hidden states, on disk",
        ]
    ]
    for name, hidden, inner, layers, experts in (
        ("SmolLM2-135M", 576, 1536, 30, 1),
        ("Llama 3 8B", 4096, 14336, 32, 1),
        ("Mixtral 8x7B", 4096, 14336, 32, 8),
    ):
        widths = [
            hidden,
            hidden,
            *experts * [hidden, inner],
        ]  # inputs of q, k and v; of the output; of gate and up; of down
        widths += [hidden] if experts > 1 else []  # the router's
        squares, outer = sum(8 * k for k in widths), sum(4 * k * k for k in widths)
        sizes = (layers * squares, layers * outer + 4 * hidden**2, outer, 8 * hidden * TOKENS)
        rows.append([name, *map(size, sizes)])
    return table(rows)


def size(count: int) -> str:
    return (
        f"{count / 1e9:.1f} GB"
        if count >= 1e9
        else f"{count / 1e6:.0f} MB"
        if count >= 1e7
        else f"{count / 1e6:.1f} MB"
    )


# ---- the server -------------------------------------------------------------------------------------------------

MEANING = {
    "model": "with one model any name goes to it, told in a header",
    "max_completion_tokens": "the same as `max_tokens`",
    "max_tokens": "longest answer; -1 is as much as fits, 0 none",
    "temperature": "0 is greedy decoding",
    "top_k": "0 or -1: all",
    "top_p": "0: the most likely token",
    "seed": "-1 or none: a random one",
    "suffix": "the text behind the answer, if the tokenizer has infill tokens",
    "best_of": "so many are made, and the `n` most probable ones given",
    "thinking_budget_tokens": "tokens of thoughts, at most; -1: no limit. As llama.cpp has it",
    "thinking_token_budget": "the same, as vLLM has it",
    "reasoning_effort": "sets `enable_thinking`, `thinking` and `reasoning_effort` of the template",
    "structured_outputs": "vLLM's: `json`, `json_object` or `grammar`",
    "json_schema": "llama.cpp's",
    "guided_json": "vLLM's older field",
    "grammar": "GBNF, as llama.cpp, or Lark",
    "guided_grammar": "the same, vLLM's older field",
    "continue_final_message": "the last message is the beginning of the answer",
    "timings_per_token": "llama-server's `timings` in each event and at the end",
    "return_progress": "llama-server's `prompt_progress` events during the prefill, in streams",
    "verbose": "the rendered prompt at the end, in `__verbose`",
    "logit_bias": "added to the logits of token ids",
    "n": "number of answers",
    "stop": "texts that end the answer and are not part of it",
    "stream": "server-sent events, the last is `[DONE]`",
    "stream_options": "`include_usage`: an event with the usage at the end",
    "draft": "false: nothing is drafted for this request, if the server has `--draft`",
    "messages": "roles system, developer, user, assistant, tool; content is a text or parts of type text; "
    "`reasoning_content` or `reasoning` of an assistant",
    "prompt": "a text, token ids, or a list of either",
    "input": f"a text, token ids, or a list of up to {MOST_TEXTS} of either",
    "logprobs": "chat: true or false; completions: number of alternatives",
    "top_logprobs": "alternatives per token, with `logprobs`",
    "tools": "functions; `strict` ones are held by a grammar",
    "tool_choice": "none, auto, required, one function, or some of them (`allowed_tools`)",
    "response_format": "text, json_object or json_schema",
    "echo": "the prompt before its answer, with its `logprobs`",
    "parallel_tool_calls": "false: at most one call",
    "chat_template_kwargs": "further variables for the chat template",
    "modalities": 'only ["text"]',
}


def server_paths() -> str:
    service: Any = SimpleNamespace(client=SimpleNamespace(answered=None), strict_fields=False)
    routes = app.make_app(OneModel(service), None).routes  # type: ignore[arg-type]
    named = [(min(route.methods - {"HEAD"}), route.path) for route in routes]
    abouts = [route.endpoint.about for route in routes]  # type: ignore[attr-defined]
    rows = [
        [f"`{method} {path.replace(':path', '')}`", about] for (method, path), about in zip(named, abouts, strict=True)
    ]
    return table([["endpoint", "answers with"], *rows])


def server_body() -> str:
    """What is wrong with a body that is too slow or too large."""
    return f"the body did not arrive within {limits.BODY_SECONDS:g} s, or exceeds {limits.BODY_BYTES >> 20} MiB"


def server_limits() -> str:
    """What a client may send, and what becomes of more."""
    mib = 2**20
    rows = [
        ["request line, headers and trailers", f"{limits.HEAD_BYTES >> 10} KiB, {limits.HEAD_LINES} lines", "431"],
        ["time to send them", f"{limits.HEAD_SECONDS:g} s", "408"],
        ["connections", f"{limits.CONNECTIONS:,}, or what `ulimit -n` leaves", "the oldest idle one is closed"],
        ["body", f"{limits.BODY_BYTES // mib} MiB, {limits.BODY_BRACKETS:,} lists and objects", "413"],
        ["chunks of a body", f"{limits.BODY_CHUNKS:,}", "413"],
        ["time to send a body", f"{limits.BODY_SECONDS:g} s", "408"],
        ["all bodies that arrive together", f"{limits.BODIES_BYTES // mib} MiB", "503 for the oldest"],
        ["messages, tokens of a prompt", "`--context`", "400"],
        ["answers to a request", f"`--streams` + `--queue`, {service.MOST_ANSWERS}", "400"],
        ["texts to embed or to rank", f"{MOST_TEXTS:,}", "400"],
        ["stop strings", f"{detokenizer.MOST_STOPS}, of {detokenizer.LONGEST_STOP:,} characters each", "400"],
        ["entries of `logit_bias`", f"{settings.MOST_BIASES:,}", "400"],
        ["CPU time of a chat template", f"{chat_template_process.SECONDS} s", "400"],
        *([f"JSON schema: {what}", f"{most:,}", "400"] for what, most in grammar.LIMITS.items()),
        ["grammar: characters", f"{grammar.LIMITS[grammar.CHARACTERS]:,}", "400"],
        [
            "JSON schema or grammar: time to compile",
            f"{grammar_process.CPU_SECONDS} s of a CPU, {grammar_process.WALL_SECONDS} s",
            "400",
        ],
        [
            "JSON schema or grammar: memory, stack",
            f"{grammar_process.MEMORY_BYTES // mib} MiB, {grammar_process.STACK_BYTES // mib} MiB",
            "400",
        ],
        [
            "JSON schemas and grammars that wait",
            f"{grammar_compiler.QUEUE}, for {grammar_compiler.QUEUE_SECONDS:g} s",
            "429",
        ],
        [
            "grammar: states of the lexer",
            f"{grammar_process.LEXER_STATES:,}",
            "400, or the stream's last event",
        ],
        [
            "grammar: work for one token",
            f"{grammar_process.STEP_ITEMS:,} items, {grammar_process.STEP_FUEL:,} steps of the lexer",
            "400, or the stream's last event",
        ],
        ["responses that are kept", f"{session.MOST_KEPT}, {session.MOST_KEPT_BYTES // mib} MiB", "404"],
    ]
    return table([["what", "at most", "more gives"], *rows])


def default(body: type[Body], field: str) -> str:
    """The default in brackets, if it is a number, a word, true or false."""
    (value,) = (each.default for each in msgspec.structs.fields(body) if each.name == field)
    if isinstance(value, (bool, int, float, str)):
        return f" ({value:g})" if isinstance(value, float) else f" ({str(value).lower()})"
    return ""


def fields(*bodies: type[Body]) -> list[list[str]]:
    rows = []
    for field in dict.fromkeys(field for body in bodies for field in body.__struct_fields__):
        own = [body for body in bodies if field in body.__struct_fields__]
        places = ["yes" if body in own else "" for body in bodies] if len(bodies) > 1 else []
        types = " / ".join(dict.fromkeys(accepted_words(body, field) for body in own))
        rows.append([f"`{field}`", *places, types + default(own[0], field), MEANING.get(field, "")])
    return rows


def server_fields() -> str:
    """The fields of chats and completions."""
    return table([["field", "chat", "completions", "accepts (default)", "notes"], *fields(ChatBody, CompletionBody)])


def embedding_fields() -> str:
    return table([["field", "accepts (default)", "notes"], *fields(EmbeddingBody)])


def server_metrics() -> str:
    """The names of /metrics, and what they say."""
    none = EngineCounts(**dict.fromkeys(metrics.ENGINE, 0) | {"finished": {}})
    engine = SimpleNamespace(counts=lambda: none)
    host: Any = SimpleNamespace(engine=engine, answers={}, first_pieces=0, first_piece_seconds=0.0)
    found = re.findall(r"^# HELP (\w+) (.*)$", metrics.metrics_text(host).decode(), re.MULTILINE)
    return table([["metric", "meaning"], *([f"`{name}`", about] for name, about in found)])


def stored_responses() -> str:
    """What /v1/responses keeps."""
    return f"the last {session.MOST_KEPT} answers, up to {session.MOST_KEPT_BYTES >> 20} MiB of text,"


def schema_limits() -> str:
    """What a JSON schema may have, and what compiling it may take."""
    rows = [["a schema has at most", ""], *([what, f"{most:,}"] for what, most in grammar.LIMITS.items())]
    process = grammar_process
    rows += [
        ["CPU time to compile", f"{process.CPU_SECONDS} s"],
        ["time on the clock", f"{process.WALL_SECONDS} s"],
        ["memory beyond the vocabulary (Linux)", f"{process.MEMORY_BYTES >> 20} MiB"],
        ["stack", f"{process.STACK_BYTES >> 20} MiB"],
        ["schemas compiled at once", str(grammar_compiler.THREADS)],
        ["schemas that wait", f"{grammar_compiler.QUEUE}, for {grammar_compiler.QUEUE_SECONDS:g} s each"],
    ]
    return table(rows)


CODE: dict[str, Callable[[], str]] = {
    "formats": formats,
    "format-elements": format_elements,
    "mixes": mixes,
    "statistics-sizes": statistics_sizes,
    "server-paths": server_paths,
    "stored-responses": stored_responses,
    "server-body": server_body,
    "server-limits": server_limits,
    "server-fields": server_fields,
    "embedding-fields": embedding_fields,
    "server-metrics": server_metrics,
    "schema-limits": schema_limits,
}
