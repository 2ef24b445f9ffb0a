"""The CUDA engine on a GPU: every format, type and number of rows against float64, and what torch and CuPy expect.

Without an NVIDIA GPU these are skipped; test_cuda.py has what can be known without one.
"""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace

import numpy as np
import pytest
from common import assert_same_bits, options_of, random_storage
from cuda_support import TAKEN
from foreign_formats import FOREIGN

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda import device_weights
from billfish.backends.cuda.backend import CudaBackend
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import device, tensor_map
from billfish.backends.cuda.memory import OurRoom, address
from billfish.backends.cuda.plans import Gemm, LargeShape, Small, fitting, launch_large, launch_small, plan
from billfish.core.errors import BackendUnavailable
from billfish.core.format import FORMATS, Format

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
        if name not in TAKEN:
            continue
        sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
        found += [(name, size, option) for size in sizes for option in options_of(format)]
    return found


def random_tensor(
    format: str | Format, n: int, k: int, size: int, option: dict[str, str], seed: int = 0
) -> bf.QuantizedTensor:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32) * 0.02
    return bf.quantize(w, format, group_size=size, **option)


def packed(q: bf.QuantizedTensor) -> DeviceWeights:
    return DeviceWeights.pack(q, "cuda:0")


def odd_k(format: bf.Format, size: int) -> int:
    """Not a multiple of a brick where the format allows it, and with a partial last group where it allows that."""
    return 3 * 256 if format.block_size == 256 else 256 + format.block_size * (3 if format.block_size < 64 else 1)


def error_of(y: object, exact: object) -> float:
    return float((y.double() - exact).norm())


@pytest.mark.parametrize(("name", "size", "option"), cases())
def test_products_are_as_good_as_dense_ones(name, size, option):
    check_products(FORMATS[name], size, option)


@pytest.mark.parametrize("format", FOREIGN, ids=lambda format: format.name)
def test_products_of_foreign_formats(format):
    made = format()
    # A zero point of elements other than integers is multiplied by its scale, and rounded, before it is taken off.
    allowed = 4 if format.name == "fp4_with_zeros" else 2
    check_products(made, made.default_group_size, made.check_options("test", {}), allowed, every_type=True)


def check_products(
    format: Format, size: int, option: dict[str, str], allowed: float = 2, every_type: bool = False
) -> None:
    """Against float64: at most `allowed` times the error of a dense product, whose weights are rounded to the type."""
    n, k = 133, odd_k(format, size)
    q = random_tensor(format, n, k, size, option)
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda()
    for type_name, dtype in TYPES.items():
        if type_name == "bfloat16" and not every_type and (format.name not in BFLOAT16_FORMATS or size == 64):
            continue
        x = torch.randn((max(ROWS), k), device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
        bias = torch.randn(n, device="cuda").to(dtype)
        for m in ROWS:
            y = bf.quantized_linear(x[:m], q, bias=bias)
            assert y.shape == (m, n)
            assert y.dtype == dtype
            exact = x[:m].double() @ dense.double().T + bias.double()
            library = torch.nn.functional.linear(x[:m], dense.to(dtype), bias)
            assert error_of(y, exact) <= allowed * error_of(library, exact) + 1e-6, (type_name, m)


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


@pytest.mark.parametrize(
    "shape", [None, LargeShape(16, teams=2, tall=2), LargeShape(32, teams=2, tall=2), LargeShape(64), LargeShape(128)]
)
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
        held = packed(q)
        chosen = launch_large(Gemm(held.kind, rows, 16, 1024), GPU, shape)
        box = tensor_map(x.data_ptr(), False, rows, 1024, 1024, chosen.box_rows)
        addresses = (address(held.bricks), address(held.row_scale), x.data_ptr(), 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *addresses, rows, 16, 1024, 1024)
    exact = x.double() @ dense.double().T
    error, library = (((v.double() - exact) ** 2).sum(0).sqrt() for v in (y, x @ dense.half().T))
    assert (error <= 2 * library + 1e-6).all()


SHAPES = [
    LargeShape(256, stages=3),
    LargeShape(128, tall=2, batch=1),
    LargeShape(128, buffers=2, batch=1),
    LargeShape(64, stages=8, batch=4),
    LargeShape(32, 4, 2, stages=8, batch=4),
    LargeShape(16, 4, 2, tall=2, stages=8),
    LargeShape(32, tall=2, stages=6),
    LargeShape(16, teams=2, tall=2, stages=12, buffers=2, batch=1),
    LargeShape(16, teams=2, tall=4, stages=8, buffers=2, batch=1),
    LargeShape(32, teams=2, tall=4, stages=6, buffers=2, batch=1),
    LargeShape(32, teams=2, tall=2, stages=8, split=2),
    LargeShape(16, teams=2, tall=2, stages=12, split=3),
    LargeShape(128, split=3),
    LargeShape(64, stages=6, split=2),
    LargeShape(32, teams=2, stages=10, split=3, batch=4),
    LargeShape(16, 4, 2, stages=8, split=2),
    LargeShape(16, teams=2, stages=10, split=3),
    LargeShape(128, tall=2, paired=True),
    LargeShape(128, paired=True),
    LargeShape(32, 4, stages=8, paired=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1096, 520, 136, 40])
def test_every_shape_of_the_large_kernel(shape, n):
    if GPU.capability != (9, 0):
        pytest.skip("wgmma is Hopper's")
    k = 1024 + 64
    q = random_tensor("u4b8", n, k, 128, {})
    held = packed(q)
    x = torch.randn((700, k), device="cuda").half()
    exact = x.double() @ torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double().T
    for m in (700, 65, 1):
        y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)
        gemm = Gemm(held.kind, m, n, k)
        chosen = launch_large(gemm, GPU, shape)
        box = tensor_map(x.data_ptr(), False, m, k, k, chosen.box_rows)
        addresses = (address(held.bricks), address(held.row_scale), x.data_ptr(), 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *addresses, m, n, k, k)
        assert error_of(y, exact[:m]) < 1e-3 * float(exact[:m].norm())


