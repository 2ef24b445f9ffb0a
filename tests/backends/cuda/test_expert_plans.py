"""Products with experts on CUDA, as far as they are known without a GPU: plans, packing, compiling, launches."""

from __future__ import annotations

from dataclasses import replace

import expert_oracle as oracle
import numpy as np
import pytest
from cases import first
from cuda_compiled import ADA, H200, SAMPLES, case, name_of, resources
from cuda_fake import FakeDriver

import billfish as bf
from billfish.backends.base import ExpertBlock
from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.driver import signature
from billfish.backends.cuda.experts import (
    ENTRY_BYTES,
    WEIGHT_TYPES,
    DeviceExperts,
    Numbers,
    Visits,
    _gate_up_biases,
    by_turns,
    joined,
    pack_gate_up,
    route_shape,
)
from billfish.backends.cuda.memory import OurRoom, fetch
from billfish.backends.cuda.packed import PackedBricks
from billfish.backends.cuda.plans import ExpertRouting, Gemm, plan_experts
from billfish.core.arrays import Input

U4B8 = Kind("Int4", "ScaleF16", "NONE", 1)
# Tokens of Mixtral -> width, where gemm_large is there and where it is not.
WIDTHS = {1: 1, 2: 2, 3: 4, 8: 8, 16: (16, 8), 30: 16, 64: 32, 128: (64, 32), 1024: (128, 32), 4096: (128, 32)}


# ---- plans ----------------------------------------------------------------------------------------------------------


def gemm(routing: ExpertRouting, n: int, k: int, kind: Kind = U4B8, gate: str | None = None) -> Gemm:
    return Gemm(kind, routing.visits, n, k, gate=gate, batch_invariant=routing.batch_invariant)


@pytest.mark.parametrize(("tokens", "widths"), WIDTHS.items())
def test_tiles_are_as_wide_as_most_experts_have_rows(tokens, widths):
    large, small = widths if isinstance(widths, tuple) else (widths, widths)
    assert ExpertRouting(tokens, 2, 8).width(H200) == large
    assert ExpertRouting(tokens, 2, 8).width(ADA) == small
    assert ExpertRouting(tokens, 2, 8, batch_invariant=True).width(H200) == small


