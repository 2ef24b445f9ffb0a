"""What the pages of the engines say of kernels, thresholds, files and sizes is what the code has."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cuda_compiled import ADA, H200
from pages import ROOT, page

import billfish as bf
from billfish.backends.cuda.axes import usual_kind
from billfish.backends.cuda.plans import Gemm, byte_plan, plan, why_exact
from billfish.backends.metal import GROUPS as METAL_GROUPS
from billfish.backends.metal.kernels import KERNELS, choose_experts, choose_kernel, launch
from billfish.backends.metal.layout import element_axis, lay_out
from billfish.core.errors import BackendUnavailable

BACKENDS = ROOT / "billfish" / "backends"
ENGINES = {"docs/cpu.md": "cpu", "docs/cuda.md": "cuda", "docs/metal.md": "metal", "docs/emulator.md": "emulator"}
ENGINES["docs/experts.md"] = "cuda"
MINE = [*ENGINES, "docs/scaling.md", "docs/inside-a-token.md"]
NOTES = sorted(f"docs/notes/{path.name}" for path in (ROOT / "docs" / "notes").glob("20*.md"))


def rows(name: str, head: str) -> list[list[str]]:
    """The cells of the table of a page whose head begins so."""
    (table,) = re.findall(rf"^{re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)+)", page(name), re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text.replace(",", ""))]


# ---- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MINE)
def test_a_page_is_short(name):
    assert len(page(name).split()) <= 1800


@pytest.mark.parametrize("name", NOTES)
def test_a_note_has_a_date_a_question_and_a_conclusion(name):
    text = page(name)
    assert text.startswith(f"# {name.split('/')[-1][:10]}: ")
    assert text.count("**Question.**") == text.count("**Conclusion.**") == 1


@pytest.mark.parametrize("name", [*MINE, *NOTES])
def test_source_files_are_where_the_page_says(name):
    engine = ENGINES.get(name) or next((kind for kind in ("cpu", "cuda", "metal") if f"-{kind}" in name), "cpu")
    for path in re.findall(r"`([\w/.]+\.(?:h|cpp|cu|cuh|metal|py))`", page(name)):
        places = [ROOT, BACKENDS / engine, *(BACKENDS / engine).glob("*/")]
        assert any((place / path).exists() for place in places) or path == "fp_quantized.h", path


# ---- CPU ------------------------------------------------------------------------------------------------------------


def constant(header: str, name: str) -> int:
    """A constexpr of a header of simd/; AVX2 and AVX-VNNI share simd/ymm.h, and AMX has those of AVX-512."""
    shared = {"simd/avx2.h": "simd/ymm.h", "simd/avx_vnni.h": "simd/ymm.h", "simd/amx.h": "simd/avx512.h"}.get(
        header, header
    )
    (value,) = re.findall(rf"\b{name} = (\w+)", (BACKENDS / "cpu" / shared).read_text())
    return ["false", "true"].index(value) if value in ("false", "true") else int(value)


def test_tiles_of_the_levels():
    found = rows("docs/cpu.md", "| level | needs |")
    cmake = re.findall(r"add_level\((\w+)", (ROOT / "CMakeLists.txt").read_text())
    assert sorted(name.strip("`") for name, *_ in found) == sorted(set(cmake))
    for _, _, height, header in found:
        assert int(height) == constant(header.strip("`"), "TILE_ROWS")


def test_limits_of_few_rows():
    headers = {name.strip("`"): header.strip("`") for name, *_, header in rows("docs/cpu.md", "| level | needs |")}
    found = rows("docs/cpu.md", "| level | q8, groups")
    assert len(found) == 4
    for names, small, large, q16 in found:
        for name in re.findall(r"`(\w+)`", names):
            header = headers[name]
            if not constant(header, "FEW_FROM_STREAM"):
                assert (small, large, q16) == ("0", "0", "0")
                continue
            packed, others = (constant(header, f"{kind}BUFFER_ROWS") - 1 for kind in ("PACKED_", "(?<!_)"))
            assert numbers(small)[:2] == [packed, others][: 1 + (packed != others)]
            assert numbers(large) == [constant(header, "GROUP_BUFFER_ROWS") - 1]
            most = constant(header, "ONE_BY_ONE_16")
            assert numbers(q16) == [most, min(most, 3)][: 1 + (most > 3)]
    held = constant("simd/neon.h", "HELD_ROWS")
    assert f"| q8 | 8 to {held}, NEON only |" in page("docs/cpu.md")
    assert all(constant(f"simd/{name}.h", "HELD_ROWS") == 0 for name in ("ymm", "avx512", "portable"))
    registers = constant("simd/neon.h", "REGISTER_ROWS"), constant("simd/ymm.h", "REGISTER_ROWS")
    assert "up to M = {} ({} on AVX2)".format(*registers) in page("docs/cpu.md")


def stored(name: str) -> bf.QuantizedTensor:
    w = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    return bf.quantize(w, name, method="rtn")


def grown(name: str, packed_bytes: int) -> int:
    """So many tenths of a percent more than in the file."""
    return round(1000 * packed_bytes / sum(array.nbytes for array in stored(name).storage.values())) - 1000


def test_bytes_of_the_packed_stream():
    more = {name: grown(name, bf.prepack(stored(name)).data.nbytes) for name in bf.FORMATS}
    assert (more["q3_k"], more["affine8"]) == (36, 111)
    assert "q3_k takes 3.6 % more and affine8 11 %" in page("docs/cpu.md")
    assert sum(each <= 0 for each in more.values()) > len(more) / 2
    assert max(more.values()) == more["affine8"]


def test_the_example_of_the_cpu_runs():
    (program,) = re.findall(r"```python\n(.*?)```", page("docs/cpu.md"), re.DOTALL)
    names: dict[str, np.ndarray] = {}
    try:
        exec(program, names)
    finally:
        bf.set_threads(0)
    assert names["y"].shape == (4, 96)


# ---- CUDA -----------------------------------------------------------------------------------------------------------


def ends(text: str, most: int) -> tuple[int, int]:
    """The least and the largest of a range such as "9 to 16" or "65 and more"."""
    found = numbers(text.split(",")[0])
    return (found[0], found[1] if "to" in text else most)


def test_which_kernel_runs_on_nvidia():
    kind, found = usual_kind(bf.get_format("mxfp4"), 32), rows("docs/cuda.md", "| M | N | GPU |")
    assert len(found) == 7
    for m, n, gpu, kernel, file in found:
        small = 2048, 4096, 6143 if "below" in n else 28672
        sizes = small if n != "6144 and more" else (6144, 14336)
        for rows_of_x in ends(m, 4096):
            for columns in sizes:
                for device in {"any": (H200, ADA), "Hopper": (H200,), "other": (ADA,)}[gpu]:
                    gemm = Gemm(kind, rows_of_x, columns, 4096)
                    if "fp8" in m:
                        if rows_of_x == 4096:  # fewer rows of small matrices stay in 16 bits
                            chosen = byte_plan(
                                replace(gemm, kind=replace(kind, narrow=True), activations="fp8"), device
                            )
                            launched = [chosen.quantize, chosen.parts[0].launch]
                            assert [each.source for each in launched] == re.findall(r"`(\w+\.cu)`", file)
                            assert [each.name for each in launched] == re.findall(r"`(\w+)`", kernel)
                        continue
                    chosen = plan(gemm, device)
                    if chosen is None:
                        assert file == "`dequantize.cu`"
                    else:
                        assert f"`{chosen.launch.source}`" == file
                        assert f"`{chosen.launch.name}`" in kernel
                    if device is H200 or rows_of_x <= 64:
                        assert plan(replace(gemm, batch_invariant=True), device).launch.name == "marlin_gemm_small"


def test_which_weights_take_8_bit_activations():
    table = {row[0]: row[1:] for row in rows("docs/cuda.md", "| weights | fp8 |")}
    examples = {
        "mxfp4, mxfp4_gguf": [("mxfp4", 32), ("mxfp4_gguf", 32)],
        "u4b8, groups of 128 or more": [("u4b8", 128), ("u4b8", 256)],
        "fp4, groups of 128 or more": [("fp4", 128), ("fp4", -1)],
        "groups below 128": [("u4b8", 64), ("q4_0", 32), ("nvfp4", 16)],
        "zero points, minimums, tables, 8-bit weights": [("u4", 128), ("q4_1", 32), ("iq4_nl", 32), ("u8b128", 128)],
    }
    assert table.keys() == examples.keys()
    for weights, cells in table.items():
        for name, group in examples[weights]:
            kind = replace(usual_kind(bf.get_format(name), group), narrow=True)
            for activations, cell in zip(("fp8", "q8"), cells, strict=True):
                assert cell.startswith("no" if why_exact(kind, activations) else "yes"), (name, activations)


# ---- Metal ----------------------------------------------------------------------------------------------------------


def test_which_kernel_runs_on_metal():
    shapes = {
        "1": [(1, 4096)],
        "2 to 8": [(2, 4096), (8, 64)],
        "9 and more, fewer than 256 tiles": [(9, 4096), (64, 32 * 255)],
        "9 and more, 256 tiles and more": [(64, 32 * 256), (4096, 4096)],
        "9 and more": [(9, 64), (512, 14336)],
        "9 and more, on an M5": [(9, 64), (512, 14336)],
    }
    found = rows("docs/metal.md", "| M | x | kernel |")
    assert [m for m, *_ in found] == list(shapes)
    for m, x, kernel, files, _ in found:
        for rows_of_x, n in shapes[m]:
            for size in {"any": (2, 4), "16 bits": (2,), "float32": (4,)}[x]:
                name = choose_kernel(rows_of_x, n, 4096, size, matrix_units="M5" in m)
                chosen = KERNELS[launch(name, rows_of_x, n, 4096).kernel]
                assert f"`{chosen.pattern.format('*')}`" in kernel
                assert f"`{chosen.body}`" in files
    for pairs, x, kernel, file in rows("docs/metal.md", "| (token, expert) pairs |"):
        assert pairs == "more" or pairs.startswith("fewer than 4 ")
        for size in {"any": (2, 4), "16 bits": (2,), "float32": (4,)}[x]:
            chosen = KERNELS[choose_experts(32 if pairs == "more" else 31, 8, size)]
            assert (kernel, file) == (f"`{chosen.pattern.format('*')}`", f"`{chosen.body}`")


def test_formats_of_metal():
    text = page("docs/metal.md")
    assert [name for name in bf.FORMATS if element_axis(bf.get_format(name).element) is None] == ["nf4"]
    assert f"groups of {', '.join(map(str, METAL_GROUPS))} or all of K" in text
    more = {name: grown(name, lay_out(stored(name)).nbytes) for name in bf.FORMATS if name != "nf4"}
    assert "iq4_xs takes 18 % more" in text
    assert more.pop("iq4_xs") // 10 + 1 == 18
    assert max(more.values()) <= 1


def test_metal_refuses_nf4():
    q = bf.quantize(np.ones((32, 64), np.float32), "nf4")
    with pytest.raises(BackendUnavailable, match="nf4"):
        bf.quantized_linear(np.ones((1, 64), np.float32), q, backend="metal-emulator")
