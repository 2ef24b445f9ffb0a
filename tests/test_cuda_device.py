"""The CUDA engine on a GPU: every format, type and number of rows against float64, and what torch and CuPy expect.

Without an NVIDIA GPU these are skipped; test_cuda.py has what can be known without one.
"""

from __future__ import annotations

import threading
from ctypes import c_void_p
from dataclasses import replace

import numpy as np
import pytest
from support import assert_same_bits, options_of, random_storage

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda import CudaBackend, CudaWeights
from billfish.backends.cuda.driver import device, tensor_map
from billfish.backends.cuda.plans import Product, Shape, Small, fitting, launch_large, launch_small, plan
from billfish.errors import BackendUnavailable
from billfish.format import FORMATS

torch = pytest.importorskip("torch")
try:
    GPU = device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
backend = BACKENDS["cuda"]
assert isinstance(backend, CudaBackend)

ROWS = (1, 2, 3, 8, 16, 17, 31, 33, 64, 100, 128, 257, 1024)
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BFLOAT16_FORMATS = ("u4b8", "u4", "u8b128", "fp4", "mxfp4", "nvfp4", "q4_1", "q8_0", "q4_k", "iq4_nl")


def cases() -> list:
    found = []
    for name, format in FORMATS.items():
        sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
        found += [(name, size, option) for size in sizes for option in options_of(format)]
    return found


def random_tensor(name: str, n: int, k: int, size: int, option: dict[str, str], seed: int = 0) -> bf.QuantizedTensor:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * 0.02
    return bf.quantize(w, name, group_size=size, **option)


def odd_k(format: bf.Format, size: int) -> int:
    """Not a multiple of a brick where the format allows it, and with a partial last group where it allows that."""
    return 3 * 256 if format.block_size == 256 else 256 + format.block_size * (3 if format.block_size < 64 else 1)


def error_of(y: object, exact: object) -> float:
    return float((y.double() - exact).norm())


@pytest.mark.parametrize(("name", "size", "option"), cases())
def test_products_are_as_good_as_dense_ones(name, size, option):
    format = FORMATS[name]
    n, k = 133, odd_k(format, size)
    q = random_tensor(name, n, k, size, option)
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda()
    for type_name, dtype in TYPES.items():
        if type_name == "bfloat16" and (name not in BFLOAT16_FORMATS or size == 64):
            continue
        x = torch.randn((max(ROWS), k), device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype)
        for m in ROWS:
            y = bf.quantized_linear(x[:m], q, bias=bias)
            assert y.shape == (m, n)
            assert y.dtype == dtype
            exact = x[:m].double() @ dense.double().T + bias.double()
            library = torch.nn.functional.linear(x[:m], dense.to(dtype), bias)
            # Against float64, a dense product of weights that were rounded to the type.
            assert error_of(y, exact) <= 2 * error_of(library, exact) + 1e-6, (type_name, m)


@pytest.mark.parametrize(("name", "size", "option"), cases())
def test_dequantize_is_exact_for_all_bytes(name, size, option):
    format = FORMATS[name]
    n, k = 37, odd_k(format, size)
    storage = random_storage(format, n, k, np.random.default_rng(3), k if size == -1 else size)
    if "zeros" in storage and option.get("zero_point") == "fractional":
        storage["zeros"] = np.random.default_rng(4).standard_normal(storage["zeros"].shape).astype(np.float16)
    q = bf.QuantizedTensor.from_storage(format, storage, size)
    for tensor in (q, random_tensor(name, n, k, size, option)):  # their scales may be kept in different ways
        for dtype in ("float32", "float16", "bfloat16"):
            with np.errstate(all="ignore"):
                there, here = (bf.dequantize(tensor, dtype, backend=backend) for backend in ("cuda", "reference"))
            assert_same_bits(there, here)
    out = torch.empty((n, k), dtype=torch.float16, device="cuda")
    assert bf.dequantize(q, out=out) is out
    with np.errstate(all="ignore"):
        assert_same_bits(out.cpu().numpy(), bf.dequantize(q, "float16", backend="reference"))


@pytest.mark.parametrize("dtype", TYPES.values())
@pytest.mark.parametrize("rows", [8, 64])
def test_every_fp4_code_times_the_identity(dtype, rows):
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 8))
    q = bf.QuantizedTensor.from_planes("fp4", {"codes": codes, "scale": np.ones((16, 1), np.float16)}, 128)
    x = torch.eye(128, dtype=dtype, device="cuda")
    y = torch.cat([bf.quantized_linear(x[i : i + rows], q) for i in range(0, 128, rows)])
    assert torch.equal(y.T.float().cpu(), torch.from_numpy(bf.dequantize(q, backend="reference")))


