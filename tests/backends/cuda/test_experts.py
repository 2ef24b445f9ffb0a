"""Products with experts on a GPU, against float64: formats, every kind of routing, graphs, and each library's arrays.

Without an NVIDIA GPU these are skipped; test_expert_plans.py and test_experts_around.py need none.
"""

from __future__ import annotations

import expert_oracle as oracle
import numpy as np
import pytest
from common import assert_same_bits

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda.driver import device
from billfish.core.errors import BackendUnavailable, DataError
from billfish.core.mixture import GATES

torch = pytest.importorskip("torch")
try:
    GPU = device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
backend = BACKENDS["cuda"]

TOKENS = (1, 2, 3, 8, 9, 20, 40, 64, 150, 300)
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of the largest number


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def sent(array: np.ndarray, dtype: object = None) -> object:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda().to(dtype)


def rows_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: object) -> tuple[object, np.ndarray]:
    """x on the GPU, and the numbers that it has."""
    x = sent(rng.standard_normal(shape).astype(np.float32), dtype)
    return x, x.double().cpu().numpy()


def error(y: object, expected: np.ndarray) -> float:
    """The largest difference beside the largest number; infinite if a number is missing."""
    got = y.double().cpu().numpy()
    assert got.shape == expected.shape
    worst = np.abs(got - expected).max(initial=0) / np.abs(expected).max(initial=1e-30)
    return float(worst) if np.isfinite(got).all() else float("inf")


def check_linear(rng, w, ids, dtype, biases=None, own_rows=False) -> None:
    tokens, chosen = ids.shape
    shape = (tokens, chosen, w.shape[2]) if own_rows else (tokens, w.shape[2])
    x, numbers = rows_of(rng, shape, dtype)
    given = None if biases is None else sent(biases, torch.float32)
    y = bf.expert_linear(x, w, sent(ids, torch.int64), biases=given)
    assert y.dtype == dtype
    expected = oracle.expert_linear(numbers, w, ids, biases, "exact")
    assert error(y, expected) < ROUNDED[dtype], (w, ids.shape, dtype)


FORMATS = [("u4b8", 128), ("u4", 64), ("u8b128", 128), ("fp4", 32), ("mxfp4", 32), ("nvfp4", 16), ("q4_0", 32)]
FORMATS += [("q4_1", 32), ("q8_0", 32), ("q4_k", 32), ("q6_k", 16), ("iq4_nl", 32)]


@pytest.mark.parametrize(("format", "size"), FORMATS)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_products_of_every_format(rng, format, size, dtype):
    w = oracle.random_stack(rng, 5, 136, 512, format, group_size=size)
    biases = rng.standard_normal((5, 136)).astype(np.float32)
    for tokens in (1, 3, 9, 20, 40, 64, 301):
        ids, _ = oracle.random_routing(rng, tokens, 2, 5)
        check_linear(rng, w, ids, dtype, biases if tokens % 2 else None)


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (2, 1), (3, 3), (8, 2), (17, 4), (32, 4)])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (40, 384), (133, 128), (520, 1152)])
def test_sizes(rng, experts, chosen, n, k):
    w = oracle.random_stack(rng, experts, n, k, "u4b8", group_size=128)
    for tokens in (1, 7, 33, 100, 257):
        ids, _ = oracle.random_routing(rng, tokens, chosen, experts)
        check_linear(rng, w, ids, torch.float16, own_rows=tokens % 2 == 0)


def test_rows_of_x_that_are_no_multiple_of_16_bytes(rng):
    w = oracle.random_stack(rng, 3, 24, 132, "u8b128", group_size=-1)
    for tokens in (1, 5, 200):
        ids, _ = oracle.random_routing(rng, tokens, 2, 3)
        check_linear(rng, w, ids, torch.float16)


UNEVEN = {
    "all to one": lambda rng, tokens: np.full((tokens, 2), 5),
    "all to the last": lambda rng, tokens: np.full((tokens, 2), 7),
    "two of eight": lambda rng, tokens: rng.integers(3, 5, (tokens, 2)),
    "mostly one": lambda rng, tokens: np.where(rng.random((tokens, 2)) < 0.9, 2, rng.integers(0, 8, (tokens, 2))),
}


