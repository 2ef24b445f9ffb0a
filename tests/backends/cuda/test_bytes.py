"""x in bytes on CUDA, without a GPU: bytes.cuh and quantize_rows.cu on the CPU, plans, refusals."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from cases import first
from common import options_of
from cuda_compiled import ADA, H200, case, resources
from cuda_on_cpu import at, compiled_file
from cuda_support import make

import billfish as bf
from billfish.backends import BACKENDS, Problem
from billfish.backends.cuda.axes import Kind, describe, usual_kind, why_not
from billfish.backends.cuda.layout import brick_shape, pack, split
from billfish.backends.cuda.plans import (
    BYTE_STAGE_NS,
    ROW_BYTES,
    ByteShape,
    Gemm,
    byte_plan,
    given_plan,
    launch_bytes,
    launches,
    why_as_it_is,
    why_exact,
    why_not_given,
)
from billfish.core.activations import quantize_rows
from billfish.core.format import FORMATS
from billfish.core.scales import decode_e4m3

ORDER = [k for c in range(4) for k in (2 * c, 2 * c + 8, 2 * c + 1, 2 * c + 9)]  # of bytes.cuh, in each 16 k


@cache
def emulated() -> ctypes.CDLL:
    library = compiled_file("bytes.cpp", ("device.cuh", "decode.cuh", "bytes.cuh", "row_of_x.cuh", "quantize_rows.cu"))
    for name in ("int4_fp8", "int4_int8", "e2m1_fp8", "e2m1_folded"):
        getattr(library, f"{name}_reduced").restype = ctypes.c_float
    return library


def in_order(k: int) -> np.ndarray:
    """Where the bytes of a row of x come from, for whole blocks of 16 k."""
    return (np.arange(k) // 16 * 16) + np.tile(ORDER, k // 16)


def decoded(q: bf.QuantizedTensor, name: str) -> np.ndarray:
    """W [N, K] as wgmma gets it, by PTX's picture of the A operand of m64n..k32, less its row scales: float64."""
    about, (n, k) = describe(q), q.shape
    down, along = brick_shape(n, k)
    bricks = split(about.kind, pack(about), n, k).reshape(down * along, -1).copy()
    registers = np.zeros((down, along, 32, 4, 4), np.uint32)  # lane, step of 32 k, register
    getattr(emulated(), name)(at(bricks), at(registers), down * along)
    octets = registers.view(np.uint8).reshape(down, along, 8, 4, 4, 2, 2, 4)  # g, c, step, later, upper, byte
    rows = octets.transpose(0, 6, 2, 1, 4, 5, 3, 7).reshape(down * 16, along * 128)
    numbers = {
        "int4_int8": lambda: rows.view(np.int8).astype(np.float64),
        "int4_fp8": lambda: decode_e4m3(rows).astype(np.float64),
    }.get(name, lambda: rows.view(ml_dtypes.float8_e5m2).astype(np.float64))()
    there = np.empty_like(numbers)
    there[:, in_order(along * 128)] = numbers
    values = there[:n, :k] / getattr(emulated(), f"{name}_reduced")() * about.row_scale[:, None]
    if name == "e2m1_folded":
        return values
    return values * np.repeat(about.scales.astype(np.float64), 128, axis=1)[:, :k]


