"""What can be known of the CUDA engine without a GPU: the layout, the choice of kernels, and that they all compile."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
from dataclasses import replace

import numpy as np
import pytest
from cases import diagonal, first
from common import options_of
from cuda_compiled import ADA, H200, KINDS, SAMPLES, case, name_of, resources
from cuda_support import TAKEN, make

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda import compile as compiler
from billfish.backends.cuda import packed as saved
from billfish.backends.cuda.attention import FEW_WARPS, IN_REGISTERS, MANY_WARPS, STAGES
from billfish.backends.cuda.axes import Kind, describe
from billfish.backends.cuda.compile import compile_kernel
from billfish.backends.cuda.device_weights import PLAIN, stored_codes
from billfish.backends.cuda.driver import Device, KernelLaunch, signature
from billfish.backends.cuda.packed import PackedBricks
from billfish.backends.cuda.plans import Gemm, LargeShape, Plan, launch_large, plan
from billfish.backends.cuda.step_memory import PAGE
from billfish.core.format import FORMATS

# ---- the layout; test_decode.py reads it back ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["u4", "iq4_nl", "nvfp4"])
def test_bricks_are_saved_and_loaded(name, tmp_path):
    q = make(name, FORMATS[name].group_sizes[0], options_of(FORMATS[name])[0], 0)
    packed = PackedBricks.of(q)
    packed.save(tmp_path / "weights.npz")
    loaded = PackedBricks.load(tmp_path / "weights.npz")
    assert (loaded.kind, loaded.shape) == (packed.kind, packed.shape)
    assert (loaded.bricks == packed.bricks).all()
    assert (loaded.row_scale == packed.row_scale).all()


def test_bricks_are_saved_to_paths():
    with pytest.raises(bf.DTypeError, match=r"PackedBricks.save.*path.*int.*string or a path"):
        PackedBricks.of(make("u4b8", 128, {}, 0)).save(5)


def test_other_files_are_not_bricks(tmp_path):
    (tmp_path / "text").write_text("no")
    np.savez(tmp_path / "other.npz", bricks=np.zeros(3))
    packed = PackedBricks.of(make("u4b8", 128, {}, 0))
    about = json.dumps({**dataclasses.asdict(packed.kind), "shape": (999, 128), "layout": saved.LAYOUT})
    np.savez(tmp_path / "short.npz", about=np.asarray(about), bricks=packed.bricks, row_scale=packed.row_scale)
    for name in ("text", "other.npz", "short.npz"):
        with pytest.raises(bf.DataError, match=r"load: .*PackedBricks"):
            PackedBricks.load(tmp_path / name)


@pytest.mark.promise("inputs", "packed weights of the wrong shape never reach a kernel")
@pytest.mark.parametrize("change", [{"element": "Int4\n#include <x>"}, {"offset": "x"}, {"groups": 3}, {"table": (1,)}])
def test_kinds_that_no_kernel_has_are_refused(change):
    """A file may name them, and they would be compiled."""
    with pytest.raises(bf.FormatError, match="Kind: kind"):
        replace(PackedBricks.of(make("u4b8", 128, {}, 0)).kind, **change)


@pytest.mark.promise("inputs", "packed weights of the wrong shape never reach a kernel")
@pytest.mark.parametrize("change", [{"shape": (999, 128)}, {"shape": (-1, 128)}, {"row_scale": np.ones(3, np.float32)}])
def test_bricks_that_do_not_fit_their_shape_are_refused(change):
    with pytest.raises(bf.ShapeError, match=r"PackedBricks"):
        replace(PackedBricks.of(make("u4b8", 128, {}, 0)), **change)


def test_bricks_of_another_version_are_refused(tmp_path, monkeypatch):
    packed = PackedBricks.of(make("u4b8", 128, {}, 0))
    monkeypatch.setattr(saved, "LAYOUT", saved.LAYOUT - 1)
    packed.save(tmp_path / "old.npz")
    monkeypatch.undo()
    with pytest.raises(bf.DataError, match="another version"):
        PackedBricks.load(tmp_path / "old.npz")


def test_scales_stay_as_small_as_the_file_has_them():
    kinds = {
        name: describe(make(name, FORMATS[name].group_sizes[-1], options_of(FORMATS[name])[0], 0)).kind
        for name in FORMATS.keys() & TAKEN.keys()
    }
    assert FORMATS.keys() - TAKEN.keys() == {"nf4"}
    assert kinds["u4b8"].brick_bytes == 1024 + 32
    assert kinds["u4"].scale == kinds["q4_1"].scale == kinds["q8_0"].scale == "ScaleF16"
    assert (kinds["mxfp4"].scale, kinds["nvfp4"].scale) == ("ScaleE5M2", "ScaleE5M3")
    for name in ("mxfp4", "nvfp4"):
        assert kinds[f"{name}_gguf"] == replace(kinds[name], one_zero=True)
    assert kinds["q4_k"].scale == "ScaleF32"
    assert kinds["iq4_nl"].table


# ---- compiling, for GPUs that are not there -------------------------------------------------------------------------


def product(kind: Kind, m: int, n: int = 4096, bfloat16: bool = False) -> Gemm:
    return Gemm(kind, m, n, 4096, bfloat16)


def chosen(product: Gemm, device: Device) -> Plan:
    found = plan(product, device)
    assert found is not None
    return found


ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")


# sm_80 and sm_89 have the same instructions for us, and so have sm_90 and sm_100.
@pytest.mark.parametrize(
    ("kind", "arch"),
    [case(kind, a, often=(i + j) % 48 == 0) for i, kind in enumerate(KINDS) for j, a in enumerate(ARCHITECTURES)],
)
def test_few_rows_compile_for_every_architecture(kind, arch):
    device = H200 if arch in ("sm_90a", "sm_100") else ADA
    launch = chosen(product(kind, 16, bfloat16=kind.groups in (1, 4)), device).launch
    assert launch.source == "gemm_small.cu"
    assert resources(launch.source, dict(launch.macros), arch) * launch.threads <= 65536


# test_decode.py runs them for every kind.
@pytest.mark.parametrize(
    ("kind", "arch"),
    [case(kind, a, often=a == "sm_90a" and kind in SAMPLES[::6]) for kind in KINDS for a in ARCHITECTURES],
)
def test_packing_and_unpacking_compile_for_every_architecture(kind, arch):
    resources("pack.cu", kind.macros(), arch)
    resources("unpack.cu", kind.macros(), arch)
    resources("dequantize.cu", kind.macros() | {"OUTPUT": "Stored<BF16>"}, arch)


@pytest.mark.parametrize("arch", first(1, ARCHITECTURES))
def test_reading_compiles_for_every_architecture(arch):
    resources("read.cu", {}, arch)


TYPED = [("sm_80", "F16"), ("sm_80", "BF16"), ("sm_90a", "BF16"), ("sm_90a", "F16")]
HEADS = [(64, 32), (128, 64), (256, 128), (96, 24)]
# E4M3 is known from sm_89 on. Heads of 512 numbers need Hopper's shared memory.
FP8 = [("sm_90a", 64, 32), ("sm_89", 96, 24), ("sm_100", 128, 64), ("sm_90a", 256, 128), ("sm_90a", 512, 64)]


@pytest.mark.parametrize(("arch", "type", "head", "pairs"), diagonal(4, TYPED, HEADS))
def test_attention_compiles_without_spills(arch, type, head, pairs):
    check_attention(arch, type, head, pairs, fp8=0)


@pytest.mark.parametrize(("arch", "head", "pairs"), first(1, FP8))
def test_attention_over_fp8_compiles_without_spills(arch, head, pairs):
    check_attention(arch, "F16", head, pairs, fp8=1)


def check_attention(arch: str, type: str, head: int, pairs: int, fp8: int) -> None:
    rotate = {
        "HEAD": head,
        "PAIRS": pairs if head != 96 else 0,
        "ADJACENT": int(head == 64),
        "NORMED": {128: 1, 256: 2}.get(head, 0),
        "VALUES_NORMED": int(head == 256),
        "OUTPUT_GATE": int(head == 96),
        "FP8": fp8,
        "ROWS": 1 + head % 3,
    }
    resources("rotate.cu", {"TYPE": type} | {name: str(value) for name, value in rotate.items()}, arch)
    for few, warps in ((1, FEW_WARPS), (0, MANY_WARPS if head <= IN_REGISTERS else MANY_WARPS // 2)):
        more = {"WINDOWED": int(head != 128), "CAPPED": int(head == 256), "OUTPUT_GATE": int(head == 256)}
        more |= {"FEW": few, "MOST_PARTS": 8 + few * 8, "FP8": fp8}
        attend = {"HEAD": head, "GROUP": 4, "WARPS": warps, "STAGES": STAGES} | more
        macros = {"TYPE": type} | {name: str(value) for name, value in attend.items()}
        assert resources("attend.cu", macros, arch) * warps * 32 <= 65536


@pytest.mark.parametrize(("arch", "type"), first(1, TYPED[::-1]))
def test_the_decoders_other_kernels_compile_without_spills(arch, type):
    for add, post, norm in ((1, 0, 1), (1, 1, 1), (1, 1, 0), (0, 0, 0)):
        macros = {"TYPE": type, "HIDDEN": 4096, "THREADS": 512, "ADD": add, "POST": post, "NORM": norm}
        resources("normalize.cu", {name: str(value) for name, value in macros.items()}, arch)
    resources("head_scales.cu", {"TYPE": type}, arch)
    resources("gate.cu", {"TYPE": type, "GATE": "SILU"}, arch)
    for name in ("choose.cu", "reorder.cu", "cap.cu", "adjust.cu", "log_probabilities.cu"):
        resources(name, {}, arch)
    for kind in (SAMPLES[0], PLAIN):
        resources("embed.cu", kind.macros(), arch)
        resources("layer_inputs.cu", kind.macros() | {"NUMBER": type, "SIZE": "256"}, arch)


@pytest.mark.parametrize("m", first(2, [1, 512, 8, 64, 2048]))
def test_products_with_plain_weights_compile_without_spills(m):
    launch = chosen(product(PLAIN, m, 4096, bfloat16=m == 64), H200).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize("format", first(2, ["q4_0", "q6_k", "q5_1", "q8_0", "u4b8", "fp4"]))
def test_packing_from_storage_compiles(format):
    q = bf.quantize(np.ones((16, 256), np.float32), format)
    about = describe(q)
    stored = stored_codes(q, about.shift)
    assert stored is not None
    resources("pack.cu", about.kind.macros() | stored[1], "sm_90a")


GATED = {"scaled": Kind("Int4", "ScaleF16", "NONE", 4), "shifted": Kind("Int4", "ScaleF16", "MINIMUM", 4, 8)}
GATES = [("silu", "scaled"), ("gelu", "shifted"), ("silu", "shifted"), ("gelu", "scaled")]


@pytest.mark.parametrize(("gate", "name", "m"), diagonal(4, GATES, [1, 64, 16, 512]))
def test_products_with_a_gate_compile_without_spills(gate, name, m):
    launch = chosen(replace(product(GATED[name], m, 28672), gate=gate), H200).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


WIDTHS = ((16, 28672), (32, 28672), (64, 4096))


@pytest.mark.parametrize(
    ("kind", "m", "n"),
    [case(kind, *w, often=i % 36 == 12 * j) for i, kind in enumerate(KINDS) for j, w in enumerate(WIDTHS)],
)
def test_more_rows_compile_without_spills(kind, m, n):
    launch = chosen(product(kind, m, n, bfloat16=kind.groups in (1, 4)), H200).launch
    assert launch.source == "gemm_large.cu"
    resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize(("n", "m"), diagonal(7, [4096, 14336], [1, 32, 64, 128, 256, 1024, 4096]))
def test_what_the_h200_runs_compiles_without_spills(m, n):
    launch = chosen(product(Kind("Int4", "ScaleF16", "NONE", 1), m, n), H200).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


WIDE = (
    Kind("Int4", "ScaleF16", "ZERO", 1, 8),
    Kind("Int4", "ScaleF16", "MINIMUM", 4, 8),
    Kind("Int8", "ScaleF16", "NONE", 4),
    Kind("E2M1", "ScaleE5M3", "NONE", 8),
)


@pytest.mark.parametrize(
    ("kind", "n"),
    [case(kind, n, often=i == j < 2) for i, kind in enumerate(WIDE) for j, n in enumerate((28672, 4096, 14336, 8192))],
)
def test_few_rows_of_wide_matrices_compile_without_spills(kind, n):
    for m in (1, 8):
        launch = chosen(product(kind, m, n), H200).launch
        macros = dict(launch.macros)
        registers = resources(launch.source, macros, "sm_90a")
        assert registers * launch.threads * int(macros["RESIDENT"]) <= 65536


LARGEST = (LargeShape(256, stages=3), LargeShape(128, tall=2, batch=1), LargeShape(128, tall=2, paired=True))
CROWDED = [
    Kind(element, "ScaleF16", *rest) for element in ("Int4", "Int8", "E2M1") for rest in (("NONE", 8), ("MINIMUM", 4))
]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [case(kind, shape, often=(i + j) % 9 == 0) for i, kind in enumerate(CROWDED) for j, shape in enumerate(LARGEST)],
)
def test_the_largest_tiles_do_not_spill_either(kind, shape):
    launch = launch_large(product(kind, 512), H200, shape).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


def test_pages_are_what_the_kernels_take_them_for():
    assert re.search(r"PAGE = (\d+)", (compiler.SOURCES / "pages.cuh").read_text())[1] == str(PAGE)


def test_a_launch_takes_what_the_kernel_takes():
    known = {"gemm_small": "mpppppiiii", "gemm_large": "mpppppiiii", "pack": "pppii", "normalize": "pppppppfff"}
    known |= {"embed": "pppppppppiiif", "rotate": "pppiiipppppppfffiiiiiii", "attend": "pppppiiiiiif"}
    known |= {"choose": "pippp", "head_scales": "pppiiiif", "cap": "pif", "layer_inputs": "pppppppiiifff"}
    known |= {"gate": "pppiii", "reorder": "pppi", "adjust": "pipp", "log_probabilities": "pippp"}
    known |= {"gemm_bytes": "mpppppiiiiii", "quantize_rows": "ppiii", "split_blocks": "ppii"}
    for name, letters in known.items():
        assert signature(f"{name}.cu", f"marlin_{name}") == letters


def test_a_kernel_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("BILLFISH_CACHE", str(tmp_path / "new"))
    kind = Kind("Int4", "ScaleF16", "NONE", 1)
    first = compile_kernel("pack.cu", kind.macros(), "sm_80")
    monkeypatch.setattr(compiler, "compile_fresh", lambda *_: pytest.fail("compiled again"))
    assert compile_kernel("pack.cu", kind.macros(), "sm_80") == first
    assert sorted(path.suffix for path in (tmp_path / "new" / "cuda").iterdir()) == [".cubin", ".sha256"]


def _compile(folder: str) -> bytes:
    import os

    os.environ["BILLFISH_CACHE"] = folder
    return compile_kernel("pack.cu", Kind("Int8", "ScaleF16", "NONE", 4).macros(), "sm_90a")


def test_several_processes_may_start_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_compile, [str(tmp_path)] * 3)
    assert results[0] == results[1] == results[2]
    assert len(list((tmp_path / "cuda").iterdir())) == 2  # with its digest


# ---- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H200, ADA], ids=lambda d: d.name)
@pytest.mark.parametrize("kind", KINDS[::3], ids=name_of)
def test_plans_fit_the_device(kind, device):
    for m in (1, 8, 9, 17, 33, 65, 129, 300, 1000, 5000):
        for n in (1, 100, 4096, 14336, 28672):
            for k in (16, 128, 4096):
                found = plan(Gemm(kind, m, n, k), device)
                if found is None:
                    assert device is ADA
                    assert m > 64
                    continue
                launch: KernelLaunch = found.launch
                assert launch.shared_bytes <= device.shared_bytes
                assert launch.threads <= 1024
                assert launch.grid[0] % launch.cluster == 0
                macros = dict(launch.macros)
                if launch.source == "gemm_small.cu":
                    names = ("TEAMS", "SHARERS", "COURSES", "SLOTS", "RESIDENT")
                    teams, sharers, courses, slots, resident = (int(macros[name]) for name in names)
                    assert (launch.shared_bytes + 2048) * resident <= device.shared_bytes + 2048
                    assert slots % teams == 8 % courses == courses % sharers == 0
                    assert 16 * courses <= launch.threads  # a thread has the scale and the bias of a column
                    assert sharers == 1 or (teams < 16 and device is H200)  # a team meets at a barrier of its own
                    assert launch.grid[0] <= device.multiprocessors * resident or device is ADA
                if launch.source == "gemm_large.cu":
                    assert int(macros["STAGES"]) >= 2 * int(macros["TEAMS"])
                    assert int(macros["STAGES"]) % int(macros["TEAMS"]) == 0
                    assert int(macros["SPLIT"]) * int(macros["TEAMS"]) <= -(-k // 128)
                    assert device is H200


def tiles(shape: LargeShape, m: int, n: int) -> list[list[tuple[int, range]]]:
    """Strips and rows of x of all tiles, as struct Tile of gemm_large.cu counts them."""
    together = 2 * shape.strips - 1 if shape.paired else shape.strips
    pair, across, found = 1 + shape.paired, -(-m // shape.width), []
    for number in range(-(-(-(-n // 64) * pair) // together) * across):
        row, place = number % across * shape.width, number // across
        first, second = place // pair * together, place % pair
        strips = [first + together - 1 - i if second else first + i for i in range(shape.strips)]
        half = range(row + second * shape.width // 2, row + (1 + second) * shape.width // 2)
        whole = range(row, row + shape.width)
        found.append([(s, half if shape.paired and s == strips[-1] else whole) for s in strips])
    return found


@pytest.mark.parametrize(
    "shape", [LargeShape(128, tall=2, paired=True), LargeShape(128, paired=True), LargeShape(64, tall=2)], ids=str
)
def test_tiles_are_all_of_y_and_nothing_twice(shape):
    for m, n in ((128, 28672), (300, 4096), (1, 1), (65, 65), (129, 449), (128, 64 * 11), (256, 64 * 13)):
        found = tiles(shape, m, n)
        assert len(found) == shape.ctas(m, n)
        times = np.zeros((-(-n // 64), m), int)
        for tile in found:
            for strip, rows in tile:
                if strip < len(times):
                    times[strip, rows.start : rows.stop] += 1
        assert (times == 1).all()


def test_tiles_are_paired_where_that_keeps_more_multiprocessors_at_work():
    kind, paired = Kind("Int4", "ScaleF16", "NONE", 1), {}
    for k, n in ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672)):
        for m in (64, 128, 256, 512):
            launch = chosen(Gemm(kind, m, n, k), H200).launch
            if dict(launch.macros)["PAIRED"] == "1":
                paired[m, k, n] = launch.grid[0]
    assert paired == {
        (256, 4096, 14336): 128,
        (512, 4096, 14336): 132,
        (128, 8192, 28672): 128,
        (256, 8192, 28672): 132,
        (512, 8192, 28672): 132,
    }


def test_batch_invariance_fixes_the_order_of_additions():
    kind = Kind("Int4", "ScaleF16", "NONE", 1)
    teams = {
        dict(chosen(Gemm(kind, m, 4096, 4096, batch_invariant=True), H200).launch.macros)["TEAMS"]
        for m in (1, 9, 17, 33, 1000)
    }
    assert len(teams) == 1


def test_without_a_gpu_the_backend_says_why():
    backend = BACKENDS["cuda"]
    problem = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float16), "torch", "cuda")
    able, reason = backend.can_run(problem)
    if able:
        pytest.skip("there is a GPU here")
    assert "NVIDIA" in reason
    q = bf.quantize(np.ones((16, 128), np.float32), "u4b8")
    with pytest.raises(bf.BackendUnavailable, match=r"backend 'cuda'.* no NVIDIA.*backend="):
        bf.quantized_linear(np.ones((1, 128), np.float16), q, backend="cuda")
    with pytest.raises(bf.BackendUnavailable, match="no NVIDIA"):  # not: float32 is the wrong type
        bf.quantized_linear(np.ones((1, 128), np.float32), q, backend="cuda")


def test_float32_in_memory_and_x_in_16_bit_integers_are_refused():
    backend = BACKENDS["cuda"]
    problem = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float32))
    assert backend.can_run(problem)[0] is False
    assert "float16 and bfloat16" in backend.can_run(problem)[1]
    integers = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float16), activations="q16")
    assert "not 'q16'" in backend.can_run(integers)[1]
    elsewhere = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float16), device="xpu")
    assert backend.can_run(elsewhere) == (False, "runs on arrays on an NVIDIA GPU or in CPU memory; x is on xpu")


def test_torch_knows_the_shape_without_computing():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from billfish.backends.cuda import torch_op

    with FakeTensorMode():
        x, bricks, row_scale = torch.empty((2, 3, 128), dtype=torch.bfloat16), torch.empty(9), torch.empty(77)
        kind = Kind("Int4", "ScaleF16", "NONE", 1).spelled()
        y = torch_op.cuda_linear(x, bricks, row_scale, None, kind, 77, False, None)
    assert y.shape == (2, 3, 77)
    assert y.dtype == torch.bfloat16
