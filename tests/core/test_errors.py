"""Every complaint, word for word: it names the call, the argument, what it got and what it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from common import gaussian

import billfish as bf
from billfish.core import bits
from billfish.core.errors import complaint

W = gaussian((4, 64))
PACKED, SCALES = bf.pack_fp4_weights(W.T)
Q = bf.quantize(W, "q4_0")
X = gaussian((2, 64))
NAMES = ", ".join(bf.FORMATS)
BACKENDS = ", ".join(bf.BACKENDS)


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
CASES = [
    # quantize
    (
        lambda: bf.quantize(W, "fp5"),
        bf.FormatError,
        f"[quantize] format: got 'fp5'; takes one of {NAMES}; did you mean 'fp4'?",
    ),
    (lambda: bf.quantize(W, ["q4_0"]), bf.FormatError, f"[quantize] format: got ['q4_0']; takes one of {NAMES}"),
    (
        lambda: bf.quantize(W, "fp4", method="best"),
        bf.FormatError,
        "[quantize] method: got 'best'; takes 'rtn' or 'mse' or 'gptq'",
    ),
    (
        lambda: bf.quantize(W, "fp4", group_size=48),
        bf.FormatError,
        "[quantize] group_size: got 48; takes 16, 32, 64, 128 or -1 (all of K) for fp4",
    ),
    (lambda: bf.quantize(W, "q4_0", group_size=64), bf.FormatError, "[quantize] group_size: got 64; takes 32 for q4_0"),
    (
        lambda: bf.quantize(W, "u4", group_size=16),
        bf.FormatError,
        "[quantize] group_size: got 16; takes 32, 64, 128 or -1 (all of K) for u4",
    ),
    (
        lambda: bf.quantize(W, "u4", group_size=True),
        bf.FormatError,
        "[quantize] group_size: got True; takes 32, 64, 128 or -1 (all of K) for u4",
    ),
    (
        lambda: bf.quantize(W, "u4", group_size=32.0),
        bf.FormatError,
        "[quantize] group_size: got 32.0; takes 32, 64, 128 or -1 (all of K) for u4",
    ),
    (
        lambda: bf.quantize(W, "u4", zero_point="half"),
        bf.FormatError,
        "[quantize] zero_point: got 'half'; takes 'integer' or 'fractional' for u4",
    ),
    (
        lambda: bf.quantize(W, "q4_0", zero_point="integer"),
        bf.FormatError,
        "[quantize] options: got 'zero_point'; takes no further options for q4_0",
    ),
    (
        lambda: bf.quantize(W, "u4", zeros="integer"),
        bf.FormatError,
        "[quantize] options: got 'zeros'; takes zero_point for u4",
    ),
    (
        lambda: bf.quantize(W.astype(int), "q4_0"),
        bf.DTypeError,
        "[quantize] w: got dtype int64; takes float32, float16 or bfloat16",
    ),
    (
        lambda: bf.quantize(W.astype(float), "q4_0"),
        bf.DTypeError,
        "[quantize] w: got dtype float64; takes float32, float16 or bfloat16",
    ),
    (
        lambda: bf.quantize([[1.0]], "q4_0"),
        bf.DTypeError,
        "[quantize] w: got a list; takes a NumPy array, torch.Tensor or mlx array",
    ),
    (
        lambda: bf.quantize(W[0], "q4_0"),
        bf.ShapeError,
        "[quantize] w: got shape (64,); takes a matrix [N, K], or a stack [E, N, K], with E > 0 and N > 0",
    ),
    (
        lambda: bf.quantize(W[:0], "q4_0"),
        bf.ShapeError,
        "[quantize] w: got shape (0, 64); takes a matrix [N, K], or a stack [E, N, K], with E > 0 and N > 0",
    ),
    (
        lambda: bf.quantize(W[:, :33], "q4_0"),
        bf.ShapeError,
        "[quantize] K: got 33; takes a positive multiple of 32 for q4_0",
    ),
    (
        lambda: bf.quantize(W[:, :0], "q4_0"),
        bf.ShapeError,
        "[quantize] K: got 0; takes a positive multiple of 32 for q4_0",
    ),
    (lambda: bf.quantize(W, "q4_k"), bf.ShapeError, "[quantize] K: got 64; takes a positive multiple of 256 for q4_k"),
    (
        lambda: bf.quantize(W[:, :60], "fp4"),
        bf.ShapeError,
        "[quantize] K: got 60; takes a positive multiple of 8 for fp4",
    ),
    (
        lambda: bf.quantize(with_value(np.nan), "q4_0"),
        bf.DataError,
        "[quantize] w: got nan at row 2, k 5; takes finite numbers",
    ),
    (
        lambda: bf.quantize(with_value(-np.inf), "fp4"),
        bf.DataError,
        "[quantize] w: got -inf at row 2, k 5; takes finite numbers",
    ),
    (
        lambda: bf.quantize(with_value(1e30), "q4_0"),
        bf.DataError,
        "[quantize] w: got weights whose scale overflows float16; takes smaller weights",
    ),
    (
        lambda: bf.quantize(with_value(1e30), "q4_1", method="mse"),
        bf.DataError,
        "[quantize] w: got weights whose scale overflows float16; takes smaller weights",
    ),
    # packers
    (
        lambda: bf.pack_fp4_weights(W),
        bf.ShapeError,
        "[pack_fp4_weights] K: got 4; takes a positive multiple of 8 for fp4",
    ),
    (
        lambda: bf.pack_fp4_weights(W[0]),
        bf.ShapeError,
        "[pack_fp4_weights] w_kn: got shape (64,); takes a matrix [K, N] with N > 0",
    ),
    (
        lambda: bf.pack_fp4_weights(W.T, 33),
        bf.FormatError,
        "[pack_fp4_weights] group_size: got 33; takes 16, 32, 64, 128 or -1 (all of K) for fp4",
    ),
    (
        lambda: bf.pack_s4_weights(with_value(np.nan).T),
        bf.DataError,
        "[pack_s4_weights] w_kn: got nan at row 2, k 5; takes finite numbers",
    ),
    (
        lambda: bf.pack_u4_weights(W.T, method="gptq"),
        bf.FormatError,
        "[pack_u4_weights] method: got 'gptq'; takes 'rtn' or 'mse'; bf.quantize takes 'gptq', with hessian=",
    ),
    (
        lambda: bf.quantize_q4_0(W, method="gptq"),
        bf.FormatError,
        "[quantize_q4_0] method: got 'gptq'; takes 'rtn' or 'mse'; bf.quantize takes 'gptq', with hessian=",
    ),
    (
        lambda: bf.unpack_u4_weights(PACKED, SCALES, SCALES[:1]),
        bf.ShapeError,
        "[unpack_u4_weights] zeros: got shape (1, 4); takes (2, 4), ceil(K/32) x N for N=4, K=64",
    ),
    (
        lambda: bf.unpack_u4_weights(PACKED, SCALES, SCALES.astype(np.float32)),
        bf.DTypeError,
        "[unpack_u4_weights] zeros: got dtype float32; takes uint8 or float16",
    ),
    # storage
    (
        lambda: storage("q4_0", blocks=np.zeros((2, 19), U8)),
        bf.ShapeError,
        "[from_storage] blocks: got rows of 19 bytes; takes rows of a positive multiple of 18 bytes for q4_0",
    ),
    (
        lambda: storage("q4_0", blocks=np.zeros((2, 18), np.int8)),
        bf.DTypeError,
        "[from_storage] blocks: got dtype int8; takes uint8",
    ),
    (
        lambda: storage("q4_0", blocks=np.zeros(18, U8)),
        bf.ShapeError,
        "[from_storage] blocks: got shape (18,); takes an array of 2 axes",
    ),
    (
        lambda: storage("q4_0", blocks=b"18 bytes"),
        bf.DTypeError,
        "[from_storage] blocks: got a bytes; takes a uint8 array",
    ),
    (
        lambda: storage("q4_0", packed=PACKED),
        bf.FormatError,
        "[from_storage] storage: got arrays ['packed']; takes blocks for q4_0",
    ),
    (
        lambda: storage("fp4", packed=PACKED),
        bf.FormatError,
        "[from_storage] storage: got arrays ['packed']; takes packed, scales for fp4",
    ),
    (
        lambda: storage("mxfp4", packed=np.zeros((2, 16), U8), scales=np.zeros((2, 2), U8)),
        bf.ShapeError,
        "[from_storage] scales: got shape (2, 2); takes (2, 1), N x ceil(K/32) for N=2, K=32",
    ),
    (
        lambda: storage(
            "nvfp4", packed=np.zeros((2, 8), U8), scales=np.zeros((2, 1), U8), global_scale=np.ones(1, np.float32)
        ),
        bf.ShapeError,
        "[from_storage] global_scale: got shape (1,); takes an array of 0 axes",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.full((1, 32), 16, U8), "scale": SCALES[:1, :1]}),
        bf.DataError,
        "[from_planes] codes: got uint8 values up to 16; takes uint8 values that q4_0 can store",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {}),
        bf.DTypeError,
        "[from_planes] codes: got a NoneType; takes a uint8 array",
    ),
    # dequantize
    (
        lambda: bf.dequantize(W),
        bf.DTypeError,
        "[dequantize] q: got a ndarray; takes a QuantizedTensor, or QuantizedExperts",
    ),
    (
        lambda: bf.dequantize(Q, "int8"),
        bf.DTypeError,
        "[dequantize] dtype: got 'int8'; takes float32, float16 or bfloat16",
    ),
    (
        lambda: bf.dequantize(Q, "no type"),
        bf.DTypeError,
        "[dequantize] dtype: got 'no type'; takes float32, float16 or bfloat16",
    ),
    (lambda: bf.dequantize(Q, out=W.T), bf.ShapeError, "[dequantize] out: got shape (64, 4); takes (4, 64)"),
    (
        lambda: bf.dequantize(Q, out=W.astype(float)),
        bf.DTypeError,
        "[dequantize] out: got dtype float64; takes float32, float16 or bfloat16",
    ),
    (
        lambda: bf.dequantize(Q, out=read_only()),
        bf.DTypeError,
        "[dequantize] out: got a read-only array; takes a writable one",
    ),
    (
        lambda: bf.dequantize(Q, out=torch.empty(4, 64, device="meta")),
        bf.BackendUnavailable,
        "[dequantize] no backend can run this: cpu: it computes in CPU memory, and the array is on meta; "
        "reference: it computes in CPU memory, and the array is on meta",
    ),
    # quantized_linear
    (
        lambda: bf.quantized_linear(X[:, :32], Q),
        bf.ShapeError,
        "[quantized_linear] x: got shape (2, 32); takes [..., 64] for weights [4, 64]",
    ),
    (
        lambda: bf.quantized_linear(X.astype(float), Q),
        bf.DTypeError,
        "[quantized_linear] x: got dtype float64; takes float32, float16 or bfloat16",
    ),
    (
        lambda: bf.quantized_linear(np.ones((), np.float32), Q),
        bf.ShapeError,
        "[quantized_linear] x: got shape (); takes [..., 64] for weights [4, 64]",
    ),
    (
        lambda: bf.quantized_linear(X, Q, bias=X[0]),
        bf.ShapeError,
        "[quantized_linear] bias: got shape (64,); takes (4,)",
    ),
    (
        lambda: bf.quantized_linear(X, Q, group_size=32),
        bf.FormatError,
        "[quantized_linear] group_size: got a value; takes none beside a QuantizedTensor, which has its own",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED),
        bf.DTypeError,
        "[quantized_linear] scales: got None; takes float16 [K/g, N] beside packed weights",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED.view(np.int32), SCALES),
        bf.DTypeError,
        "[quantized_linear] weight: got dtype int32; takes uint32",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, group_size=64),
        bf.ShapeError,
        "[quantized_linear] scales: got shape (2, 4); takes (1, 4), ceil(K/64) x N for N=4, K=64",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, format="u4"),
        bf.FormatError,
        "[quantized_linear] zeros: got None; takes zeros [K/g, N] for u4, and none for other formats",
    ),
    (
        lambda: bf.quantized_linear(X, Q, backend="tpu"),
        bf.BackendUnavailable,
        f"[quantized_linear] backend: got 'tpu'; takes one of {BACKENDS}",
    ),
    (
        lambda: bf.quantized_linear(torch.empty(2, 64, device="meta"), Q, backend="cpu"),
        bf.BackendUnavailable,
        "[quantized_linear] no backend can run this: cpu: it computes in CPU memory, and the array is on meta",
    ),
    # blocks
    (
        lambda: bf.quantize_q4_0(X[:, :31]),
        bf.ShapeError,
        "[quantize_q4_0] K: got 31; takes a positive multiple of 32 for q4_0",
    ),
    (
        lambda: bf.quantize_q8_1(with_value(np.inf)),
        bf.DataError,
        "[quantize_q8_1] x: got inf at row 2, k 5; takes finite numbers",
    ),
    (
        lambda: bf.quantize_q8_1(np.ones((), np.float32)),
        bf.ShapeError,
        "[quantize_q8_1] x: got shape (); takes [..., K]",
    ),
    (
        lambda: bf.dequantize_q5_1(np.zeros((2, 25), U8)),
        bf.ShapeError,
        "[dequantize_q5_1] blocks: got rows of 25 bytes; takes rows of a positive multiple of 24 bytes for q5_1",
    ),
    (
        lambda: bf.dequantize_q5_1(np.zeros((), U8)),
        bf.ShapeError,
        "[dequantize_q5_1] blocks: got shape (); takes [..., bytes]",
    ),
    # gemm_w4a8
    (
        lambda: bf.gemm_w4a8(np.zeros((1, 70), U8), Q),
        bf.ShapeError,
        "[gemm_w4a8] x_q8: got rows of 70 bytes; takes 68 (q8_0) or 72 (q8_1) for K=64",
    ),
    (lambda: bf.gemm_w4a8(Q, Q), bf.FormatError, "[gemm_w4a8] x_q8: got q4_0 with K=64; takes q8_0 or q8_1 with K=64"),
    (
        lambda: bf.gemm_w4a8(bf.quantize(X[:, :32], "q8_0"), Q),
        bf.FormatError,
        "[gemm_w4a8] x_q8: got q8_0 with K=32; takes q8_0 or q8_1 with K=64",
    ),
    (
        lambda: bf.quantized_linear(X, PACKED, SCALES, zeros=SCALES),
        bf.FormatError,
        "[quantized_linear] zeros: got a value; takes zeros [K/g, N] for u4, and none for other formats",
    ),
    (
        lambda: bf.quantized_linear(X, Q, format="q4_0"),
        bf.FormatError,
        "[quantized_linear] format: got a value; takes none beside a QuantizedTensor, which has its own",
    ),
    (
        lambda: bf.quantized_linear(X[:, :0], PACKED[:0], SCALES[:0], group_size=-1),
        bf.ShapeError,
        "[quantized_linear] K: got 0; takes a positive multiple of 8 for fp4",
    ),
    (
        lambda: bf.quantized_linear(X, Q, backend=["cpu"]),
        bf.BackendUnavailable,
        f"[quantized_linear] backend: got ['cpu']; takes one of {BACKENDS}",
    ),
    (
        lambda: bf.quantized_linear(X, Q, bias=X[:1, :4]),
        bf.ShapeError,
        "[quantized_linear] bias: got shape (1, 4); takes (4,)",
    ),
    (
        lambda: bf.quantized_linear(X, Q, bias=torch.empty(4, device="meta")),
        bf.DTypeError,
        "[quantized_linear] bias: got a torch array on meta; takes an array in CPU memory",
    ),
    (
        lambda: bf.quantize(torch.empty(4, 64, device="meta"), "q4_0"),
        bf.DTypeError,
        "[quantize] w: got a torch array on meta; takes an array in CPU memory",
    ),
    (
        lambda: bf.pack_fp4_weights(W.T * np.float32(1e6)),
        bf.DataError,
        "[pack_fp4_weights] w_kn: got weights whose scale overflows float16; takes smaller weights",
    ),
    (
        lambda: bf.pack_fp4_weights(np.zeros((8, 0), np.float32)),
        bf.ShapeError,
        "[pack_fp4_weights] w_kn: got shape (8, 0); takes a matrix [K, N] with N > 0",
    ),
    (
        lambda: bf.quantize_q4_0(W[:0], method="x"),
        bf.FormatError,
        "[quantize_q4_0] method: got 'x'; takes 'rtn' or 'mse'",
    ),
    (
        lambda: bf.dequantize(Q, out=torch.empty(1, 64).expand(4, 64)),
        bf.DTypeError,
        "[dequantize] out: got an array whose rows share memory; takes one place for each number",
    ),
    (
        lambda: bf.QuantizedTensor.from_storage("q4_0", None),
        bf.DTypeError,
        "[from_storage] storage: got a NoneType; takes a dict with blocks for q4_0",
    ),
    (
        lambda: storage("q4_0", blocks=np.zeros((2, 0), U8)),
        bf.ShapeError,
        "[from_storage] blocks: got rows of 0 bytes; takes rows of a positive multiple of 18 bytes for q4_0",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 32), U8)}),
        bf.DataError,
        "[from_planes] planes: got planes ['codes'] that do not fit together ('scale'); takes those of q4_0",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 32), U8), "scale": np.ones((1, 1))}),
        bf.DataError,
        "[from_planes] scale: got float64 values up to 1.0; takes float16 values that q4_0 can store",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {**Q.planes, "zero": SCALES}),
        bf.DataError,
        f"[from_planes] zero: got float16 values up to {SCALES.max()}; takes no such plane",
    ),
    (
        lambda: bf.QuantizedTensor.from_planes("q4_0", {"codes": np.zeros((1, 24), U8), "scale": SCALES[:1, :1]}),
        bf.ShapeError,
        "[from_planes] K: got 24; takes a positive multiple of 32 for q4_0",
    ),
    (
        lambda: bf.gemm_w4a8(bf.quantize(X, "q8_0"), Q, format="q4_0"),
        bf.FormatError,
        "[gemm_w4a8] format: got a value; takes none beside a QuantizedTensor, which has its own",
    ),
    (
        lambda: bf.gemm_w4a8(np.zeros((1, 34), U8), bf.quantize(W[:, :8], "fp4")),
        bf.ShapeError,
        "[gemm_w4a8] w_q4: got K=8; takes a multiple of 32, as x_q8 has",
    ),
    (
        lambda: bf.gemm_w4a8(np.zeros((1, 68), np.int8), Q),
        bf.DTypeError,
        "[gemm_w4a8] x_q8: got dtype int8; takes uint8",
    ),
    (
        lambda: bits.dequant_fp4_pair(np.zeros(2, np.int32)),
        bf.DTypeError,
        "[bits] words: got dtype int32; takes uint32, or uint16 for a single lane",
    ),
    (lambda: bits.lop3(1, 2, 3, 300), bf.DataError, "[lop3] lut: got 300; takes a truth table from 0 to 255"),
    # the registry
    (
        lambda: bf.register(type("Twice", (type(bf.FORMATS["q4_0"]),), {"name": "q4_0"})),
        bf.FormatError,
        "[register] name: got 'q4_0'; takes a name that no other format has",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=[message[:60] for _, _, message in CASES])
def test_complaint(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    assert isinstance(caught.value, bf.BillfishError)


def test_errors_are_also_the_ones_python_programmers_expect():
    assert issubclass(bf.ShapeError, ValueError)
    assert issubclass(bf.FormatError, ValueError)
    assert issubclass(bf.DataError, ValueError)
    assert issubclass(bf.DTypeError, TypeError)
    assert issubclass(bf.BackendUnavailable, RuntimeError)


def test_a_quantized_tensor_does_not_turn_into_an_array_by_accident():
    with pytest.raises(TypeError, match=r"billfish\.dequantize"):
        np.asarray(Q)


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
    assert complaint("call", text, text, text[:9]).startswith(f"[call] {shown}: got {shown}; takes ")
    assert complaint("call", text, text, text[:9]).isprintable()