@pytest.mark.parametrize("way", UNEVEN)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_uneven_routing(rng, way, dtype):
    w = oracle.random_stack(rng, 8, 264, 512, "u4b8", group_size=128)
    for tokens in TOKENS:
        check_linear(rng, w, UNEVEN[way](rng, tokens), dtype)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 6, 90, 300])
def test_experts_that_are_not_there_give_nan(rng, id_type, tokens):
    w = oracle.random_stack(rng, 4, 72, 256, "u4b8", group_size=128)
    gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
    ids, weights = oracle.random_routing(rng, tokens, 2, 4)
    bad = rng.random((tokens, 2)) < 0.2
    bad[-1, 1] = True
    wrong = np.where(bad, rng.choice([-1, 4, 1 << 30], (tokens, 2)), ids)
    x, numbers = rows_of(rng, (tokens, 256), torch.float16)
    y = bf.expert_linear(x, w, sent(wrong, id_type))
    expected = oracle.expert_linear(numbers, w, ids, None, "exact")
    assert torch.isnan(y[sent(bad)]).all()
    assert error(y[~sent(bad)], expected[~bad]) < ROUNDED[torch.float16]
    y = bf.experts(x, gate_up, down, sent(wrong, id_type), sent(weights))
    touched = bad.any(axis=1)
    assert torch.isnan(y[sent(touched)]).all()
    expected = oracle.experts(numbers, gate_up, down, ids, weights)
    assert error(y[~sent(touched)], expected[~touched]) < 3 * ROUNDED[torch.float16]
    with pytest.raises(DataError, match="ids"):
        bf.expert_linear(x, w, sent(wrong, id_type), check=True)


def test_no_tokens(rng):
    w = oracle.random_stack(rng, 4, 72, 256)
    x, ids = torch.empty((0, 256), device="cuda").half(), torch.empty((0, 2), dtype=torch.int64, device="cuda")
    assert bf.expert_linear(x, w, ids).shape == (0, 2, 72)
    gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
    assert bf.experts(x, gate_up, down, ids, torch.empty((0, 2), device="cuda")).shape == (0, 256)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("way", ["stack", "pair", "two kinds", "odd"])
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_blocks(rng, activation, way, dtype):
    experts, hidden, inner = 6, 256, 132 if way == "odd" else 160
    options = {"format": "u8b128", "group_size": -1} if way == "odd" else {"format": "q4_0"}
    down = oracle.random_stack(rng, experts, hidden, inner, **options)
    gate_up = oracle.random_stack(rng, experts, 2 * inner, hidden, **options)
    biases = rng.standard_normal((experts, 2 * inner)).astype(np.float32)
    sent_biases = sent(biases)
    if way in ("pair", "two kinds"):
        other = "q8_0" if way == "two kinds" else "q4_0"
        gate_up = tuple(oracle.random_stack(rng, experts, inner, hidden, name) for name in ("q4_0", other))
        biases = (biases[:, :inner], biases[:, inner:])
        sent_biases = tuple(map(sent, biases))
    down_biases = rng.standard_normal((experts, hidden)).astype(np.float32)
    for tokens in (1, 6, 20, 64, 151):
        ids, weights = oracle.random_routing(rng, tokens, 3, experts)
        x, numbers = rows_of(rng, (tokens, hidden), dtype)
        given = {"gate_up_biases": sent_biases, "down_biases": sent(down_biases)} if tokens % 2 else {}
        asked = {"gate_up_biases": biases, "down_biases": down_biases} if tokens % 2 else {}
        y = bf.experts(x, gate_up, down, sent(ids), sent(weights), hidden_act=activation, **given)
        expected = oracle.experts(numbers, gate_up, down, ids, weights, activation, **asked)
        assert error(y, expected) < 3 * ROUNDED[dtype], (tokens, activation)


@pytest.mark.parametrize("weights_type", [torch.float32, torch.float16, torch.bfloat16])
def test_routing_weights_of_every_type(rng, weights_type):
    gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
    ids, weights = oracle.random_routing(rng, 12, 2, 4)
    x, numbers = rows_of(rng, (12, 256), torch.float16)
    rounded = sent(weights, weights_type)
    y = bf.experts(x, gate_up, down, sent(ids), rounded)
    expected = oracle.experts(numbers, gate_up, down, ids, rounded.float().cpu().numpy())
    assert error(y, expected) < 3 * ROUNDED[torch.float16]


