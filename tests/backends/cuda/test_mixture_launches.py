"""Mixtures inside a step without a GPU: which kernels are launched, that they compile, and that memory suffices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_compiled import H200, resources
from cuda_fake import FakeDriver
from cuda_mixtures import RandomMixture, step_for
from mixture_oracle import ROUTERS, Router, RouterKind

from billfish.backends.cuda import step_memory
from billfish.backends.cuda.driver import signature
from billfish.backends.cuda.launcher import Launcher, sent
from billfish.backends.cuda.mixture_step import DeviceDenseAndMixture
from billfish.backends.cuda.step_memory import Batch

HOPPER = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
}


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeDriver, "ATTRIBUTES", FakeDriver.ATTRIBUTES | HOPPER)
    monkeypatch.setattr(FakeDriver, "cuMemsetD8", lambda *_: (0,), raising=False)
    made = FakeDriver(monkeypatch)
    monkeypatch.setattr(step_memory, "driver", lambda: made)
    yield made
    made.forget()


def launched(fake, part, rows: int, hidden: int = 256) -> list[str]:
    before = len(fake.launches)
    part.run(Launcher(hidden, 1e-5), 0, step_for(part.memory, rows, hidden), Batch(rows, rows))
    return fake.launches[before:]


def test_one_row_is_four_launches_and_a_few_are_five(fake):
    part = RandomMixture(ROUTERS["softmax"]).part
    small, large = ["gemm_small.cu"] * 2, ["gemm_large.cu"] * 2
    assert launched(fake, part, 1) == ["router.cu", *small, "mix.cu"]
    assert launched(fake, part, 7) == ["router.cu", "gather.cu", *small, "mix.cu"]
    assert launched(fake, part, 64) == ["router.cu", "gather.cu", *large, "mix.cu"]
    assert launched(fake, part, 257) == ["router.cu", "route.cu", "gather.cu", *large, "mix.cu"]


def test_only_the_first_product_behind_the_router_waits_for_the_table(fake):
    part = RandomMixture(ROUTERS["softmax"], ("q4_0", "q8_0", "q4_0")).part
    for rows, expected in ((1, [True, False, False]), (2, [False] * 3)):
        maker = Launcher(256, 1e-5)
        fake._kernels.clear()
        fake.forget()
        part.run(maker, 0, step_for(part.memory, rows, 256), Batch(rows, rows))
        products = [macros for source, macros in fake._kernels if source == "gemm_small.cu"]
        assert [("FRESH" in macros) for macros in products] == expected
        assert "gate.cu" in [source for source, _ in fake._kernels]


def test_a_shared_expert_and_a_dense_part_come_first(fake):
    mixture = RandomMixture(ROUTERS["sigmoid"], shared="gated").part
    experts = ["router.cu", "gemm_small.cu", "gemm_small.cu", "mix.cu"]
    assert launched(fake, mixture, 1) == ["gemm_small.cu", "gemm_small.cu", *experts]
    assert len(mixture.matrices) == 2
    dense, norm = mixture.shared, sent(np.ones(256, np.float32), 0)
    both = DeviceDenseAndMixture(dense, RandomMixture(ROUTERS["softmax"]).part, norm, norm, norm, norm)
    beside = ["gemm_small.cu", "gemm_small.cu", "normalize.cu", "normalize.cu"]
    assert launched(fake, both, 1) == [*beside, "router.cu", "gather.cu", *experts[1:], "add_norms.cu"]


def test_what_would_be_launched_is_heard(fake):
    part = RandomMixture(ROUTERS["softmax"]).part
    maker = Launcher(256, 1e-5)
    maker.heard, before = set(), len(fake.launches)
    part.run(maker, 0, step_for(part.memory, 9, 256), Batch(9, 9))
    assert len(fake.launches) == before
    assert {launch.source for launch in maker.heard} == {"router.cu", "gather.cu", "gemm_small.cu", "mix.cu"}


def test_limits_are_said(fake):
    router = RandomMixture(ROUTERS["softmax"]).part.router
    assert router.why_not() == ""
    assert "33" in replace(router, chosen=33, experts=64).why_not()
    assert "2000" in replace(router, experts=2000).why_not()
    assert "40" in replace(router, groups=40).why_not()


@pytest.mark.parametrize("kind", [ROUTERS["softmax"], RouterKind(Router(8))], ids=["few", "many"])
def test_parts_of_one_key_launch_the_same(fake, kind):
    first, second = (RandomMixture(kind, seed=seed).part for seed in (0, 1))
    assert first.key == second.key
    assert first.key != RandomMixture(kind, shared="plain").part.key
    assert first.key != RandomMixture(kind, biased=True).part.key


ROUTER = {"ROWS": "8", "WARPS": "16", "EACH": "4", "SIGMOIDAL": "0", "RENORMALIZED": "1", "SHARED": "0", "SORTED": "1"}


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.full) for arch in ("sm_80", "sm_100"))]
)
def test_kernels_compile_without_spills(arch):
    resources("router.cu", ROUTER | {"TYPE": "F16"}, arch)
    more = {"ROWS": "32", "EACH": "16", "SIGMOIDAL": "1", "SHARED": "2", "SORTED": "0"}
    resources("router.cu", ROUTER | more | {"TYPE": "BF16"}, arch)
    resources("add_norms.cu", {"TYPE": "BF16", "HIDDEN": "2816", "THREADS": "352"}, arch)


def test_a_product_that_waits_for_the_table_compiles(fake):
    part = RandomMixture(ROUTERS["softmax"], hidden=2048, size=64).part
    maker = Launcher(2048, 1e-5)
    maker.heard = set()
    part.run(maker, 0, step_for(part.memory, 1, 2048), Batch(1, 1))
    [waiting] = [launch for launch in maker.heard if ("FRESH", "1") in launch.macros]
    assert waiting.shared_bytes <= H200.shared_bytes
    resources(waiting.source, dict(waiting.macros), "sm_90a")


def test_a_launch_takes_what_the_kernel_takes():
    assert signature("router.cu", "marlin_router") == "p" * 13 + "i" * 8 + "f"
    assert signature("add_norms.cu", "marlin_add_norms") == "pppppf"
