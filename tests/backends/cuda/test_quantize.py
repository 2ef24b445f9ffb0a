"""Weights that are quantized and packed on a GPU: the CPU's bits, and not a byte of them on the CPU.

Without an NVIDIA GPU these are skipped; test_device_array.py has the same operations on the CPU.
"""

from __future__ import annotations

import gc
import json
import pickle

import numpy as np
import pytest
from common import assert_same_bits, gaussian, options_of
from cuda_support import TAKEN
from device_array_support import PECULIAR, assert_as_good, error_of, storable_weights_of

import billfish as bf
from billfish.backends.cuda.driver import device
from billfish.core.arrays import bfloat16
from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format
from billfish.core.formats.word_packing import ScaledWordFormat

torch = pytest.importorskip("torch")
try:
    GPU = device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

from billfish.nn.torch.linear import MarlinLinear  # noqa: E402

ALL = list(TAKEN.values())
EVERY_FORMAT = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
NAMES = pytest.mark.parametrize("name", ["q4_0", "fp4", "u4b8", "u4", "q4_k", "nvfp4", "mxfp4_gguf", "iq4_nl"])
METHODS = pytest.mark.parametrize("method", ["rtn", "mse"])
COPIED = 1 << 16  # bytes that tables, and answers to "is all of it finite", may take between CPU and GPU


