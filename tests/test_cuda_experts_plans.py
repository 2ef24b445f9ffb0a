"""Products with experts on CUDA, as far as they are known without a GPU: routing, plans, packing, compiling."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import expert_oracle as oracle
import numpy as np
import pytest
from cuda_fake import FakeDriver
from cuda_on_cpu import EMULATED, translated
from kept import kept
from test_cuda import ADA, H200, SAMPLES, name_of, resources

import billfish as bf
from billfish.backends.cuda import DeviceExperts
from billfish.backends.cuda.compile import SOURCES
from billfish.backends.cuda.driver import signature
from billfish.backends.cuda.expert_plans import Routing, plan_experts
from billfish.backends.cuda.expert_weights import by_turns, joined, pack_gate_up
from billfish.backends.cuda.experts import ENTRY_BYTES, WEIGHT_TYPES, Numbers, Visits, route_shape
from billfish.backends.cuda.kind import Kind
from billfish.backends.cuda.memory import OurRoom, fetch
from billfish.backends.cuda.packed import PackedBricks
from billfish.backends.cuda.plans import Gemm
from billfish.gates import open_gate

U4B8 = Kind("Int4", "ScaleF16", "NONE", 1)
WIDTHS = {1: 1, 2: 2, 3: 4, 8: 8, 16: 8, 30: 16, 64: 32, 128: 64, 1024: 128, 4096: 128}  # tokens of Mixtral -> width


# ---- routing, gathering and mixing, run on the CPU ------------------------------------------------------------------


@cache
def emulated() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    names = ("device.cuh", "route.cu", "gather.cu", "gate.cu", "mix.cu")
    files = {name: translated((SOURCES / name).read_text()) for name in names}
    files |= {name: (EMULATED / name).read_text() for name in ("ptx.h", "warps.h", "experts.cpp")}
    command = [compiler, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-pthread", "experts.cpp"]

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            result = subprocess.run([*command, "-o", path], cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]

    return ctypes.CDLL(str(kept("experts.so", (files, command), compile_to)))


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def routed(ids: np.ndarray, experts: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The table and the order that route.cu makes, with guards behind both."""
    tokens, chosen = ids.shape
    entries = Routing(tokens, chosen, experts).entries(width)
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
    emulated().mix(at(x), at(ids), at(weights), at(y), 5, 4, 3, n)
    expected = np.zeros((5, n), np.float32)
    for j in range(3):
        expected += weights[:, j, None] * x[:, j]
    assert np.isnan(y[2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(y[others].astype(np.float32), expected[others], rtol=1e-3, atol=1e-6)


# ---- plans ----------------------------------------------------------------------------------------------------------


def gemm(routing: Routing, n: int, k: int, kind: Kind = U4B8, gate: str | None = None) -> Gemm:
    return Gemm(kind, routing.visits, n, k, gate=gate, batch_invariant=routing.batch_invariant)


@pytest.mark.parametrize(("tokens", "width"), WIDTHS.items())
def test_tiles_are_as_wide_as_most_experts_have_rows(tokens, width):
    assert Routing(tokens, 2, 8).width(H200) == width
    assert Routing(tokens, 2, 8).width(ADA) == min(width, 32)
    assert Routing(tokens, 2, 8, batch_invariant=True).width(H200) == min(width, 32)


def test_the_table_has_room_for_every_routing():
    for tokens, chosen, experts in ((1, 1, 1), (5, 2, 8), (40, 4, 32), (300, 2, 8), (7, 8, 128)):
        routing = Routing(tokens, chosen, experts)
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
                routing = Routing(tokens, 2, 8, invariant)
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
    routings = [Routing(tokens, 2, 8, batch_invariant=True) for tokens in (1, 3, 9, 40, 1000)]
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
            warps, shared = route_shape(Routing(tokens, 2, experts), device)
            assert 2 <= warps <= 32
            assert shared <= device.shared_bytes
    assert ENTRY_BYTES == 16


# ---- compiling, for GPUs that are not there -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_the_kernels_around_products_compile(arch):
    for id_type in ("int", "unsigned", "long long"):
        resources("route.cu", {"ID": id_type, "WARPS": "32"}, arch)
    resources("gather.cu", {}, arch)
    for weight in WEIGHT_TYPES.values():
        resources("mix.cu", {"TYPE": "BF16" if weight == "Float" else "F16", "ID": "int", "WEIGHT": weight}, arch)


@pytest.mark.parametrize("tokens", [1, 4, 16, 30, 64, 128, 1024])
def test_what_the_h200_runs_compiles_without_spills(tokens):
    routing = Routing(tokens, 2, 8)
    for asked in (gemm(routing, 28672, 4096, gate="silu"), gemm(routing, 4096, 14336)):
        launch = plan_experts(asked, routing, H200).launch
        resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize("kind", SAMPLES, ids=name_of)
def test_every_kind_compiles_without_spills(kind):
    for i, tokens in enumerate((2, 40, 600)):
        routing = Routing(tokens, 2, 8)
        asked = replace(gemm(routing, 4096, 4096, kind, "clamped_silu" if i else None), bfloat16=kind.groups in (1, 4))
        launch = plan_experts(asked, routing, H200).launch
        resources(launch.source, dict(launch.macros), "sm_90a")


def test_few_rows_compile_for_other_gpus():
    for tokens in (1, 20):
        routing = Routing(tokens, 2, 8)
        launch = plan_experts(gemm(routing, 4096, 4096), routing, ADA).launch
        resources(launch.source, dict(launch.macros), "sm_89")


def test_a_launch_takes_what_the_kernel_takes():
    known = {"route": "pppiii", "gather": "pppppiiiiii", "mix": "ppppiii"}
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


@pytest.mark.parametrize("format", ["u4b8", "q4_0", "nvfp4", "q4_k"])
def test_a_stack_is_packed_as_its_experts_are(fake, format):
    stack = oracle.random_stack(np.random.default_rng(0), 3, 40, 512, format)
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


def test_gate_and_up_lie_by_turns(fake):
    rng = np.random.default_rng(0)
    stack = oracle.random_stack(rng, 2, 48, 256)
    pair = [stack.take_rows(np.arange(first, first + 24)) for first in (0, 24)]
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
    visits = Visits(Nothing(0), Routing(tokens, 1, 8), Numbers(0, "int32"), False)
    visits.open_gate(0, 0, "silu", 56 * 256 - 3)
    assert launched == [(ctas, (tokens, 56 * 256 - 3, 56 * 256))]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9, 64])