def test_the_table_has_room_for_every_routing():
    for tokens, chosen, experts in ((1, 1, 1), (5, 2, 8), (40, 4, 32), (300, 2, 8), (7, 8, 128)):
        routing = ExpertRouting(tokens, chosen, experts)
        for width in (1, 8, 32, 128):
            busy = min(experts, routing.visits)
            worst = [
                routing.visits - busy + 1,
                *([1] * (busy - 1)),
            ]  # each expert's last entry is as empty as it can be
            even = [len(part) for part in np.array_split(np.arange(routing.visits), busy)]
            one_more = [width + 1] * (routing.visits // (width + 1))
            for rows in (worst, even, one_more[:experts]):
                assert sum(-(-count // width) for count in rows) <= routing.entries(width)
            assert 0 < routing.expected(width) <= routing.entries(width)


@pytest.mark.parametrize("device", [H200, ADA], ids=lambda d: d.name)
@pytest.mark.parametrize("kind", SAMPLES, ids=name_of)
def test_plans_fit_the_device(kind, device):
    for tokens in (1, 4, 9, 30, 64, 128, 1024):
        for n, k in ((1, 128), (768, 2048), (28672, 4096), (4096, 14336)):
            for invariant in (False, True):
                routing = ExpertRouting(tokens, 2, 8, invariant)
                found = plan_experts(gemm(routing, n, k, kind), routing, device)
                launch, macros = found.launch, dict(found.launch.macros)
                assert launch.shared_bytes <= device.shared_bytes
                assert launch.cluster == 1
                assert int(macros["EXPERTS"]) == routing.width(device)
                if launch.source == "gemm_large.cu":
                    assert int(macros["STAGES"]) > 2
                    assert device is H200
                    assert found.box_rows == int(macros["WIDTH"])
                else:
                    assert int(macros["EXPERTS"]) <= int(macros["ROWS"])
                    assert found.box_rows == (1 if macros["ALONE"] == "1" else min(int(macros["ROWS"]), 2 * tokens))
                walks = device is H200 and not invariant
                assert not walks or launch.grid[0] <= device.multiprocessors * int(macros.get("RESIDENT", 1))


def test_batch_invariance_fixes_the_order_of_additions():
    routings = [ExpertRouting(tokens, 2, 8, batch_invariant=True) for tokens in (1, 3, 9, 40, 1000)]
    launches = [plan_experts(gemm(routing, 4096, 4096 + 128), routing, H200).launch for routing in routings]
    assert {dict(launch.macros)["TEAMS"] for launch in launches} == {"8"}
    for routing, launch in zip(routings, launches, strict=True):  # every CTA begins with its only pass
        assert launch.grid[0] == routing.entries(routing.width(H200)) * 4096 // 16 // int(
            dict(launch.macros)["COURSES"]
        )


@pytest.mark.parametrize("experts", [1, 8, 128, 1024])
def test_routing_fits_the_device(experts):
    for tokens in (1, 100, 10_000):
        for device in (H200, ADA):
            warps, shared = route_shape(ExpertRouting(tokens, 2, experts), device)
            assert 2 <= warps <= 32
            assert shared <= device.shared_bytes
    assert ENTRY_BYTES == 16


# ---- compiling, for GPUs that are not there -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", first(1, ["sm_90a", "sm_80", "sm_100"]))
def test_the_kernels_around_products_compile(arch):
    for id_type in ("int", "unsigned", "long long"):
        resources("route.cu", {"ID": id_type, "WARPS": "32"}, arch)
    resources("gather.cu", {}, arch)
    for weight in WEIGHT_TYPES.values():
        resources("mix.cu", {"TYPE": "BF16" if weight == "Float" else "F16", "ID": "int", "WEIGHT": weight}, arch)


@pytest.mark.parametrize("tokens", first(1, [1024, 16, 1, 4, 30, 64, 128]))
def test_what_the_h200_runs_compiles_without_spills(tokens):
    routing = ExpertRouting(tokens, 2, 8)
    for asked in (gemm(routing, 28672, 4096, gate="silu"), gemm(routing, 4096, 14336)):
        launch = plan_experts(asked, routing, H200).launch
        resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize("kind", [case(kind, often=i == 10) for i, kind in enumerate(SAMPLES)])
def test_every_kind_compiles_without_spills(kind):
    for i, tokens in enumerate((2, 40, 600)):
        routing = ExpertRouting(tokens, 2, 8)
        asked = replace(gemm(routing, 4096, 4096, kind, "clamped_silu" if i else None), bfloat16=kind.groups in (1, 4))
        launch = plan_experts(asked, routing, H200).launch
        resources(launch.source, dict(launch.macros), "sm_90a")


def test_few_rows_compile_for_other_gpus():
    for tokens in (1, 20):
        routing = ExpertRouting(tokens, 2, 8)
        launch = plan_experts(gemm(routing, 4096, 4096), routing, ADA).launch
        resources(launch.source, dict(launch.macros), "sm_89")


def test_a_launch_takes_what_the_kernel_takes():
    known = {"route": "pppiii", "gather": "pppppiiiiii", "mix": "pppppiiii"}
    for name, letters in known.items():
        assert signature(f"{name}.cu", f"marlin_{name}") == letters
    for size in ("small", "large"):
        assert signature(f"gemm_{size}.cu", f"marlin_experts_{size}") == "mpppppppiiii"


# ---- packing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    driver = FakeDriver(monkeypatch)
    yield driver
    driver.forget()


def bytes_of(experts: DeviceExperts) -> np.ndarray:
    with OurRoom(0).current():
        return fetch(experts.bricks, OurRoom(0), np.uint8, (experts.bricks.nbytes,))


@pytest.mark.parametrize("at_once", [1, 30000, 1 << 24])
@pytest.mark.parametrize("format", ["u4b8", "q4_0", "mxfp4_gguf", "nvfp4", "q4_k"])
def test_a_stack_is_packed_as_its_experts_are(fake, monkeypatch, format, at_once):
    monkeypatch.setattr("billfish.backends.cuda.experts.AT_ONCE", at_once)
    stack = oracle.random_stack(np.random.default_rng(0), 11, 40, 512, format)
    packed = DeviceExperts.pack(stack, "cpu")
    alone = [PackedBricks.of(matrix) for matrix in stack]
    assert (bytes_of(packed) == np.concatenate([one.bricks for one in alone])).all()
    assert packed.shape == stack.shape
    assert {one.kind for one in alone} == {packed.kind}


def test_experts_of_two_kinds_get_float32_scales(fake):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 16, 256)).astype(np.float32)
    w[1, :, 32:] *= 1e-12
    stack = bf.quantize(w, "mxfp4", method="rtn")
    assert [PackedBricks.of(matrix).kind.scale for matrix in stack] == ["ScaleE5M2", "ScaleF32"]
    packed = DeviceExperts.pack(stack, "cpu")
    assert packed.kind.scale == "ScaleF32"
    assert len(bytes_of(packed)) == 2 * 2 * packed.kind.brick_bytes


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_gate_and_up_lie_by_turns(fake, monkeypatch, at_once):
    rng = np.random.default_rng(0)
    stack = oracle.random_stack(rng, 2, 48, 256)
    pair = [stack.take_rows(np.arange(first, first + 24)) for first in (0, 24)]
    monkeypatch.setattr("billfish.backends.cuda.experts.AT_ONCE", at_once)
    order = by_turns(24)
    assert order[:17].tolist() == [*range(8), *range(24, 32), 8]
    expected = bytes_of(DeviceExperts.pack(stack.take_rows(order), "cpu"))
    for given in ([stack], pair):
        (packed,) = pack_gate_up(given, "cpu")
        assert packed.gated
        assert (bytes_of(packed) == expected).all()


