"""Torch layers with weights on a GPU: one copy of the weights, and a product in few steps. The GPU is a fake.

test_cuda.py has the same on a real one.
"""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian
from cuda_fake import FakeDriver, TorchMemory
from torch.utils.flop_counter import FlopCounterMode

import billfish as bf
from billfish.nn.torch import weights
from billfish.nn.torch.linear import MarlinLinear

N, K = 48, 256
STREAM = 7


@pytest.fixture
def fake(monkeypatch):
    """Tensors of the CPU count as tensors of a GPU for layers, and its memory is counted."""
    driver = FakeDriver(monkeypatch)
    TorchMemory(driver, monkeypatch)
    cuda = bf.BACKENDS["cuda"]
    monkeypatch.setattr(weights, "choose", lambda call, problem: cuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal=None: STREAM)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda memory, stream: recorded.append(stream))
    driver.recorded = recorded
    yield driver
    gc.collect()
    driver.forget()
    assert not driver.live


def make_layer(format="q4_0", bias=None, **settings):
    tensor = bf.quantize(gaussian((N, K)), format)
    return MarlinLinear.from_quantized(tensor, bias, **settings), tensor


X = torch.from_numpy(gaussian((3, K), 9)).half()


def held_bytes(fake):
    return sum(memory.nbytes for memory in fake.live.values())


def packed_bytes(layer):
    return sum(tensor.nbytes for tensor in layer._weights.tensors)


# ---- one copy -------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(K, N), torch.nn.Linear(K, N, bias=False)


def arrive(way, tmp_path):
    if way == "from_quantized":
        return [make_layer()[0]]
    if way == "to":
        layer = MarlinLinear(K, N, format="q4_0")
        return [layer.to("cpu")]
    if way == "load_state_dict":
        layer, other = MarlinLinear(K, N, bias=False, format="q4_0"), make_layer()[0]
        layer.load_state_dict(other.state_dict())
        return [layer]
    model = Model()
    if way == "quantize_model":
        bf.quantize_model(model, "q4_0", progress=False)
    else:
        weights = {f"{name}.weight": bf.quantize(gaussian((N, K)), "q4_0") for name in ("up", "down")}
        path = tmp_path / "model.safetensors"
        bf.save({**weights, "up.bias": gaussian((N,))}, path, progress=False)
        bf.load_into(model, path, progress=False)
    return [model.up, model.down]


@pytest.mark.parametrize("way", ["from_quantized", "to", "load_state_dict", "quantize_model", "load_into"])
def test_a_layer_that_arrives_holds_its_packed_weights_and_nothing_else(fake, tmp_path, way):
    layers = arrive(way, tmp_path)
    gc.collect()
    for layer in layers:
        assert layer._weights.form.startswith("cuda:")
        assert not layer._weights.matrix.storage
        assert layer.storage_bytes == N * K // 32 * 18
    assert held_bytes(fake) == sum(map(packed_bytes, layers))
    scales = N * K // 32 * 2  # kept beside the bricks, so that storage comes back bit for bit
    assert packed_bytes(layers[0]) == layers[0].storage_bytes + scales + 4 * N


def test_storage_comes_back_when_asked_for_and_goes_again(fake):
    layer, tensor = make_layer()
    before = held_bytes(fake)
    state = layer.state_dict()
    assert_same_bits(state["blocks"].numpy(), tensor.storage["blocks"])
    assert_same_bits(layer.quantized().storage["blocks"], tensor.storage["blocks"])
    del state
    gc.collect()
    assert held_bytes(fake) == before


# ---- few steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, "same", torch.float32])
def test_the_launch_gets_the_tensors_themselves(fake, dtype, bias_dtype):
    bias = None
    if bias_dtype is not None:
        bias = torch.nn.Parameter(torch.zeros(N, dtype=dtype if bias_dtype == "same" else bias_dtype))
    layer, _ = make_layer(bias=bias)
    x = X.to(dtype).reshape(1, 3, K)
    with torch.no_grad():
        ys = [layer(x), layer(x)]
    for y, product in zip(ys, fake.products, strict=True):
        assert y.shape == (1, 3, N)
        assert y.dtype == dtype
        assert product == (STREAM, x.data_ptr(), K, 0 if bias is None else bias.data_ptr(), y.data_ptr())