SMALL_SHAPES = [Small(8, 4, 16, 2), Small(8, 8, 16), Small(16, 2, 32), Small(4, 1, 8), Small(8, 2, 8)]
SMALL_SHAPES += [Small(8, 4, 24, sharers=2), Small(4, 8, 16, sharers=4), Small(8, 2, 16, sharers=2)]


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
@pytest.mark.parametrize("multiprocessors", [GPU.multiprocessors, 3])
@pytest.mark.parametrize(("name", "size"), [("u4b8", 128), ("u8b128", 64), ("fp4", 32), ("nvfp4", 16), ("q4_1", 32)])
def test_every_shape_of_the_small_kernel(shape, multiprocessors, name, size):
    """On three multiprocessors CTAs start over, up to eleven times; last courses are few, the last brick is short."""
    n, k, few = 520, 1024 + 64, replace(GPU, multiprocessors=multiprocessors)
    q = random_tensor(name, n, k, size, {})
    held = packed(q)
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double()
    for dtype, m in [*((torch.float16, m) for m in (1, 3, 9, 20)), (torch.bfloat16, 1), (torch.bfloat16, 9)]:
        x = torch.randn((m, k), device="cuda").to(dtype)
        y = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
        gemm = Gemm(held.kind, m, n, k, dtype == torch.bfloat16)
        chosen = launch_small(gemm, few, fitting(gemm, few, shape))
        box = tensor_map(x.data_ptr(), gemm.bfloat16, m, k, k, chosen.box_rows)
        addresses = (address(held.bricks), address(held.row_scale), x.data_ptr(), 0, y.data_ptr())
        chosen.launch(0, torch.cuda.current_stream().cuda_stream, box, *addresses, m, n, k, k)
        exact = x.double() @ dense.T
        assert error_of(y, exact) < (1e-3 if dtype == torch.float16 else 6e-3) * float(exact.norm()), (dtype, m)


def test_strided_broadcast_empty_and_misaligned_x():
    q = random_tensor("u8b128", 40, 132, -1, {})  # 132 halves are no multiple of 16 bytes
    dense = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().half()
    base = torch.randn((6, 2, 140), device="cuda").half()
    xs = [base[..., 1:133], base[:, :1, 4:136].expand(6, 5, 132), base[:0, :, :132], base[0, 0, :132]]
    xs += [base[0, :1, :132].expand(m, 132) for m in (1, 3, 40)]
    long = torch.randn(40 * 132, device="cuda").half()
    overlapping = [(m, stride) for m in (3, 40) for stride in (0, 1, 8, 128)]
    xs += [long.as_strided((m, 132), (stride, 1)) for m, stride in overlapping]
    for x in xs:
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
    held = packed(q)
    x = torch.randn((3, 256), device="cuda").half()
    expected = torch.relu(bf.quantized_linear(x * 2, q)) + 1
    kind = held.kind.spelled()
    torch.library.opcheck(torch_op.cuda_linear, (x, held.bricks, held.row_scale, None, kind, 96, False, None))

    def product(x: object, bricks: object, row_scale: object) -> object:
        return torch_op.cuda_linear(x * 2, bricks, row_scale, None, kind, 96, False, "relu") + 1

    compiled = torch.compile(product, fullgraph=True)
    torch.testing.assert_close(compiled(x, held.bricks, held.row_scale), expected)
    # Other weights, perhaps in the memory that the first ones had.
    del held
    other = random_tensor("u4b8", 96, 256, 64, {}, seed=1)
    held = packed(other)
    expected = torch.relu(bf.quantized_linear(x * 2, other)) + 1
    torch.testing.assert_close(compiled(x, held.bricks, held.row_scale), expected)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("m", [4, 200])
