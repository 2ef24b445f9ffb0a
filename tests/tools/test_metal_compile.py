"""The texts that Apple's compiler gets on a Mac; here a stand-in refuses some of them."""

from __future__ import annotations

import sys

import pytest

from billfish.backends.emulator.lint import check_text
from tools.metal_compile import METAL_4, compile_all, texts

pytestmark = pytest.mark.process
REFUSES = "import sys; sys.exit('error: no half' if 'tensor_ops' in open(sys.argv[5]).read() else 0)"


@pytest.mark.compile
def test_texts_of_every_kernel():
    found = texts(["mxfp4"])
    kinds = ("gemv", "gemv_rows", "gemm", "gemm_fused", "gemv_experts", "gemm_experts", "gemm_fused_experts", "embed")
    names = "\n".join(found)
    assert all(f"marlin_{kind}_mxfp4" in names for kind in kinds)
    assert "dequant_mxfp4" in names
    for name in ("reduce", "add_norm", "rotate", "recurrence"):
        text, *_ = (text for made, text in found.items() if f"marlin_{name}" in made)
        assert check_text(text) == []
    assert sum(METAL_4 in text for text in found.values()) == 2  # half and bfloat


def test_what_is_refused_is_told(tmp_path, capsys):
    (tmp_path / "compiler.py").write_text(REFUSES)
    command = f"{sys.executable} {tmp_path / 'compiler.py'}"
    assert compile_all(["mxfp4"], "metal3.1", command) == []
    refused = compile_all(["mxfp4"], "metal4.0", command)
    assert len(refused) == 2
    assert all("tensor" in message and "no half" in message for message in refused)
    assert "2 refused" in capsys.readouterr().out
