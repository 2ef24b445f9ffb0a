"""`billfish doctor`: kernels beside NumPy, devices beside the CPU, and what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llm_models import Small, write_model

from billfish.cli import doctor
from billfish.cli.main import main
from billfish.core.format import FORMATS


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


@pytest.mark.full
@pytest.mark.compile
def test_all_kernels_of_the_emulator_are_right(capsys):
    assert main(["doctor", "--backend", "metal-emulator"]) == 0