def test_torch_is_told_once_that_a_stream_reads_the_weights(fake):
    layer, _ = make_layer()
    for _ in range(3):
        layer(X)
    assert fake.recorded == [STREAM] * 2  # bricks and row scales


OTHERS = {
    "float32": lambda: X.float(),
    "rows apart": lambda: torch.zeros(3, 2 * K, dtype=torch.float16)[:, :K],
    "not aligned": lambda: torch.zeros(3 * K + 1, dtype=torch.float16)[1:].view(3, K),
    "no rows": lambda: X[:0],
    "another K": lambda: X[:, : K // 2].contiguous(),
    "a parameter": lambda: torch.nn.Parameter(X),
    "with a gradient": lambda: X.clone().requires_grad_(),
}


@pytest.mark.parametrize("way", OTHERS)
def test_what_takes_more_steps_goes_another_way(fake, monkeypatch, way):
    layer, _ = make_layer()
    monkeypatch.setattr(MarlinLinear, "_product", lambda self, x: "another way")
    assert layer(X) != "another way"
    assert layer(OTHERS[way]()) == "another way"


def test_who_watches_sees_an_operator(fake, monkeypatch):
    layer, _ = make_layer(bias=torch.nn.Parameter(torch.zeros(N)))
    monkeypatch.setattr(MarlinLinear, "_product", lambda self, x: "another way")
    assert layer(X) == "another way"  # the bias wants a gradient
    with torch.no_grad():
        assert layer(X) != "another way"
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(X) == "another way"
        with FlopCounterMode(display=False):
            assert layer(X) == "another way"
        layer.activations = "q8"
        assert layer(X) == "another way"


def test_columns_in_another_order(fake, monkeypatch):
    """x goes to the launch in the order of the columns."""
    order = np.random.default_rng(0).permutation(K)
    layer, _ = make_layer(permutation=order)
    seen = []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, shape: seen.append(x) or torch.empty(shape, dtype=x.dtype))
    assert layer(X).shape == (3, N)
    assert torch.equal(seen[0], X[:, torch.from_numpy(order)])
    assert fake.products[0][1] == seen[0].data_ptr()
    monkeypatch.setattr(MarlinLinear, "_product", lambda self, x: "another way")
    assert layer(X[:, :-8].contiguous()) == "another way"


def test_a_bias_that_changes_is_seen(fake, monkeypatch):
    monkeypatch.setattr(MarlinLinear, "_product", lambda self, x: "another way")
    layer, _ = make_layer(bias=torch.nn.Parameter(torch.zeros(N), requires_grad=False))
    layer(X)
    layer.bias = torch.nn.Parameter(torch.zeros(N), requires_grad=False)
    layer(X)
    assert fake.products[-1][3] == layer.bias.data_ptr()
    layer.bias.data = torch.zeros(N, dtype=torch.float16)
    layer(X)
    assert fake.products[-1][3] == layer.bias.data_ptr()
    layer.bias = torch.nn.Parameter(torch.zeros(N - 1), requires_grad=False)
    assert layer(X) == "another way"  # which refuses it


def test_other_weights_are_never_multiplied_with_old_ones(fake):
    layer, _ = make_layer()
    old = layer._weights.direct
    layer.load_state_dict(MarlinLinear.from_quantized(bf.quantize(gaussian((N, K), 5), "q4_0")).state_dict())
    assert layer._weights.direct is not None
    assert layer._weights.direct is not old
    other = copy.deepcopy(layer)
    assert None is not other._weights.direct is not layer._weights.direct is not None


def test_a_row_of_a_batch_may_be_asked_to_have_the_same_bits(fake, monkeypatch):
    layer, _ = make_layer()
    layer(X)
    monkeypatch.setattr(bf.BACKENDS["cuda"], "batch_invariant", True)
    layer(X)
    assert len({gemm.batch_invariant for gemm in layer._weights.matrix._made["cuda", "cpu"]._products}) == 2
