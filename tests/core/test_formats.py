"""What holds for every format in the registry: lossless storage, one rounding, layouts as documented."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from common import (
    assert_same_bits,
    assert_same_planes,
    gaussian,
    options_of,
    random_storage,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import billfish as bf
from billfish.core.format import Format, aliases_of, parse_format
from billfish.core.formats.word_packing import WordFormat, pack_words, unpack_words


@pytest.mark.parametrize(
    ("text", "beside", "expected"),
    [
        ("fp4", None, ("fp4", None)),
        ("FP4:64", None, ("fp4", 64)),
        ("fp4:-1", None, ("fp4", -1)),
        ("fp4", 64, ("fp4", 64)),
        ("fp4:64", 64, ("fp4", 64)),
        ("q4_0:32", None, ("q4_0", 32)),
    ],
)
def test_a_format_is_written_with_its_group_size(text, beside, expected):
    format, group_size = parse_format(text, "call", beside)
    assert (format.name, group_size) == expected


@pytest.mark.parametrize(
    ("text", "beside", "message"),
    [
        ("fp5:64", None, "'fp5'"),
        ("fp4:", None, "'fp4:'.*fp4:"),
        ("fp4:6.4", None, "'fp4:6.4'"),
        ("fp4:" + "9" * 5000, None, "fp4:999"),
        ("fp4:48", None, "48.*16, 32, 64, 128"),
        ("fp4", 48, "48.*16, 32, 64, 128"),
        ("q4_0:-1", None, "-1.*32"),
        ("fp4:64", 32, "'fp4:64'.*group_size.*32"),
        (3, None, "3"),
    ],
)
def test_what_is_no_format_and_group_size_is_refused(text, beside, message):
    with pytest.raises(bf.FormatError, match=message):
        parse_format(text, "call", beside)


FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


def sizes(format: Format) -> st.SearchStrategy[tuple[int, int, int]]:
    """(N, K, group size) that the format takes, partial last groups included."""
    multiples = max(1, 512 // format.block_size)
    k = st.integers(1, multiples).map(lambda blocks: blocks * format.block_size)
    group = st.sampled_from([*format.group_sizes, *([-1] if format.whole_row_groups else [])])
    return st.tuples(st.integers(1, 5), k, group)


@FORMATS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_storage_and_planes_are_inverse_on_random_bytes(format, data):
    n, k, group_size = data.draw(sizes(format))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    storage = random_storage(format, n, k, rng, k if group_size == -1 else group_size)
    tensor = bf.QuantizedTensor.from_storage(format, storage, group_size)
    assert tensor.shape == (n, k)
    planes = tensor.planes
    again = format.pack(planes)
    assert_same_planes(again, storage)
    assert_same_planes(format.unpack(again), planes)


@FORMATS
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_representable_weights_survive_a_round_trip(format, data):
    """What came out of dequantize goes through pack, unpack and dequantize unchanged."""
    n, k, group_size = data.draw(sizes(format))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    w = rng.standard_normal((n, k)).astype(np.float32)
    once = bf.quantize(w, format, group_size=group_size)
    again = bf.QuantizedTensor.from_planes(format, once.planes, once.group_size)
    assert_same_planes(again.storage, once.storage)
    assert_same_bits(bf.dequantize(again), bf.dequantize(once))
    assert again.shape == (n, k)


@FORMATS
def test_quantizing_what_is_representable_does_not_move_it(format):
    source = gaussian((16, 4 * max(64, format.block_size)))
    w = bf.dequantize(bf.quantize(source, format))
    moved = np.abs(bf.dequantize(bf.quantize(w, format, method="mse")) - w)
    # Where the scale is found again the weights are exact; a block may find another that is nearly as good.
    assert np.mean(moved**2) <= 0.1 * np.mean((w - source) ** 2)
    assert moved.max() <= 0.2 * np.abs(w).max()


@FORMATS
def test_storage_may_be_a_strided_view(format):
    """As a slice of a larger memory-mapped array is."""
    q = bf.quantize(gaussian((12, 2 * format.block_size)), format)
    views = {}
    for name, array in q.storage.items():
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype) if array.ndim else array.copy()
        views[name] = wide[..., ::2] if array.ndim else wide
        views[name][...] = array
    again = bf.QuantizedTensor.from_storage(format, views, q.group_size)
    for backend in ("cpu", "reference"):
        assert_same_bits(bf.dequantize(again, backend=backend), bf.dequantize(q))


@FORMATS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_rounds_once(format, dtype):
    k = 4 * format.block_size
    storage = random_storage(format, 16, k, np.random.default_rng(11))
    tensor = bf.QuantizedTensor.from_storage(format, storage)
    exact = bf.dequantize(tensor)
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = exact.astype(target)
    assert_same_bits(bf.dequantize(tensor, dtype), expected)
    out = np.full((16, k), 7, target)
    assert bf.dequantize(tensor, out=out) is out
    assert_same_bits(out, expected)


@FORMATS
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_zeros_stay_zero_and_tiny_weights_do_no_harm(format, method):
    k = 2 * format.block_size
    for options in options_of(format):
        w = np.zeros((3, k), np.float32)
        assert not bf.dequantize(bf.quantize(w, format, method=method, **options)).any()
        w[1] = 1e-30
        w[2, 0] = 1.0
        assert np.isfinite(bf.dequantize(bf.quantize(w, format, method=method, **options))).all()


@FORMATS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_narrow_weights_quantize_as_their_float32(format, dtype, method):
    w = gaussian((4, 2 * format.block_size)).astype(dtype)
    narrow = bf.quantize(w, format, method=method)
    wide = bf.quantize(w.astype(np.float32), format, method=method)
    assert_same_planes(narrow.storage, wide.storage)


@FORMATS
def test_size_is_as_announced(format):
    for group_size in format.group_sizes:
        tensor = bf.quantize(gaussian((8, 1024)), format, group_size=group_size)
        announced = format.bits_per_weight(group_size)
        extra = 32 / 8192 if "global_scale" in tensor.storage else 0
        assert tensor.bits_per_weight == pytest.approx(announced + extra)
        assert tensor.nbytes == sum(a.nbytes for a in tensor.storage.values())


@FORMATS
def test_plain_rounding_is_off_by_a_step_at_most(format):
    """Half a step inside the range; a whole one where a signed range ends a step earlier above zero than below. The
    rest is the rounding of the scale itself, and the rule of mxfp4 and mxfp8, which clips by up to a quarter."""
    for options in options_of(format):
        w = gaussian((16, 1024), 12)
        tensor = bf.quantize(w, format, method="rtn", **options)
        scale = np.abs(format.group_values(tensor.planes).scale)
        widest = np.nanmax(np.diff(np.unique(format.element.values)))
        step = np.repeat(scale, tensor.group_size, axis=1) * widest
        allowed = step * (1 if format.element.low + format.element.high else 0.5) * 1.01
        allowed += np.abs(w) * (0.26 if "mxfp" in format.name else 0.04)
        assert (np.abs(w - bf.dequantize(tensor)) <= allowed).all()


@FORMATS
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-42])
def test_weights_near_the_end_of_float32_come_back_finite_and_small(format, method, size):
    w = np.zeros((2, 2 * format.block_size), np.float32)
    w[0, 0] = size
    w[1] = gaussian((2 * format.block_size,)) * np.float32(size)
    for options in options_of(format):
        back = bf.dequantize(bf.quantize(w, format, method=method, **options))
        assert np.isfinite(back).all()
        assert np.abs(back).max() <= 4 * np.abs(w).max()


@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
def test_u4_of_weights_far_from_zero(zero_point, method):
    """All equal, nearly equal, and a narrow range away from zero."""
    w = np.ones((4, 32), np.float32)
    w[1] += np.linspace(0, 1e-4, 32, dtype=np.float32)
    w[2] = np.linspace(3, 4, 32)
    w[3] = -np.linspace(3, 4, 32)
    error = np.abs(bf.dequantize(bf.quantize(w, "u4", zero_point=zero_point, method=method)) - w)
    allowed = 4 / 15 if zero_point == "integer" else np.array([[1 / 1000], [1 / 1000], [1 / 25], [1 / 25]])
    assert (error <= allowed).all()


def test_signed_formats_use_the_longer_side_of_their_range():
    """-8 reaches further than 7: a group whose extreme is negative gets the finer scale."""
    w = np.zeros((2, 32), np.float32)
    w[0, 0], w[1, 0] = -8, 7
    for name in ("u4b8", "q4_0"):
        scale = np.abs(bf.quantize(w, name).planes["scale"][:, 0])
        assert scale[0] == 1
    np.testing.assert_array_equal(bf.quantize(w, "u4b8").planes["scale"][:, 0], [1, 1])


def test_nvfp4_uses_the_whole_range_of_its_scales():
    w = gaussian((8, 64))
    planes = bf.quantize(w, "nvfp4").planes
    assert planes["global_scale"] == np.float32(np.abs(w).max()) / np.float32(448 * 6)
    assert planes["scale"].max() == 0x7E  # 448
    assert bf.quantize(w * 0, "nvfp4").planes["global_scale"] == 1


def test_mxfp4_search_takes_the_next_scale_on_either_side():
    w = np.full((2, 32), 7.9, np.float32)  # clipped to 6 by the plain rule: one up is better
    w[1] = 0.25  # rounded to 0 by the plain rule, for the sake of one large weight: one down is better
    w[1, 0] = 4.1
    plain, searched = (bf.quantize(w, "mxfp4", method=m).planes["scale"][:, 0].astype(int) for m in ("rtn", "mse"))
    assert (searched - plain).tolist() == [1, -1]


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_q8_1_carries_the_sum_of_its_codes(method):
    planes = bf.quantize(gaussian((8, 64)), "q8_1", method=method).planes
    sums = planes["codes"].view(np.int8).reshape(8, 2, 32).sum(axis=2)
    np.testing.assert_allclose(planes["sum"], planes["scale"].astype(np.float32) * sums, rtol=2e-3)
    huge = bf.quantize(np.full((1, 32), 3000, np.float32), "q8_1")
    assert huge.planes["sum"][0, 0] == 65504
    np.testing.assert_allclose(bf.dequantize(huge), 3000, rtol=1e-3)


def test_q4_0_round_trip_error_is_at_most_an_eighth():
    """A source document says amax/7; the worst case of ggml's rule is amax/8, and the float16 rounding of d."""
    w = np.random.default_rng(13).uniform(-1, 1, (4096, 32)).astype(np.float32)
    worst = np.abs(w - bf.dequantize_q4_0(bf.quantize_q4_0(w))).max(axis=1) / np.abs(w).max(axis=1)
    assert worst.max() <= 1 / 8 * (1 + 7 * 2.0**-11)
    assert worst.max() > 0.12


