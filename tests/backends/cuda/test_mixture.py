"""Mixtures inside a step on a GPU, against float64: every kind of router, formats, numbers of rows, graphs.

Without an NVIDIA GPU these are skipped; test_mixture_launches.py needs none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_mixtures import RandomMixture, step_for
from mixture_oracle import ROUTERS, Router, RouterKind

from billfish.backends.cuda.decoder import captured
from billfish.backends.cuda.driver import (
    Stream,
    check,
    compile_together,
    copy_in,
    copy_out,
    current,
    device,
    driver,
    synchronize,
)
from billfish.backends.cuda.launcher import Launcher, sent
from billfish.backends.cuda.mixture_step import DeviceDenseAndMixture
from billfish.backends.cuda.step_memory import Batch, StepMemory
from billfish.core.errors import BackendUnavailable

try:
    device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

ROWS = (1, 2, 7, 33, 300)
ROUNDED = {False: 6e-3, True: 5e-2}  # float16 and bfloat16, of the largest number
FORMATS = ("q4_0", "q8_0", "mxfp4", "q4_k", "f16")


def as_type(numbers: np.ndarray, bfloat16: bool) -> tuple[np.ndarray, np.ndarray]:
    """The bits of numbers as x has them, and the numbers that these bits are."""
    if not bfloat16:
        half = numbers.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float64)
    words = numbers.astype(np.float32).view(np.uint32)
    bits = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    return bits, numbers_of(bits, True).astype(np.float64)


def numbers_of(bits: np.ndarray, bfloat16: bool) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32) if bfloat16 else bits.view(np.float16)


class Run:
    """A part of a model in a step of its own."""

    def __init__(self, part: Any, hidden: int, rows: int, *, bfloat16: bool = False, invariant: bool = False) -> None:
        self.part, self.hidden, self.bfloat16 = part, hidden, bfloat16
        self.launcher = Launcher(hidden, 1e-5, bfloat16=bfloat16)
        self.launcher.batch_invariant = invariant
        self.step: StepMemory = step_for(part.memory, rows, hidden)
        self.stream = Stream(0)
        with current(0):
            for name in part.memory(rows):  # what is read must have been written before
                check(driver().cuMemsetD8(self.step.at(name), 0xFF, max(16, part.memory(rows)[name])), "clearing")

    def __call__(self, x: np.ndarray, hidden: np.ndarray | None = None) -> np.ndarray:
        """y of x, bits [rows, hidden]."""
        batch = Batch(len(x), len(x))
        with current(0):
            copy_in(self.step.at("x"), x, 0)
            if hidden is not None:
                copy_in(self.step.at("hidden"), hidden, 0)
            self.launcher.heard = set()
            self.part.run(self.launcher, 0, self.step, batch)
            heard, self.launcher.heard = self.launcher.heard, None
            compile_together(heard, 0)
            self.part.run(self.launcher, self.stream.pointer, self.step, batch)
            return self.read("added", (len(x), self.hidden), np.uint16)

    def read(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        with current(0):
            copy_out(array, self.step.at(name), self.stream.pointer)
        return array


def check_rows(
    model: RandomMixture, rows: int, *, bfloat16: bool = False, invariant: bool = False, seed: int = 1
) -> None:
    rng = np.random.default_rng(seed + rows)
    bits, x = as_type(rng.standard_normal((rows, model.hidden)), bfloat16)
    run = Run(model.part, model.hidden, rows, bfloat16=bfloat16, invariant=invariant)
    y = numbers_of(run(bits), bfloat16).astype(np.float64)
    chosen = model.router.chosen
    ids = run.read("expert_ids", (rows, chosen), np.int32)
    apart = chosen + (model.part.shared is not None)
    weights = run.read("expert_weights", (rows, apart), np.float32)[:, :chosen]
    expected_ids, expected_weights = model.routed(x)
    same = (ids == expected_ids).all(axis=1)
    assert same.sum() >= rows - 1 - rows // 100, (ids, expected_ids)  # but for near ties
    np.testing.assert_allclose(weights[same], expected_weights[same], rtol=1e-3, atol=1e-5)
    expected = model.expected(x, ids, weights)
    assert np.isfinite(y).all()
    error = np.abs(y - expected).max() / np.abs(expected).max()
    assert error < ROUNDED[bfloat16], (rows, error)


@pytest.mark.parametrize("kind", ROUTERS.values(), ids=ROUTERS)
def test_every_router(kind):
    model = RandomMixture(kind)
    for rows in ROWS:
        check_rows(model, rows)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_every_format(format, bfloat16):
    model = RandomMixture(ROUTERS["softmax"], (format,) * 3, hidden=512, size=256)
    for rows in ROWS:
        check_rows(model, rows, bfloat16=bfloat16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.full
def test_every_router_with_every_format(kind, format):
    model = RandomMixture(kind, (format,) * 3, hidden=256, size=256)
    for rows in ROWS:
        check_rows(model, rows)


OTHERS = {
    "gpt-oss": {"kind": RouterKind(Router(4)), "formats": ("mxfp4",) * 3, "activation": "clamped_silu", "biased": True},
    "a shared expert": {"kind": ROUTERS["sigmoid"], "shared": "plain"},
    "a gated shared expert": {"kind": ROUTERS["softmax"], "shared": "gated"},
    "gelu": {"kind": ROUTERS["softmax, scaled by expert"], "activation": "gelu"},
    "gate and up of two kinds": {"kind": ROUTERS["softmax"], "formats": ("q4_0", "q8_0", "q4_0"), "biased": True},
    "many experts": {"kind": RouterKind(Router(10)), "experts": 512, "size": 32, "shared": "gated"},
    "sixteen experts, with a gate more than a course": {
        "kind": RouterKind(Router(8)),
        "experts": 16,
        "shared": "gated",
    },
    "two and a half bricks": {"kind": RouterKind(Router(4)), "hidden": 320, "size": 96, "experts": 32},
}


@pytest.mark.parametrize("about", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_other_parts(about, bfloat16):
    model = RandomMixture(**about)
    for rows in (*ROWS, 64, 255, 257):
        check_rows(model, rows, bfloat16=bfloat16)


def test_a_dense_part_and_experts_side_by_side():
    model, dense = (
        RandomMixture(ROUTERS["softmax, scaled by expert"], activation="gelu"),
        RandomMixture(ROUTERS["softmax"], shared="plain", activation="gelu", seed=7),
    )
    rng = np.random.default_rng(0)
    norms = [(1 + 0.2 * rng.standard_normal(256)).astype(np.float32) for _ in range(4)]
    part = DeviceDenseAndMixture(dense.part.shared, model.part, *(sent(norm, 0) for norm in norms))

    def normalized(v: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return v / np.sqrt((v * v).mean(axis=1, keepdims=True) + 1e-5) * weight

    for rows in ROWS:
        hidden = rng.standard_normal((rows, 256)).astype(np.float32) * 3
        bits, x = as_type(rng.standard_normal((rows, 256)), False)
        run = Run(part, 256, rows)
        y = numbers_of(run(bits, hidden), False).astype(np.float64)
        ids = run.read("expert_ids", (rows, 2), np.int32)
        weights = run.read("expert_weights", (rows, 2), np.float32)
        mixed = normalized(hidden.astype(np.float64), norms[2])
        expected_ids, _ = model.routed(normalized(hidden.astype(np.float64), norms[1]))
        assert (ids == expected_ids).all(axis=1).sum() >= rows - 1 - rows // 30
        every = np.zeros((rows, 0), np.int32), np.zeros((rows, 0))
        first = normalized(dense.expected(x, *every), norms[0])
        expected = first + normalized(model.expected(mixed, ids, weights), norms[3])
        assert np.abs(y - expected).max() / np.abs(expected).max() < 2 * ROUNDED[False]


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
def test_graphs_follow_the_routing(rows):
    model = RandomMixture(ROUTERS["sigmoid"], shared="gated")
    rng, run = np.random.default_rng(0), Run(model.part, 256, rows)
    inputs = [as_type(rng.standard_normal((rows, 256)), False)[0] for _ in range(3)]
    expected = [run(x) for x in inputs]
    d, batch = driver(), Batch(rows, rows)
    with current(0):
        synchronize(run.stream.pointer)
        graph = captured(lambda stream: run.part.run(run.launcher, stream, run.step, batch), run.stream.pointer)
        for x, y in zip(inputs, expected, strict=True):
            copy_in(run.step.at("x"), x, run.stream.pointer)
            for _ in range(5):
                check(d.cuGraphLaunch(graph, run.stream.pointer), "a graph")
            assert (run.read("added", y.shape, np.uint16) == y).all()
        check(d.cuGraphExecDestroy(graph), "a graph")


def test_the_same_bits_in_any_batch():
    model = RandomMixture(RouterKind(Router(4)), ("mxfp4",) * 3, hidden=320, size=160, experts=16, biased=True)
    rng = np.random.default_rng(0)
    bits, _ = as_type(rng.standard_normal((100, 320)), False)
    run = Run(model.part, 320, 100, invariant=True)
    alone = np.concatenate([run(bits[i : i + 1]) for i in range(100)])
    for rows in (2, 7, 9, 33, 65, 100):
        assert (run(bits[:rows]) == alone[:rows]).all(), rows
