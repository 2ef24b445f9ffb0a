"""The two verbs for experts on the engines that compute in CPU memory, against an oracle in float64."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path

import expert_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from common import assert_same_bits

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.experts import pack_experts
from billfish.backends.cpu.packed import PLAIN_TYPES
from billfish.core.arrays import FLOATS
from billfish.core.format import FORMATS
from billfish.core.mixture import GATES

E, N, K = 5, 24, 512
BACKENDS = ("cpu", "reference")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def cpu_backend() -> CpuBackend:
    backend = bf.BACKENDS["cpu"]
    assert isinstance(backend, CpuBackend)
    return backend


def error(y, expected) -> float:
    """The largest difference beside the largest number."""
    return float(np.abs(np.asarray(y, np.float64) - expected).max(initial=0) / np.abs(expected).max(initial=1e-30))


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("format", FORMATS)
def test_products_with_every_format(format, activations, backend, rng):
    w = oracle.random_stack(rng, E, N, K, format)
    ids, _ = oracle.random_routing(rng, 9, 2, E)
    x = rng.standard_normal((9, K)).astype(np.float32)
    biases = rng.standard_normal((E, N)).astype(np.float32)
    y = bf.expert_linear(x, w, ids, biases=biases, activations=activations, backend=backend)
    assert y.shape == (9, 2, N)
    assert y.dtype == np.float32
    rounding = oracle.activations_of(w, activations, backend)
    assert error(y, oracle.expert_linear(x, w, ids, biases, rounding)) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("each_its_own", [False, True])
def test_products_with_any_number_of_rows(each_its_own, tokens, backend, rng):
    w = oracle.random_stack(rng, E, 40, 96, "q4_0")
    ids, _ = oracle.random_routing(rng, tokens, 3, E)
    x = rng.standard_normal((tokens, 3, 96) if each_its_own else (tokens, 96)).astype(np.float32)
    y = bf.expert_linear(x, w, ids, backend=backend)
    assert error(y, oracle.expert_linear(x, w, ids, None, "exact")) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("tokens", [1, 12])
def test_the_whole_block(tokens, pair, activation, backend, rng):
    hidden, inner = 64, 40
    shapes = [(inner, "q4_0"), (inner, "q8_0")] if pair else [(2 * inner, "q4_0")]
    gate_up = tuple(oracle.random_stack(rng, E, n, hidden, format) for n, format in shapes)
    biases = tuple(rng.standard_normal((E, n)).astype(np.float32) * 5 for n, _ in shapes)
    down = oracle.random_stack(rng, E, hidden, inner, "u4", group_size=-1)
    down_biases = rng.standard_normal((E, hidden)).astype(np.float32)
    ids, weights = oracle.random_routing(rng, tokens, 3, E)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    stacks = (gate_up, biases) if pair else (gate_up[0], biases[0])
    options = {"activation": activation, "gate_up_biases": stacks[1], "down_biases": down_biases}
    y = bf.experts(x, stacks[0], down, ids, weights, **options, backend=backend)
    assert error(y, oracle.experts(x, stacks[0], down, ids, weights, **options)) < 4e-6


@pytest.mark.parametrize("activations", ["q8", "q16"])
def test_the_whole_block_in_integers(activations, rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "mxfp4") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 20, 2, E)
    x = rng.standard_normal((20, 96)).astype(np.float32)
    y = bf.experts(x, gate_up, down, ids, weights, activations=activations)
    assert error(y, oracle.experts(x, gate_up, down, ids, weights, activations=activations)) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "torch"])
def test_y_is_of_the_kind_and_type_of_x(kind, backend, rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "q4_0") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 6, 2, E)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    if kind == "torch":
        given = torch.from_numpy(x).bfloat16(), torch.from_numpy(ids).long(), torch.from_numpy(weights).half()
        x, weights = given[0].float().numpy(), given[2].float().numpy()
    else:
        given = x.astype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]), ids, weights
        x = given[0].astype(np.float32)
    y = bf.experts(given[0], gate_up, down, given[1], given[2], backend=backend)
    assert type(y) is type(given[0])
    assert y.dtype == given[0].dtype
    expected = oracle.experts(x, gate_up, down, ids, weights)
    assert error(y.float().numpy() if kind == "torch" else y, expected) < 5e-3
    z = bf.expert_linear(given[0], gate_up, given[1], backend=backend)
    assert type(z) is type(given[0])
    assert z.dtype == given[0].dtype
    assert tuple(z.shape) == (6, 2, 128)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_give_an_empty_y(backend, rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "q4_0") for n, k in ((128, 96), (96, 64)))
    x, ids, weights = np.empty((0, 96), np.float16), np.empty((0, 2), np.int64), np.empty((0, 2), np.float32)
    y = bf.experts(x, gate_up, down, ids, weights, backend=backend)
    assert y.shape == (0, 96)
    assert y.dtype == np.float16
    assert bf.expert_linear(x, gate_up, ids, backend=backend).shape == (0, 2, 128)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_that_is_chosen_twice(backend, rng):
    w = oracle.random_stack(rng, 1, N, 64)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    y = bf.expert_linear(x, w, np.zeros((3, 2), np.int32), backend=backend)
    assert_same_bits(y[:, 0], y[:, 1])
    assert error(y[:, 0], x.astype(np.float64) @ bf.dequantize(w)[0].T.astype(np.float64)) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_token_that_is_no_number_spoils_no_other(bad, activations, backend, rng):
    """All experts of a token are chosen, so it shares each of them with all others."""
    gate_up, down = (oracle.random_stack(rng, 3, n, k, "q4_0") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 7, 3, 3)
    x = rng.standard_normal((7, 96)).astype(np.float32)
    spoilt, others = x.copy(), np.arange(7) != 2
    spoilt[2, 50] = bad
    ways = (
        lambda x: bf.expert_linear(x, gate_up, ids, activations=activations, backend=backend),
        lambda x: bf.experts(x, gate_up, down, ids, weights, activations=activations, backend=backend),
    )
    for way in ways:
        assert_same_bits(way(spoilt)[others], way(x)[others])
        assert bad == 3e38 or not np.isfinite(way(spoilt)[2]).any()


def test_the_page_shows_what_works(capsys):
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, np.ndarray] = {}
    exec(program, names)
    assert names["y"].shape == (5, 256)
    assert names["z"].shape == (5, 2, 256)
    assert capsys.readouterr().out.startswith("QuantizedExperts(mxfp4, [8, 256, 256]")


# ---- the CPU engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_any_number_of_threads_gives_the_same_bits(tokens, activations, rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "q4_k") for n, k in ((512, 256), (256, 256)))
    ids, weights = oracle.random_routing(rng, tokens, 3, E)
    x = rng.standard_normal((tokens, 256)).astype(np.float32)
    found = []
    try:
        for threads in (1, 2, 3, 7):
            bf.set_threads(threads)
            y = bf.experts(x, gate_up, down, ids, weights, activations=activations, backend="cpu")
            found.append((y, bf.expert_linear(x, gate_up, ids, activations=activations, backend="cpu")))
    finally:
        bf.set_threads(0)
    for y, z in found[1:]:
        assert_same_bits(y, found[0][0])
        assert_same_bits(z, found[0][1])


@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
def test_an_expert_gives_what_its_matrix_gives_alone(activations, rng):
    w = oracle.random_stack(rng, 2, 40, 256, "q4_k")
    x = rng.standard_normal((12, 256)).astype(np.float32)
    y = bf.expert_linear(x, w, np.ones((12, 1), np.int64), activations=activations, backend="cpu")
    assert_same_bits(y[:, 0], bf.quantized_linear(x, w[1], activations=activations, backend="cpu"))


@pytest.mark.parametrize("dtype", PLAIN_TYPES)
def test_plain_stacks(dtype, rng):
    w = rng.standard_normal((3, 40, 96)).astype(np.float32).astype(FLOATS[dtype])
    ids, _ = oracle.random_routing(rng, 10, 2, 3)
    x = rng.standard_normal((10, 96)).astype(np.float32)
    packed = cpu_backend().pack_experts(w)
    assert packed.shape == (3, 40, 96)
    expected = np.einsum("tnk,tk->tn", w.astype(np.float64)[ids.ravel()], np.repeat(x.astype(np.float64), 2, axis=0))
    assert error(bf.expert_linear(x, packed, ids), expected.reshape(10, 2, 40)) < 2e-6
    with pytest.raises(bf.DTypeError, match=r"stack.*int32 of shape \(3, 40, 96\).*\[E, N, K\] of float32"):
        cpu_backend().pack_experts(w.astype(np.int32))


def test_prepacked_stacks(rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "nvfp4") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 6, 2, E)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    expected = bf.experts(x, gate_up, down, ids, weights, backend="cpu")
    for packed in (bf.prepack(gate_up), pickle.loads(pickle.dumps(bf.prepack(gate_up)))):
        assert repr(packed).startswith("PackedExperts(nvfp4, [5, 128, 96], ")
        assert_same_bits(bf.experts(x, packed, down, ids, weights), expected)
        with pytest.raises(bf.BackendUnavailable, match=r"backend.*'reference'.*'cpu'"):
            bf.expert_linear(x, packed, ids, backend="reference")


def test_packed_stacks_that_kernels_would_read_beyond_are_refused(rng):
    packed = bf.prepack(oracle.random_stack(rng, 3, 16, 64, "nvfp4"))
    assert packed.factors is not None
    for data in (packed.data[:-1], packed.data.view(np.int8), np.repeat(packed.data, 2)[::2]):
        with pytest.raises(bf.ShapeError, match=r"data.*u?int8 of shape .*3 times the packed bytes"):
            dataclasses.replace(packed, data=data)
    for factors in (packed.factors[:2], packed.factors.astype(np.float64), np.repeat(packed.factors, 2)[::2]):
        with pytest.raises(bf.ShapeError, match=r"factors.*float.*float32 of shape \(3,\)"):
            dataclasses.replace(packed, factors=factors)
    for shape in ((16, 64), (0, 16, 64), (3, 16, -64)):
        with pytest.raises(bf.ShapeError, match="shape is"):
            dataclasses.replace(packed, shape=shape)
    with pytest.raises(bf.DTypeError, match=r"kind.*'nvfp4' without axes.*float32"):
        dataclasses.replace(packed, axes=None)


@pytest.mark.skipif(len(_cpu.levels()) == 1, reason="this machine has one level")
def test_stacks_that_were_packed_for_two_levels_are_refused(rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k) for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 6, 2, E)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    first, last = _cpu.levels()[0], _cpu.levels()[-1]
    other = last if cpu_backend().level == first else first
    message = f"gate_up is packed for {other}, and down for {cpu_backend().level}"
    with pytest.raises(bf.BackendUnavailable, match=message):
        bf.experts(x, pack_experts(other, gate_up), down, ids, weights)
    both = pack_experts(other, gate_up), pack_experts(other, down)
    assert error(bf.experts(x, *both, ids, weights), oracle.experts(x, gate_up, down, ids, weights)) < 4e-6


def test_experts_whose_scales_are_unlike_are_packed_alike(rng):
    w = oracle.random_stack(rng, 3, N, 256, "q4_0")
    blocks = w.storage["blocks"].copy()
    blocks[1, 0, :2] = np.array([0x00, 0x7C])  # the first scale of expert 1 is infinite
    odd = bf.QuantizedExperts.from_storage("q4_0", {"blocks": blocks})
    x = rng.standard_normal((4, 256)).astype(np.float32)
    ids = np.array([[0, 1], [1, 2], [2, 0], [1, 0]], np.int32)
    y, expected = bf.expert_linear(x, odd, ids, backend="cpu"), bf.expert_linear(x, w, ids, backend="reference")
    assert not np.isfinite(y[..., 0][ids == 1]).any()
    assert error(y[..., 1:], expected[..., 1:]) < 2e-6
    assert error(y[ids != 1], expected[ids != 1]) < 2e-6


UNREADABLE = """
import ctypes, mmap
import numpy as np
import billfish as bf
from billfish.backends.cpu.experts import PackedExperts

