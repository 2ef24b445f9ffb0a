"""Several models behind one server: loaded when they are asked for, unloaded where memory ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import llm_architectures
import pytest
from llm_models import Small, write_model
from peft_adapters import ALL, write_adapter
from serving_http import events, process, send, serving, until

import billfish as bf
from billfish.core.errors import DataError
from billfish.llm.text_model import TextModel
from billfish.serving.api.request_bodies import Refusal
from billfish.serving.engine.engine_settings import EngineSettings
from billfish.serving.ipc.client import ServerClient
from billfish.serving.models import pool as pool_module
from billfish.serving.models.catalog import bytes_needed, catalog_of, memory_of, models_in
from billfish.serving.models.pool import ModelPool

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform == "win32", reason="no sockets that processes share"),
]
COMPLETIONS = "/v1/completions"
CONTEXT = 20000
WORDS = ["--context", str(CONTEXT), "--streams", "2", "--queue", "40", "--activations", "exact", "--device", "cpu"]
ENDLESS = {"prompt": "ab", "max_tokens": CONTEXT, "logit_bias": {"1": -100}, "stream": True}  # until somebody stops it
ROOM = 1.5  # models that fit into memory, in `tight`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three models with other answers."""
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        write_model(made / f"{name}.gguf", Small(context=CONTEXT, seed=seed))
    return made


@pytest.fixture(scope="module")
def server(folder):
    """With room for all of them."""
    with process("--models", str(folder), *WORDS) as (started, url):
        yield started, url
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0


def size(folder: Path) -> int:
    model = TextModel.open(folder / "a.gguf")
    return bytes_needed(model, EngineSettings(context=CONTEXT, streams=2), on_gpu=False)


@pytest.fixture
def tight(folder):
    """With room for one of them."""
    with process("--models", str(folder), *WORDS, "--memory", f"{size(folder) * ROOM / 1e3}kB") as (started, url):
        yield started, url


@contextlib.contextmanager
def asked(url: str, body: object) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun, and ends with the context."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
        connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def states(url: str) -> dict[str, str]:
    return send(url, "/health", None, "GET")[2]["models"]


