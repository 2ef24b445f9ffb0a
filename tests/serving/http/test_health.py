"""An engine that fails says so: every waiting client gets an answer, /health is 503, and the process ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cuda_fake_gpu import FakeGpu
from llm_models import Small, write_model
from serving_http import send, serving, until
from serving_support import submit

import billfish as bf
from billfish.backends.cuda import driver
from billfish.core.errors import DeviceLost
from billfish.llm import load
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request, ServerClosing
from billfish.serving.http import server as server_module
from billfish.serving.ipc import messages
from billfish.serving.ipc.client import EngineClient

BODY = {"prompt": "abc", "max_tokens": 5}


@pytest.fixture
def path(tmp_path):
    write_model(tmp_path / "m.gguf", Small(context=256))
    return tmp_path / "m.gguf"


def health(url: str) -> tuple[int, str]:
    status, _, answer = send(url, "/health", None, "GET")
    return status, answer["status"]


@pytest.mark.promise("server", "a GPU that is lost ends the engine, its clients are told, and `/health` says so")
@pytest.mark.promise(
    "server", "an engine that fails answers every client with 500, `/health` is 503, and the process ends with a code"
)
def test_clients_and_monitors_learn_of_an_engine_that_ends(path, monkeypatch, caplog):
    """One request runs, one waits, then the thread ends. Later ones are refused, and the server ends by itself."""
    monkeypatch.setattr(server_module, "FAILED_SECONDS", 1.0)
    with serving(path, streams=1, queue=4) as server:
        engine, go = server.engine, threading.Event()

        def lost(*_: Any) -> None:
            assert go.wait(60)
            raise DeviceLost("cuda: a step failed: CUDA_ERROR_ILLEGAL_ADDRESS.")

        monkeypatch.setattr(engine._decoder, "choose", lost)
        answers: list[tuple[int, dict, Any]] = []
        clients = [threading.Thread(target=lambda: answers.append(send(server.url, "/v1/completions", BODY)))]
        clients += [threading.Thread(target=lambda: answers.append(send(server.url, "/v1/completions", BODY)))]
        clients += [threading.Thread(target=lambda: answers.append(send(server.url, "/v1/embeddings", {"input": "a"})))]
        clients[0].start()
        until(lambda: engine.counts().running == 1)  # an embedding that came first would be computed
        for client in clients[1:]:
            client.start()
        until(lambda: engine.counts().running + engine.counts().waiting == 3)
        assert health(server.url) == (200, "ok")
        started = time.monotonic()
        go.set()
        until(lambda: health(server.url) == (503, "failed"))
        assert time.monotonic() - started < 30, "soon; a loaded machine may take its time"
        assert send(server.url, "/v1/completions", BODY)[0] == 503
        for client in clients:
            client.join(60)
        assert [status for status, _, _ in answers] == [500] * 3
        assert sum("ILLEGAL_ADDRESS" in str(answer) for _, _, answer in answers) == 2  # an embedding's is in the log
        assert "ILLEGAL_ADDRESS" in engine.failure
        until(lambda: not _answers(server.url))
    assert sum(record.levelname == "CRITICAL" for record in caplog.records) == 1
    assert engine.counts().finished["failed"] == 3


def _answers(url: str) -> bool:
    try:
        health(url)
    except OSError:
        return False
    return True


def test_an_error_of_nobody_ends_all_requests_and_the_engine_goes_on_if_the_model_runs(path, monkeypatch):
    model = load(path, device="cpu")
    with Engine(model, streams=2) as engine:
        end = engine._end_cancelled

        def broken() -> None:
            monkeypatch.setattr(engine, "_end_cancelled", end)
            raise ZeroDivisionError("nobody's")

        monkeypatch.setattr(engine, "_end_cancelled", broken)
        answer = submit(engine, Request([5, 6], 3)).wait()
        assert (answer.finished, "nobody's" in answer.pieces[-1].error) == ("failed", True)
        assert submit(engine, Request([5, 6], 3)).wait().finished in ("stop", "length")
        assert engine.is_alive


def test_an_error_of_nobody_ends_the_engine_if_the_model_does_not_run(path, monkeypatch):
    model = load(path, device="cpu")
    engine = Engine(model, streams=2)
    for where, name in ((engine, "_end_cancelled"), (model.decoder, "choose")):
        monkeypatch.setattr(where, name, lambda *_: 1 / 0)
    assert submit(engine, Request([5, 6], 3)).wait().finished == "failed"
    engine._thread.join(60)
    assert not engine.is_alive
    assert "ZeroDivisionError" in engine.failure
    with pytest.raises(ServerClosing, match="ZeroDivisionError"):
        engine.submit(Request([5], 1), print)
    engine.close()


class Code(int):
    name = "CUDA_ERROR_MISALIGNED_ADDRESS"


@pytest.mark.promise("server", "a GPU that is lost ends the engine, its clients are told, and `/health` says so")
@pytest.mark.promise("server", "a GPU error after which nothing runs is told from one of a single request")
@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuMemcpyHtoDAsync"])
def test_a_device_that_is_lost_ends_the_engine(monkeypatch, tmp_path, call):
    """By its code, in whatever call it comes. An error that the device survives ends its requests alone."""
    gpu = FakeGpu(monkeypatch)
    write_model(tmp_path / "model.gguf", Small(quantization="Q4_0", hidden=64, context=300))
    model = load(tmp_path / "model.gguf", device="cuda")
    engine = Engine(model, streams=2)
    with monkeypatch.context() as patched:
        patched.setattr(gpu, "cuMemcpyHtoDAsync", lambda *_: (Code(1),))
        assert submit(engine, Request([5, 6], 3)).wait().finished == "failed"
    assert engine.is_alive
    assert submit(engine, Request([5, 6], 3)).wait().finished == "length"
    with monkeypatch.context() as patched:
        for name in (call, "cuCtxSynchronize"):
            patched.setattr(gpu, name, lambda *_: (Code(716),))
        answers = [submit(engine, Request([5, token], 3)) for token in (6, 7)]
        assert {answer.wait().finished for answer in answers} == {"failed"}
        engine._thread.join(60)
        assert "MISALIGNED_ADDRESS" in engine.failure
        assert not engine.is_alive
        with pytest.raises(DeviceLost, match="cannot use the GPU"):
            driver.check_device(0)
    engine.close()
    del engine, model, answers
    gc.collect()
    monkeypatch.undo()
    gpu.forget()


@pytest.mark.promise(
    "server", "an engine that fails answers every client with 500, `/health` is 503, and the process ends with a code"
)
@pytest.mark.process
@pytest.mark.parametrize("fronts", ["0", "2"])
def test_the_process_ends_with_a_code_and_a_sentence(path, fronts):
    """Its decoder loses its device at the second step."""
    program = """