@pytest.mark.parametrize("shape", [None, Shape(16, teams=2, tall=2), Shape(32, teams=2, tall=2), Shape(64), Shape(128)])
@pytest.mark.parametrize(("name", "most"), [("u4", 15), ("u8", 255)])
def test_any_zero_point_is_as_good_as_the_middle(shape, name, most):
    """Codes around it, and x that does not cancel out: what is rounded for a whole group alike would add up."""
    if shape is not None and GPU.capability != (9, 0):
        pytest.skip("wgmma is Hopper's")
    rng, zeros, rows = np.random.default_rng(0), np.linspace(0, most, 16).round(), shape.width if shape else 8
    codes = rng.standard_normal((16, 1024)) * (most * 0.18) + zeros[:, None]
    planes = {
        "codes": np.clip(np.rint(codes), 0, most).astype(np.uint8),
        "scale": rng.uniform(1, 2, (16, 8)).astype(np.float16),
        "zero": np.repeat(zeros[:, None], 8, axis=1).astype(np.uint8),
    }
    q = bf.QuantizedTensor.from_planes(name, planes, 128)
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda()
    x = torch.from_numpy(np.abs(rng.standard_normal((rows, 1024))).astype(np.float16)).cuda()
    y = torch.full((rows, 16), float("nan"), device="cuda", dtype=torch.float16)
    if shape is None:
        y = bf.quantized_linear(x, q)
    else:
        held = CudaWeights(q).on(0)
        chosen = launch_large(Product(held.kind, rows, 16, 1024), GPU, shape)
        box = tensor_map(x.data_ptr(), False, rows, 1024, 1024, chosen.box_rows)
        addresses = (held.bricks.pointer, held.row_scale.pointer, 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *map(c_void_p, addresses), rows, 16, 1024)
    exact = x.double() @ dense.double().T
    error, library = (((v.double() - exact) ** 2).sum(0).sqrt() for v in (y, x @ dense.half().T))
    assert (error <= 2 * library + 1e-6).all()


SHAPES = [
    Shape(256, stages=3),
    Shape(128, tall=2, batch=1),
    Shape(128, buffers=2, batch=1),
    Shape(64, stages=8, batch=4),
    Shape(32, 4, 2, stages=8, batch=4),
    Shape(16, 4, 2, tall=2, stages=8),
    Shape(32, tall=2, stages=6),
    Shape(16, teams=2, tall=2, stages=12, buffers=2, batch=1),
    Shape(16, teams=2, tall=4, stages=8, buffers=2, batch=1),
    Shape(32, teams=2, tall=4, stages=6, buffers=2, batch=1),
    Shape(32, teams=2, tall=2, stages=8, split=2),
    Shape(16, teams=2, tall=2, stages=12, split=3),
    Shape(128, split=3),
    Shape(64, stages=6, split=2),
    Shape(32, teams=2, stages=10, split=3, batch=4),
    Shape(16, 4, 2, stages=8, split=2),
    Shape(16, teams=2, stages=10, split=3),
    Shape(128, tall=2, paired=True),
    Shape(128, paired=True),
    Shape(32, 4, stages=8, paired=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1096, 520, 136, 40])
def test_every_shape_of_the_large_kernel(shape, n):
    if GPU.capability != (9, 0):
        pytest.skip("wgmma is Hopper's")
    k = 1024 + 64
    q = random_tensor("u4b8", n, k, 128, {})
    held = CudaWeights(q).on(0)
    x = torch.randn((700, k), device="cuda").half()
    exact = x.double() @ torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double().T
    for m in (700, 65, 1):
        y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
        product = Product(held.kind, m, n, k)
        chosen = launch_large(product, GPU, shape)
        box = tensor_map(x.data_ptr(), False, m, k, k, chosen.box_rows)
        addresses = (held.bricks.pointer, held.row_scale.pointer, 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *map(c_void_p, addresses), m, n, k)
        assert error_of(y, exact[:m]) < 1e-3 * float(exact[:m].norm())


SMALL_SHAPES = [Small(8, 4, 16, 2), Small(8, 8, 16), Small(16, 2, 32), Small(4, 1, 8), Small(8, 2, 8)]
SMALL_SHAPES += [Small(8, 4, 24, sharers=2), Small(4, 8, 16, sharers=4), Small(8, 2, 16, sharers=2)]


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [GPU.multiprocessors, 3])
@pytest.mark.parametrize(("name", "size"), [("u4b8", 128), ("u8b128", 64), ("fp4", 32), ("nvfp4", 16), ("q4_1", 32)])
def test_every_shape_of_the_small_kernel(shape, multiprocessors, name, size):
    """On three multiprocessors CTAs start over, up to eleven times; the last tiles are few, the last brick is short."""
    n, k, few = 520, 1024 + 64, replace(GPU, multiprocessors=multiprocessors)
    q = random_tensor(name, n, k, size, {})
    held = CudaWeights(q).on(0)
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double()
    for dtype, m in [*((torch.float16, m) for m in (1, 3, 9, 20)), (torch.bfloat16, 1), (torch.bfloat16, 9)]:
        x = torch.randn((m, k), device="cuda").to(dtype)
        y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        product = Product(held.kind, m, n, k, dtype == torch.bfloat16)
        chosen = launch_small(product, few, fitting(product, few, shape))
        box = tensor_map(x.data_ptr(), product.bfloat16, m, k, k, chosen.box_rows)
        addresses = (held.bricks.pointer, held.row_scale.pointer, x.data_ptr(), 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *map(c_void_p, addresses), m, n, k, k)
        exact = x.double() @ dense.T
        assert error_of(y, exact) < (1e-3 if dtype == torch.float16 else 6e-3) * float(exact.norm()), (dtype, m)