def test_activations_in_the_epilogue(activation, m):
    from billfish.backends.cuda import torch_op

    q = random_tensor("fp4", 80, 256, 32, {})
    x = torch.randn((m, 256), device="cuda").half()
    bias = torch.randn(80, device="cuda")
    expected = getattr(torch.nn.functional, activation)(bf.quantized_linear(x, q, bias=bias).float())
    torch.testing.assert_close(
        torch_op.linear(x, packed(q), bias, activation=activation).float(), expected, rtol=2e-3, atol=2e-3
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
    kind = packed(random_tensor("u4b8", 32, 128, 128, {})).kind
    ada = replace(GPU, capability=(8, 9), shared_bytes=100 * 1024)
    assert plan(Gemm(kind, 1000, 4096, 4096), ada) is None
    assert plan(Gemm(kind, 64, 4096, 4096), ada) is not None


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_memory_is_free_when_the_tensor_is_gone():
    q = random_tensor("u4b8", 1024, 1024, 128, {})
    x = torch.randn((3, 1024), device="cuda").half()
    y = bf.quantized_linear(x, q)
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        del q
        freed = before - torch.cuda.memory_allocated()
    finally:
        gc.enable()
    assert freed >= 1024 * 1024 // 2
    assert y.isfinite().all()


def test_copies_of_a_tensor_have_memory_of_their_own():
    q = random_tensor("nvfp4", 512, 512, 16, {})
    x = torch.randn((3, 512), device="cuda").half()
    expected = bf.quantized_linear(x, q)
    others = [copy.copy(q), copy.deepcopy(q), replace(q)]
    del q
    for other in others:
        assert torch.equal(bf.quantized_linear(x, other), expected)


def test_our_own_memory_is_freed_once(monkeypatch):
    """NumPy x: no torch tensor, but buffers."""
    from billfish.backends.cuda import driver

    real, live = driver.driver(), set()

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def cuMemAlloc(self, nbytes: int) -> tuple:
            error, pointer = real.cuMemAlloc(nbytes)
            live.add(int(pointer))
            return error, pointer

        def cuMemFree(self, pointer: int) -> tuple:
            live.remove(pointer)
            return real.cuMemFree(pointer)

    counting = Counting()
    monkeypatch.setattr(driver, "driver", lambda: counting)
    q = random_tensor("u4b8", 256, 256, 128, {})
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float16)
    expected = bf.quantized_linear(torch.from_numpy(x).cuda(), q).cpu().numpy()
    assert not live
    assert_same_bits(bf.quantized_linear(x, q, backend="cuda"), expected)
    assert live
    other = copy.deepcopy(q)
    assert_same_bits(bf.quantized_linear(x, other, backend="cuda"), expected)
    held = DeviceWeights.pack(q, "cpu")
    twin = copy.deepcopy(held)
    assert address(twin.bricks) != address(held.bricks)
    gc.disable()
    try:
        del q, other, held, twin
        assert not live
    finally:
        gc.enable()