CASES = {"int4_fp8": "u4b8", "int4_int8": "u4b8", "e2m1_fp8": "fp4", "e2m1_folded": "mxfp4"}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_weights_exactly(name):
    rng = np.random.default_rng(0)
    size = 32 if CASES[name] == "mxfp4" else 128
    w = rng.standard_normal((37, 384)) * np.exp2(rng.integers(-9, 1, (37, 384 // size))).repeat(size, axis=1)
    q = bf.quantize(w.astype(np.float32), CASES[name], group_size=size)
    assert np.array_equal(decoded(q, name), bf.dequantize(q).astype(np.float64))


@pytest.mark.parametrize("octaves", [0, 16, 17])
def test_powers_of_two_are_folded_over_16_octaves(octaves):
    planes = {"codes": np.tile(np.arange(16, dtype=np.uint8), (16, 16)), "scale": np.full((16, 8), 120, np.uint8)}
    planes["scale"][5, 3] -= octaves
    format = bf.get_format("mxfp4")
    q = bf.QuantizedTensor.from_storage(format, format.pack(planes), 32)
    assert describe(q).kind.narrow == (octaves <= 16)
    if octaves <= 16:
        assert np.array_equal(decoded(q, "e2m1_folded"), bf.dequantize(q).astype(np.float64))


def test_groups_of_zeros_have_any_power_of_two(monkeypatch):
    rng = np.random.default_rng(0)
    planes = {"codes": rng.integers(1, 8, (64, 256)).astype(np.uint8), "scale": np.full((64, 8), 120, np.uint8)}
    planes["codes"][:, 96:128] = 0
    planes["scale"][5, 3] = 0  # as ggml has it
    planes["scale"][6, 3] = 254
    format = bf.get_format("mxfp4_gguf")
    q = bf.QuantizedTensor.from_storage(format, format.pack(planes), 32)
    read, unpack = [], type(format).unpack_codes
    monkeypatch.setattr(type(format), "unpack_codes", lambda *of: read.append(unpack(*of)) or read[-1])
    about = describe(q)
    assert about.kind.scale == "ScaleE5M2"
    assert about.kind.narrow
    assert [codes.shape for codes in read] == [(2, 256)], "only of the rows whose scales differ much"
    monkeypatch.undo()
    assert np.array_equal(decoded(q, "e2m1_folded"), bf.dequantize(q).astype(np.float64))


@pytest.mark.parametrize(("call", "activations"), [("fp8", "fp8"), ("int8", "q8"), ("int8_of_bfloat16", "q8")])
@pytest.mark.parametrize("k", [1, 16, 100, 2048, 2200])
def test_rows_are_rounded_as_the_model_says(call, activations, k):
    rng = np.random.default_rng(1)
    type = ml_dtypes.bfloat16 if "bfloat16" in call else np.float16
    m, stride, x_stride = 7, -(-k // 16) * 16, -(-k // 8) * 8 + 8
    x = np.full((m, x_stride), 7, type)
    x[:, :k] = rng.standard_normal((m, k)) * np.exp(3 * rng.standard_normal((m, 1)))
    x[1, :k], x[2, k // 2], x[3, k - 1] = 0, np.nan, -np.inf
    work = np.full(m * stride + ROW_BYTES * m, 255, np.uint8)
    getattr(emulated(), f"quantize_{call}")(at(x), at(work), m, k, x_stride, stride)
    expected = quantize_rows(x[:, :k], activations)
    finite = np.isfinite(expected.scale)
    scale = work[m * stride :].view(np.float32)[::2]
    assert np.array_equal(scale, expected.scale, equal_nan=True)
    assert finite.tolist() == [True, True, False, False, True, True, True]
    padded = np.zeros((m, stride), np.uint8)
    padded[:, :k] = expected.codes
    assert np.array_equal(work[: m * stride].reshape(m, stride)[finite], padded[:, in_order(stride)][finite])


def steep_parts(x: np.ndarray) -> np.ndarray:
    """Which parts of 512 k are steep, by row_of_x.cuh: bool [M, parts]."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // 512) * 512))
    padded[:, :k] = np.abs(x.astype(np.float64))
    peaks = padded.reshape(m, -1, 32, 16).max(axis=3).sum(axis=2)
    others = (peaks.sum(axis=1) - padded.max(axis=1)) / -(-k // 16)
    return peaks > 2 * 32 * others[:, None]


@pytest.mark.parametrize("k", [512, 4096, 20000])
def test_parts_of_rows_with_a_large_number_are_steep(k):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((6, k)).astype(np.float16)
    x[1, 7], x[2, k - 1], x[3, k // 2], x[4], x[5, 3] = 500, -300, 20, 0, np.inf
    stride = -(-k // 16) * 16
    work = np.full(6 * (stride + ROW_BYTES), 255, np.uint8)
    emulated().quantize_fp8(at(x), at(work), 6, k, k, stride)
    parts = np.arange(-(-k // 512))
    found = work[6 * stride :].view(np.uint32)[1::2, None] >> (parts % 32).astype(np.uint32) & 1
    expected = steep_parts(x[:5])
    assert expected.sum() == 2
    if len(parts) > 32:  # a bit has several parts
        expected[:, :-32] |= expected[:, 32:]
        expected[:, 32:] = expected[:, :-32]
    assert np.array_equal(found[:5], expected)
    assert not found[5].any()


# ---- plans ----------------------------------------------------------------------------------------------------------

MXFP4, U4B8 = Kind("E2M1", "ScaleE5M2", "NONE", 4, narrow=True), Kind("Int4", "ScaleF16", "NONE", 1)
WAYS = {"folded": (MXFP4, "fp8"), "scaled": (U4B8, "fp8"), "int8": (U4B8, "q8")}


def plan_of(kind: Kind, activations: str, m: int, n: int = 4096, k: int = 4096, **more: object):
    return byte_plan(Gemm(kind, m, n, k, activations=activations, **more), H200)


@pytest.mark.parametrize(
    ("way", "width"),
    [case(way, width, often=width == 128) for way, (widths, _) in BYTE_STAGE_NS.items() for width in widths],
)
def test_shapes_compile_without_spills(way, width):
    kind, activations = WAYS[way]
    for more in ({}, {"gate": "silu", "float_bias": True}):
        if more and (way, width) == ("folded", 208):
            continue  # too few registers: byte_plan does not take it
        gemm = Gemm(kind, 2048, 4096, 4096, activations=activations, **more)
        launch = launch_bytes(gemm, H200, ((ByteShape(width), 32),)).parts[0].launch
        resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize("way", first(1, [*WAYS]))
def test_partners_and_rounding_compile_without_spills(way):
    kind, activations = WAYS[way]
    plan = launch_bytes(Gemm(kind, 100, 4096, 14336, activations=activations), H200, ((ByteShape(128, 2, 3), 64),))
    for launch in (plan.parts[0].launch, plan.quantize):
        resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.full
@pytest.mark.parametrize("kind", [MXFP4, U4B8], ids=["folded", "scaled"])
def test_parts_of_a_product_compile_without_spills(kind):
    parts = plan_of(kind, "fp8", 1024, 14336).parts
    assert [dict(part.launch.macros)["PARTS"] for part in parts] == ["1", "1"]
    for part in parts:
        resources(part.launch.source, dict(part.launch.macros), "sm_90a")


@pytest.mark.parametrize("groups", first(1, [4, 1]))
def test_products_of_given_blocks_compile_without_spills(groups):
    plan = given_plan(Gemm(Kind("Int4", "ScaleF32", "NONE", groups), 300, 4096, 4096), H200, 34)
    for launch in (plan.parts[0].launch, plan.quantize):
        resources(launch.source, dict(launch.macros), "sm_90a")


def test_plans_fit_the_device():
    for kind, activations in WAYS.values():
        for m in (65, 100, 200, 257, 1000, 5000):
            for n in (1, 4096, 14336):
                for k in (128, 4096, 14336):
                    found = plan_of(kind, activations, m, n, k)
                    if found is None:
                        continue
                    place = 0
                    for part in found.parts:
                        launch, macros = part.launch, dict(part.launch.macros)
                        width, teams, split = (int(macros[name]) for name in ("WIDTH", "TEAMS", "SPLIT"))
                        assert launch.shared_bytes <= H200.shared_bytes
                        assert launch.grid[0] % launch.cluster == 0
                        assert int(macros["STAGES"]) >= 3
                        assert split * teams <= -(-k // 128)
                        assert found.work_bytes >= m * found.stride + ROW_BYTES * -(-m // width) * width
                        assert part.box_rows == width
                        assert part.first_place == place
                        place += part.places
                    assert place == -(-n // (64 if teams == 2 else 128))


def test_two_shapes_share_a_product_that_whole_rounds_do_not_fit():
    parts = plan_of(MXFP4, "fp8", 1024, 14336).parts
    tiles = [part.places * -(-1024 // part.box_rows) for part in parts]
    assert len(parts) == 2
    assert all(H200.multiprocessors * 0.97 * -(-t // 132) <= t for t in tiles)
    assert len(plan_of(MXFP4, "fp8", 4096, 14336).parts) == 1


def test_few_rows_small_matrices_and_other_gpus_take_x_as_it_is():
    assert plan_of(MXFP4, "fp8", 64) is None
    assert plan_of(MXFP4, "fp8", 2048, 1536, 576) is None
    assert plan_of(MXFP4, "fp8", 2048) is not None
    assert plan_of(MXFP4, "fp8", 2048, batch_invariant=True) is None
    assert plan_of(MXFP4, "exact", 2048) is None
    assert byte_plan(Gemm(MXFP4, 2048, 4096, 4096, activations="fp8"), ADA) is None
    assert [launch.name for launch in launches(Gemm(MXFP4, 64, 4096, 4096, activations="fp8"), H200)] == [
        "marlin_gemm_large"
    ]
    names = [launch.name for launch in launches(Gemm(MXFP4, 2048, 4096, 4096, activations="fp8"), H200)]
    assert names == ["marlin_quantize_rows", "marlin_gemm_bytes"]


def test_what_takes_x_as_it_is_says_why():
    fp8 = Gemm(MXFP4, 2048, 4096, 4096, activations="fp8")
    assert why_as_it_is(fp8, H200) == ""
    assert "Hopper" in why_as_it_is(fp8, ADA)
    assert "up to 64, x in 16 bits" in why_as_it_is(replace(fp8, m=64), H200)
    assert "rounding x would take longer" in why_as_it_is(replace(fp8, n=1536, k=576), H200)
    assert "the same bits" in why_as_it_is(replace(fp8, batch_invariant=True), H200)
    assert "16 octaves" in why_as_it_is(replace(fp8, kind=replace(MXFP4, narrow=False)), H200)
    assert "nobody asked" in why_as_it_is(replace(fp8, activations="exact"), H200)


def test_what_was_measured_goes_in_bytes():
    """docs/notes/2026-11-18-cuda-fp8.md has the figures of these."""
    for k, n in ((4096, 14336), (14336, 4096), (8192, 8192)):
        for m in (128, 256, 1024, 4096):
            assert plan_of(MXFP4, "fp8", m, n, k) is not None
            assert plan_of(U4B8, "fp8", m, n, k) is not None


# ---- who can --------------------------------------------------------------------------------------------------------


def test_formats_that_can_and_why_others_cannot():
    able = {
        (name, size, activations)
        for name, format in FORMATS.items()
        for size in (*format.group_sizes, *([4096] if format.whole_row_groups else []))
        for activations in ("fp8", "q8")
        if not why_not(format, size, 4096) and not why_exact(usual_kind(format, size), activations)
    }
    whole = {(name, size) for name, size, activations in able if activations == "fp8"}
    assert whole == {("u4b8", 128), ("u4b8", 4096), ("fp4", 128), ("fp4", 4096), ("mxfp4", 32), ("mxfp4_gguf", 32)}
    assert {(name, size) for name, size, activations in able if activations == "q8"} == {("u4b8", 128), ("u4b8", 4096)}
    assert (
        why_exact(Kind("E2M1", "ScaleE5M2", "NONE", 4), "fp8") == "a row whose powers of two span more than 16 octaves"
    )
    assert not why_not_given(usual_kind(FORMATS["q4_0"], 32))
    assert "groups of 32 or more" in why_not_given(usual_kind(FORMATS["nvfp4"], 16))


@pytest.mark.parametrize("name", ["u4b8", "u4", "q4_0", "mxfp4", "mxfp4_gguf", "q4_1", "q8_0", "fp4", "iq4_nl"])
def test_usual_kinds_are_those_of_tensors(name):
    q = make(name, FORMATS[name].group_sizes[-1], options_of(FORMATS[name])[0], 0)
    kind, usual = describe(q).kind, usual_kind(q.format, q.group_size)
    assert (kind.element, kind.offset, kind.groups, kind.narrow) == (
        usual.element,
        usual.offset,
        usual.groups,
        usual.narrow,
    )


@pytest.mark.parametrize(
    ("name", "size", "activations", "reason"),
    [
        ("q4_0", 32, "fp8", "groups of 32: to scale sums every 32 of K"),
        ("u4", 128, "fp8", "weights with a zero point or a minimum"),
        ("mxfp4", 32, "q8", "E2M1"),
        ("q8_0", 32, "fp8", "Int8"),
    ],
)
def test_the_backend_refuses_with_the_reason(name, size, activations, reason):
    sizes = 512, 4096, 4096, np.dtype(np.float16), "torch", "cuda", activations
    assert reason in BACKENDS["cuda"].can_run(Problem("matmul", FORMATS[name], size, *sizes))[1]


def test_the_reference_rounds_rows_to_fp8_and_the_cpu_does_not():
    rng = np.random.default_rng(0)
    x, q = (
        rng.standard_normal((3, 128)).astype(np.float32),
        bf.quantize(rng.standard_normal((5, 128)).astype(np.float32), "u4b8"),
    )
    y = bf.quantized_linear(x, q, activations="fp8")
    expected = quantize_rows(x, "fp8").values() @ bf.dequantize(q).astype(np.float64).T
    assert np.allclose(y, expected, rtol=1e-6)
    with pytest.raises(bf.BackendUnavailable, match="fp8"):
        bf.quantized_linear(x, q, activations="fp8", backend="cpu")