def test_strided_broadcast_empty_and_misaligned_x():
    q = random_tensor("u8b128", 40, 132, -1, {})  # 132 halves are no multiple of 16 bytes
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().half()
    base = torch.randn((6, 2, 140), device="cuda").half()
    for x in (base[..., 1:133], base[:, :1, 4:136].expand(6, 5, 132), base[:0, :, :132], base[0, 0, :132]):
        torch.testing.assert_close(bf.quantized_linear(x, q), x @ dense.T, rtol=2e-2, atol=2e-2)


def test_float32_goes_through_the_library():
    q = random_tensor("q4_k", 64, 512, 32, {})
    x = torch.randn((5, 512), device="cuda")
    expected = x.double() @ torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double().T
    torch.testing.assert_close(bf.quantized_linear(x, q).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m", [1, 16, 50, 300])
def test_the_same_bits_from_run_to_run_and_on_two_streams_and_threads(m):
    q = random_tensor("u4b8", 1024, 2048, 128, {})
    x = torch.randn((m, 2048), device="cuda").half()
    first = bf.quantized_linear(x, q)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list = []

    def work(stream: object) -> None:
        with torch.cuda.stream(stream):
            results.extend(bf.quantized_linear(x, q) for _ in range(20))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 40
    assert all(torch.equal(first, y) for y in results)


def test_batch_invariance_when_asked_for(monkeypatch):
    monkeypatch.setattr(backend, "batch_invariant", True)
    q = random_tensor("u4b8", 256, 1024, 128, {})
    x = torch.randn((100, 1024), device="cuda").half()
    alone = torch.cat([bf.quantized_linear(x[i : i + 1], q) for i in range(100)])
    for m in (100, 33, 17, 9):
        assert torch.equal(bf.quantized_linear(x[:m], q), alone[:m])


@pytest.mark.parametrize("m", [1, 40])
def test_graph_capture(m):
    q = random_tensor("nvfp4", 256, 512, 16, {})
    x = torch.randn((m, 512), device="cuda").half()
    expected = bf.quantized_linear(x, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bf.quantized_linear(x, q)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    x.mul_(2)
    graph.replay()
    assert torch.equal(y, bf.quantized_linear(x, q))


def test_torch_compile_and_the_fake():
    from billfish.backends.cuda import torch_op

    q = random_tensor("u4b8", 96, 256, 64, {})
    held = q.prepacked_for("cuda", backend.prepack)
    x = torch.randn((3, 256), device="cuda").half()
    number = torch_op.handle(held)
    torch.library.opcheck(torch_op.cuda_linear, (x, None, number, 96, False, None))
    compiled = torch.compile(lambda x: torch_op.cuda_linear(x * 2, None, number, 96, False, "relu") + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.relu(bf.quantized_linear(x * 2, q)) + 1)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("m", [4, 200])
def test_activations_in_the_epilogue(activation, m):
    from billfish.backends.cuda import torch_op

    q = random_tensor("fp4", 80, 256, 32, {})
    held = q.prepacked_for("cuda", backend.prepack)
    x = torch.randn((m, 256), device="cuda").half()
    bias = torch.randn(80, device="cuda")
    expected = getattr(torch.nn.functional, activation)(bf.quantized_linear(x, q, bias=bias).float())
    torch.testing.assert_close(
        torch_op.linear(x, held, bias, activation=activation).float(), expected, rtol=2e-3, atol=2e-3
    )


def test_cupy_and_numpy():
    cupy = pytest.importorskip("cupy")
    q = random_tensor("mxfp4", 64, 256, 32, {})
    x = np.random.default_rng(0).standard_normal((7, 256)).astype(np.float16)
    expected = bf.quantized_linear(torch.from_numpy(x).cuda(), q).cpu().numpy()
    y = bf.quantized_linear(cupy.asarray(x), q)
    assert isinstance(y, cupy.ndarray)
    assert_same_bits(y.get(), expected)
    assert_same_bits(bf.quantized_linear(x, q, backend="cuda"), expected)


def test_a_plan_for_many_rows_elsewhere_is_the_library():
    kind = CudaWeights(random_tensor("u4b8", 32, 128, 128, {})).on(0).kind
    ada = replace(GPU, capability=(8, 9), shared_bytes=100 * 1024)
    assert plan(Product(kind, 1000, 4096, 4096), ada) is None
    assert plan(Product(kind, 64, 4096, 4096), ada) is not None
