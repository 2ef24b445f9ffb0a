"""benchmarks.products --backend metal, as far as it goes without a Mac: what is timed, beside whom, what it refuses."""

from __future__ import annotations

import io
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from bench_support import settings

import billfish as bf
from benchmarks import products
from benchmarks.machine import GpuLimits
from billfish.backends.metal import MetalBackend, kernels, lay_out

FAKE = GpuLimits(1e9, 4e9, 4e9)


@pytest.fixture
def like_a_mac(monkeypatch):
    """The CPU stands in for the GPU, and dense products for the kernels."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.metal, "device_info", lambda: {"device_name": "Apple M0"})
    monkeypatch.setattr(mx, "gpu", mx.cpu)

    def with_numbers(tensor):
        weights = lay_out(tensor)
        return replace(weights, arrays=weights.arrays | {"numbers": bf.dequantize(tensor)})

    def multiply(self, x, w, bias=None, kernel=None):
        return (x.astype(mx.float32) @ w.arrays["numbers"].T).astype(x.dtype)

    for module in ("billfish.backends.metal", "benchmarks.products.engines"):
        monkeypatch.setattr(f"{module}.lay_out", with_numbers)
    monkeypatch.setattr(kernels.Kernels, "multiply", multiply)
    monkeypatch.setattr(MetalBackend, "kernels", kernels.Kernels(lambda **arguments: None))


def test_records_and_peers(like_a_mac):
    found = settings(backend="metal", shapes="64x96", formats="fp4,q4_0", peers="all")
    out = io.StringIO()
    report = products.run(found, FAKE, out)
    assert report.complete
    assert report.notes == []
    assert report.machine["gpu"] == "Apple M0"
    records = {(record["format"], record["m"]): record for record in report.records}
    assert records.keys() == {("fp4", 1), ("fp4", 17), ("q4_0", 1), ("q4_0", 17)}
    assert {record["backend"] for record in report.records} == {"metal"}
    assert {record["activations"] for record in report.records} == {"exact"}
    assert records["fp4", 1]["peers"].keys() == {"mlx:mxfp4"}
    assert records["q4_0", 1]["peers"].keys() == {"mlx"}
    assert out.getvalue().splitlines()[-1] == "limits: memory 1 GB/s, float16 4 GOP/s"


def test_limits_are_measured(like_a_mac, monkeypatch):
    monkeypatch.setattr("benchmarks.products.engines.PEAK_SIZE", 32)
    engine = products.ENGINES["metal"]()
    limits = engine.limits(1 << 20)
    assert limits.read_bytes_per_second > 0
    assert limits.fma_operations_per_second > 0
    assert engine.cold_bytes() > 96 << 20


def refused(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        products.main(["--backend", "metal", *flags])
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--formats", "nf4", "--shapes", "256x8"], "no kernels for the nf4 codes of nf4"),
        (["--activations", "q8"], "'q8'"),
    ],
)
def test_what_it_refuses(like_a_mac, monkeypatch, capsys, flags, fact):
    monkeypatch.setattr("benchmarks.products.engines.MetalEngine.limits", lambda self, cold_bytes: FAKE)
    assert fact in refused(capsys, ["--shapes", "64x8", "--m", "1", *flags])


def test_without_metal(monkeypatch, capsys):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert "MLX finds no Metal" in refused(capsys, [])


def test_dense_stand_in_is_what_it_says(like_a_mac):
    q = bf.quantize(np.eye(64, dtype=np.float32), "fp4")
    product = MetalBackend().pack(q)
    np.testing.assert_array_equal(np.array(product(mx.eye(64))), bf.dequantize(q).T)