def on_gpu(w: np.ndarray) -> object:
    if w.dtype == bfloat16:
        return torch.from_numpy(w.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(w).cuda()


def sizes_of(format: Format) -> list[int]:
    return [*format.group_sizes, *([-1] if format.whole_row_groups else [])]


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_plain_rounding_gives_the_bits_of_the_cpu(format, dtype):
    w = storable_weights_of(format).astype(dtype)
    for size in sizes_of(format):
        for options in options_of(format):
            settings = {"group_size": size, "method": "rtn", **options}
            q, expected = bf.quantize(on_gpu(w), format, **settings), bf.quantize(w, format, **settings)
            assert repr(q) == repr(expected)
            assert ("cuda", "cuda:0") in q._made
            for name, array in expected.storage.items():
                assert_same_bits(q.storage[name], array)


@EVERY_FORMAT
def test_search_has_the_error_of_the_cpu(format):
    w = storable_weights_of(format)
    for size in sizes_of(format):
        for options in options_of(format):
            settings = {"group_size": size, "method": "mse", **options}
            q, expected = bf.quantize(on_gpu(w), format, **settings), bf.quantize(w, format, **settings)
            found, least = (error_of(format, tensor.planes, tensor.group_size, w) for tensor in (q, expected))
            assert_as_good(found, least, 37 - PECULIAR)


@NAMES
@METHODS
def test_products_and_numbers(name, method):
    w = gaussian((300, 512))
    q = bf.quantize(on_gpu(w), name, method=method)
    here = bf.QuantizedTensor.from_storage(q.format, dict(q.storage), q.group_size)
    for rows in (1, 40):
        x = torch.from_numpy(gaussian((rows, 512), 1)).half().cuda()
        assert torch.equal(bf.quantized_linear(x, q), bf.quantized_linear(x, here))
    out = torch.empty(w.shape, device="cuda")
    assert_same_bits(bf.dequantize(q, out=out).cpu().numpy(), bf.dequantize(here, backend="reference"))
    assert_same_bits(bf.dequantize(q), bf.dequantize(here))
    on_cpu = gaussian((2, 512), 1)
    assert_same_bits(bf.quantized_linear(on_cpu, q), bf.quantized_linear(on_cpu, here))


def test_saved_copied_and_pickled(tmp_path):
    w = gaussian((96, 256))
    expected = bf.quantize(w, "u4", method="rtn")
    q = bf.quantize(on_gpu(w), "u4", method="rtn")
    bf.save(q, tmp_path / "w.safetensors")
    others = [
        bf.load(tmp_path / "w.safetensors")["weight"],
        pickle.loads(pickle.dumps(q)),
        q.take_rows(range(96)),
    ]
    for other in others:
        for name, array in expected.storage.items():
            assert_same_bits(np.ascontiguousarray(other.storage[name]), np.ascontiguousarray(array))


@pytest.mark.parametrize("layout", ["transposed", "strided", "a parameter", "one row"])
def test_tensors_that_lie_otherwise(layout):
    w = gaussian((128, 256))
    there = on_gpu(w)
    if layout == "transposed":
        there = on_gpu(np.ascontiguousarray(w.T)).T
    elif layout == "strided":
        there = torch.cat([there, there], dim=1)[::2, :256]
        w = w[::2]
    elif layout == "a parameter":
        there = torch.nn.Parameter(there)
    else:
        there, w = there[:1], w[:1]
    assert_same_bits(
        bf.quantize(there, "q4_0", method="rtn").storage["blocks"],
        bf.quantize(np.ascontiguousarray(w), "q4_0", method="rtn").storage["blocks"],
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(value):
    w = torch.ones(5, 64, device="cuda", dtype=torch.bfloat16)
    w[3, 17] = value
    with pytest.raises(bf.DataError, match=f"{value} at row 3, k 17"):
        bf.quantize(w, "q4_0")
    with pytest.raises(bf.DataError, match="overflows float16"):
        bf.quantize(torch.full((4, 64), 1e8, device="cuda"), "q4_0", method="rtn")
    with pytest.raises(bf.DTypeError, match="a dense tensor"):
        bf.quantize(torch.ones(4, 64, device="cuda").to_sparse(), "q4_0")


class OwnDecode(ScaledWordFormat):
    name, element, block_size = "own_decode", bf.get_format("u4b8").element, 8

    def decode(self, planes: object, group_size: int) -> np.ndarray:
        return super().decode(planes, group_size)


def test_a_format_that_no_kernel_reads_comes_to_the_cpu():
    w = gaussian((40, 256))
    q = bf.quantize(on_gpu(w), OwnDecode(), method="rtn")
    assert not q._made
    assert_same_bits(q.storage["packed"], bf.quantize(w, OwnDecode(), method="rtn").storage["packed"])


# ---- what moves, and how much memory it takes -----------------------------------------------------------------------


def copied_bytes(work: object, tmp_path: object) -> int:
    """Bytes that went between CPU and GPU in either direction, as the GPU's own records have it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    if not any(event.get("cat") == "kernel" for event in events):
        pytest.skip("no records of kernels: CUPTI is not there")
    between = ("Memcpy HtoD", "Memcpy DtoH")
    return sum(event["args"]["bytes"] for event in events if event.get("name", "").startswith(between))


@NAMES
@METHODS
@pytest.mark.filterwarnings("ignore")  # the profiler's
def test_weights_do_not_leave_the_gpu(name, method, tmp_path):
    w = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 2048, device="cuda", dtype=torch.bfloat16)
    made: list = []

    def work() -> None:
        q = bf.quantize(w, name, method=method)
        made.append(bf.quantized_linear(x, q))

    work()  # kernels are compiled
    assert copied_bytes(work, tmp_path) <= COPIED
    assert torch.equal(made[0], made[1])


@NAMES
@pytest.mark.filterwarnings("ignore")
def test_layers_do_not_leave_the_gpu(name, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)).cuda().half()
    x = torch.randn(3, 1024, device="cuda").half()

    def work() -> None:
        layers = [MarlinLinear.from_linear(model[i], name, method="rtn") for i in (0, 2)]
        with torch.no_grad():
            layers[1](layers[0](x))

    work()
    assert copied_bytes(work, tmp_path) <= 2 * COPIED


@METHODS
def test_memory_is_that_of_the_weights_and_of_a_slice(method):
    w = torch.randn(8192, 16384, device="cuda", dtype=torch.bfloat16)  # eight slices
    bf.quantize(w[:64], "q4_0", method=method)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q = bf.quantize(w, "q4_0", method=method)
    # Codes of all slices, the same in one plane, bricks; and temporaries of 2^24 weights.
    assert torch.cuda.max_memory_allocated() - before <= 3 * w.numel() + (1 << 30)
    assert torch.cuda.memory_allocated() - before <= 0.7 * w.numel()
    del q
    gc.collect()
    assert torch.cuda.memory_allocated() == before


# ---- layers and models ----------------------------------------------------------------------------------------------


@NAMES
def test_layers_are_those_of_the_cpu(name):
    linear = torch.nn.Linear(512, 384).half()
    here = MarlinLinear.from_linear(linear, name, method="rtn")
    bits = {key: tensor.clone() for key, tensor in here.state_dict().items()}
    there = MarlinLinear.from_linear(linear.cuda(), name, method="rtn")
    x = torch.randn(5, 512, device="cuda").half()
    with torch.no_grad():
        assert torch.equal(there(x), here.to("cuda")(x))
    for key, tensor in there.state_dict().items():
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu().reshape(-1).view(torch.uint8), bits[key].cpu().reshape(-1).view(torch.uint8))


@METHODS
def test_models(method):
    def model() -> object:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).half()

    here, there = model(), model().cuda()
    reports = [bf.quantize_model(m, "q4_0", method=method, progress=False) for m in (here, there)]
    assert str(reports[0]) == str(reports[1])
    x = torch.randn(4, 256).half()
    with torch.no_grad():
        y, expected = there(x.cuda()), here.cuda()(x.cuda())
    assert torch.equal(y, expected) or (method == "mse" and (y - expected).norm() <= 0.01 * expected.norm())


def test_an_error_leaves_a_model_as_it_was():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
    with torch.no_grad():
        model[1].weight[5, 3] = float("nan")
    before = list(model)
    with pytest.raises(bf.DataError, match="nan at row 5, k 3"):
        bf.quantize_model(model, "q4_0", progress=False)
    assert list(model) == before