w = bf.quantize(np.random.default_rng(0).standard_normal((3, 512, 512)).astype(np.float32), "q4_0", method="rtn")
packed = bf.prepack(w)
size = packed.part(0).nbytes
assert size % mmap.PAGESIZE == 0
memory = mmap.mmap(-1, packed.nbytes)
data = np.frombuffer(memory, np.uint8)
data[:] = packed.data
libc = ctypes.CDLL(None, use_errno=True)
for expert in (0, 2):
    assert libc.mprotect(ctypes.c_void_p(data.ctypes.data + expert * size), ctypes.c_size_t(size), 0) == 0
torn = PackedExperts(packed.kind, packed.shape, packed.level, packed.axes, data)
for tokens in (1, 5, 40):
    for activations in ("exact", "q8", "q16"):
        x = np.random.default_rng(1).standard_normal((tokens, 512)).astype(np.float32)
        ids = np.ones((tokens, 1), np.int32)
        y = bf.expert_linear(x, torn, ids, activations=activations)
        assert np.array_equal(y, bf.expert_linear(x, packed, ids, activations=activations))
print("read nothing else")
"""


def test_the_bytes_of_experts_that_nobody_chose_are_not_read():
    """They cannot be: their pages are protected."""
    run = subprocess.run([sys.executable, "-c", UNREADABLE], capture_output=True, text=True, check=False)
    assert run.stdout == "read nothing else\n", run.stderr


def test_threads_keep_little_of_the_room_that_a_call_took(rng):
    w = oracle.random_stack(rng, E, 64, 512, "q4_0")
    ids, _ = oracle.random_routing(rng, 6000, 2, E)
    bf.expert_linear(rng.standard_normal((6000, 512)).astype(np.float32), w, ids, backend="cpu")
    assert _cpu.kept_bytes() <= 2 * 8 << 20


class TakenAway(dict):
    """What a stack keeps, while another thread removes every entry as soon as it is there."""

    def __setitem__(self, key, value):
        pass


@pytest.mark.parametrize("of", ["stack", "matrix"])
def test_what_was_made_is_returned_though_another_thread_removes_it(of, rng):
    stack = oracle.random_stack(rng, E, 64, 96, "q4_0")
    kept = stack if of == "stack" else stack[0]
    object.__setattr__(kept, "_made", TakenAway())
    assert kept.made("key", lambda: 7) == 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_of_stacks_is_packed_though_another_thread_removes_it(backend, rng):
    gate, up, other = (oracle.random_stack(rng, E, 64, 96, "q4_0") for _ in range(3))
    down = oracle.random_stack(rng, E, 96, 64, "q4_0")
    ids, weights = oracle.random_routing(rng, 4, 2, E)
    x = rng.standard_normal((4, 96)).astype(np.float32)
    expected = bf.experts(x, (gate, up), down, ids, weights, backend=backend)
    bf.experts(x, (gate, other), down, ids, weights, backend=backend)
    object.__setattr__(gate, "_made", TakenAway(gate._made))  # with the pair (gate, other)
    assert_same_bits(bf.experts(x, (gate, up), down, ids, weights, backend=backend), expected)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_routing_is_named(backend, rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "q4_0") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 4, 2, E)
    x = rng.standard_normal((4, 96)).astype(np.float32)

    def call(ids=ids, weights=weights, **options):
        return bf.experts(x, gate_up, down, ids, weights, backend=backend, **options)

    for wrong in (-1, E):
        bad = ids.copy()
        bad[2, 1] = wrong
        with pytest.raises(bf.DataError, match=rf"experts.*ids\[2, 1\].*{wrong}.*0 to 4"):
            call(bad)
        with pytest.raises(bf.DataError, match=rf"expert_linear.*ids\[2, 1\].*{wrong}"):
            bf.expert_linear(x, gate_up, bad, backend=backend)
    for wrong in (np.nan, np.inf):
        bad = weights.copy()
        bad[3, 0] = wrong
        with pytest.raises(bf.DataError, match=rf"weights\[3, 0\].*{wrong}.*finite"):
            call(weights=bad)
    with pytest.raises(bf.ShapeError, match=r"ids.*\(4, 0\).*k > 0"):
        call(ids[:, :0], weights[:, :0])
    with pytest.raises(bf.ShapeError, match=r"ids.*\(3, 2\).*\[4, k\]"):
        call(ids[:3])
    with pytest.raises(bf.ShapeError, match=r"weights.*\(4, 1\).*\(4, 2\)"):
        call(weights=weights[:, :1])
    with pytest.raises(bf.DTypeError, match=r"ids.*float32.*int32 or int64"):
        call(ids.astype(np.float32))
    with pytest.raises(bf.DTypeError, match=r"weights.*int32"):
        call(weights=ids)
    with pytest.raises(bf.FormatError, match=r"hidden_act.*'relu'.*'silu' or"):
        call(hidden_act="relu")
    with pytest.raises(TypeError, match=r"activation.*hidden_act"):
        call(hidden_act="silu", activation="silu")
    assert np.array_equal(call(activation="gelu"), call(hidden_act="gelu")), "the older name"


def test_wrong_shapes_are_named(rng):
    gate_up, down = (oracle.random_stack(rng, E, n, k, "q4_0") for n, k in ((128, 96), (96, 64)))
    ids, weights = oracle.random_routing(rng, 4, 2, E)
    x = rng.standard_normal((4, 96)).astype(np.float32)
    with pytest.raises(bf.ShapeError, match=r"gate_up.*\[4, 128, 96\].*\[5, 128, 96\] for down"):
        bf.experts(x, gate_up.take_experts(slice(4)), down, ids, weights)
    with pytest.raises(bf.ShapeError, match=r"gate_up.*\[5, 128, 96\].*\[5, 64, 96\]"):
        bf.experts(x, (gate_up, gate_up), down, ids, weights)
    with pytest.raises(bf.ShapeError, match=r"x.*\(4, 64\).*\[T, 96\]"):
        bf.experts(x[:, :64], gate_up, down, ids, weights)
    with pytest.raises(bf.ShapeError, match=r"x.*\(4, 64\).*\[T, 96\] or \[T, k, 96\]"):
        bf.expert_linear(x[:, :64], gate_up, ids)
    with pytest.raises(bf.ShapeError, match=r"ids.*\(4, 2\).*\(4, 3\)"):
        bf.expert_linear(np.zeros((4, 3, 96), np.float32), gate_up, ids)
    with pytest.raises(bf.ShapeError, match=r"down_biases.*\(96,\).*\(5, 96\)"):
        bf.experts(x, gate_up, down, ids, weights, down_biases=x[0])
    elsewhere = torch.empty((E, 96), device="meta")
    with pytest.raises(bf.DTypeError, match=r"down_biases.*meta:0.*cpu, as x"):
        bf.experts(x, gate_up, down, ids, weights, down_biases=elsewhere)
    with pytest.raises(bf.ShapeError, match=r"gate_up_biases.*tuple.*array"):
        bf.experts(x, gate_up, down, ids, weights, gate_up_biases=(None, None))
    with pytest.raises(bf.DTypeError, match=r"w.*QuantizedTensor.*QuantizedExperts"):
        bf.expert_linear(x, gate_up[0], ids)
    with pytest.raises(bf.ShapeError, match=r"w.*\(0, 2, 64\)"):
        bf.quantize(np.zeros((0, 2, 64), np.float32), "q4_0")


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_that_nobody_chose_change_nothing(backend, rng):
    w = oracle.random_stack(rng, 4, N, 256, "u4", group_size=64)
    damaged = {name: array.copy() for name, array in w.storage.items()}
    damaged["scales"][[0, 2]] = np.nan
    bad = bf.QuantizedExperts.from_storage("u4", damaged, 64)
    ids = np.array([[1, 3], [3, 1], [1, 3]], np.int32)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    expected = bf.expert_linear(x, w, ids, backend="reference")
    assert error(bf.expert_linear(x, bad, ids, backend=backend), expected) < 2e-6