import sys
from billfish.core.errors import DeviceLost
from billfish.llm.cpu import CpuDecoder
from billfish.cli.main import main
choose, calls = CpuDecoder.choose, []
def lost(*how):
    calls.append(1)
    if len(calls) > 1:
        raise DeviceLost("the device is lost.")
    return choose(*how)
CpuDecoder.choose = lost
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--fronts", sys.argv[2]]))
"""
    command = [sys.executable, "-c", program, str(path), fronts]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        url = started.stdout.readline().partition(" on ")[2].partition(": ")[0]
        assert send(url, "/v1/completions", {**BODY, "logit_bias": {"1": -100}})[0] == 500
        assert health(url) == (503, "failed")
        _, said = started.communicate(timeout=60)
    assert started.returncode == 2
    assert "the device is lost" in said.splitlines()[-1]
    assert issubclass(DeviceLost, bf.BillfishError)


@pytest.mark.promise(
    "server", "an engine that fails answers every client with 500, `/health` is 503, and the process ends with a code"
)
@pytest.mark.process
def test_the_process_ends_when_its_gpu_is_lost(tmp_path):
    """The driver of a fake GPU answers every call with a sticky error from the second token of an answer on."""
    write_model(tmp_path / "m.gguf", Small(quantization="Q4_0", hidden=64, context=300))
    program = """
import sys
import pytest
sys.path.insert(0, sys.argv[2])
from cuda_fake_gpu import FakeGpu
from billfish.cli.main import main
from billfish.serving.http import fronts
fronts.FAILED_SECONDS = 6.0  # a loaded machine may take its time
class Code(int):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"
gpu = FakeGpu(pytest.MonkeyPatch())
def sticky(call):
    return lambda *how: (Code(700),) if any(place > 4 for step in gpu.fed for _, place, _ in step) else call(*how)
for name in ("cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyHtoDAsync"):
    setattr(gpu, name, sticky(getattr(gpu, name)))
sys.exit(main(["serve", sys.argv[1], "--device", "cuda", "--port", "0", "--fronts", "1"]))
"""
    support = str(Path(__file__).parents[2] / "support")
    command = [sys.executable, "-c", program, str(tmp_path / "m.gguf"), support]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        url = started.stdout.readline().partition(" on ")[2].partition(": ")[0]
        assert send(url, "/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": 50})[0] == 500
        assert health(url) == (503, "failed")
        _, said = started.communicate(timeout=60)
    assert started.returncode == 2
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said.splitlines()[-1]


def test_an_engine_is_ill_when_it_says_so_or_is_gone_not_when_it_is_slow():
    async def asked() -> list[str]:
        loop, client, sent = asyncio.get_running_loop(), EngineClient(None), list[Any]()
        client.connect(sent.append)
        states = [asyncio.ensure_future(client.state()) for _ in range(3)]
        await asyncio.sleep(0)
        now = loop.time() + 3600
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loop, "time", lambda: now)  # an hour later
            for _ in range(10):
                await asyncio.sleep(0)
            assert not any(state.done() for state in states)
        for message, said in zip(sent, (b"ok", b"failed"), strict=False):
            client.receive(messages.Reply(message.id, said))
        client.lose()
        return await asyncio.gather(*states, client.state())

    assert asyncio.run(asked()) == ["ok", "failed", "failed", "failed"]