# ---- layouts, element by element ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_codes_least_significant_first(bits):
    per = 32 // bits
    codes = np.random.default_rng(14).integers(0, 2**bits, (4 * per, 3)).astype(np.uint8)
    words = pack_words(codes, bits)
    for k in range(4 * per):
        for n in range(3):
            assert words[k // per, n] >> np.uint32(bits * (k % per)) & np.uint32(2**bits - 1) == codes[k, n]
    np.testing.assert_array_equal(unpack_words(words, bits), codes)


@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8b128"])
@pytest.mark.parametrize(("k", "group_size"), [(64, 32), (72, 32), (8, 64), (136, 128), (40, -1)])
def test_word_formats_decode_as_written_down(name, k, group_size):
    """The slow way: one element after the other, from the packed arrays."""
    format = bf.FORMATS[name]
    assert isinstance(format, WordFormat)
    groups = 1 if group_size == -1 else -(-k // group_size)
    rng = np.random.default_rng(15)
    bits, n = format.element.bits, 5
    per = 32 // bits
    packed = rng.integers(0, 2**32, (k // per, n), dtype=np.uint32)
    scales = rng.standard_normal((groups, n)).astype(np.float16)
    zeros = rng.uniform(0, 15, (groups, n)).astype(np.float16)
    storage = {"packed": packed, "scales": scales} | ({"zeros": zeros} if name == "u4" else {})
    w = bf.dequantize(bf.QuantizedTensor.from_storage(format, storage, group_size))
    assert w.shape == (n, k)
    for column in range(n):
        for row in range(k):
            group = 0 if group_size == -1 else row // group_size
            code = int(packed[row // per, column]) >> (bits * (row % per)) & (2**bits - 1)
            value = format.element.values[code]
            if name == "u4":
                value = value - np.float32(zeros[group, column])
            assert w[column, row] == value * np.float32(scales[group, column])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_microscaled_formats_decode_as_written_down(name):
    rng = np.random.default_rng(16)
    g = bf.FORMATS[name].group_sizes[0]
    packed = rng.integers(0, 256, (3, 64), dtype=np.uint8)
    scales = rng.integers(60, 120, (3, 128 // g), dtype=np.uint8)
    storage = {"packed": packed, "scales": scales}
    held = scales.view(ml_dtypes.float8_e8m0fnu if name == "mxfp4" else ml_dtypes.float8_e4m3fn).astype(np.float32)
    if name == "nvfp4":
        storage["global_scale"] = np.asarray(0.37, np.float32)
        held = held * np.float32(0.37)
    w = bf.dequantize(bf.QuantizedTensor.from_storage(name, storage))
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 128)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bits(w, values * np.repeat(held, g, axis=1))


# ---- MLX as outside oracle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_microscaled_formats_equal_mlx(mode):
    import mlx.core as mx

    w = gaussian((32, 256), 17)
    packed, scales = mx.quantize(mx.array(w), mode=mode)
    expected = np.array(mx.dequantize(packed, scales, mode=mode, dtype=mx.float32))
    storage = {"packed": np.array(packed).view(np.uint8), "scales": np.array(scales)}
    if mode == "nvfp4":
        storage["global_scale"] = np.ones((), np.float32)
    assert_same_bits(bf.dequantize(bf.QuantizedTensor.from_storage(mode, storage)), expected)


@pytest.mark.parametrize(("name", "bits", "bias"), [("u4b8", 4, 8), ("u8b128", 8, 128)])
def test_word_formats_equal_mlx_affine(name, bits, bias):
    """MLX's affine mode is row-major with the same order in a word, and w = s * q + b."""
    import mlx.core as mx

    tensor = bf.quantize(gaussian((32, 256), 18), name, group_size=64)
    scales = tensor.storage["scales"].T.astype(np.float32)
    expected = mx.dequantize(
        mx.array(np.ascontiguousarray(tensor.storage["packed"].T)),
        mx.array(scales),
        mx.array(-bias * scales),
        group_size=64,
        bits=bits,
    )
    np.testing.assert_allclose(bf.dequantize(tensor), np.array(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["u4", "u8", "u4b8", "u8b128", "fp4", "affine4", "affine8"])
def test_scales_of_checkpoints_may_be_wider_than_float16(name, backend):
    """Values that float16 has no room for, in the types that checkpoints use."""
    format = bf.FORMATS[name]
    dtypes = [np.float32] if isinstance(format, WordFormat) else [np.float32, ml_dtypes.bfloat16]
    for dtype in dtypes:
        planes = bf.quantize(gaussian((24, 160)), name, group_size=64).planes
        for plane in ("scale", "minimum"):
            if plane in planes:
                planes[plane] = (planes[plane].astype(np.float32) * np.float32(1e-9)).astype(dtype)
        tensor = bf.QuantizedTensor.from_planes(name, planes, 64)
        expected = format.decode(planes, 64)
        assert_same_bits(bf.dequantize(tensor, backend=backend), expected)
        x = gaussian((3, 160), 1) * np.float32(1e9)
        y = bf.quantized_linear(x, tensor, backend=backend)
        exact = x.astype(np.float64) @ expected.T.astype(np.float64)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


# ---- names ----------------------------------------------------------------------------------------------------------


@FORMATS
def test_a_format_has_its_name_in_any_case_and_with_any_separators(format):
    for name in (format.name, *aliases_of(format)):
        for written in (name, name.upper(), name.title(), name.replace("_", "-"), name.replace("_", "")):
            assert bf.get_format(written) is format


@pytest.mark.parametrize(
    ("name", "known"),
    [("Q4_K", "q4_k"), ("MXFP4", "mxfp4"), ("FP4_E2M1", "fp4"), ("int4", "u4b8"), ("uint4b8", "u4b8"), ("uint4", "u4")],
)
def test_the_names_that_people_use(name, known):
    q = bf.quantize(gaussian((4, 256)), name)
    assert q.format.name == known
    assert_same_planes(q.storage, bf.quantize(gaussian((4, 256)), known).storage)
    storage = {name: np.array(array) for name, array in q.storage.items()}
    assert bf.QuantizedTensor.from_storage(name, storage, q.group_size).format.name == known
    assert bf.MarlinLinear.from_linear(torch.nn.Linear(256, 8), name).format == known
    model = torch.nn.Sequential(torch.nn.Linear(256, 8))
    assert bf.quantize_model(model, name, predicate=lambda *_: {"format": name}).replaced[0].format == known


def test_a_configuration_is_saved_by_the_names_that_files_have():
    from billfish.nn.transformers import BillfishConfig

    config = BillfishConfig("INT4", 64, modules={"a": {"format": "UINT4B8"}})
    assert (config.format, config.modules) == ("u4b8", {"a": {"format": "u4b8"}})
    assert config.settings("a")["group_size"] == 64  # as it is the same format


def test_no_name_stands_for_two_formats():
    names = ["".join(filter(str.isalnum, name)) for f in bf.FORMATS.values() for name in (f.name, *aliases_of(f))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "near"), [("q4_2", "q4_0"), ("MXPF4", "mxfp4"), ("uint4b9", "uint4b8"), ("none", None)]
)
def test_an_unknown_name_gets_the_nearest(name, near):
    with pytest.raises(bf.FormatError) as caught:
        bf.get_format(name)
    assert f"get_format: unknown format {name!r}" in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == (near is not None)
    assert near is None or repr(near) in str(caught.value)


@pytest.mark.parametrize("name", ["Q4_K_M", "q4_k_s", "Q3_K_L", "q5km"])
def test_a_mix_is_no_format(name):
    main = f"q{name[1]}_k"
    message = f"'{name}'.*mix.*'{main}'.*billfish quantize"
    with pytest.raises(bf.FormatError, match=message):
        bf.quantize(gaussian((4, 256)), name)


def test_foreign_formats_have_aliases_of_their_own_and_take_nobody_elses():
    class Foreign(type(bf.FORMATS["u4b8"])):  # a subclass does not inherit the aliases
        name = "foreign"

    try:
        bf.register(Foreign)
        assert bf.get_format("Foreign").name == "foreign"
        assert bf.get_format("int4").name == "u4b8"
    finally:
        del bf.FORMATS["foreign"]
    for taken in ({"name": "Q4-0"}, {"name": "foreign", "aliases": ("int4",)}):
        with pytest.raises(bf.FormatError, match="another format has the name"):
            bf.register(type("Foreign", (Foreign,), taken))
    assert "foreign" not in bf.FORMATS
