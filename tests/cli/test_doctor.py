"""`billfish doctor`: kernels beside NumPy, devices beside the CPU, and what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llm_models import Small, write_model

from billfish.backends import BACKENDS, emulator
from billfish.backends.metal import Kernels
from billfish.cli import doctor, metal_checks
from billfish.cli.main import main
from billfish.core.format import FORMATS
from billfish.nn.torch.emulated_mps import mps


def test_all_kernels_of_the_cpu_are_right(tmp_path, capsys):
    write_model(tmp_path / "m.gguf", Small())
    options = ["--backend", "cpu", "--report", str(tmp_path / "report.json")]
    assert main(["doctor", str(tmp_path / "m.gguf"), *options]) == 0
    assert "Everything is right." in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {record["format"] for record in report["matmuls"]} == set(FORMATS)
    assert [answer["device"] for answer in report["answers"]] == ["cpu"]
    assert "backends" in report["machine"]


def test_a_wrong_kernel_is_found(monkeypatch, capsys):
    right = doctor.quantized_linear
    monkeypatch.setattr(doctor, "FORMATS", ["q4_0"])
    monkeypatch.setattr(doctor, "quantized_linear", lambda x, q, **how: right(x, q, **how) * np.float16(1.01))
    assert main(["doctor", "--backend", "cpu"]) == 1
    assert "3 wrong" in capsys.readouterr().out


def test_what_a_compiler_says_is_in_the_report(monkeypatch, capsys):
    def broken(x, q, **how):
        raise RuntimeError("error: no member named 'simd_sum'\nmore")

    monkeypatch.setattr(doctor, "FORMATS", ["q4_0"])
    monkeypatch.setattr(doctor, "quantized_linear", broken)
    assert main(["doctor", "--backend", "cpu"]) == 1
    assert "no member named 'simd_sum'" in capsys.readouterr().out


def test_a_backend_that_is_none(capsys):
    assert main(["doctor", "--backend", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.compile
def test_times_are_beside_those_of_mlx_with_as_many_bits(monkeypatch):
    """Of weights that no cache holds: each copy is an array of its own. In emulation, without the clock."""
    monkeypatch.setattr(doctor, "TIMED", (96, 256))
    monkeypatch.setattr(doctor, "OUT_OF_CACHE", 40000)
    timed: list[tuple] = []
    monkeypatch.setattr(doctor, "_best", lambda multiply, copies: timed.append((multiply, copies)) or 1.0)
    records = list(doctor.times("metal-emulator"))
    assert [(r["format"], r["rows"]) for r in records] == [(f, m) for f in doctor.MLX_FORMATS for m in (1, 8, 512)]
    assert [r["mlx_bits"] for r in records] == [pytest.approx(r["ours_bits"], abs=0.01) for r in records]
    ours, theirs = timed[:2]  # of q4_0, one row
    for _, copies in timed:
        arrays = [copy if isinstance(copy, list) else [*copy.arrays.values()] for copy in copies]
        assert len({id(array) for each in arrays for array in each}) == len(arrays) * len({*map(id, arrays[0])})
        assert sum(array.nbytes for each in arrays for array in {id(a): a for a in each}.values()) >= 40000
    y, wanted = (np.array(multiply(copies[-1])).astype(np.float64).ravel() for multiply, copies in (ours, theirs))
    assert np.corrcoef(y, wanted)[0, 1] > 0.98  # both have weights of their own 4 bits


@pytest.mark.torch
def test_each_call_that_is_timed_has_other_weights():
    import mlx.core as mx

    called: list[int] = []
    assert doctor._best(lambda copy: called.append(copy) or mx.zeros(1), [1, 2, 3]) > 0
    assert called == [1, 2, 3] * doctor.ROUNDS


@pytest.mark.torch
@pytest.mark.compile
def test_an_answer_of_other_tokens_is_wrong(tmp_path, monkeypatch):
    """Even though the logits of the prompt are right."""
    write_model(tmp_path / "m.gguf", Small())
    right = list(doctor.answers(str(tmp_path / "m.gguf"), ["metal-emulator"]))
    assert [(r["device"], r["verdict"]) for r in right] == [("cpu", "right"), ("metal-emulator", "right")]
    monkeypatch.setattr("billfish.llm.metal.next_tokens", lambda logits, samplers: logits.argmin(axis=-1))
    _, wrong = doctor.answers(str(tmp_path / "m.gguf"), ["metal-emulator"])
    assert wrong["verdict"] == "wrong"
    assert wrong["error"] <= doctor.LIMIT < wrong["gap"]


KERNELS = {"gemv", "gemm", "striped", "fused", "gemv_experts", "gemm_experts", "fused_experts", "dequantize", "embed"}
KERNELS |= {"add_norm", "rotate", "recurrence"}


@pytest.mark.compile
@pytest.mark.parametrize("name", ["q4_0", *(pytest.param(name, marks=pytest.mark.full) for name in ("nvfp4", "q4_k"))])
def test_every_kernel_of_an_apple_gpu_is_checked(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "FORMATS", [name, "nf4"])  # which has none
    kernels = BACKENDS["metal-emulator"].kernels
    monkeypatch.setattr(kernels, "without_units", "")
    assert main(["doctor", "--backend", "metal-emulator", "--report", str(tmp_path / "report.json")]) == 0
    records = json.loads((tmp_path / "report.json").read_text())["matmuls"]
    assert {record["kernel"] for record in records if "kernel" in record} == KERNELS | {"tensor"}
    assert "right; the largest error" in capsys.readouterr().out


@pytest.mark.compile
def test_kernels_that_are_wrong_by_name_are_found(monkeypatch):
    def wrong(**arguments):
        built = emulator.metal_kernel(**arguments)
        return lambda **call: [y * y.dtype.type(1.01) for y in built(**call)]

    monkeypatch.setitem(BACKENDS["metal-emulator"].__dict__, "kernels", Kernels(wrong))
    records = list(metal_checks.checks("metal-emulator", ["q4_0"]))
    assert {record["kernel"] for record in records} == KERNELS
    assert {record["verdict"] for record in records} == {"wrong"}


@pytest.mark.full  # nn/test_mps.py runs some of them through torch
@pytest.mark.compile
@pytest.mark.torch
def test_every_kernel_is_checked_through_torch():
    with mps():
        records = list(metal_checks.checks("mps", ["mxfp4"]))
    assert {record["kernel"] for record in records} == KERNELS - {"add_norm", "rotate", "recurrence"}
    assert {record["verdict"] for record in records} == {"right"}
