"""What can be known of the CUDA engine without a GPU: the layout, the choice of kernels, and that they all compile."""

from __future__ import annotations

import multiprocessing
import re

import numpy as np
import pytest
from support import assert_same_bits, options_of, random_storage

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda import compile as compiler
from billfish.backends.cuda import layout
from billfish.backends.cuda.compile import compile_fresh, compile_kernel
from billfish.backends.cuda.driver import Device, Launch
from billfish.backends.cuda.layout import Description, Kind, PackedBricks, brick_shape, describe, pack
from billfish.backends.cuda.plans import Plan, Product, Shape, launch_large, plan
from billfish.elements import FP4
from billfish.format import FORMATS

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448 - 1024)
ADA = Device(0, "NVIDIA L4", (8, 9), 58, 101376 - 1024)


def storages() -> list:
    """Every format, group size and option, with all bytes random and with sane ones."""
    found = []
    for name, format in FORMATS.items():
        sizes = [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
        found += [(name, size, option, wild) for size in sizes for option in options_of(format) for wild in (0, 1)]
    return found


def make(name: str, size: int, option: dict[str, str], wild: int) -> bf.QuantizedTensor:
    format, n, k = FORMATS[name], 37, 256 + FORMATS[name].block_size
    rng = np.random.default_rng(0)
    if not wild:
        return bf.quantize(rng.standard_normal((n, k)).astype(np.float32), name, group_size=size, **option)
    storage = random_storage(format, n, k, rng, k if size == -1 else size)
    if option.get("zero_point") == "fractional":
        storage["zeros"] = rng.standard_normal(storage["zeros"].shape).astype(np.float16)
    return bf.QuantizedTensor.from_storage(name, storage, size)


# ---- the layout, read back the way the instruction reads it ---------------------------------------------------------


def registers(kind: Kind, words: np.ndarray) -> np.ndarray:
    """Words [..., words of a tile] of one lane to the eight codes a0..a7 of its A operand, as decode.cuh takes them."""
    w = words.astype(np.uint64)
    if kind.words == 2:
        return np.stack([w[..., i // 4] >> np.uint64(8 * (i % 4)) & np.uint64(255) for i in range(8)], axis=-1)
    codes = []
    for i in range(8):
        if kind.element == "E2M1":
            # The second half of the pairs lies like the first in the word with its bits reversed.
            word = w[..., 0] if i < 4 else np.array([int(f"{int(v):032b}"[::-1], 2) for v in w[..., 0].flat], np.uint64)
            half = word.reshape(w.shape[:-1]) >> np.uint64(16 * (i % 2)) << np.uint64(8 * (i // 2 % 2))
            codes.append(half >> np.uint64(12) & np.uint64(8) | half >> np.uint64(9) & np.uint64(7))
        else:
            half = w[..., 0] >> np.uint64(16 * (i % 2)) & np.uint64(0xFFFF)
            codes.append(half >> np.uint64(4 * (i // 2)) & np.uint64(15))
    return np.stack(codes, axis=-1)


def read_back(kind: Kind, data: np.ndarray, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Bricks to codes [tiles * 16, bricks * 128] and the bytes of scales and offsets of each brick."""
    down, along = brick_shape(n, k)
    codes = np.zeros((down * 16, along * 128), np.uint8)
    rest = np.zeros((down, along, kind.brick_bytes - kind.code_bytes), np.uint8)
    position = 0
    for first in range(0, down, 8):
        for brick in range(along):
            for tile in range(first, min(first + 8, down)):
                content = data[position : position + kind.brick_bytes]
                position += kind.brick_bytes
                rest[tile, brick] = content[kind.code_bytes :]
                chunks = content[: kind.code_bytes].view("<u4").reshape(-1, 32, 4)
                for lane in range(32):
                    for step in range(8):
                        at = step * kind.words
                        values = registers(kind, chunks[at // 4, lane, at % 4 : at % 4 + kind.words])
                        # PTX, m16n8k16: row g for a0 a1 a4 a5, else g + 8; column 2c + (i & 1), and 8 more from a4 on.
                        for i in range(8):
                            row = lane // 4 + (0 if i in (0, 1, 4, 5) else 8)
                            column = lane % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
                            codes[tile * 16 + row, brick * 128 + step * 16 + column] = values[i]
    assert position == len(data)
    return codes, rest


@pytest.mark.parametrize("element", ["Int4", "Int8", "E2M1", "Table4"])
@pytest.mark.parametrize(("scale", "offset", "groups"), [("ScaleF16", "NONE", 1), ("ScaleF32", "MINIMUM", 8)])
def test_bricks_hold_the_operand_of_the_instruction(element, scale, offset, groups):
    kind, n, k = Kind(element, scale, offset, groups), 150, 200
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256 if element == "Int8" else 16, (n, k)).astype(np.uint8)
    columns = -(-k * groups // 128)
    scales = rng.standard_normal((n, columns)).astype(kind.scale_dtype)
    offsets = rng.standard_normal((n, columns)).astype(kind.scale_dtype) if offset != "NONE" else None
    packed = pack(Description(kind, codes, scales, offsets, np.ones(n, np.float32)))
    found, rest = read_back(kind, packed, n, k)
    assert (found[:n, :k] == codes).all()
    assert found[n:].max() == found[:, k:].max() == 0
    # Of each group, lanes with g want the rows g and g + 8 side by side.
    planes = rest.view(kind.scale_dtype).reshape(*rest.shape[:2], -1, 8, groups, 2)
    for plane, expected in enumerate([scales] if offsets is None else [scales, offsets]):
        rows = planes[:, :, plane].transpose(0, 4, 2, 1, 3).reshape(len(found), -1)
        assert (rows[:n, :columns] == expected).all()


def decode_bytes(codes: np.ndarray, kind: str) -> np.ndarray:
    """The upper bits of a float16 that is 2^7 times the scale: float32."""
    shift = {"ScaleE5M2": 8, "ScaleE5M3": 7}[kind]
    return (codes.astype(np.uint16) << shift).view(np.float16).astype(np.float32) * np.float32(2.0**-7)


def test_scales_of_two_groups_share_a_word():
    """As decode.cuh takes them apart: a mask for the first group, and before it a rotation for the second."""
    scales = np.random.default_rng(0).integers(0, 256, (5, 8, 2)).astype(np.uint8)
    words = layout.interleave_e5m3(scales)
    for group in range(8):
        word = words[:, group // 2]
        rotated = word << np.uint32(8) | word >> np.uint32(24) if group % 2 else word
        halves = rotated & np.uint32(0x7F807F80)
        assert (halves >> np.uint32(7) & np.uint32(255) == scales[:, group, 0]).all()
        assert (halves >> np.uint32(23) == scales[:, group, 1]).all()


@pytest.mark.parametrize(("name", "size", "option", "wild"), storages())
def test_no_format_loses_a_bit_on_the_way_to_bricks(name, size, option, wild):
    """What dequantize.cu does, in NumPy, from the description alone."""
    q = make(name, size, option, wild)
    about = describe(q)
    kind = about.kind
    k = q.shape[1]
    if kind.element == "E2M1":
        w = FP4.values[about.codes]
    elif kind.element == "Table4":
        w = np.asarray(kind.table, np.float32)[about.codes] - 128
    else:
        center = {"Int4": 8, "Int8": 128}[kind.element]
        w = about.codes.astype(np.float32) - center + kind.middle
    with np.errstate(all="ignore"):
        scale = about.scales.astype(np.float32)
        if kind.scale in ("ScaleE5M2", "ScaleE5M3"):
            scale = decode_bytes(about.scales, kind.scale)

        def spread(x: np.ndarray) -> np.ndarray:
            return np.repeat(x, 128 // kind.groups, axis=1)[:, :k]

        row = about.row_scale[:, None]
        if kind.offset == "ZERO":
            w = w - spread(about.offsets.astype(np.float32))
        w = w * spread(scale * row)
        if kind.offset == "MINIMUM":
            w = w + spread(about.offsets.astype(np.float32) * row)
        assert_same_bits(w.astype(np.float32), bf.dequantize(q, backend="reference"))


@pytest.mark.parametrize("name", ["u4", "iq4_nl", "nvfp4"])
def test_bricks_are_saved_and_loaded(name, tmp_path):
    q = make(name, FORMATS[name].group_sizes[0], options_of(FORMATS[name])[0], 0)
    packed = PackedBricks.of(q)
    packed.save(tmp_path / "weights.npz")
    loaded = PackedBricks.load(tmp_path / "weights.npz")
    assert (loaded.kind, loaded.shape) == (packed.kind, packed.shape)
    assert (loaded.bricks == packed.bricks).all()
    assert (loaded.row_scale == packed.row_scale).all()


def test_other_files_are_not_bricks(tmp_path):
    (tmp_path / "text").write_text("no")
    np.savez(tmp_path / "other.npz", bricks=np.zeros(3))
    q = make("u4b8", 128, {}, 0)
    packed = PackedBricks.of(q)
    PackedBricks(packed.kind, (999, 128), packed.bricks, packed.row_scale).save(tmp_path / "short.npz")
    for name in ("text", "other.npz", "short.npz"):
        with pytest.raises(bf.DataError, match=r"\[load\] path"):
            PackedBricks.load(tmp_path / name)


def test_bricks_of_another_version_are_refused(tmp_path, monkeypatch):
    packed = PackedBricks.of(make("u4b8", 128, {}, 0))
    monkeypatch.setattr(layout, "LAYOUT", layout.LAYOUT - 1)
    packed.save(tmp_path / "old.npz")
    monkeypatch.undo()
    with pytest.raises(bf.DataError, match="another version: pack the tensor again"):
        PackedBricks.load(tmp_path / "old.npz")


def test_scales_stay_as_small_as_the_file_has_them():
    kinds = {
        name: describe(make(name, FORMATS[name].group_sizes[-1], options_of(FORMATS[name])[0], 0)).kind
        for name in FORMATS
    }
    assert kinds["u4b8"].brick_bytes == 1024 + 32
    assert kinds["u4"].scale == kinds["q4_1"].scale == kinds["q8_0"].scale == "ScaleF16"
    assert (kinds["mxfp4"].scale, kinds["nvfp4"].scale) == ("ScaleE5M2", "ScaleE5M3")
    assert (kinds["mxfp4_gguf"], kinds["nvfp4_gguf"]) == (kinds["mxfp4"], kinds["nvfp4"])
    assert kinds["q4_k"].scale == "ScaleF32"
    assert kinds["iq4_nl"].table


@pytest.mark.parametrize(("factor", "center"), [(2.0**15, 8), (2.0**11, 8), (2.0**15, 128)])
def test_codes_are_decoded_and_scaled_with_one_rounding(factor, center):
    """decode.cuh's fma(code * 2^-24, scale * factor, -center * scale * 2^-9): its factors are float16s, for scales from
    2^-6 to 2, so the result is (code - center) * scale * 2^-9 rounded once."""
    bits = np.arange(np.float16(2.0**-6).view(np.uint16), np.float16(2).view(np.uint16), dtype=np.uint16)
    scale = bits.view(np.float16).astype(np.float64)
    for number in (scale * factor, -center * scale * 2.0**-9):
        assert (number.astype(np.float16) == number).all()
    shift = 2.0**15 / factor  # a code that lies a nibble higher is as much larger
    code = np.arange(2 * center) * shift
    assert (code.astype(np.uint16).view(np.float16) == code * 2.0**-24).all()
    exact = (code * 2.0**-24)[:, None] * (scale * factor) - center * scale * 2.0**-9
    assert (exact == (np.arange(2 * center) - center)[:, None] * scale * 2.0**-9).all()


def test_plain_codes_are_numbers():
    """decode.cuh's units: what 1 is as codes are in float16, also a nibble higher; E2M1's; and 128 in bfloat16."""
    halves = np.array([0x0001, 0x0010, 0x0400], np.uint16).view(np.float16).astype(np.float64)
    assert halves.tolist() == [2.0**-24, 2.0**-20, 2.0**-14]
    assert (np.arange(16, dtype=np.uint16).view(np.float16) == np.arange(16) * 2.0**-24).all()
    assert ((np.arange(16, dtype=np.uint16) << 4).view(np.float16) == np.arange(16) * 2.0**-20).all()
    wide = (np.arange(0x4300, 0x4310, dtype=np.uint32) << 16).view(np.float32)
    assert wide.tolist() == list(range(128, 144))


def test_a_minimum_is_added_and_a_zero_point_taken_off_without_rounding():
    """gemm_large's fma: it adds minimum * 2^-9, or takes zero * 2^-9 off a code, and both are float16s."""
    minimums = np.arange(np.float16(2.0**-5).view(np.uint16), np.float16(2048).view(np.uint16), dtype=np.uint16)
    reduced = minimums.view(np.float16).astype(np.float64) * 2.0**-9
    assert (reduced.astype(np.float16) == reduced).all()
    for codes in (np.arange(16), np.arange(256)):
        weights = (codes[:, None] - codes) * 2.0**-9
        assert (weights.astype(np.float16) == weights).all()


def test_bits_of_e2m1_are_numbers():
    """decode.cuh: in float16 times 2^-14, in bfloat16 times 2^-126; the second pair lies eight bits lower."""
    half, others = np.arange(1 << 16, dtype=np.uint32), np.array([[0], [0x5A5A], [0xFFFF]], np.uint32)
    words = np.concatenate([half | others << np.uint32(16), half << np.uint32(16) | others])
    for pair in range(2):

        def numbers(first: int, pair: int = pair) -> np.ndarray:
            bits = words >> np.uint32(first) << np.uint32(8 * pair)
            return FP4.values[bits >> np.uint32(12) & np.uint32(8) | bits >> np.uint32(9) & np.uint32(7)]

        narrow = words << np.uint32(8 * pair) & np.uint32(0x8E008E00)
        if pair == 0:
            wide = words & np.uint32(0x80008000) | words >> np.uint32(3) & np.uint32(0x01C001C0)
        else:  # one multiplication shifts two ways
            wide = (words & np.uint32(0x008E008E)) * np.uint32(1 << 8 | 1 << 5) & np.uint32(0x81C081C0)
        for first in (0, 16):
            number = (narrow >> np.uint32(first)).astype(np.uint16).view(np.float16).astype(np.float64)
            assert (number * 2.0**14 == numbers(first)).all()
            number = (wide >> np.uint32(first) << np.uint32(16)).view(np.float32).astype(np.float64)
            assert (number * 2.0**126 == numbers(first)).all()


def test_scales_of_one_byte_are_exact_in_products():
    """A code times its scale as float16, and as bfloat16: gemm_small multiplies them before they are summed."""
    scale = decode_bytes(np.arange(0xF8, dtype=np.uint8), "ScaleE5M3")
    e4m3, powers = bf.scales.decode_e4m3(np.arange(0x7F, dtype=np.uint8)), 2.0 ** np.arange(8, -24, -1)
    assert {*e4m3, *powers} <= set(scale)
    assert {*powers} <= set(decode_bytes(np.arange(0x7C, dtype=np.uint8), "ScaleE5M2"))
    product = FP4.values[:, None].astype(np.float64) * 2.0**-14 * (scale * 2.0**7)
    usual = np.isin(scale, [*e4m3, *powers[:25]])  # to 2^-24 of the largest
    assert (product.astype(np.float16) == product)[:, usual].all()
    assert (product.astype(np.float32).view(np.uint32) & 0xFFFF == 0).all()


def test_scales_that_a_byte_does_not_hold_are_float32():
    """Powers of two more than 2^31 apart; but not because of groups of zeros."""
    codes = np.full((2, 128), 5, np.uint8)
    codes[:, 32:64] = 8
    exponents = np.array([[130, 0, 130, 99], [130, 254, 127, 130]], np.uint8)
    for first, last, expected in (
        (130, 99, "ScaleE5M2"),
        (130, 98, "ScaleF32"),
        (254, 0, "ScaleF32"),
        (1, 255, "ScaleF32"),
    ):
        exponents[0] = first, 0, first, last
        q = bf.QuantizedTensor.from_planes("mxfp4", {"codes": codes, "scale": exponents}, 32)
        about = describe(q)
        assert about.kind.scale == expected
        if expected == "ScaleE5M2":
            scale = np.repeat(decode_bytes(about.scales, expected), 32, axis=1) * about.row_scale[:, None]
            assert_same_bits((FP4.values[codes] * scale).astype(np.float32), bf.dequantize(q, backend="reference"))


# ---- compiling, for GPUs that are not there -------------------------------------------------------------------------


def all_kinds() -> list[Kind]:
    return sorted({describe(make(*storage)).kind for storage in storages() if not storage[3]}, key=repr)


def resources(source: str, macros: dict[str, str], arch: str) -> int:
    """Registers of a kernel, which must not spill; nor may its wgmmas wait for each other."""
    code, log = compile_fresh(source, macros, arch, verbose=True)
    assert code[:4] == b"\x7fELF"
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled is not None, log
    assert int(spilled[1]) == 0, log
    assert "serialized" not in log, log
    found = re.search(r"Used (\d+) registers", log)
    assert found is not None, log
    return int(found[1])


def product(kind: Kind, m: int, n: int = 4096, bfloat16: bool = False) -> Product:
    return Product(kind, m, n, 4096, bfloat16)


def chosen(product: Product, device: Device) -> Plan:
    found = plan(product, device)
    assert found is not None
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100"])
@pytest.mark.parametrize(
    "kind", all_kinds(), ids=lambda kind: f"{kind.element}-{kind.scale}-{kind.offset}-{kind.groups}"
)
def test_every_kind_of_weights_compiles_for_every_architecture(kind, arch):
    device = H200 if arch in ("sm_90a", "sm_100") else ADA
    bfloat16 = kind.groups in (1, 4)
    launch = chosen(product(kind, 16, bfloat16=bfloat16), device).launch
    assert resources(launch.source, dict(launch.macros), arch) * launch.threads <= 65536
    if arch == "sm_90a":
        resources("pack.cu", kind.macros(), arch)
        resources("dequantize.cu", kind.macros() | {"OUTPUT": "Stored<BF16>"}, arch)
        for m, n in ((16, 28672), (32, 28672), (64, 4096)):
            launch = chosen(product(kind, m, n, bfloat16), device).launch
            assert launch.source == "gemm_large.cu"
            resources(launch.source, dict(launch.macros), arch)


@pytest.mark.parametrize("n", [4096, 14336])
@pytest.mark.parametrize("m", [1, 32, 64, 128, 256, 1024, 4096])
def test_what_the_h200_runs_compiles_without_spills(m, n):
    launch = chosen(product(Kind("Int4", "ScaleF16", "NONE", 1), m, n), H200).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


@pytest.mark.parametrize("n", [4096, 8192, 14336, 28672])
@pytest.mark.parametrize(
    "kind",
    [
        Kind("Int4", "ScaleF16", "ZERO", 1, 8),
        Kind("Int4", "ScaleF16", "MINIMUM", 4, 8),
        Kind("Int8", "ScaleF16", "NONE", 4),
        Kind("E2M1", "ScaleE5M3", "NONE", 8),
    ],
    ids=lambda kind: f"{kind.element}-{kind.scale}-{kind.offset}-{kind.groups}",
)
def test_few_rows_of_wide_matrices_compile_without_spills(kind, n):
    for m in (1, 8):
        launch = chosen(product(kind, m, n), H200).launch
        macros = dict(launch.macros)
        registers = resources(launch.source, macros, "sm_90a")
        assert registers * launch.threads * int(macros["RESIDENT"]) <= 65536


@pytest.mark.parametrize("element", ["Int4", "Int8", "E2M1"])
@pytest.mark.parametrize(("groups", "offset"), [(8, "NONE"), (4, "MINIMUM")])
@pytest.mark.parametrize(
    "shape", [Shape(256, stages=3), Shape(128, tall=2, batch=1), Shape(128, tall=2, paired=True)], ids=str
)
def test_the_largest_tiles_do_not_spill_either(element, groups, offset, shape):
    kind = Kind(element, "ScaleF16", offset, groups)
    launch = launch_large(product(kind, 512), H200, shape).launch
    resources(launch.source, dict(launch.macros), "sm_90a")


def test_a_kernel_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("BILLFISH_CACHE", str(tmp_path / "new"))
    kind = Kind("Int4", "ScaleF16", "NONE", 1)
    first = compile_kernel("pack.cu", kind.macros(), "sm_80")
    monkeypatch.setattr(compiler, "compile_fresh", lambda *_: pytest.fail("compiled again"))
    assert compile_kernel("pack.cu", kind.macros(), "sm_80") == first
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".cubin"]


def _compile(folder: str) -> bytes:
    import os

    os.environ["BILLFISH_CACHE"] = folder
    return compile_kernel("pack.cu", Kind("Int8", "ScaleF16", "NONE", 4).macros(), "sm_90a")


def test_several_processes_may_start_at_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_compile, [str(tmp_path)] * 3)
    assert results[0] == results[1] == results[2]
    assert len(list(tmp_path.iterdir())) == 1


# ---- choosing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H200, ADA], ids=lambda d: d.name)
@pytest.mark.parametrize("kind", all_kinds()[::3], ids=lambda kind: f"{kind.element}-{kind.scale}-{kind.groups}")
def test_plans_fit_the_device(kind, device):
    for m in (1, 8, 9, 17, 33, 65, 129, 300, 1000, 5000):
        for n in (1, 100, 4096, 14336, 28672):
            for k in (16, 128, 4096):
                found = plan(Product(kind, m, n, k), device)
                if found is None:
                    assert device is ADA
                    assert m > 64
                    continue
                launch: Launch = found.launch
                assert launch.shared_bytes <= device.shared_bytes
                assert launch.threads <= 1024
                assert launch.grid[0] % launch.cluster == 0
                macros = dict(launch.macros)
                if launch.source == "gemm_small.cu":
                    names = ("TEAMS", "SHARERS", "TILES", "SLOTS", "RESIDENT")
                    teams, sharers, tiles, slots, resident = (int(macros[name]) for name in names)
                    assert (launch.shared_bytes + 2048) * resident <= device.shared_bytes + 2048
                    assert slots % teams == 8 % tiles == tiles % sharers == 0
                    assert 16 * tiles <= launch.threads  # a thread has the scale and the bias of a column
                    assert sharers == 1 or (teams < 16 and device is H200)  # a team meets at a barrier of its own
                    assert launch.grid[0] <= device.multiprocessors * resident or device is ADA
                if launch.source == "gemm_large.cu":
                    assert int(macros["STAGES"]) >= 2 * int(macros["TEAMS"])
                    assert int(macros["STAGES"]) % int(macros["TEAMS"]) == 0
                    assert int(macros["SPLIT"]) * int(macros["TEAMS"]) <= -(-k // 128)
                    assert device is H200


def tiles(shape: Shape, m: int, n: int) -> list[list[tuple[int, range]]]:
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
    "shape", [Shape(128, tall=2, paired=True), Shape(128, paired=True), Shape(64, tall=2)], ids=str
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
            launch = chosen(Product(kind, m, n, k), H200).launch
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
        dict(chosen(Product(kind, m, 4096, 4096, batch_invariant=True), H200).launch.macros)["TEAMS"]
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
    with pytest.raises(bf.BackendUnavailable, match="no backend can run this: cuda: no NVIDIA"):
        bf.quantized_linear(np.ones((1, 128), np.float16), q, backend="cuda")


def test_float32_in_memory_and_quantized_x_are_refused():
    backend = BACKENDS["cuda"]
    problem = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float32))
    assert backend.can_run(problem)[0] is False
    assert "float16 and bfloat16" in backend.can_run(problem)[1]
    integers = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float16), activations="q8")
    assert "q8" in backend.can_run(integers)[1]
    elsewhere = bf.backends.Problem("matmul", FORMATS["u4b8"], 128, 1, 16, 128, np.dtype(np.float16), device="xpu")
    assert backend.can_run(elsewhere) == (False, "it computes on NVIDIA GPUs, and x is on xpu")


def test_torch_knows_the_shape_without_computing():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from billfish.backends.cuda import torch_op

    with FakeTensorMode():
        y = torch_op.cuda_linear(torch.empty((2, 3, 128), dtype=torch.bfloat16), None, 0, 77, False, None)
    assert y.shape == (2, 3, 77)
    assert y.dtype == torch.bfloat16
    with pytest.raises(bf.DataError, match="still held"):
        torch_op.cuda_linear(torch.empty((1, 128)), None, 0, 77, False, None)
