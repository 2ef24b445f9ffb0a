"""Every flag of every command has an effect: of two runs that differ in one flag, what the table names differs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import re
import shlex
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from checkpoint_folders import write_folder
from llm_models import Small, write_model
from safetensors.numpy import save_file
from serving_http import send
from small_adapters import write_small_adapter

from billfish.backends.cpu import _cpu
from billfish.cli.main import COMMANDS, main, module_of, parser_of
from billfish.core.errors import BackendUnavailable
from billfish.llm.drafting.drafter import StepSeconds

# A thought that never ends by itself, and places for a system message and the effort.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ reasoning_effort }}{% if think %}<think>\n{% endif %}{% endif %}"
)
THINKING = TEMPLATE.replace("{% if think %}<think>\n{% endif %}", "<think>\n")
VOLATILE = re.compile(r"[\d.]+ (tok/s|s)\b|127\.0\.0\.1:\d+")


class Flag(NamedTuple):
    """Lines of words without the flag and with it; what is looked at in both."""

    sees: str
    without: str
    given: str


def added(base: str) -> Callable[..., Flag]:
    """A flag that is added to a line, or to the line with `more` words."""
    return lambda sees, words, more="": Flag(sees, f"{base} {more}", f"{base} {more} {words}")


run = added("run MODEL -p abba -n 12 --temperature 0 --device cpu")
sampled = functools.partial(run, more="--temperature 2 --seed 1")
serve = added("serve MODEL --device cpu --port 0")
evaluate = added("eval MODEL --text TEXT --tokens 40 --window 20 --device cpu")
calibrate = added("calibrate FLOATS --text TEXT -o s.safetensors --tokens 40 --window 20 --device cpu")
rotate = added("rotate FLOATS out.gguf")
quantize = added("quantize FOLDER out --format q4_0")
calibrated = added("quantize FLOATS out.gguf --format q4_0 --calibrate TEXT")
planned = added("quantize FLOATS out.gguf --bits 8 --formats q8_0,q4_0 --calibrate TEXT")
tune = added("tune Q4 out.gguf --against FLOATS --text TEXT --tokens 40 --window 20 --epochs 1 --device cpu")
convert = added("convert FOLDER out --to plain")

EFFECTS: dict[str, dict[str, Flag]] = {
    "run": {
        "model": Flag("out", "run MODEL -p abba -n 9 --temperature 0", "run OTHER -p abba -n 9 --temperature 0"),
        "model_option": Flag("out", "run MODEL abba -n 9 --temperature 0", "run -m OTHER abba -n 9 --temperature 0"),
        "quantize": Flag(
            "out", "run FLOATS -p abba --temperature 0", "run FLOATS -p abba --temperature 0 --quantize fp4"
        ),
        "device": run("status", "--device cuda"),
        "activations": run("out", "--activations q8", "-n 60 --temperature 2 --seed 1"),
        "cache_type": run("out", "--cache-type int8", "-n 60 --temperature 2 --seed 1"),
        "threads": run("threads", "--threads 2"),
        "text": Flag("out", "run MODEL a --temperature 0 -n 9", "run MODEL bbbb --temperature 0 -n 9"),
        "prompt": run("out", "-p bbbb"),
        "file": run("err", "-f KEYS"),
        "system": run("out", "--system bbbb"),
        "raw": run("err", "--raw"),
        "max_tokens": run("out", "-n 3"),
        "context": run("status", "--context 3"),
        "stop": run("out", "--stop .", "-n 60"),
        "reasoning_effort": run("err", "--reasoning-effort high"),
        "reasoning_budget": Flag("out", "run THINKS -p abba -n 30", "run THINKS -p abba -n 30 --reasoning-budget 2"),
        "draft": run("err", "--draft ngram", "-n 60"),
        "draft_length": run("err", "--draft-length 1", "-n 60 --draft ngram"),
        "lora": run("out", "--lora mine=LORA"),
        "json": run("out", "--json"),
        "temperature": sampled("out", "--temperature 0"),
        "top_k": sampled("out", "--top-k 2"),
        "top_p": sampled("out", "--top-p 0.1"),
        "min_p": sampled("out", "--min-p 0.9"),
        "repetition_penalty": run("out", "--repetition-penalty 9", "-n 40"),
        "seed": sampled("out", "--seed 2"),
    },
    "serve": {
        "models": Flag("models", "serve MODEL --port 0", "serve OTHER --port 0"),
        "model_option": Flag("models", "serve -m MODEL --port 0", "serve -m OTHER --port 0"),
        "quantize": Flag("answer", "serve FLOATS --port 0", "serve FLOATS --port 0 --quantize fp4"),
        "device": serve("status", "--device cuda"),
        "activations": serve("answer", "--activations exact"),
        "cache_type": serve("cache", "--cache-type float16"),
        "threads": serve("threads", "--threads 2"),
        "folder": Flag("several", "serve MODEL MODEL2 --port 0", "serve MODEL MODEL2 --port 0 --models MODELS"),
        "memory": Flag("several", "serve MODEL MODEL2 --port 0", "serve MODEL MODEL2 --port 0 --memory 1GB"),
        "host": serve("announced", "--host 0.0.0.0"),
        "port": serve("port", "--port PORT"),
        "streams": serve("streams", "--streams 2"),
        "context": serve("context", "--context 64"),
        "cache_tokens": serve("cache", "--cache-tokens 256"),
        "queue": serve("choices", "--queue 1", "--streams 1"),
        "alias": serve("models", "--alias other"),
        "draft": serve("drafted", "--draft ngram"),
        "draft_length": serve("drafted", "--draft-length 1", "--draft ngram"),
        "lora": serve("models", "--lora mine=LORA"),
        "api_key": serve("without_key", "--api-key k1"),
        "api_key_file": serve("without_key", "--api-key-file KEYS"),
        "share_prefixes": serve("shared", "--share-prefixes", "--api-key k1 --api-key k2"),
        "allow_host": serve("host", "--allow-host b.example"),
        "cors_origin": serve("cors", "--cors-origin https://a.example"),
        "strict_fields": serve("unknown_field", "--strict-fields"),
        "verbose": serve("rendered", "--verbose"),
        "reasoning_effort": serve("rendered", "--reasoning-effort high", "--verbose"),
        "reasoning_budget": Flag("answer", "serve THINKS --port 0", "serve THINKS --port 0 --reasoning-budget 2"),
        "fronts": serve("fronts", "--fronts 2"),
        "no_access_log": serve("log", "--no-access-log"),
    },
    "eval": {
        "models": Flag("out", "eval MODEL --text TEXT --tokens 40", "eval OTHER --text TEXT --tokens 40"),
        "quantize": Flag(
            "out", "eval FLOATS --text TEXT --tokens 40", "eval FLOATS --text TEXT --tokens 40 --quantize fp4"
        ),
        "device": evaluate("status", "--device cuda"),
        "activations": evaluate("out", "--activations exact"),
        "cache_type": evaluate("out", "--cache-type int8", "--json"),
        "threads": evaluate("threads", "--threads 2"),
        "text": evaluate("out", "--text OTHERTEXT"),
        "against": evaluate("out", "--against OTHER"),
        "window": evaluate("out", "--window 10"),
        "tokens": evaluate("out", "--tokens 30"),
        "json": evaluate("out", "--json"),
        "plot": evaluate("names", "--plot p.png", "--against OTHER"),
    },
    "inspect": {
        "path": Flag("out", "inspect MODEL", "inspect FOLDER"),
        "json": Flag("out", "inspect MODEL", "inspect MODEL --json"),
    },
    "calibrate": {
        "model": Flag(
            "files",
            "calibrate FLOATS --text TEXT -o s.safetensors --tokens 40",
            "calibrate OTHER --text TEXT -o s.safetensors --tokens 40",
        ),
        "text": calibrate("files", "--text OTHERTEXT"),
        "out": calibrate("names", "-o other.safetensors"),
        "hessian": calibrate("files", "--hessian"),
        "tokens": calibrate("files", "--tokens 30"),
        "window": calibrate("files", "--window 10"),
        "device": calibrate("status", "--device cuda"),
        "force": Flag("status", *(f"{calibrate('', '').without} && {calibrate('', x).given}" for x in ("", "--force"))),
        "threads": calibrate("threads", "--threads 2"),
    },
    "rotate": {
        "source": Flag("files", "rotate FLOATS out.gguf", "rotate FLOATS2 out.gguf"),
        "out": Flag("names", "rotate FLOATS out.gguf", "rotate FLOATS out2.gguf"),
        "dtype": rotate("files", "--dtype float16"),
        "seed": rotate("files", "--seed 1"),
        "force": Flag("status", *(f"rotate FLOATS out.gguf && rotate FLOATS out.gguf {x}" for x in ("", "--force"))),
    },
    "quantize": {
        "source": Flag("files", "quantize FOLDER out --format q4_0", "quantize MODEL out --format q4_0 --requantize"),
        "out": Flag("names", "quantize FOLDER out --format q4_0", "quantize FOLDER out2 --format q4_0"),
        "format": quantize("files", "--format q8_0"),
        "bits": planned("files", "--bits 4.6"),
        "formats": planned("files", "--formats q8_0,q5_0"),
        "plan": planned("names", "--plan plan.txt"),
        "group_size": Flag(
            "files", "quantize FOLDER out --format fp4", "quantize FOLDER out --format fp4 --group-size 64"
        ),
        "method": quantize("files", "--method rtn"),
        "calibrate": Flag("files", *(f"quantize FLOATS out.gguf --format q4_0 {x}" for x in ("", "--calibrate TEXT"))),
        "no_sequential": calibrated("files", "--no-sequential", "--method gptq"),
        "imatrix": Flag(
            "files",
            f"{calibrate('', '').given} && quantize FLOATS out.gguf --format q4_0",
            f"{calibrate('', '').given} && quantize FLOATS out.gguf --format q4_0 --imatrix s.safetensors",
        ),
        "keep": quantize("files", "--keep q_proj=q8_0"),
        "only": quantize("files", "--only q_proj"),
        "device": calibrated("status", "--device cuda"),
        "to": quantize("files", "--to gptq", "--format u4b8 --group-size 32"),
        "requantize": Flag("status", *(f"quantize MODEL out --format q4_0 {x}" for x in ("", "--requantize"))),
        "raw_names": Flag("status", *(f"quantize UNKNOWN out.gguf --format q4_0 {x}" for x in ("", "--raw-names"))),
        "force": Flag("status", *(f"{quantize('', '').given} && {quantize('', x).given}" for x in ("", "--force"))),
    },
    "tune": {
        "source": Flag("files", tune("", "").given, tune("", "").given.replace("Q4 ", "MODEL ")),
        "out": Flag("names", tune("", "").given, tune("", "").given.replace("out.gguf", "out2.gguf")),
        "against": tune("files", "--against OTHER"),
        "text": tune("files", "--text OTHERTEXT"),
        "tokens": tune("files", "--tokens 20"),
        "window": tune("files", "--window 10"),
        "epochs": tune("files", "--epochs 2"),
        "rate": tune("files", "--rate 0.1"),
        "device": tune("status", "--device cuda:99"),
        "force": Flag("status", *(f"{tune('', '').given} && {tune('', x).given}" for x in ("", "--force"))),
        "threads": tune("threads", "--threads 2"),
    },
    "convert": {
        "source": Flag("files", "convert FOLDER out --to plain", "convert MODEL out --to plain"),
        "out": Flag("names", "convert FOLDER out --to plain", "convert FOLDER out2 --to plain"),
        "to": Flag("names", "convert FOLDER out --to plain", "convert FOLDER out.gguf --to gguf"),
        "dtype": convert("files", "--dtype float16"),
        "requantize": Flag("status", *(f"convert MODEL out --to awq {x}" for x in ("", "--requantize"))),
        "raw_names": Flag("status", *(f"convert UNKNOWN out.gguf --to gguf {x}" for x in ("", "--raw-names"))),
        "force": Flag("status", *(f"{convert('', '').given} && {convert('', x).given}" for x in ("", "--force"))),
    },
    "verify": {
        "a": Flag("status", "verify MODEL MODEL", "verify OTHER MODEL"),
        "b": Flag("status", "verify MODEL MODEL", "verify MODEL OTHER"),
    },
    "formats": {"markdown": Flag("out", "formats", "formats --markdown")},
    "explain": {
        "format": Flag("out", "explain fp4 3", "explain mxfp4 3"),
        "code": Flag("out", "explain fp4 3", "explain fp4 4"),
        "scale": Flag("out", "explain fp4 3", "explain fp4 3 --scale 2"),
        "offset": Flag("out", "explain q4_1 3", "explain q4_1 3 --offset 2"),
    },
    "info": {"json": Flag("json", "info", "info --json")},
    "doctor": {
        "model": Flag("out", "doctor --backend cpu", "doctor --backend cpu MODEL"),
        "backend": Flag("out", "doctor --backend cpu", "doctor --backend cpu --backend reference"),
        "report": Flag("names", "doctor --backend cpu", "doctor --backend cpu --report r.json"),
    },
}
MARKS = {"serve": "process", "tune": "torch"}


def flags_of(command: str) -> set[str]:
    return {action.dest for action in parser_of(command)._actions if action.dest != "help"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    """What words in capital letters stand for."""
    folder = tmp_path_factory.mktemp("inputs")
    # One small layer, and weights of the embedding in the LM head: after a while its answers repeat themselves.
    repeats = Small(template=TEMPLATE, seed=4, tied=True, layers=1, heads=1, kv_heads=1, feed_forward=32)
    models = {
        "MODEL": repeats,
        "MODEL2": Small(seed=3),
        "OTHER": Small(seed=1),
        "THINKS": Small(template=THINKING),
        "FLOATS": Small(quantization="F32"),
        "Q4": Small(quantization="Q4_0"),
    }
    for name, small in models.items():
        write_model(folder / f"{name}.gguf", small)
    write_model(folder / "FLOATS2.gguf", Small(quantization="F32", seed=1, fields={}))
    write_folder(folder / "FOLDER", "plain")
    save_file({"some.weight": np.ones((32, 64), np.float32)}, folder / "UNKNOWN.safetensors")
    (folder / "models").mkdir()
    write_model(folder / "models" / "third.gguf", Small(seed=2))
    write_small_adapter(folder / "lora", repeats)
    (folder / "text").write_text("abc " * 60)
    (folder / "other text").write_text("xyz 12 " * 60)
    (folder / "keys").write_text("k1\n")
    paths = {path.stem: path for path in folder.glob("*.*")} | {path.name: path for path in folder.glob("[A-Z]*")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    named = {"MODELS": "models", "LORA": "lora", "TEXT": "text", "OTHERTEXT": "other text", "KEYS": "keys"}
    return (
        {name: str(path) for name, path in paths.items()}
        | {name: str(folder / at) for name, at in named.items()}
        | {"PORT": str(port)}
    )


def asked(url: str, key: str | None) -> Iterator[tuple[str, object]]:
    """What a server answers: the parts that flags of `serve` are about."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    ask = functools.partial(send, url, "/v1/chat/completions")
    chat = {
        "messages": [{"role": "user", "content": "abba " * 18}],
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": True,
    }
    yield "models", [each["id"] for each in send(url, "/v1/models", method="GET", **headers)[2]["data"]]
    yield "without_key", ask(chat)[0]
    answer = ask(chat, **headers)[2]
    yield "answer", answer.get("choices")
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as metrics:
        text = metrics.read().decode()
    yield "cache", re.findall(r"^billfish_cache_bytes_bound.*", text, re.MULTILINE)
    yield "drafted", re.findall(r"^billfish_draft\w+.*", text, re.MULTILINE)
    yield "rendered", answer.get("__verbose")
    yield "unknown_field", ask(chat | {"no_such_field": 1}, **headers)[0]
    allowed = ask(chat, Origin="https://a.example", **headers)[1]
    yield "cors", [value for name, value in allowed.items() if name.lower() == "access-control-allow-origin"]
    yield "host", ask(chat, Host="b.example", **headers)[0]
    yield "choices", ask(chat | {"n": 4}, **headers)[0]
    again = ask(chat, Authorization="Bearer k2")[2]
    yield "shared", again.get("usage")


