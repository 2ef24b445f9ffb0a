"""The kernels around products with experts on CUDA, run on the CPU: routing, gathering, gates and mixing."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
from cuda_on_cpu import at, compiled_file
from mixture_oracle import ROUTERS

from billfish.backends.cuda.plans import ExpertRouting
from billfish.core.mixture import open_gate


@cache
def emulated() -> ctypes.CDLL:
    return compiled_file(
        "experts.cpp", ("device.cuh", "route.cuh", "route.cu", "choose_experts.cuh", "gather.cu", "gate.cu", "mix.cu")
    )


def routed(ids: np.ndarray, experts: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The table and the order that route.cu makes, with guards behind both."""
    tokens, chosen = ids.shape
    entries = ExpertRouting(tokens, chosen, experts).entries(width)
    table, order = np.full((1 + entries + 1, 4), -7, np.int32), np.full(ids.size + 1, -7, np.int32)
    call = emulated().route_wide if ids.dtype == np.int64 else emulated().route
    call(at(ids), at(table), at(order), ids.size, experts, width)
    assert (table[-1] == -7).all()
    assert order[-1] == -7
    return table, order[:-1]


ROUTINGS = {
    "random": lambda rng, tokens, chosen, experts: rng.integers(0, experts, (tokens, chosen)),
    "one": lambda rng, tokens, chosen, experts: np.full((tokens, chosen), experts - 1),
    "bad ones, too": lambda rng, tokens, chosen, experts: rng.integers(-2, experts + 2, (tokens, chosen)),
    "none that is there": lambda rng, tokens, chosen, experts: np.full((tokens, chosen), experts),
}


@pytest.mark.parametrize("way", ROUTINGS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_visits_are_sorted_by_expert(way, dtype):
    rng = np.random.default_rng(0)
    for tokens, chosen, experts, width in ((1, 1, 1, 1), (1, 2, 8, 1), (3, 4, 40, 4), (70, 2, 5, 8), (300, 3, 33, 32)):
        ids = np.ascontiguousarray(ROUTINGS[way](rng, tokens, chosen, experts).astype(dtype))
        table, order = routed(ids, experts, width)
        flat = ids.ravel().astype(np.int64)
        bucket = np.where((flat < 0) | (flat >= experts), experts, flat)
        assert (order == np.argsort(bucket, kind="stable")).all()
        counts = np.bincount(bucket, minlength=experts + 1)[:experts]
        expected, first_row = [], 0
        for e, rows in enumerate(counts.tolist()):
            expected += [(e, first_row, rows, len(expected))] * -(-rows // width)
            first_row += rows
        assert tuple(table[0, :2]) == (len(expected), first_row)
        # The first entry of an expert is where its entries begin.
        begins = {e: i for i, (e, *_) in reversed(list(enumerate(expected)))}
        assert [tuple(entry) for entry in table[1 : 1 + len(expected)]] == [
            (e, row, rows, begins[e]) for e, row, rows, _ in expected
        ]


def test_rows_are_gathered_and_those_of_bad_ids_become_nan():
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 5, (13, 3)).astype(np.int32)
    table, order = routed(ids, 4, 8)
    k, stride, n = 20, 24, 11
    x = rng.standard_normal((13, stride)).astype(np.float16)
    out, y = np.zeros((39, stride), np.float16), np.zeros((39, n), np.float16)
    emulated().gather(5, at(x), at(table), at(order), at(out), at(y), 39, k, stride, stride, 3, n)
    good = int(table[0, 1])
    assert 0 < good < 39
    assert (out[:good, :k] == x[order[:good] // 3, :k]).all()
    bad = (ids.ravel() < 0) | (ids.ravel() >= 4)
    assert np.isnan(y[bad]).all()
    assert (y[~bad] == 0).all()


@pytest.mark.parametrize(("columns", "ctas"), [(8, 1), (256, 3), (600, 3), (600, 6)])
def test_gates_of_rows_that_are_shared_out(columns, ctas):
    rng = np.random.default_rng(0)
    gates, numbers = rng.standard_normal((2, 5, columns)).astype(np.float16)
    out = np.full((5, columns + 3), 9, np.float16)
    emulated().gate(ctas, at(gates), at(numbers), at(out), 5, columns, columns + 3)
    expected = open_gate(gates.astype(np.float32), numbers.astype(np.float32), "silu")
    np.testing.assert_allclose(out[:, :columns].astype(np.float32), expected, rtol=1e-3, atol=1e-6)
    assert (out[:, columns:] == 9).all()


@pytest.mark.parametrize("n", [16, 13, 4096])
def test_what_experts_gave_is_added_in_order(n):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((5, 3, n)).astype(np.float16), rng.random((5, 3)).astype(np.float32)
    ids = rng.integers(0, 4, (5, 3)).astype(np.int32)
    ids[2, 1] = 4
    y = np.zeros((5, n), np.float16)
    emulated().mix(at(x), at(ids), at(weights), None, at(y), 5, 4, 3, 3, n)
    expected = np.zeros((5, n), np.float32)
    for j in range(3):
        expected += weights[:, j, None] * x[:, j]
    assert np.isnan(y[2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(y[others].astype(np.float32), expected[others], rtol=1e-3, atol=1e-6)


def test_a_shared_expert_is_added_in_place():
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((5, 3, 24)).astype(np.float16), rng.random((5, 4)).astype(np.float32)
    ids, y = np.zeros((5, 3), np.int32), rng.standard_normal((5, 24)).astype(np.float16)
    expected = np.einsum("tj,tjn->tn", weights[:, :3], x) + weights[:, 3:] * y
    emulated().mix(at(x), at(ids), at(weights), at(y), at(y), 5, 4, 3, 4, 24)
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("how", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("experts", [8, 40])
def test_experts_are_chosen_by_their_scores(how, experts):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((9, experts)).astype(np.float32)
    logits[0] = 0.5  # of equal scores the first ones
    logits[1, 3] = -np.inf
    router = how.made(rng, experts)
    ids, weights = np.full((9, router.chosen), -1, np.int32), np.zeros((9, router.chosen), np.float32)
    bias, scale = router.selection_bias, router.expert_scale
    pointers = (
        at(logits),
        None if bias is None else at(bias),
        None if scale is None else at(scale),
        at(ids),
        at(weights),
    )
    sizes = 9, experts, router.chosen, router.groups, router.groups_used
    about = ctypes.c_float(router.scale), int(router.sigmoid), int(router.renormalized)
    emulated().choose_experts(*pointers, *sizes, *about)
    expected_ids, expected = router.chosen_of(logits)
    assert (ids == expected_ids).all()
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


def test_logits_that_are_no_numbers_spoil_weights_and_no_index():
    logits = np.array([[np.nan] * 6, [1, np.nan, 3, 2, 0, 4]], np.float32)
    ids, weights = np.full((2, 3), -1, np.int32), np.zeros((2, 3), np.float32)
    sizes = 2, 6, 3, 1, 1
    emulated().choose_experts(at(logits), None, None, at(ids), at(weights), *sizes, ctypes.c_float(1), 0, 0)
    assert ids[0].tolist() == [0, 1, 2]
    assert ids[1].tolist() == [5, 2, 3]
    assert np.isnan(weights).all()
