"""Errors name the call, the argument, its value and what is accepted. Their wording is free."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from common import gaussian

import billfish as bf
from billfish.core import bits
from billfish.core.errors import bad_argument

W = gaussian((4, 64))
PACKED, SCALES = bf.pack_fp4_weights(W.T)
Q = bf.quantize(W, "q4_0")
X = gaussian((2, 64))
STACK = bf.quantize(W.reshape(2, 2, 64), "q4_0")


def with_value(value: float) -> np.ndarray:
    w = W.copy()
    w[2, 5] = value
    return w


def read_only() -> np.ndarray:
    out = np.zeros((4, 64), np.float32)
    out.setflags(write=False)
    return out


def storage(name: str, **arrays: object) -> object:
    return bf.QuantizedTensor.from_storage(name, arrays)


U8 = np.uint8
# What is called, what it raises, and the facts of the message.
CASES = [
    # quantize
    (lambda: bf.quantize(W, "fp5"), bf.FormatError, "quantize|format|'fp5'|'fp4'|billfish formats"),
    (lambda: bf.quantize(W, ["q4_0"]), bf.FormatError, "quantize|format|['q4_0']|'q4_0'|bf.FORMATS"),
    (lambda: bf.quantize(W, "fp4", method="best"), bf.FormatError, "quantize|method|'best'|'rtn'|'mse'|'gptq'"),
    (lambda: bf.quantize(W, "fp4", group_size=48), bf.FormatError, "quantize|group_size|48|128|-1|fp4"),
    (lambda: bf.quantize(W, "q4_0", group_size=64), bf.FormatError, "quantize|group_size|64|32|q4_0"),
    (lambda: bf.quantize(W, "u4", group_size=16), bf.FormatError, "quantize|group_size|128|-1|u4"),
    (lambda: bf.quantize(W, "u4", group_size=True), bf.FormatError, "quantize|group_size|True|128|-1|u4"),
    (lambda: bf.quantize(W, "u4", group_size=32.0), bf.FormatError, "quantize|group_size|32.0|128|-1|u4"),
    (
        lambda: bf.quantize(W, "u4", zero_point="half"),
        bf.FormatError,
        "quantize|zero_point|'half'|'integer'|'fractional'|u4",
    ),
    (lambda: bf.quantize(W, "q4_0", zero_point="integer"), bf.FormatError, "quantize|options|'zero_point'|q4_0"),
    (lambda: bf.quantize(W, "u4", zeros="integer"), bf.FormatError, "quantize|options|'zeros'|zero_point|u4"),
    (lambda: bf.quantize(W.astype(int), "q4_0"), bf.DTypeError, "quantize|w|int64|float32|bfloat16"),
    (lambda: bf.quantize(W.astype(float), "q4_0"), bf.DTypeError, "quantize|w|float64|float32|bfloat16"),
    (lambda: bf.quantize([[1.0]], "q4_0"), bf.DTypeError, "quantize|w|list|NumPy|torch|mlx"),
    (lambda: bf.quantize(W[0], "q4_0"), bf.ShapeError, "quantize|w|(64,)|[N, K]|[E, N, K]|N > 0"),
    (lambda: bf.quantize(W[:0], "q4_0"), bf.ShapeError, "quantize|w|(0, 64)|[N, K]|[E, N, K]|N > 0"),
    (lambda: bf.quantize(W[:, :33], "q4_0"), bf.ShapeError, "quantize|K|33|32|q4_0"),
    (lambda: bf.quantize(W[:, :0], "q4_0"), bf.ShapeError, "quantize|K|0|32|q4_0"),
    (lambda: bf.quantize(W, "q4_k"), bf.ShapeError, "quantize|K|64|256|q4_k"),
    (lambda: bf.quantize(W[:, :60], "fp4"), bf.ShapeError, "quantize|K|60|8|fp4"),
    (lambda: bf.quantize(with_value(np.nan), "q4_0"), bf.DataError, "quantize|w|nan|row 2, k 5|finite"),
    (lambda: bf.quantize(with_value(-np.inf), "fp4"), bf.DataError, "quantize|w|-inf|row 2, k 5|finite"),
    (lambda: bf.quantize(with_value(1e30), "q4_0"), bf.DataError, "quantize|w|overflows|float16"),
    (lambda: bf.quantize(with_value(1e30), "q4_1", method="mse"), bf.DataError, "quantize|w|overflows|float16"),
    # packers
    (lambda: bf.pack_fp4_weights(W), bf.ShapeError, "pack_fp4_weights|K|4|8|fp4"),
    (lambda: bf.pack_fp4_weights(W[0]), bf.ShapeError, "pack_fp4_weights|w_kn|(64,)|[K, N]|N > 0"),
    (lambda: bf.pack_fp4_weights(W.T, 33), bf.FormatError, "pack_fp4_weights|group_size|33|128|-1|fp4"),
    (lambda: bf.pack_s4_weights(with_value(np.nan).T), bf.DataError, "pack_s4_weights|w_kn|nan|row 2, k 5|finite"),
    (
        lambda: bf.pack_u4_weights(W.T, method="gptq"),
        bf.FormatError,
        "pack_u4_weights|method|'gptq'|'rtn'|'mse'|bf.quantize|hessian",
    ),
    (
        lambda: bf.quantize_q4_0(W, method="gptq"),
        bf.FormatError,
        "quantize_q4_0|method|'gptq'|'rtn'|'mse'|bf.quantize|hessian",
    ),
    (
        lambda: bf.unpack_u4_weights(PACKED, SCALES, SCALES[:1]),
        bf.ShapeError,
        "unpack_u4_weights|zeros|(1, 4)|(2, 4)|K/32|K=64",
    ),
    (
        lambda: bf.unpack_u4_weights(PACKED, SCALES, SCALES.astype(np.float32)),
        bf.DTypeError,
        "unpack_u4_weights|zeros|float32|uint8|float16",
    ),
    # storage
    (lambda: storage("q4_0", blocks=np.zeros((2, 19), U8)), bf.ShapeError, "from_storage|blocks|19|bytes|18|q4_0"),
    (lambda: storage("q4_0", blocks=np.zeros((2, 18), np.int8)), bf.DTypeError, "from_storage|blocks|int8|uint8"),
    (lambda: storage("q4_0", blocks=np.zeros(18, U8)), bf.ShapeError, "from_storage|blocks|(18,)|2"),
    (lambda: storage("q4_0", blocks=b"18 bytes"), bf.DTypeError, "from_storage|blocks|bytes|uint8"),
    (lambda: storage("q4_0", packed=PACKED), bf.FormatError, "from_storage|storage|['packed']|blocks|q4_0"),
    (lambda: storage("fp4", packed=PACKED), bf.FormatError, "from_storage|storage|['packed']|packed, scales|fp4"),
    (
        lambda: storage("mxfp4", packed=np.zeros((2, 16), U8), scales=np.zeros((2, 2), U8)),
        bf.ShapeError,
        "from_storage|scales|(2, 2)|(2, 1)|K/32|K=32",
    ),
    (
        lambda: storage(
            "nvfp4", packed=np.zeros((2, 8), U8), scales=np.zeros((2, 1), U8), global_scale=np.ones(1, np.float32)
        ),
        bf.ShapeError,
        "from_storage|global_scale|(1,)|0",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.full((1, 32), 16, U8), "scale": SCALES[:1, :1]}),
        bf.DataError,
        "from_planes|codes|uint8|16|q4_0",
    ),
    (lambda: bf.QuantizedTensor.from_planes("q4_0", {}), bf.DTypeError, "from_planes|codes|NoneType|uint8"),
    # dequantize
    (lambda: bf.dequantize(W), bf.DTypeError, "dequantize|q|ndarray|QuantizedTensor|QuantizedExperts"),
    (lambda: bf.dequantize(Q, "int8"), bf.DTypeError, "dequantize|dtype|'int8'|float32|bfloat16"),
    (lambda: bf.dequantize(Q, "no type"), bf.DTypeError, "dequantize|dtype|'no type'|float32|bfloat16"),
    (lambda: bf.dequantize(Q, out=W.T), bf.ShapeError, "dequantize|out|(64, 4)|(4, 64)"),
    (lambda: bf.dequantize(Q, out=W.astype(float)), bf.DTypeError, "dequantize|out|float64|float32|bfloat16"),
    (lambda: bf.dequantize(Q, out=read_only()), bf.DTypeError, "dequantize|out|read-only|writable"),
    (
        lambda: bf.dequantize(Q, out=torch.empty(4, 64, device="meta")),
        bf.BackendUnavailable,
        "dequantize|cpu|CPU memory|on meta|reference",
    ),
    # quantized_linear
    (lambda: bf.quantized_linear(X[:, :32], Q), bf.ShapeError, "quantized_linear|x|(2, 32)|[..., 64]|[4, 64]"),
    (lambda: bf.quantized_linear(X.astype(float), Q), bf.DTypeError, "quantized_linear|x|float64|float32|bfloat16"),
    (lambda: bf.quantized_linear(np.ones((), np.float32), Q), bf.ShapeError, "quantized_linear|x|()|[..., 64]|[4, 64]"),
    (lambda: bf.quantized_linear(X, Q, bias=X[0]), bf.ShapeError, "quantized_linear|bias|(64,)|(4,)"),
    (lambda: bf.quantized_linear(X, Q, group_size=32), bf.FormatError, "quantized_linear|group_size|QuantizedTensor"),
    (lambda: bf.quantized_linear(X, PACKED), bf.DTypeError, "quantized_linear|scales|None|float16|[K/g, N]"),
    (
        lambda: bf.quantized_linear(X, PACKED.view(np.int32), SCALES),
        bf.DTypeError,
        "quantized_linear|weight|int32|uint32",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, group_size=64),
        bf.ShapeError,
        "quantized_linear|scales|(2, 4)|(1, 4)|K/64|K=64",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, format="u4"),
        bf.FormatError,
        "quantized_linear|zeros|u4",
    ),
    (
        lambda: bf.quantized_linear(X, Q, backend="tpu"),
        bf.BackendUnavailable,
        "quantized_linear|backend|'tpu'|cpu|cuda|metal",
    ),
    (
        lambda: bf.quantized_linear(torch.empty(2, 64, device="meta"), Q, backend="cpu"),
        bf.BackendUnavailable,
        "quantized_linear|cpu|CPU memory|on meta",
    ),
    (
        lambda: bf.quantized_linear(Q, X),
        bf.DTypeError,
        "quantized_linear|x|QuantizedTensor|quantized_linear(x, weights)",
    ),
    (lambda: bf.quantized_linear(bf.prepack(Q), X), bf.DTypeError, "x|PackedWeights|quantized_linear(x, weights)"),
    (lambda: bf.quantized_linears(Q, [X]), bf.DTypeError, "x|QuantizedTensor|quantized_linears(x, weights)"),
    (lambda: bf.expert_linear(STACK, X, X), bf.DTypeError, "x|QuantizedExperts|expert_linear(x, weights)"),
    (lambda: bf.experts(STACK, X, X, X, X), bf.DTypeError, "x|QuantizedExperts|experts(x, weights)"),
    (lambda: bf.quantized_linear(X, W), bf.DTypeError, "quantized_linear|weight|float32|bf.quantize"),
    # blocks
    (lambda: bf.quantize_q4_0(X[:, :31]), bf.ShapeError, "quantize_q4_0|K|31|32|q4_0"),
    (lambda: bf.quantize_q8_1(with_value(np.inf)), bf.DataError, "quantize_q8_1|x|inf|row 2, k 5|finite"),
    (lambda: bf.quantize_q8_1(np.ones((), np.float32)), bf.ShapeError, "quantize_q8_1|x|()|[..., K]"),
    (lambda: bf.dequantize_q5_1(np.zeros((2, 25), U8)), bf.ShapeError, "dequantize_q5_1|blocks|25|bytes|24|q5_1"),
    (lambda: bf.dequantize_q5_1(np.zeros((), U8)), bf.ShapeError, "dequantize_q5_1|blocks|()|[..., bytes]"),
    # gemm_w4a8
    (
        lambda: bf.gemm_w4a8(np.zeros((1, 70), U8), Q),
        bf.ShapeError,
        "gemm_w4a8|x_q8|70|bytes|68|(q8_0)|72|(q8_1)|K = 64",
    ),
    (lambda: bf.gemm_w4a8(Q, Q), bf.FormatError, "gemm_w4a8|x_q8|q4_0|K = 64|q8_0|q8_1"),
    (lambda: bf.gemm_w4a8(bf.quantize(X[:, :32], "q8_0"), Q), bf.FormatError, "gemm_w4a8|x_q8|q8_0|K = 32|q8_1|K = 64"),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, zeros=SCALES),
        bf.FormatError,
        "quantized_linear|zeros|u4",
    ),
    (lambda: bf.quantized_linear(X, Q, format="q4_0"), bf.FormatError, "quantized_linear|format|QuantizedTensor"),
    (
        lambda: bf.quantized_linear(X[:, :0], PACKED[:0], SCALES[:0], group_size=-1),
        bf.ShapeError,
        "quantized_linear|K|0|8|fp4",
    ),
    (
        lambda: bf.quantized_linear(X, Q, backend=["cpu"]),
        bf.BackendUnavailable,
        "quantized_linear|backend|['cpu']|cpu|cuda|metal",
    ),
    (lambda: bf.quantized_linear(X, Q, bias=X[:1, :4]), bf.ShapeError, "quantized_linear|bias|(1, 4)|(4,)"),
    (
        lambda: bf.quantized_linear(X, Q, bias=torch.empty(4, device="meta")),
        bf.DTypeError,
        "quantized_linear|bias|torch|on meta|CPU memory",
    ),
    (
        lambda: bf.quantize(torch.empty(4, 64, device="meta"), "q4_0"),
        bf.DTypeError,
        "quantize|w|torch|on meta|CPU memory",
    ),
    (lambda: bf.pack_fp4_weights(W.T * np.float32(1e6)), bf.DataError, "pack_fp4_weights|w_kn|overflows|float16"),
    (
        lambda: bf.pack_fp4_weights(np.zeros((8, 0), np.float32)),
        bf.ShapeError,
        "pack_fp4_weights|w_kn|(8, 0)|[K, N]|N > 0",
    ),
    (lambda: bf.quantize_q4_0(W[:0], method="x"), bf.FormatError, "quantize_q4_0|method|'x'|'rtn'|'mse'"),
    (lambda: bf.dequantize(Q, out=torch.empty(1, 64).expand(4, 64)), bf.DTypeError, "dequantize|out|memory"),
    (
        lambda: bf.QuantizedTensor.from_storage("q4_0", None),
        bf.DTypeError,
        "from_storage|storage|NoneType|dict|blocks|q4_0",
    ),
    (lambda: storage("q4_0", blocks=np.zeros((2, 0), U8)), bf.ShapeError, "from_storage|blocks|0|bytes|18|q4_0"),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 32), U8)}),
        bf.DataError,
        "from_planes|planes|['codes']|('scale')|q4_0",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 32), U8), "scale": np.ones((1, 1))}),
        bf.DataError,
        "from_planes|scale|float64|1.0|q4_0",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {**Q.planes, "zero": SCALES}),
        bf.DataError,
        f"from_planes|zero|float16|{SCALES.max()}",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 24), U8), "scale": SCALES[:1, :1]}),
        bf.ShapeError,
        "from_planes|K|24|32|q4_0",
    ),
    (
        lambda: bf.gemm_w4a8(bf.quantize(X, "q8_0"), Q, format="q4_0"),
        bf.FormatError,
        "gemm_w4a8|format|QuantizedTensor",
    ),
    (lambda: bf.gemm_w4a8(np.zeros((1, 34), U8), bf.quantize(W[:, :8], "fp4")), bf.ShapeError, "gemm_w4a8|w_q4|K|8|32"),
    (lambda: bf.gemm_w4a8(np.zeros((1, 68), np.int8), Q), bf.DTypeError, "gemm_w4a8|x_q8|int8|uint8"),
    (lambda: bits.dequant_fp4_pair(np.zeros(2, np.int32)), bf.DTypeError, "bits|words|int32|uint32|uint16"),
    (lambda: bits.lop3(1, 2, 3, 300), bf.DataError, "lop3|lut|300|0|255"),
    # the registry
    (
        lambda: bf.register(type("Twice", (type(bf.FORMATS["q4_0"]),), {"name": "q4_0"})),
        bf.FormatError,
        "register|name|'q4_0'",
    ),
]


@pytest.mark.promise("inputs", "a wrong argument raises a `BillfishError`, and nothing is written")
@pytest.mark.parametrize(("call", "error", "facts"), CASES, ids=[facts for _, _, facts in CASES])
def test_an_error_names_what_is_wrong(call, error, facts):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, bf.BillfishError)
    for fact in facts.split("|"):
        whole = rf"(?<![\w.]){re.escape(fact)}(?!\w)"
        assert re.search(whole, str(caught.value)), f"{fact!r} is not in: {caught.value}"


def test_errors_are_also_the_ones_python_programmers_expect():
    assert issubclass(bf.ShapeError, ValueError)
    assert issubclass(bf.FormatError, ValueError)
    assert issubclass(bf.DataError, ValueError)
    assert issubclass(bf.DTypeError, TypeError)
    assert issubclass(bf.BackendUnavailable, RuntimeError)


def test_a_quantized_tensor_does_not_turn_into_an_array_by_accident():
    with pytest.raises(TypeError, match=r"billfish\.dequantize"):
        np.asarray(Q)


@pytest.mark.promise("inputs", "a wrong argument raises a `BillfishError`, and nothing is written")
def test_nothing_is_written_when_an_argument_is_wrong():
    out = np.full((4, 64), 7, np.float64)
    with pytest.raises(bf.DTypeError):
        bf.dequantize(Q, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a name, \u00fc \u2581", "a name, \u00fc \u2581"),
        ("\x1b[2J\r\n\x00\x9b", r"\x1b[2J\r\n\x00\x9b"),
        ("\u202egnp.exe\ud800", r"\u202egnp.exe\ud800"),
        ("a" * 200 + "b" * 300, "a" * 198 + "..." + "b" * 198),
    ],
)
def test_messages_are_readable_whatever_a_name_holds(text, shown):
    assert bad_argument("call", text, text, text[:9]).startswith(f"call: {shown} is {shown}; ")
    assert bad_argument("call", text, text, text[:9]).isprintable()