def served(seen: dict[str, object], key: str | None, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`billfish serve` answers some requests instead of running until a signal comes."""
    from billfish.serving.http.fronts import Fronts
    from billfish.serving.http.server import Server, address
    from billfish.serving.models.http_process import PoolServer

    run_server = Server.run

    def answer(server: Any, sockets: Any) -> None:
        url = address(sockets[0])
        ready = threading.Event()
        announce, server._announce = server._announce, lambda: (announce(), ready.set())

        def client() -> None:
            try:
                assert ready.wait(60)
                seen.update(asked(url, key))
            finally:
                server.handle_exit(0, None)

        asking = threading.Thread(target=client)
        asking.start()
        run_server(server, sockets)
        asking.join()
        seen["port"] = url.endswith(port)

    monkeypatch.setattr(Server, "run", answer)
    monkeypatch.setattr(PoolServer, "run", lambda self, sockets: self._announce())
    monkeypatch.setattr(Fronts, "run", lambda self: seen.update(fronts=self._told.fronts))


def parts_of(seen: dict[str, object]) -> None:
    """Of the announcement of a server."""
    text = str(seen["out"])
    for name, pattern in (("streams", r"(\d+) streams"), ("context", r"of (\d+) tokens")):
        seen[name] = re.findall(pattern, text)
    seen["several"] = re.findall(r"(\d+ models).*\n?.*(up to .* together)", text)
    seen["announced"] = re.sub(r"^.* on http.*$", "", text, flags=re.MULTILINE)
    seen["log"] = len(re.findall("POST /v1/chat", str(seen["err"])))


class Observer:
    """Runs lines of words, and remembers what was seen."""

    def __init__(self, inputs: dict[str, str], folder: Path) -> None:
        self._inputs, self._folder, self._seen = inputs, folder, {}

    def base(self, line: str, sees: str) -> dict[str, object]:
        """It is the same each time, so that a difference comes of a flag."""
        if line not in self._seen:
            self._seen[line] = self.observe(line), self.observe(line)
        first, again = self._seen[line]
        assert first[sees] == again[sees], (sees, line)
        return first

    def observe(self, line: str) -> dict[str, object]:
        """Status, output, files and more of the last command of a line."""
        words = [self._path(word) for word in shlex.split(line)]
        place = self._folder / str(len(list(self._folder.iterdir())))
        place.mkdir()
        seen: dict[str, object] = {"fronts": 0}
        key = (
            words[words.index("--api-key") + 1] if "--api-key" in words else "k1" if "--api-key-file" in words else None
        )
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as streams:
            patch.chdir(place)
            patch.setattr(sys, "stdin", io.StringIO(""))
            patch.setenv("BILLFISH_DEVICE", "cpu")
            if words[0] == "serve":
                served(seen, key, self._inputs["PORT"], patch)
            out, err = io.StringIO(), io.StringIO()
            streams.enter_context(contextlib.redirect_stdout(out))
            streams.enter_context(contextlib.redirect_stderr(err))
            _cpu.set_threads(1)
            for command in split(words):
                seen["status"] = main(command)
            seen["threads"] = _cpu.threads()
        seen |= {"out": VOLATILE.sub("", out.getvalue()), "err": VOLATILE.sub("", err.getvalue())}
        found = {str(path.relative_to(place)): path for path in sorted(place.rglob("*")) if path.is_file()}
        seen["json"] = out.getvalue().startswith("{")
        seen["names"] = list(found)
        seen["files"] = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
        parts_of(seen)
        return seen

    def _path(self, word: str) -> str:
        name, equals, value = word.rpartition("=")
        return f"{name}{equals}{self._inputs.get(value, value)}"


def split(words: list[str]) -> Iterator[list[str]]:
    """The commands between &&."""
    while "&&" in words:
        end = words.index("&&")
        yield words[:end]
        words = words[end + 1 :]
    yield words


@pytest.fixture(scope="module")
def observer(inputs, tmp_path_factory) -> Iterator[Observer]:
    threads = _cpu.threads()
    yield Observer(inputs, tmp_path_factory.mktemp("runs"))
    _cpu.set_threads(threads)


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    """There is no GPU, and how much is drafted does not depend on measured times."""

    def device(ordinal: int = 0) -> Any:
        raise BackendUnavailable("cuda: no NVIDIA driver was found.")

    monkeypatch.setattr("billfish.backends.cuda.driver.device", device)
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        pytest.param(command, flag, marks=[getattr(pytest.mark, MARKS[command])] if command in MARKS else [])
        for command, flags in EFFECTS.items()
        for flag in flags
    ],
)
def test_a_flag_has_an_effect(command, flag, observer):
    row = EFFECTS[command][flag]
    without = observer.base(row.without, row.sees)
    given = observer.observe(row.given)
    assert without[row.sees] != given[row.sees], row
    assert row.sees == "status" or without["status"] == given["status"] == 0, row


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_has_every_flag(command):
    assert set(EFFECTS[command]) == flags_of(command)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_flag_ends_with_its_default(name):
    for action in parser_of(name)._actions:
        about = action.help or ""
        assert not about.endswith("."), (name, action.dest)
        if action.dest != "help" and (action.option_strings or action.nargs in ("?", "*")):
            ending = re.search(r"\((?:default: (.+)|required.*)\)$", about)
            assert ending, (name, action.dest, about)
            if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
                assert ending[1] == f"{action.default:g}", (name, action.dest, about)


def test_files_of_commands_have_the_shape_of_a_command():
    """cli/ is one file a command; what several share has a name that is no command."""
    shared = {"__init__", "main", "metal_checks", "model_arguments", "parser", "pictures", "start"}
    folder = Path(module_of("run").__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - shared == set(COMMANDS)