def metric(url: str, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    [line] = re.findall(rf"^billfish_{name} (\S+)$", text, re.MULTILINE)
    return float(line)


def complete(url: str, model: str, **more: object) -> tuple[int, dict, dict]:
    return send(url, COMPLETIONS, {"model": model, "prompt": "ab", "max_tokens": 4, "temperature": 0, **more})


def refuses(url: str) -> bool:
    """Whether a server takes no request any more: with 503, or as it does not listen."""
    try:
        return complete(url, "b")[0] == 503
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """The engines of a server."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = re.search(r"^PPid:\s+(\d+)", (entry / "status").read_text(), re.MULTILINE)
            ours = parent is not None and int(parent[1]) == pid
            if ours and b"models.engine_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_each_name_is_answered_by_its_model(server, folder):
    """Streamed or whole, as a server with that model alone answers."""
    _, url = server
    body = {"prompt": "ab", "max_tokens": 12, "seed": 3, "logprobs": 1}
    texts = []
    for name in "abca":
        code, headers, answer = send(url, COMPLETIONS, body | {"model": name})
        assert (code, answer["model"]) == (200, name)
        assert "x-billfish-model" not in headers
        streamed = events(url, COMPLETIONS, body | {"model": f"{name}:latest", "stream": True})
        pieces = [each["choices"][0]["text"] for each in streamed if each["choices"]]
        assert "".join(pieces) == answer["choices"][0]["text"]
        texts.append(answer["choices"])
    assert texts[0] == texts[3] != texts[1]
    with serving(folder / "b.gguf", streams=2, context=CONTEXT) as alone:
        assert send(alone.url, COMPLETIONS, body)[2]["choices"] == texts[1]
    vectors = [send(url, "/v1/embeddings", {"model": name, "input": "ab"})[2]["data"] for name in "ab"]
    assert vectors[0] != vectors[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "ab"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/api/generate", {"prompt": "ab"}),
        ("/tokenize", {"content": "ab"}),
    ],
)
def test_other_names_are_refused(server, path, body):
    _, url = server
    code, _, answer = send(url, path, body | {"model": "other"})
    assert code == 404
    assert all(f'"{name}"' in json.dumps(answer).replace("\\", "") for name in ("other", *"abc"))
    assert send(url, path, {**body})[0] == 400


def test_models_are_listed_and_shown_without_being_loaded(folder):
    with process(*(str(folder / f"{name}.gguf") for name in "ab"), *WORDS, "--alias", "x", "--alias", "y") as (_, url):
        listed = send(url, "/v1/models", None, "GET")[2]["data"]
        assert [(each["id"], each["status"]["value"]) for each in listed] == [("x", "unloaded"), ("y", "unloaded")]
        assert [each["name"] for each in send(url, "/api/tags", None, "GET")[2]["models"]] == ["x", "y"]
        shown = send(url, "/api/show", {"model": "y"})[2]
        assert shown["model_info"]["llama.context_length"] == CONTEXT
        assert send(url, "/api/show", {"model": "z"})[0] == 404
        assert states(url) == {"x": "unloaded", "y": "unloaded"}
        assert send(url, "/api/generate", {"model": "y", "stream": False})[2]["done_reason"] == "load"
        assert states(url) == {"x": "unloaded", "y": "loaded"}
        assert [each["name"] for each in send(url, "/api/ps", None, "GET")[2]["models"]] == ["y"]
        assert send(url, "/v1/models/y", None, "GET")[2]["status"]["value"] == "loaded"
        assert send(url, "/v1/models/z", None, "GET")[0] == 404


def test_counts_are_those_of_each_model(server):
    _, url = server
    before = dict.fromkeys("ab", 0.0)
    for name in before:
        assert complete(url, name)[0] == 200
        before[name] = metric(url, rf'prompt_tokens_total\{{model="{name}"\}}')
    assert complete(url, "b")[0] == 200
    assert metric(url, r'prompt_tokens_total\{model="a"\}') == before["a"]
    assert metric(url, r'prompt_tokens_total\{model="b"\}') > before["b"]
    assert metric(url, r'model_loads_total\{model="b"\}') == 1
    assert metric(url, r'model_bytes\{model="b"\}') > 0
    assert metric(url, r'http_responses_total\{path="/v1/completions",status="200"\}') >= 3


def test_responses_are_kept_for_all_models(server):
    _, url = server
    first = send(url, "/v1/responses", {"model": "a", "input": "ab", "max_output_tokens": 3})[2]
    body = {"model": "b", "input": "ab", "max_output_tokens": 3, "previous_response_id": first["id"]}
    code, _, second = send(url, "/v1/responses", body)
    assert code == 200
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert send(url, f"/v1/responses/{first['id']}", None, "GET")[2]["id"] == first["id"]


def test_what_a_model_takes_is_estimated(folder, server):
    """The estimate decides what is unloaded before a model is loaded."""
    _, url = server
    assert complete(url, "a")[0] == 200
    took = metric(url, r'model_bytes\{model="a"\}')
    assert 0.7 < size(folder) / took < 1.3


@pytest.mark.parametrize("quantize", ["q4_0", "fp4:64", "Q4_K_M"])
def test_float_weights_count_as_what_they_are_quantized_to(tmp_path, quantize):
    """As a file does that was quantized before; what stays as it is counts in full."""
    sizes = Small(layers=3, hidden=256, feed_forward=512, context=64, quantization="F16")
    write_model(tmp_path / "float.gguf", sizes)
    to = tmp_path / "quantized.gguf" if quantize != "fp4:64" else tmp_path / "quantized"
    format, _, group = quantize.partition(":")
    bf.quantize_checkpoint(tmp_path / "float.gguf", to, format, group_size=int(group) if group else None)
    needed = {}
    for path, given in ((tmp_path / "float.gguf", quantize), (tmp_path / "float.gguf", None), (to, None)):
        settings = EngineSettings(context=64, streams=1, quantize=given)
        needed[path, given] = bytes_needed(TextModel.open(path), settings, on_gpu=False)
    float_file, quantized = needed[tmp_path / "float.gguf", None], needed[to, None]
    assert quantized < 0.6 * float_file
    assert needed[tmp_path / "float.gguf", quantize] == pytest.approx(quantized, rel=0.02)


def test_the_least_recently_used_model_makes_room(folder):
    with process("--models", str(folder), *WORDS, "--memory", f"{size(folder) * 2.5 / 1e3}kB") as (_, url):
        for name in "abac":
            assert complete(url, name)[0] == 200
        assert states(url) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_a_model_with_running_requests_stays(tight):
    """Another one is loaded when these are over. Requests that come meanwhile wait for their turn."""
    _, url = tight
    with ThreadPoolExecutor(2) as pool:
        with asked(url, ENDLESS | {"model": "a"}) as running:
            assert running.readline().startswith(b"data: ")
            other = pool.submit(complete, url, "b")
            until(lambda: states(url)["b"] == "loading")
            again = pool.submit(complete, url, "a")
            until(lambda: metric(url, r'requests_waiting_for_load\{model="a"\}') == 1)
            for _ in range(20):  # of the answer that runs
                assert running.readline()
            assert not other.done()
            assert states(url)["a"] == "loaded"
        assert (other.result()[0], again.result()[0]) == (200, 200)
    assert states(url) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


def test_many_requests_for_many_models_are_all_answered(tight):
    _, url = tight
    alone = {name: complete(url, name)[2]["choices"] for name in "abc"}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda name: (name, complete(url, name)), "abcabbc"))
    for name, (code, _, answer) in found:
        assert (code, answer.get("choices")) == (200, alone[name]), answer


def test_a_client_that_leaves_while_a_model_is_loaded_does_not_hold_it(tight):
    _, url = tight
    with asked(url, ENDLESS | {"model": "a"}):
        leave(url, "b")
    assert complete(url, "c")[0] == 200
    assert states(url)["c"] == "loaded"


def leave(url: str, model: str) -> None:
    """Ask, and go while the model is waited for."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(
        "POST", COMPLETIONS, json.dumps({"model": model, "prompt": "ab"}), {"Content-Type": "application/json"}
    )
    until(lambda: metric(url, r'requests_waiting_for_load\{model="b"\}') == 1)
    connection.close()
    until(lambda: metric(url, r'requests_waiting_for_load\{model="b"\}') == 0)


