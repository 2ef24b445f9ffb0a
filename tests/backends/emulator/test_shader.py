"""`compile_shader` of the emulator: torch's rules for arguments, on a stand-in for torch's device "mps"."""

from __future__ import annotations

import pytest
import torch

from billfish.backends import emulator
from billfish.core.errors import BillfishError, DTypeError, FormatError, ShapeError
from billfish.nn.torch import emulated_mps

FULL = """kernel void full(device float* out, constant float& val, uint idx [[thread_position_in_grid]]) {
  out[idx] = val;
}"""
MANY = """#include <metal_stdlib>
using namespace metal;
// y = 2 x + n[1], of n[0] numbers
template <typename T, int FACTOR>
[[kernel]] void scale(const device T* x [[buffer(0)]], constant int* n [[buffer(1)]], device T* y [[buffer(2)]],
                      uint3 at [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  if (int(at.x) < n[0]) y[at.x] = x[at.x] * T(FACTOR) + T(n[1]);
}
template [[host_name("scale_half")]] [[kernel]] decltype(scale<half, 2>) scale<half, 2>;
template [[host_name("scale_float")]] kernel void scale<float, 3>(const device float* x, constant int* n,
                                                                  device float* y, uint3 at, uint lane);
kernel void numbers(device float* y, constant long& a, constant half& b, constant float* c, constant float& d,
                    uint2 at [[thread_position_in_grid]], uint2 size [[threads_per_grid]]) {
  y[at.y * size.x + at.x] = float(a >> 32) + float(b) + c[1] + d;
}
"""


@pytest.fixture(autouse=True)
def device():
    with emulated_mps.mps():
        yield


def test_the_example_of_torch():
    x = torch.zeros(16, device="mps")
    torch.mps.compile_shader(FULL).full(x, 3.5)  # as many threads as the first tensor has numbers
    assert torch.equal(x.cpu(), torch.full((16,), 3.5))


def test_instances_by_their_host_names():
    library = emulator.compile_shader(MANY)
    assert dir(library) == ["numbers", "scale_float", "scale_half"]
    x, y = torch.arange(8.0, device="mps"), torch.zeros(8, device="mps")
    library.scale_float(x, (8, 1), y, threads=8, group_size=4, arg_casts={1: "int32"})
    assert y.tolist() == [3 * i + 1 for i in range(8)]
    with pytest.raises(AttributeError, match=r"kernel.*'scale'.*numbers, scale_half, scale_float"):
        library.scale  # noqa: B018


def test_memory_from_the_storage_offset_on():
    """torch binds memory: offsets are honoured, strides are nobody's business."""
    library = emulator.compile_shader(MANY)
    x = torch.arange(16, device="mps").half().reshape(4, 4)
    y = torch.zeros(8, device="mps", dtype=torch.float16)
    library.scale_half(x[2:], [8, 0], y, threads=8, arg_casts="int32")
    assert y.tolist() == [2 * i for i in range(8, 16)]
    library.scale_half(x.T[1:], [8, 0], y, threads=8, arg_casts="int32")
    assert y.tolist() == [2 * i for i in range(1, 9)]


def test_numbers_and_lists():
    """int is int64, float is float32, others by `arg_casts`; a CPU tensor without axes is a number."""
    y = torch.zeros(6, device="mps")
    arguments = (2**33, 0.5, [0.0, 0.25], torch.tensor(1.0, dtype=torch.float64))
    library = emulator.compile_shader(MANY)
    library.numbers(y, *arguments, threads=(3, 2), group_size=(3, 1), arg_casts={2: "fp16"})
    assert y.tolist() == [3.75] * 6