def test_a_block_is_five_launches(monkeypatch, hopper, tokens):
    sizes = HOPPER | {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448} if hopper else {}
    monkeypatch.setattr(FakeDriver, "ATTRIBUTES", FakeDriver.ATTRIBUTES | sizes)
    monkeypatch.setattr("billfish.backends.cuda.check_compiler", lambda: None)
    fake, rng = FakeDriver(monkeypatch), np.random.default_rng(0)
    try:
        gate_up, down = oracle.random_stack(rng, 4, 64, 256), oracle.random_stack(rng, 4, 256, 32)
        up = oracle.random_stack(rng, 4, 32, 256, "q8_0")
        ids, weights = oracle.random_routing(rng, tokens, 2, 4)
        x = rng.standard_normal((tokens, 256)).astype(np.float16)
        gemm = "gemm_large.cu" if hopper and tokens == 64 else "gemm_small.cu"

        def launches(run: object) -> list[str]:
            run()  # the first call packs
            before = len(fake.launches)
            assert run().shape[0] == tokens
            return fake.launches[before:]

        block = launches(lambda: bf.experts(x, gate_up, down, ids, weights, backend="cuda"))
        pair = gate_up.take_rows(np.arange(32)), up
        biases = (None, np.zeros((4, 32), np.float32))
        apart = launches(
            lambda: bf.experts(x, pair, down, ids, weights, gate_up_biases=biases, activation="gelu", backend="cuda")
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
    monkeypatch.setattr("billfish.backends.cuda.check_compiler", lambda: None)
    w = oracle.random_stack(np.random.default_rng(0), 2, 16, 256)
    with pytest.raises(bf.BackendUnavailable, match="float16 and bfloat16"):
        bf.expert_linear(np.ones((1, 256), np.float32), w, np.zeros((1, 1), np.int32), backend="cuda")