def test_weights_that_die_while_another_stream_reads_them():
    """Their memory is not given to others before that stream is done with it."""
    x = torch.randn((1, 8192), device="cuda").half()
    stream = torch.cuda.Stream()
    for seed in range(3):
        q = random_tensor("u4b8", 512, 8192, 128, {}, seed)
        expected = bf.quantized_linear(x, q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            y = bf.quantized_linear(x, q)
        del q
        overwritten = [torch.full((512 * 4096 + 512 * 128,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
        torch.cuda.synchronize()
        del overwritten
        assert torch.equal(y, expected)


def test_weights_that_were_made_without_torch(monkeypatch):
    """As with CuPy alone: torch then reads the same memory."""
    monkeypatch.setattr(device_weights, "room_for", lambda place: OurRoom(0))
    q = random_tensor("q4_k", 96, 512, 32, {})
    held = packed(q)
    monkeypatch.undo()
    x = torch.randn((5, 512), device="cuda").half()
    expected = bf.quantized_linear(x, q)
    other = replace(q)
    assert other.made(("cuda", "cuda:0"), lambda: held) is held
    assert torch.equal(bf.quantized_linear(x, other), expected)
    out = torch.empty((96, 512), device="cuda")
    assert torch.equal(bf.dequantize(other, out=out), torch.from_numpy(bf.dequantize(q, backend="reference")).cuda())


# ---- the way back, and large extents --------------------------------------------------------------------------------


@pytest.mark.parametrize("format", TAKEN.values(), ids=lambda f: f.name)
def test_storage_comes_back_bit_for_bit(format):
    """From memory of torch, of which a layer is made, and from our own."""
    n, k = 150, 512
    for size in [*format.group_sizes, *([-1] if format.whole_row_groups else [])]:
        storage = random_storage(format, n, k, np.random.default_rng(0), k if size == -1 else size)
        q = bf.QuantizedTensor.from_storage(format, storage, size)
        tensors, about = backend.to_tensors(packed(q))
        assert all(tensor.is_cuda and tensor.dtype == torch.uint8 for tensor in tensors)
        moved = backend.from_tensors([tensor.clone() for tensor in tensors], about)
        for held in (moved, DeviceWeights.pack(q, "cpu")):
            found = backend.unpack(held, q.format, q.shape, q.group_size)
            assert found.keys() == q.storage.keys()
            for name, array in q.storage.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("format", FOREIGN, ids=lambda format: format.name)
def test_foreign_formats_are_decoded_exactly(format):
    made = format()
    wild = bf.QuantizedTensor.from_storage(made, random_storage(made, 37, 768, np.random.default_rng(3)))
    for q in (wild, random_tensor(made, 37, 768, made.default_group_size, {})):  # their scales may be kept in two ways
        with np.errstate(all="ignore"):
            assert_same_bits(bf.dequantize(q, backend="cuda"), bf.dequantize(q, backend="reference"))


@pytest.mark.parametrize(("name", "scale"), [("mxfp4_gguf", 127), ("nvfp4_gguf", 56)])
def test_the_second_zero_of_ggml_is_decoded_as_the_first(name, scale):
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 4))
    groups = np.full((16, 64 // FORMATS[name].group_sizes[0]), scale, np.uint8)
    beside = {"global_scale": np.asarray(1, np.float32)} if name == "nvfp4_gguf" else {}
    q = bf.QuantizedTensor.from_planes(name, {"codes": codes, "scale": groups, **beside})
    assert packed(q).kind.one_zero
    assert_same_bits(bf.dequantize(q, backend="cuda"), bf.dequantize(q, backend="reference"))


def test_more_columns_than_a_grid_has_in_its_second_axis():
    n, k, rng = 1_048_576 + 16, 64, np.random.default_rng(0)
    words = rng.integers(0, 2**32, (k // 8, n), dtype=np.uint32)
    scales = rng.uniform(0.01, 0.02, (1, n)).astype(np.float16)
    q = bf.QuantizedTensor.from_storage("u4b8", {"packed": words, "scales": scales}, -1)
    exact = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda()
    out = torch.full((n, k), float("nan"), device="cuda")
    assert torch.equal(bf.dequantize(q, out=out), exact)
    assert (backend.unpack(packed(q), q.format, q.shape, q.group_size)["packed"] == words).all()
    for m in (1, 7, 30, 130):
        x = torch.randn((m, k), device="cuda").half()
        expected = x.double() @ exact.double().T
        assert error_of(bf.quantized_linear(x, q), expected) < 1e-3 * float(expected.norm())


@pytest.mark.parametrize("k", [8, 24, 64, 72])
def test_rows_that_are_shorter_than_a_brick(k):
    q = random_tensor("u4b8", 40, k, -1, {})
    exact = torch.from_numpy(bf.dequantize(q, backend="reference")).cuda().double()
    for m in (1, 5, 20, 100):
        x = torch.randn((m, k), device="cuda").half()
        expected = x.double() @ exact.T
        assert error_of(bf.quantized_linear(x, q), expected) < 1e-3 * float(expected.norm())


def test_more_rows_than_a_grid_has_in_its_second_axis(monkeypatch):
    monkeypatch.setattr(backend, "batch_invariant", True)
    m, k = 65_535 * 32 + 33, 8
    q = random_tensor("u4b8", 16, k, -1, {})
    x = torch.randn((m, k), device="cuda").half()
    y = bf.quantized_linear(x, q)
    for rows in (slice(0, 9), slice(device_weights.ROWS_AT_ONCE - 3, device_weights.ROWS_AT_ONCE + 3), slice(m - 5, m)):
        assert torch.equal(y[rows], bf.quantized_linear(x[rows], q))


def test_decoded_into_an_array_with_gaps():
    q = random_tensor("q4_0", 40, 128, 32, {})
    out = torch.zeros((40, 256), device="cuda")[:, ::2]
    assert bf.dequantize(q, out=out) is out
    assert torch.equal(out.cpu(), torch.from_numpy(bf.dequantize(q, backend="reference")))