def launch(**changes):
    x = torch.zeros(8, device="mps")
    call = {"x": x, "n": (8, 0), "y": x.clone(), "threads": 8, "group_size": 8, "arg_casts": "int32"} | changes
    emulator.compile_shader(MANY).scale_float(call.pop("x"), call.pop("n"), call.pop("y"), **call)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(8)}, DTypeError, r"argument 0 of scale_float.*tensor on cpu.*tensor on mps"),
        ({"n": ()}, DTypeError, r"argument 1 of scale_float.*empty list.*tensor, an int, a float"),
        ({"n": "8"}, DTypeError, r"argument 1 of scale_float.*str"),
        ({"arg_casts": "double"}, FormatError, r"arg_casts.*'double'.*fp16, bf16, int32"),
        ({"threads": (8, 1)}, ShapeError, r"group_size.*\(8,\).*2 axes"),
        ({"threads": 0}, ShapeError, r"threads.*0.*to three numbers"),
        ({"threads": 4096, "group_size": 2048}, ShapeError, r"group_size.*\(2048,\).*at most 1024 threads"),
    ],
)
def test_wrong_arguments(changes, error, message):
    with pytest.raises(error, match=r"compile_shader: " + message):
        launch(**changes)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kernel void f(device float* ä) {}", r"source.*ASCII"),
        ("kernel void f(device int* a [[buffer(1)]], device int* b [[buffer(0)]]) {}", "buffers are numbered 1, 0"),
        ("kernel void f(texture2d<half> t [[texture(0)]]) {}", "does not understand this parameter: texture2d<half> t"),
        ('template [[host_name("g")]] [[kernel]] decltype(f<int>) f<int>;', "g names no kernel"),
        ("kernel void f(device int* a", "a bracket is not closed"),
    ],
)
def test_shaders_that_nobody_takes(source, message):
    with pytest.raises(BillfishError, match=message):
        emulator.compile_shader(source)


def test_arguments_are_counted():
    with pytest.raises(ShapeError, match=r"arguments.*1.*2"):
        emulator.compile_shader(FULL).full(torch.zeros(4, device="mps"))


def test_what_does_not_compile_is_said():
    with pytest.raises(emulator.CompileError, match="f does not compile"):
        emulator.compile_shader("kernel void f(device int* a) { a[0] = nothing; }").f(torch.zeros(8, device="mps"))


def test_faults_and_counts():
    library, y = emulator.compile_shader(FULL), torch.zeros(16, device="mps")
    with emulator.options(check=True), pytest.raises(emulator.KernelFault) as caught:
        library.full(y[8:], 1.0, threads=16, group_size=16)
    assert (caught.value.kind, caught.value.buffer, caught.value.site.line) == ("out-of-bounds", "out", 2)
    with emulator.launches() as log:
        library.full(y, 1.0)
    assert log[0].written == {"out": 64, "val": 0}
    assert log[0].sizes == {"out": 64}


def test_an_offset_may_be_no_place_for_vectors():
    source = "kernel void sum(const device float4* x, device float* y) { y[0] = x[0].x + x[0].y + x[0].z + x[0].w; }"
    library, x, y = emulator.compile_shader(source), torch.ones(16, device="mps"), torch.zeros(1, device="mps")
    with emulator.options(check=True):
        library.sum(x[4:], y, threads=1)
        assert y.tolist() == [4]
        with pytest.raises(emulator.KernelFault) as caught:
            library.sum(x[1:], y, threads=1)
    assert (caught.value.kind, caught.value.buffer) == ("misaligned", "x")


# ---- the device ---------------------------------------------------------------------------------------------------


def test_the_device_of_tensors():
    x = torch.arange(6.0).reshape(2, 3)
    there = x.to("mps")
    assert (x.device.type, there.device, there.is_cpu, there.is_mps) == ("cpu", torch.device("mps", 0), False, True)
    for result in (there[0], there + 1, there.T.contiguous(), torch.zeros_like(there), there.to(torch.float16)):
        assert result.device.type == "mps"
    there += 1
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3))
    back = there.cpu()
    assert back.is_cpu
    assert torch.equal(back, x + 1)


def test_what_the_device_refuses():
    there = torch.zeros(3, device="mps")
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.zeros(3)
    with pytest.raises(TypeError, match=r"Cannot convert a MPS Tensor to torch\.float64"):
        torch.zeros(3, dtype=torch.float64).to("mps")
    with pytest.raises(TypeError, match="can't convert mps:0 device type tensor to numpy"):
        there.numpy()


def test_gradients_are_on_the_device():
    x = torch.ones(3, device="mps", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device.type == "mps"
    assert x.grad.tolist() == [2, 2, 2]