def test_what_cannot_be_loaded_is_told_and_others_are_answered(folder, tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.gguf").write_bytes((folder / f"{name}.gguf").read_bytes())
    whole = (tmp_path / "b.gguf").read_bytes()
    (tmp_path / "b.gguf").write_bytes(whole[: len(whole) // 2])
    write_model(tmp_path / "large.gguf", Small(context=CONTEXT, layers=9))
    memory = f"{size(folder) * 1.2 / 1e3}kB"
    with process("--models", str(tmp_path), *WORDS, "--memory", memory) as (_, url):
        assert complete(url, "a")[0] == 200
        for name, why in (("b", "b.gguf"), ("large", "--memory")):
            code, headers, answer = complete(url, name)
            assert (code, answer["error"]["code"]) == (503, "model_not_loaded")
            assert why in answer["error"]["message"]
            assert 1 <= int(headers["retry-after"]) <= 10
            assert complete(url, name)[0] == 503
            assert states(url)[name] == "failed"
        assert states(url)["a"] == "loaded"  # no room was made for what does not fit
        assert complete(url, "a")[0] == 200


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_engine_that_ends_is_told_and_loaded_again(folder):
    with process("--models", str(folder), *WORDS) as (started, url):
        assert complete(url, "b")[0] == 200
        [other] = children(started.pid)
        with asked(url, ENDLESS | {"model": "a"}) as running:
            assert running.readline()
            [pid] = set(children(started.pid)) - {other}
            os.kill(pid, signal.SIGKILL)
            assert "The engine has ended." in running.read().decode()
        assert complete(url, "b")[0] == 200
        assert complete(url, "a")[0] == 200
        assert other in children(started.pid)
        started.kill()
        started.wait()
        until(lambda: not any(Path(f"/proc/{each}/stat").exists() for each in (other, pid)))


def test_an_engine_that_ends_while_its_load_waits_for_room_is_not_loaded(folder, monkeypatch):
    """Its size is known when it is ready, and other models may have to leave then."""

    async def load() -> None:
        settings = EngineSettings(device="cpu", context=64, streams=1)
        pool = ModelPool(catalog_of([folder / "a.gguf"], [], []), settings, 10**9, on_gpu=False)
        pool.connect()
        ended = asyncio.Event()
        monkeypatch.setattr(pool, "_lose", lambda *_: ended.set())

        async def make_room(entry, needed):
            if entry.engine is not None:
                os.kill(entry.engine.pid, signal.SIGKILL)
                await asyncio.wait_for(ended.wait(), 60)

        monkeypatch.setattr(pool, "_make_room", make_room)
        try:
            with pytest.raises(Refusal, match="process has ended"):
                await pool.use("a", lambda waited: waited)
            assert pool.entries["a"].state == "failed"
            assert pool.entries["a"].engine is None
        finally:
            pool.kill()

    asyncio.run(load())


def test_an_engine_that_does_not_answer_holds_up_no_health(folder, monkeypatch):
    """It is busy, not ill."""
    monkeypatch.setattr(pool_module, "TELL_SECONDS", 0.01)

    async def health() -> object:
        pool = ModelPool(catalog_of([folder / "a.gguf"], [], []), EngineSettings(), 10**9, on_gpu=False)
        pool.entries["a"].service = SimpleNamespace(client=ServerClient())  # connected with nothing
        try:
            return await asyncio.wait_for(pool.health(), 20)
        finally:
            pool.kill()

    assert asyncio.run(health()) == {"status": "ok", "models": {"a": "loaded"}}


def test_a_signal_lets_requests_finish_and_ends_all_processes(folder):
    with process("--models", str(folder), *WORDS) as (started, url):
        with asked(url, ENDLESS | {"model": "a", "max_tokens": 3000}) as running:
            assert running.readline()
            pids = children(started.pid)
            assert len(pids) == 1
            started.send_signal(signal.SIGTERM)
            until(lambda: refuses(url))
            assert '"finish_reason":"length"' in running.read().decode()
        assert started.wait(60) == 0
        assert not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


def test_adapters_belong_to_their_model(tmp_path):
    llm_architectures.write_model(tmp_path / "m", "llama3")
    write_adapter(tmp_path / "m", tmp_path / "adapter", ALL)
    write_model(tmp_path / "other.gguf", Small())
    words = [str(tmp_path / "m"), str(tmp_path / "other.gguf"), "--lora", f"mine@m={tmp_path / 'adapter'}"]
    with process(*words, "--activations", "exact", "--device", "cpu") as (_, url):
        listed = send(url, "/v1/models", None, "GET")[2]["data"]
        assert [each["id"] for each in listed] == ["m", "mine", "other"]
        assert listed[1]["parent"] == "m"
        body = {"prompt": llm_architectures.TOKENS[:9], "max_tokens": 8, "temperature": 0}
        found = {name: send(url, COMPLETIONS, body | {"model": name})[2]["choices"] for name in ("mine", "m", "mine")}
        assert states(url) == {"m": "loaded", "other": "unloaded"}
    with serving(tmp_path / "m", streams=2) as alone:
        alone.model.load_adapter("mine", tmp_path / "adapter")
        expected = {name: send(alone.url, COMPLETIONS, body | {"model": name})[2]["choices"] for name in found}
    assert found == expected
    assert found["mine"] != found["m"]


# ---- names and sizes --------------------------------------------------------------------------------------------


def test_a_folder_has_its_files_and_folders(tmp_path):
    for name in ("b.gguf", "mmproj-b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("a/config.json", "d/e.gguf", "d/f.gguf", "empty/x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in models_in(str(tmp_path))]
    assert found == ["a", "b.gguf", "c-00001-of-00002.gguf", "d/e.gguf", "d/f.gguf"]
    for wrong in (tmp_path / "empty", tmp_path / "b.gguf"):
        with pytest.raises(DataError, match="--models"):
            models_in(str(wrong))


def test_names_are_unique_and_as_many_as_models(tmp_path):
    paths = [tmp_path / "a.gguf", tmp_path / "x" / "a.gguf"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [named.name for named in catalog_of(paths, ["one", "two"], [])] == ["one", "two"]
    assert catalog_of(paths, ["one", "two"], [("mine@two", "f")])[1].adapters == {"mine": "f"}
    for aliases, adapters, word in (
        ([], [], "--alias"),
        (["one"], [], "--alias"),
        (["one", "two"], [("mine", "f")], "--lora"),
        (["one", "two"], [("mine@three", "f")], "three"),
        (["one", "two"], [("two@one", "f")], "two"),
    ):
        with pytest.raises(DataError, match=word):
            catalog_of(paths, aliases, adapters)


@pytest.mark.parametrize(
    ("given", "size"),
    [("24GB", 24 * 10**9), ("24 gib", 24 * 2**30), ("1.5G", 1500 * 10**6), ("80%", 800), ("123", 123), ("2kB", 2000)],
)
def test_sizes_of_memory(given, size):
    assert memory_of(given, 1000) == size


@pytest.mark.parametrize("given", ["", "much", "-1GB", "0", "80 percent", "0%", "GB"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(DataError, match="--memory"):
        memory_of(given, 1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b", "--fronts", "2"], "--fronts"),
        (["a", "--memory", "1GB"], "--memory"),
        (["a", "--alias", "x", "--alias", "y"], "--alias"),
        (["a", "b", "--memory", "some"], "--memory"),
        (["a", "missing"], "missing"),
        (["a", "-m", "b"], "-m"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder, capsys, words, message):
    from billfish.cli.main import main

    given = [str(folder / f"{word}.gguf") if word in ("a", "b") else word for word in words]
    assert main(["serve", *given, "--port", "0", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
