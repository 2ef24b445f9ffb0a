"""benchmarks.products: what it records, what it refuses, and that every peer computes the same product. No times."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict

import numpy as np
import pytest
from bench_support import FAKE, case_of, settings

import billfish as bf
from benchmarks import machine as machine_limits
from benchmarks import products
from benchmarks.machine import Limits
from benchmarks.peers import PEERS, copies_for, select
from benchmarks.peers.numpy import set_blas_threads
from benchmarks.products import main
from benchmarks.timing import take_turns
from billfish.backends.cpu import _cpu
from billfish.core.files import write_atomically

RECORD_KEYS = {
    "backend",
    "format",
    "activations",
    "m",
    "k",
    "n",
    "seconds",
    "gops",
    "weight_gbps",
    "limit_fraction",
    "peers",
    "error",
    "peer_errors",
}


@pytest.fixture(autouse=True, scope="module")
def threads_of_blas():
    """NumPy as a peer sets them for the whole process: the tests after these want as many as they started with."""
    yield
    if "OPENBLAS_NUM_THREADS" in os.environ:
        set_blas_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))


@pytest.fixture
def fake_limits(monkeypatch):
    monkeypatch.setattr(Limits, "measure", lambda level, cold_bytes: FAKE)


# ---- records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", ["none", "numpy"])
def test_one_record_for_each_measurement(peers):
    flags = {"formats": "q4_0,fp4:16", "activations": "exact,q8,q16", "shapes": "64x32,256x7", "peers": peers}
    out = io.StringIO()
    report = products.run(settings(**flags), FAKE, out)
    assert report.complete
    assert len(report.records) == 2 * 3 * 2 * 2
    for record in report.records:
        assert record.keys() == RECORD_KEYS
        assert record["backend"] == "cpu"
        assert record["peers"].keys() == ({"numpy"} if peers == "numpy" else set())
        operations = 2 * record["m"] * record["k"] * record["n"]
        assert record["gops"] == pytest.approx(operations / record["seconds"] / 1e9)
        assert record["weight_gbps"] > 0
        assert record["limit_fraction"] > 0
    asked = {(r["format"], r["activations"], r["m"], r["k"], r["n"]) for r in report.records}
    assert len(asked) == len(report.records)
    assert ("fp4:16", "q16", 17, 256, 7) in asked
    lines = out.getvalue().splitlines()
    assert len(lines) == 1 + len(report.records) + 2
    assert ("numpy" in lines[0]) == (peers == "numpy")
    assert lines[-1] == "limits: memory 1 GB/s, int8 4 GOP/s, float32 1 GOP/s"


def test_the_fraction_of_the_limit():
    # 1000 bytes take 1 us to read. Operations: 4 a nanosecond as int8, half of that for q16, 1 in float32.
    assert FAKE.least_seconds("q8", 1000, 2000) == pytest.approx(1e-6)  # memory
    assert FAKE.least_seconds("q8", 1000, 8000) == pytest.approx(2e-6)  # arithmetic
    assert FAKE.least_seconds("q16", 1000, 8000) == pytest.approx(4e-6)
    assert FAKE.least_seconds("exact", 1000, 8000) == pytest.approx(8e-6)
    case, run = case_of("q4_0"), products.Bench(settings(), FAKE)
    record = run._record(case, 2, 10_000, 4e-5, {})
    assert record["gops"] == pytest.approx(2 * 2 * 256 * 96 / 4e-5 / 1e9)
    assert record["weight_gbps"] == pytest.approx(0.25)
    assert record["limit_fraction"] == pytest.approx(2 * 2 * 256 * 96 / 4e9 / 4e-5)


def test_limits_are_positive_and_use_the_kernels_of_the_level():
    measured = Limits.measure(bf.BACKENDS["cpu"].level, 1 << 20)
    assert min(asdict(measured).values()) > 0


def test_the_command_writes_a_file(tmp_path, capsys, monkeypatch, fake_limits):
    path = tmp_path / "results.json"
    path.write_text("old")
    threads = _cpu.threads()
    flags = ["--shapes", "64x64", "--m", "32", "--peers", "numpy", "--threads", "1", "--json", str(path)]
    main(flags)
    content = json.loads(path.read_text())
    assert content.keys() == {"machine", "versions", "limits", "complete", "notes", "records"}
    assert [r["format"] for r in content["records"]] == ["q4_0", "fp4"]
    assert content["machine"]["threads"] == 1
    assert content["versions"]["billfish"] == bf.__version__
    assert content["versions"]["numpy"] == np.__version__
    assert _cpu.threads() == threads
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    captured = capsys.readouterr()
    assert captured.out.startswith("format ")
    assert captured.err == ""


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("old")

    def fail(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch, capsys, fake_limits):
    calls = []

    def interrupted(prepared, x, budget):
        calls.append(len(x))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return take_turns(prepared, x, 0.0)

    monkeypatch.setattr(products, "take_turns", interrupted)
    path = tmp_path / "results.json"
    flags = ["--shapes", "64x64", "--m", "32,33,64", "--peers", "none", "--json", str(path)]
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 130
    content = json.loads(path.read_text())
    assert [r["m"] for r in content["records"]] == [32, 33]
    assert not content["complete"]
    assert "stopped after 2 of 6 measurements" in capsys.readouterr().err


def test_a_breakdown_keeps_what_was_measured(tmp_path, monkeypatch):
    def broken(prepared, x, budget):
        if len(x) == 17:
            raise RuntimeError("theirs")
        return take_turns(prepared, x, 0.0)

    monkeypatch.setattr(products, "take_turns", broken)
    path = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="theirs"):
        products.run(settings(json=str(path)), FAKE, io.StringIO())
    assert [r["m"] for r in json.loads(path.read_text())["records"]] == [1]


def test_the_progress_bar_is_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    drawn = {}
    for stream in (io.StringIO(), Terminal()):
        products.Bench(settings(formats="q4_0"), FAKE, stream).run()
        drawn[stream.isatty()] = stream.getvalue()
    assert drawn[False] == ""
    assert "0/2 q4_0 q8 256x96 M=1" in drawn[True]
    assert "1/2 q4_0 q8 256x96 M=17" in drawn[True]
    assert drawn[True].endswith("\r\x1b[K")


def test_a_wrong_result_is_no_result(monkeypatch):
    def zeros(self, products, activations):
        products[-1].out.source.fill(0)

    monkeypatch.setattr(type(bf.BACKENDS["cpu"]), "linears", zeros)
    with pytest.raises(bf.BillfishError, match=r"billfish computes something else for q4_0"):
        products.run(settings(), FAKE, io.StringIO())


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--formats", "q4_7"], ["format", "'q4_7'", "'q4_0'"]),
        (["--formats", "u4b8:7"], ["group_size", "7", "32, 64, 128", "u4b8"]),
        (["--formats", "u4b8:big"], ["--formats", "'u4b8:big'", "u4b8:32"]),
        (["--shapes", "4096"], ["--shapes", "'4096'", "KxN"]),
        (["--shapes", "64x0"], ["--shapes", "'64x0'", "KxN"]),
        (["--shapes", "64xmany"], ["--shapes", "'64xmany'", "KxN"]),
        (["--shapes", "33x64"], ["33", "multiple of 32", "q4_0"]),
        (["--m", "0"], ["--m", "'0'", "positive integer"]),
        (["--m", "1,,2"], ["--m", "''", "positive integer"]),
        (["--activations", "q9"], ["--activations", "'q9'", "exact, q8, q16, fp8"]),
        (["--threads", "0"], ["--threads", "'0'", "positive integer"]),
        (["--backend", "abacus"], ["--backend", "'abacus'", "cpu", "metal"]),
        (["--json", "/no/such/folder/x"], ["--json", "'/no/such/folder/x'", "folder that exists"]),
        (["--peers", "numpy,abacus"], ["--peers", "'abacus'", "all, none, onnxruntime, ggml, mlx, numpy"]),
        (["--report", "x.json"], ["--report", "--backend metal", "cpu"]),
    ],
)
def test_wrong_flags_end_with_what_is_wrong(capsys, flags, facts):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert all(fact in last for fact in facts), last


def test_a_missing_peer_is_a_line_or_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setenv("BILLFISH_GGML_LIB", "/no/such/folder")
    peers, missing = select("all")
    assert "numpy" in [peer.name for peer in peers]
    assert not {"onnxruntime", "ggml", "ggml-repack"} & {peer.name for peer in peers}
    assert next(line for line in missing if "onnxruntime" in line).endswith("pip install onnxruntime onnx")
    assert next(line for line in missing if "ggml" in line).endswith("pip install llama-cpp-python")
    with pytest.raises(bf.BackendUnavailable, match="pip install onnxruntime onnx"):
        select("numpy,onnxruntime")


def test_a_peer_that_fails_or_cannot_is_a_note():
    class Broken:
        name = "broken"

        def can_run(self, case):
            return (True, "") if case.activations == "q8" else (False, "it is no good")

        def prepare(self, case, cold_bytes, threads):
            raise RuntimeError("out of luck\nand more")

    run = products.Bench(settings(formats="q4_0", activations="q8,q16"), FAKE, io.StringIO())
    run.peers = [Broken()]
    report = run.run()
    assert len(report.records) == 4
    assert report.notes == ["broken: failed for q4_0 q8: out of luck", "broken: not for q4_0 q16: it is no good"]


# ---- the machine ------------------------------------------------------------------------------------------------


def test_weights_are_rotated_past_the_cache():
    assert copies_for(10, 0) == 1
    assert copies_for(10, 40) == 4
    assert copies_for(10, 41) == 5


def test_the_last_level_cache_counts_each_instance_once(tmp_path):
    for cpu in range(4):
        for index, (level, size, cpus) in enumerate([(1, "64K", f"{cpu}"), (3, "32768K", "0-1" if cpu < 2 else "2-3")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("size", size), ("shared_cpu_list", cpus)):
                (folder / name).write_text(f"{text}\n")
    assert machine_limits.sysfs_last_level_cache(tmp_path) == 64 << 20
    assert machine_limits.sysfs_last_level_cache(tmp_path / "nothing") == 0


def test_the_machine_has_a_name():
    assert machine_limits.machine()["cpu"]


# ---- the peers --------------------------------------------------------------------------------------------------

# How far a peer may be from the exact product of the same weights: with int8 activations, with float arithmetic; and a
# stand-in, whose weights are its own, from the product before quantization.
TOLERANCE = {"q8": 0.015, "exact": 1e-4, "stand-in": 0.2}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("activations", ["exact", "q8"])
@pytest.mark.parametrize("cold", [False, True], ids=["one copy", "rotated"])
def test_every_peer_computes_the_same_product(peer, activations, cold):
    try:
        peer.load()
    except bf.BackendUnavailable as error:
        pytest.skip(str(error))
    assert peer.version()
    ran = []
    for format in bf.FORMATS.values():
        for group_size in format.group_sizes:
            case = case_of(format, activations, k=512, n=96, group_size=group_size)
            able, reason = peer.can_run(case)
            assert able or reason
            if not able:
                continue
            contender = peer.prepare(case, 1 << 20 if cold else 0, threads=2)
            assert (contender.copies > 1) == cold
            for m in (1, 5, 2):
                x = np.random.default_rng(m).standard_normal((m, 512), dtype=np.float32)
                contender.bind(x)()
                stand_in = ":" in peer.label(case) and not peer.label(case).endswith(":f32")
                weights = case.repeated(case.rows) if stand_in else case.dense()
                expected = x.astype(np.float64) @ weights.T.astype(np.float64)
                error = np.sqrt(np.square(contender.result() - expected).mean() / np.square(expected).mean())
                assert error < TOLERANCE["stand-in" if stand_in else activations], (peer.label(case), case.label, m)
            contender.close()
            ran.append(case.label)
    if peer.family == "ggml":
        assert bool(ran) == (activations == "q8")
    else:
        assert {"q4_0", "u4b8:128", "q8_0"} <= set(ran)