def test_gate_and_up_that_cannot_be_one_stay_two(fake):
    rng = np.random.default_rng(0)
    gate, up = (oracle.random_stack(rng, 2, 24, 256, format) for format in ("q4_0", "q8_0"))
    odd = oracle.random_stack(rng, 2, 40, 256)  # I = 20
    scaled = [oracle.random_stack(rng, 2, 24, 256, "nvfp4") for _ in range(2)]  # each with scales of all of W
    assert joined(*scaled) is None
    for given in ([gate, up], [odd], scaled):
        packed = pack_gate_up(given, "cpu")
        assert len(packed) == 2
        assert not any(part.gated for part in packed)
        assert sum(part.shape[1] for part in packed) == sum(stack.shape[1] for stack in given)


def test_a_stack_without_biases_gets_zeros_beside_one_that_has_some():
    """Whatever numbers the other has."""

    class Joining:
        dtype = "float16"

        def joined(self, arrays, *types):
            return np.concatenate([array.numpy() for array in arrays], axis=1)

    biases = np.array([[np.inf, np.nan], [1, -2]], np.float32)
    given = ExpertBlock(*[None] * 3, [None], None, 2, 2, [Input("experts", "b", biases), None], None, "silu")
    (found,) = _gate_up_biases(Joining(), given)
    np.testing.assert_array_equal(found, np.hstack([biases, np.zeros((2, 2), np.float32)]))


# ---- a call ---------------------------------------------------------------------------------------------------------


AROUND = ["route.cu", "gather.cu"]
HOPPER = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0, "MULTIPROCESSOR_COUNT": 132}


@pytest.mark.parametrize(("tokens", "ctas"), [(1, 56), (20, 20 * 56), (1 << 18, 73 * 56)])
def test_more_numbers_than_an_int_counts_pass_their_gates(fake, tokens, ctas):
    class Nothing(OurRoom):
        def empty(self, nbytes):
            return super().empty(0)

    launched = []
    fake.launch = lambda function, grid, values: launched.append((grid[0], values[3:]))
    visits = Visits(Nothing(0), ExpertRouting(tokens, 1, 8), Numbers(0, "int32"), False)
    visits.open_gate(0, 0, "silu", 56 * 256 - 3)
    assert launched == [(ctas, (tokens, 56 * 256 - 3, 56 * 256))]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9, 64])
def test_a_block_is_five_launches(monkeypatch, hopper, tokens):
    sizes = HOPPER | {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448} if hopper else {}
    monkeypatch.setattr(FakeDriver, "ATTRIBUTES", FakeDriver.ATTRIBUTES | sizes)
    monkeypatch.setattr("billfish.backends.cuda.backend.check_compiler", lambda: None)
    fake, rng = FakeDriver(monkeypatch), np.random.default_rng(0)
    try:
        gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
        up = oracle.random_stack(rng, 4, 32, 256, "q8_0")
        ids, weights = oracle.random_routing(rng, tokens, 2, 4)
        x = rng.standard_normal((tokens, 256)).astype(np.float16)
        gemm = "gemm_large.cu" if hopper and tokens > 8 else "gemm_small.cu"

        def launches(run: object) -> list[str]:
            run()  # the first call packs
            before = len(fake.launches)
            assert run().shape[0] == tokens
            return fake.launches[before:]

        block = launches(lambda: bf.experts(x, gate_up, down, ids, weights, backend="cuda"))
        pair = gate_up.take_rows(np.arange(32)), up
        biases = (None, np.zeros((4, 32), np.float32))
        apart = launches(
            lambda: bf.experts(x, pair, down, ids, weights, gate_up_biases=biases, hidden_act="gelu", backend="cuda")
        )
        linear = launches(lambda: bf.expert_linear(x, gate_up, ids, backend="cuda"))
        if tokens == 0:
            assert block == apart == linear == []
        else:
            assert block == [*AROUND, gemm, gemm, "mix.cu"]
            assert apart == [*AROUND, gemm, gemm, "gate.cu", gemm, "mix.cu"]
            assert linear == [*AROUND, gemm]
    finally:
        fake.forget()


def test_float32_is_refused_by_name(fake, monkeypatch):
    monkeypatch.setattr("billfish.backends.cuda.backend.check_compiler", lambda: None)
    w = oracle.random_stack(np.random.default_rng(0), 2, 16, 256)
    with pytest.raises(bf.BackendUnavailable, match="float16 and bfloat16"):
        bf.expert_linear(np.ones((1, 256), np.float32), w, np.zeros((1, 1), np.int32), backend="cuda")
