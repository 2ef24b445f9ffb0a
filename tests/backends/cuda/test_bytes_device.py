"""x in bytes on a GPU, against float64 of the rounded x: every shape of gemm_bytes, the worst signs, odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

import billfish as bf
from billfish.backends import BACKENDS
from billfish.core.activations import quantize_rows

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

from billfish.backends.cuda.device_weights import (  # noqa: E402
    DeviceWeights,
    native_parts,
)
from billfish.backends.cuda.driver import device, native  # noqa: E402
from billfish.backends.cuda.plans import (  # noqa: E402
    ByteShape,
    Gemm,
    Parts,
    byte_plan,
    launch_bytes,
)

GPU = device()
BOUND = 3e-3  # of docs/cuda.md
WAYS = [("mxfp4", 32, "fp8"), ("u4b8", 128, "fp8"), ("fp4", 128, "fp8"), ("u4b8", 128, "q8"), ("u4b8", -1, "fp8")]
ways = pytest.mark.parametrize(("format", "size", "activations"), WAYS)


def weights(n: int, k: int, format: str, size: int, positive: bool = False) -> bf.QuantizedTensor:
    w = torch.randn((n, k), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    return bf.quantize(w.abs() if positive else w, format, group_size=size, method="rtn")


def error(y: torch.Tensor, x: torch.Tensor, q: bf.QuantizedTensor, activations: str) -> float:
    """Relative to float64 on the decoded weights and the rounded x."""
    numbers = x.float().cpu().numpy()
    rounded = numbers.astype(np.float64) if activations == "exact" else quantize_rows(numbers, activations).values()
    w = torch.empty(q.shape, device="cuda")
    exact = torch.from_numpy(rounded).cuda() @ bf.dequantize(q, out=w).double().T
    return float((y.double() - exact).norm() / exact.norm())


def multiplied(x: torch.Tensor, q: bf.QuantizedTensor, activations: str, shape: ByteShape | Parts) -> torch.Tensor:
    """y in bytes, whatever the plan would be; every byte that is not written is 255."""
    held, (n, k), m = DeviceWeights.pack(q, "cuda:0"), q.shape, len(x)
    parts = ((shape, shape.places(n)),) if isinstance(shape, ByteShape) else shape
    plan = launch_bytes(Gemm(held.kind, m, n, k, x.dtype == torch.bfloat16, activations=activations), GPU, parts)
    work = torch.full((plan.work_bytes,), 255, dtype=torch.uint8, device="cuda")
    y, stream = torch.full((m, n), float("nan"), dtype=x.dtype, device="cuda"), torch.cuda.current_stream()
    native(plan.quantize, 0)(stream.cuda_stream, x.data_ptr(), work.data_ptr(), k, k, plan.stride)
    for part in native_parts(plan, held, m):
        part(stream.cuda_stream, work.data_ptr(), plan.stride, 0, y.data_ptr())
    torch.cuda.synchronize()
    return y


SHAPES = [
    *(ByteShape(width) for width in (64, 128, 152, 176, 192, 208, 256)),
    *(ByteShape(128, teams, split) for teams in (1, 2) for split in (1, 2, 3)),
    ByteShape(64, split=2),
]


@ways
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape, format, size, activations):
    if activations == "q8" and (shape.width % 16 or shape.width == 208):
        pytest.skip("no such wgmma, or registers are too few")
    if shape.width == 256 and format != "mxfp4":
        pytest.skip("registers are too few")
    q = weights(200, 1056 if format == "mxfp4" else 1024, format, size)
    for m, dtype in ((70, torch.float16), (333, torch.bfloat16)):
        x = torch.randn((m, q.shape[1]), device="cuda").to(dtype)
        x[m // 2, 7] = 3000  # a steep row
        results = [multiplied(x, q, activations, shape) for _ in range(2)]
        assert error(results[0], x, q, activations) < (1e-3 if dtype == torch.float16 else 4e-3)
        assert torch.equal(*results)


@ways
@pytest.mark.parametrize("n", [200, 384])
def test_two_shapes_share_a_product(n, format, size, activations):
    q = weights(n, 1024, format, size)
    x = torch.randn((333, 1024), device="cuda").half()
    x[40, 7] = 3000  # a steep row
    for second in (ByteShape(192), ByteShape(128, split=2)):
        y = multiplied(x, q, activations, ((ByteShape(128), 1), (second, -(-n // 128) - 1)))
        alone = multiplied(x, q, activations, ByteShape(128)), multiplied(x, q, activations, second)
        assert torch.equal(y[:, :128], alone[0][:, :128])
        assert torch.equal(y[:, 128:], alone[1][:, 128:])


@ways
@pytest.mark.parametrize(("m", "n", "k"), [(65, 4096, 4096), (257, 4100, 4096), (1000, 4096, 2048 + 128)])
def test_products_with_a_bias(m, n, k, format, size, activations):
    q, bias = weights(n, k, format, size), torch.randn(n, device="cuda").half()
    x = torch.randn((m, k), device="cuda").half()
    y = bf.quantized_linear(x, q, bias=bias, activations=activations)
    gemm = Gemm(DeviceWeights.pack(q, "cuda:0").kind, m, n, k, activations=activations)
    taken = activations if byte_plan(gemm, GPU) is not None else "exact"
    assert error(y.double() - bias.double(), x, q, taken) < 1e-3


fp8_ways = pytest.mark.parametrize(("format", "size", "activations"), [way for way in WAYS if way[2] == "fp8"])


@fp8_ways
@pytest.mark.parametrize("k", [512, 1024, 2560, 4096, 14336])
def test_one_large_number_of_x_stays_within_the_bound(k, format, size, activations):
    """All terms positive: none larger, then one of each row, which the tensor core would add the others to."""
    q = weights(2048, k, format, size, positive=True)
    for times in (1, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536):
        for place in (0, 3, k // 2 + 33, k - 1):
            x = torch.rand((256, k), device="cuda")
            x[:, place] = times / 2
            x = (x / x.sum(dim=1).max() * 2000).half()
            for width in (128, 256) if format == "mxfp4" else (128,):
                found = error(multiplied(x, q, activations, ByteShape(width)), x, q, activations)
                assert found < BOUND, (times, place, width, found)


@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("times", [8, 128, 1024, 8192])
def test_one_large_weight_stays_within_the_bound(times, k):
    w = torch.rand((2048, k), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    w[:, k // 2] = times / 2
    q, x = bf.quantize(w, "mxfp4", method="rtn"), torch.rand((512, k), device="cuda").half()
    y = bf.quantized_linear(x, q, activations="fp8")
    taken = byte_plan(Gemm(DeviceWeights.pack(q, "cuda:0").kind, 512, 2048, k, activations="fp8"), GPU) is not None
    assert taken == (times == 8)
    assert error(y, x, q, "fp8" if taken else "exact") < BOUND


@fp8_ways
def test_large_numbers_in_other_places_of_each_row_and_both_signs(format, size, activations):
    k = 4096
    q = weights(2048, k, format, size)
    x = torch.randn((300, k), device="cuda")
    places = torch.randint(0, k, (300, 3), device="cuda")
    x.scatter_(1, places, 2000.0)
    x = x.half()
    assert error(multiplied(x, q, activations, ByteShape(128)), x, q, activations) < BOUND


@ways
def test_rows_that_are_not_finite_are_nan_and_no_others(format, size, activations):
    q = weights(4096, 4096, format, size)
    x = torch.randn((512, 4096), device="cuda").half()
    clean = bf.quantized_linear(x, q, activations=activations)
    x[3, 7], x[500, 4000] = float("nan"), float("-inf")
    y = bf.quantized_linear(x, q, activations=activations)
    bad = torch.zeros(512, dtype=torch.bool, device="cuda")
    bad[[3, 500]] = True
    assert y[bad].isnan().all()
    assert torch.equal(y[~bad], clean[~bad])


def test_few_rows_and_wide_rows_are_multiplied_as_they_are():
    q = weights(4096, 4096, "mxfp4", 32)
    x = torch.randn((64, 4096), device="cuda").half()
    assert torch.equal(bf.quantized_linear(x, q, activations="fp8"), bf.quantized_linear(x, q))
    w = torch.randn((4096, 4096), device="cuda")
    w[9, :32] *= 2.0**-18
    wide, x = bf.quantize(w, "mxfp4", method="rtn"), torch.randn((512, 4096), device="cuda").half()
    assert not DeviceWeights.pack(wide, "cuda:0").kind.narrow
    assert torch.equal(bf.quantized_linear(x, wide, activations="fp8"), bf.quantized_linear(x, wide))


def test_what_cannot_is_refused_with_the_reason():
    x = torch.ones((512, 256), device="cuda").half()
    for format, activations, reason in (
        ("q4_0", "fp8", "groups of 32"),
        ("nvfp4", "fp8", "groups of 16"),
        ("u4", "fp8", "a zero point"),
        ("mxfp4", "q8", "E2M1"),
        ("u4b8", "q16", "not 'q16'"),
    ):
        with pytest.raises(bf.BackendUnavailable, match=reason):
            bf.quantized_linear(
                x, weights(64, 256, format, bf.get_format(format).group_sizes[-1]), activations=activations
            )


@pytest.mark.parametrize(("format", "size"), [("q4_0", 32), ("u4b8", 64), ("u4b8", 128)])
@pytest.mark.parametrize("m", [1, 70, 300])
def test_gemm_w4a8_of_blocks(m, format, size):
    q, x = weights(200, 1056 if size == 32 else 1024, format, size), np.random.default_rng(1)
    k = q.shape[1]
    blocks = bf.quantize_q8_0(x.standard_normal((m, k)).astype(np.float32))
    y = bf.gemm_w4a8(torch.from_numpy(blocks).cuda(), q)
    assert (y.device.type, y.dtype) == ("cuda", torch.float32)
    given = bf.dequantize_q8_0(blocks).astype(np.float64)
    exact = given @ bf.dequantize(q).astype(np.float64).T
    assert np.linalg.norm(y.double().cpu().numpy() - exact) < 1e-6 * np.linalg.norm(exact)
    assert np.array_equal(bf.gemm_w4a8(blocks, q, backend="cuda"), y.cpu().numpy())


def test_layers_graphs_and_compiled_ones():
    linear = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.float16)
    layer = bf.MarlinLinear.from_linear(linear, format="mxfp4", activations="fp8")
    x = torch.randn((512, 4096), device="cuda").half()
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(again, layer(x))
        assert torch.equal(torch.compile(layer)(x), layer(x))
        assert not torch.equal(layer(x), bf.MarlinLinear.from_linear(linear, format="mxfp4")(x))


def test_batch_invariance_keeps_x_as_it_is():
    q, x = weights(4096, 4096, "mxfp4", 32), torch.randn((512, 4096), device="cuda").half()
    backend = BACKENDS["cuda"]
    backend.batch_invariant = True
    try:
        assert torch.equal(bf.quantized_linear(x, q, activations="fp8")[:1], bf.quantized_linear(x[:1], q))
    finally:
        backend.batch_invariant = False