def test_experts_whose_scales_are_kept_in_different_ways(rng):
    """One expert has scales that float16 does not hold, so all have float32 ones."""
    w = rng.standard_normal((3, 48, 256)).astype(np.float32)
    w[1, ::2, 32:] *= 1e-12
    stack = bf.quantize(w, "mxfp4", method="rtn")
    for tokens in (1, 6, 80):
        ids, _ = oracle.random_routing(rng, tokens, 2, 3)
        check_linear(rng, stack, ids, torch.float16)


@pytest.mark.parametrize("tokens", [1, 16, 50, 300])
def test_the_same_bits_from_run_to_run(rng, tokens):
    gate_up = oracle.random_stack(rng, 8, 512, 512, "u4b8", group_size=128)
    down = oracle.random_stack(rng, 8, 512, 256, "u4b8", group_size=128)
    ids, weights = (sent(array) for array in oracle.random_routing(rng, tokens, 2, 8))
    x, _ = rows_of(rng, (tokens, 512), torch.float16)
    first = bf.experts(x, gate_up, down, ids, weights)
    assert all(torch.equal(bf.experts(x, gate_up, down, ids, weights), first) for _ in range(20))


def test_batch_invariance_when_asked_for(rng, monkeypatch):
    monkeypatch.setattr(backend, "batch_invariant", True)
    gate_up = oracle.random_stack(rng, 8, 320, 1152, "u4b8", group_size=128)
    down = oracle.random_stack(rng, 8, 1152, 160, "u4b8", group_size=32)
    ids, weights = (sent(array) for array in oracle.random_routing(rng, 100, 2, 8))
    x, _ = rows_of(rng, (100, 1152), torch.float16)
    alone = torch.cat([bf.experts(x[i : i + 1], gate_up, down, ids[i : i + 1], weights[i : i + 1]) for i in range(100)])
    for tokens in (100, 60, 33, 9, 5):
        assert torch.equal(bf.experts(x[:tokens], gate_up, down, ids[:tokens], weights[:tokens]), alone[:tokens])


@pytest.mark.parametrize("tokens", [1, 12, 80, 300])
def test_graphs_follow_the_routing(rng, tokens):
    gate_up = oracle.random_stack(rng, 8, 256, 512, "u4b8", group_size=128)
    down = oracle.random_stack(rng, 8, 512, 128, "u4b8", group_size=128)
    ids, weights = (sent(array) for array in oracle.random_routing(rng, tokens, 2, 8))
    x, _ = rows_of(rng, (tokens, 512), torch.float16)
    expected = bf.experts(x, gate_up, down, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = bf.experts(x, gate_up, down, ids, weights)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        others, new_weights = oracle.random_routing(rng, tokens, 2, 8)
        ids.copy_(sent(others))
        weights.copy_(sent(new_weights))
        x.normal_()
        expected = bf.experts(x, gate_up, down, ids, weights)


def test_two_streams(rng):
    w = oracle.random_stack(rng, 8, 512, 512, "u4b8", group_size=128)
    ids = sent(oracle.random_routing(rng, 64, 2, 8)[0])
    x, _ = rows_of(rng, (64, 512), torch.float16)
    first = bf.expert_linear(x, w, ids)
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream() for _ in range(2)] * 5:
        with torch.cuda.stream(stream):
            results.append(bf.expert_linear(x, w, ids))
    torch.cuda.synchronize()
    assert all(torch.equal(first, y) for y in results)


def test_numpy_there_and_back(rng):
    gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
    ids, weights = oracle.random_routing(rng, 9, 2, 4)
    x = rng.standard_normal((9, 256)).astype(np.float16)
    y = bf.experts(x, gate_up, down, ids, weights, backend="cuda")
    assert_same_bits(y, bf.experts(sent(x), gate_up, down, sent(ids), sent(weights)).cpu().numpy())
    with pytest.raises(DataError, match="ids"):
        bf.experts(x, gate_up, down, ids + 4, weights, backend="cuda")


def test_cupy(rng):
    cupy = pytest.importorskip("cupy")
    w = oracle.random_stack(rng, 4, 64, 256)
    ids, _ = oracle.random_routing(rng, 9, 2, 4)
    x = rng.standard_normal((9, 256)).astype(np.float16)
    y = bf.expert_linear(cupy.asarray(x), w, cupy.asarray(ids))
    assert isinstance(y, cupy.ndarray)
    assert_same_bits(y.get(), bf.expert_linear(sent(x), w, sent(ids)).cpu().numpy())
