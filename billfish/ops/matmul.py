"""The verbs: check the arguments, choose a backend, call it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS, Backend, Problem, choose
from billfish.backends.base import Product
from billfish.backends.cpu.experts import PackedExperts
from billfish.backends.cpu.packed import PackedWeights
from billfish.core.activations import IntegerActivations, check_activations
from billfish.core.arrays import FLOATS, Input, float_dtype, float_input, library_for
from billfish.core.errors import BackendUnavailable, DTypeError, FormatError, ShapeError, bad_argument, failure, type_of
from billfish.core.format import Format, get_format
from billfish.core.formats.word_packing import WordFormat
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import check_array
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import Activations, AnyArray, ArrayT, FloatName, FloatType, FormatLike

if TYPE_CHECKING:
    import mlx.core as mx
    import torch

Quantized = QuantizedTensor | QuantizedExperts
Weights = QuantizedTensor | PackedWeights  # what a product takes


@overload
def dequantize(
    q: Quantized,
    dtype: Literal["float32"] = "float32",
    *,
    like: Literal["numpy"] | NDArray[Any] | None = None,
    backend: str | None = None,
) -> NDArray[np.float32]: ...
@overload
def dequantize(
    q: Quantized,
    dtype: FloatName | type[np.generic] | np.dtype[Any],
    *,
    like: Literal["numpy"] | NDArray[Any] | None = None,
    backend: str | None = None,
) -> NDArray[Any]: ...
@overload
def dequantize(
    q: Quantized, dtype: FloatType = "float32", *, out: ArrayT, like: None = None, backend: str | None = None
) -> ArrayT: ...
@overload
def dequantize(
    q: Quantized, dtype: FloatType = "float32", *, like: Literal["torch"], backend: str | None = None
) -> torch.Tensor: ...
@overload
def dequantize(
    q: Quantized, dtype: FloatType = "float32", *, like: Literal["mlx"], backend: str | None = None
) -> mx.array: ...
@overload
def dequantize(q: Quantized, dtype: FloatType = "float32", *, like: ArrayT, backend: str | None = None) -> ArrayT: ...
@overload
def dequantize(q: Quantized, dtype: torch.dtype, *, backend: str | None = None) -> torch.Tensor: ...
@overload
def dequantize(q: Quantized, dtype: mx.Dtype, *, backend: str | None = None) -> mx.array: ...


def dequantize(
    q: Quantized, dtype: Any = "float32", *, like: Any = None, out: Any = None, backend: str | None = None
) -> Any:
    """Decode quantized weights: float32 arithmetic, rounded once to `dtype`. Columns are in W's own order.

    q: a QuantizedTensor [N, K] or QuantizedExperts [E, N, K], from :func:`quantize` or a checkpoint.
    dtype: "float32", "float16" or "bfloat16"; or a type of NumPy, ml_dtypes, torch or MLX, which also chooses the
    library of the result.
    like: "numpy", "torch" or "mlx" for a result of that library, or an array for one of its library and device.
    out: an array of W's shape to write to: NumPy, torch in CPU memory, or torch or CuPy on an NVIDIA GPU. Its type
    counts, and it is returned.
    backend: a name of BACKENDS; None takes the best that can.

    Returns an array of q's shape. Raises DTypeError for anything else than quantized weights, and for an `out` that
    cannot be written.

        >>> w = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
        >>> decoded = bf.dequantize(bf.quantize(w, "q8_0"))
        >>> decoded.shape, bool(np.abs(decoded - w).max() < 0.01)
        ((8, 64), True)
    """
    call = "dequantize"
    if not isinstance(q, (QuantizedTensor, QuantizedExperts)):
        raise DTypeError(bad_argument(call, "q", type_of(q), "a QuantizedTensor, or QuantizedExperts"))
    if out is None:
        numbers, library = float_dtype(call, dtype), library_for(call, like, dtype)
        if library.kind == "mlx":  # whose arrays nobody writes to in place
            return library.from_numpy(dequantize(q, numbers, backend=backend))
        out = library.empty(q.shape, numbers.name, like)
    elif like is not None:
        raise DTypeError(failure(call, "like= and out= exclude each other", "Pass one of them."))
    target = _writable(float_input(call, "out", out), q.shape)
    if isinstance(q, QuantizedExperts):
        for e, matrix in enumerate(q):
            dequantize(matrix, out=target.source[e], backend=backend)
        return _written(target, out)
    numbers = FLOATS[target.dtype_name]
    problem = Problem("dequantize", q.format, q.group_size, 0, *q.shape, numbers, target.kind, target.device)
    chosen = choose(call, problem, backend)
    if q.permutation is None:
        chosen.dequantize(q, target)
    else:
        stored = target.with_source(target.adapter.empty_like(target.source))
        chosen.dequantize(q, stored)
        target.source[:, _order(q, target)] = stored.source
    return _written(target, out)


def _writable(taken: Input, shape: tuple[int, ...]) -> Input:
    """`out` as an array that a backend can write to; :func:`_written` comes after it."""
    call, out = taken.call, taken.source
    if taken.kind == "mlx":  # whose arrays nobody writes to in place
        raise DTypeError(bad_argument(call, "out", "an mlx array", "an array of NumPy, torch or CuPy"))
    if taken.shape != shape:
        raise ShapeError(bad_argument(call, "out.shape", taken.shape, f"{shape}"))
    if taken.kind == "torch" and out.is_neg():  # a view with the opposite sign of its memory
        return taken.with_source(taken.adapter.empty_like(out))
    if taken.device == "cpu":
        flags, strides = (array := taken.numpy()).flags, array.strides
        if not flags.writeable:
            raise DTypeError(bad_argument(call, "out", "a read-only array", "a writable one"))
        if not flags.c_contiguous and any(s == 0 and size > 1 for s, size in zip(strides, shape, strict=True)):
            raise DTypeError(bad_argument(call, "out", "an array whose rows overlap", "rows of their own memory"))
    return taken


def _written(target: Input, out: Any) -> Any:
    """`out` with what was written to `target`; torch learns of it."""
    if target.source is not out:
        out.copy_(target.source)
    elif target.kind == "torch" and not out.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(out)
    return out


def _order(q: QuantizedTensor | PackedWeights, beside: Input) -> Any:
    """The tensor's permutation as an index array of the library, and in the place, of another array."""
    order, adapter = q.permutation, beside.adapter
    assert order is not None
    return q.made(("order", beside.kind, beside.place), lambda: adapter.index(order, beside.source))


def quantized_linear(
    x: ArrayT,
    weight: QuantizedTensor | PackedWeights | AnyArray,
    scales: AnyArray | None = None,
    *,
    bias: AnyArray | None = None,
    zeros: AnyArray | None = None,
    format: FormatLike | None = None,
    group_size: int | None = None,
    activations: Activations = "exact",
    out: ArrayT | None = None,
    backend: str | None = None,
) -> ArrayT:
    """Multiply activations by quantized weights: y = x @ W.T + bias.

    x: [..., K] in float32, float16 or bfloat16; NumPy, torch, MLX or CuPy.
    weight: a QuantizedTensor [N, K], or what :func:`prepack` made of one. Or codes, uint32 [K/8, N], as
    :func:`pack_fp4_weights` makes them; they are packed for the kernels at each call.
    scales, zeros, format, group_size: beside codes only. scales is float16 [K/g, N]. format is "fp4" (the default),
    "u4" with `zeros`, "u4b8" or "u8b128". group_size is 32 by default.
    bias: [N].
    activations: "exact" (the default) multiplies x as it is, accumulates in float32 or better, and rounds once, after
    the bias. "q8" and "q16" round x to integers first, per 32 values or per group, which is faster. On a Hopper GPU,
    "fp8" and "q8" round x to E4M3 or int8 per row where there are enough rows.
    out: an array [..., N] of x's type in CPU memory to write y to. It is returned.
    backend: a name of BACKENDS; None takes the best that can.

    Returns y [..., N], of x's type and library. Raises ShapeError and DTypeError for arguments that do not fit
    together, and BackendUnavailable if no backend can run the product.

        >>> w = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
        >>> x = np.ones((2, 64), np.float32)
        >>> y = bf.quantized_linear(x, bf.quantize(w, "q8_0"))
        >>> y.shape, bool(np.allclose(y, x @ w.T, atol=0.1))
        ((2, 8), True)
    """
    call = "quantized_linear"
    rows = rows_input(call, x)
    tensor: Weights
    if isinstance(weight, (QuantizedTensor, PackedWeights)):
        _check_absent(call, scales=scales, zeros=zeros, group_size=group_size, format=format)
        tensor = weight
    else:
        if Input(call, "weight", weight).dtype_name in FLOATS:
            expected = "a QuantizedTensor (bf.quantize returns one), or packed words uint32 [K/8, N] with scales="
            raise DTypeError(bad_argument(call, "weight", f"an unquantized array ({weight.dtype})", expected))
        tensor = _from_words(call, weight, scales, zeros, format or "fp4", group_size)
    chosen, product = _choose(call, rows, tensor, bias, activations, backend)
    if out is None:
        return chosen.linears([product], activations)[0]
    taken = float_input(call, "out", out)
    assert isinstance(product.x, Input)
    if taken.dtype_name != product.x.dtype_name or taken.device != "cpu" or product.x.device != "cpu":
        expected = f"{product.x.dtype_name} in CPU memory, as x"
        raise DTypeError(bad_argument(call, "out", f"{taken.dtype_name} on {taken.device}", expected))
    target = _writable(taken, (*product.x.shape[:-1], product.n))
    chosen.linears([product._replace(out=target)], activations)
    return _written(target, out)


def quantized_linears(
    x: ArrayT | Sequence[ArrayT],
    weights: Sequence[QuantizedTensor | PackedWeights],
    *,
    biases: Sequence[AnyArray | None] | None = None,
    activations: Activations = "exact",
    backend: str | None = None,
) -> list[ArrayT]:
    """Multiply by several quantized matrices in one call, as with query, key and value, or gate and up.

    x: [..., K], multiplied by all of the weights; or a list or tuple with an array for each of them.
    weights: QuantizedTensors [N, K], or what :func:`prepack` made of them.
    biases: [N] for each of the weights, or None in its place.
    activations, backend: as in :func:`quantized_linear`.

    Returns a list: what `quantized_linear(x, w)` gives for each w, bit for bit. The CPU prepares x once, and its
    threads share the rows of all weights. Raises as :func:`quantized_linear` does.

        >>> q, x = bf.quantize(np.eye(32, dtype=np.float32), "q8_0"), np.ones((2, 32), np.float32)
        >>> [y.shape for y in bf.quantized_linears(x, [q, q])]
        [(2, 32), (2, 32)]
    """
    call = "quantized_linears"
    shared = None if isinstance(x, (list, tuple)) else rows_input(call, x)
    for name, given in (("weights", weights), ("biases", biases)):
        if not isinstance(given, (list, tuple)) and (given is not None or name == "weights"):
            raise DTypeError(bad_argument(call, name, type_of(given), "a list or tuple"))
    for name, many in (("x", shared or x), ("biases", biases)):
        if isinstance(many, (list, tuple)) and len(many) != len(weights):
            raise ShapeError(bad_argument(call, f"len({name})", len(many), f"{len(weights)}, one for each weight"))
    results: list[Any] = []
    waiting: list[Product] = []  # of one backend
    last = None
    for i, w in enumerate(weights):
        if not isinstance(w, (QuantizedTensor, PackedWeights)):
            expected = "a QuantizedTensor, or what `prepack` made of one"
            raise DTypeError(bad_argument(call, f"weights[{i}]", type_of(w), expected))
        one = shared or float_input(call, f"x[{i}]", cast("Sequence[Any]", x)[i])
        bias = None if biases is None else biases[i]
        chosen, product = _choose(call, one, w, bias, activations, backend)
        if last is not None and chosen is not last:
            results += last.linears(waiting, activations)
            waiting = []
        last = chosen
        waiting.append(product)
    return results if last is None else results + last.linears(waiting, activations)


def _choose(
    call: str, x: Input, tensor: Weights, bias: Any, activations: str, backend: str | None
) -> tuple[Backend, Product]:
    """The backend for a product, and the product as it takes it."""
    (n, k), shape = tensor.shape, x.shape
    if not shape or shape[-1] != k:
        raise ShapeError(bad_argument(call, f"shape of {x.argument}", shape, f"[..., {k}] for weights [{n}, {k}]"))
    m = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    check_activations(call, activations)
    dtype = FLOATS[x.dtype_name]
    problem = Problem("matmul", tensor.format, tensor.group_size, m, n, k, dtype, x.kind, x.device, activations)
    if isinstance(tensor, PackedWeights):
        if backend not in (None, "cpu"):
            raise BackendUnavailable(bad_argument(call, "backend", repr(backend), "'cpu', as the weights are packed"))
        chosen, weights = choose(call, problem, "cpu"), tensor
    else:
        chosen = choose(call, problem, backend)
        weights = packed_for(tensor, chosen, x)
    if tensor.permutation is not None:
        x = x.with_source(x.adapter.take(x.source, _order(tensor, x)))
    return chosen, Product(x, weights, n, None if bias is None else _bias(call, bias, n))


def packed_for(tensor: QuantizedTensor, backend: Backend, x: Input) -> Any:
    """The weights as a backend wants them beside x; a tensor keeps them, one for each place."""
    key = backend.name, x.place
    packed = tensor._made.get(key)
    return tensor.made(key, lambda: backend.pack(tensor, key[1])) if packed is None else packed


@overload
def prepack(q: QuantizedTensor) -> PackedWeights: ...
@overload
def prepack(q: QuantizedExperts) -> PackedExperts: ...


def prepack(q: Quantized) -> PackedWeights | PackedExperts:
    """Pack weights for the CPU's kernels. The packed weights alone are enough for products.

    q: a QuantizedTensor [N, K] or QuantizedExperts [E, N, K]. A product packs it at its first call and then holds
    both; call this to keep one of them.

    Returns PackedWeights or PackedExperts. Packed weights of a matrix can be saved: packed.save(path),
    PackedWeights.load(path).

        >>> packed = bf.prepack(bf.quantize(np.eye(32, dtype=np.float32), "q8_0"))
        >>> bf.quantized_linear(np.ones((2, 32), np.float32), packed).shape
        (2, 32)
    """
    if not isinstance(q, (QuantizedTensor, QuantizedExperts)):
        expected = "a QuantizedTensor, or QuantizedExperts"
        raise DTypeError(bad_argument("prepack", "q", type_of(q), expected))
    backend = BACKENDS["cpu"]
    packed = backend.pack_experts(q) if isinstance(q, QuantizedExperts) else backend.pack(q)
    assert isinstance(packed, (PackedWeights, PackedExperts))
    return packed


def _bias(call: str, bias: Any, n: int) -> Input:
    taken = float_input(call, "bias", bias)
    if taken.shape != (n,):
        raise ShapeError(bad_argument(call, "bias.shape", taken.shape, f"({n},)"))
    return taken


def rows_input(call: str, x: object) -> Input:
    """`x` as an argument; an error that says so where the weights stand in its place."""
    if isinstance(x, (QuantizedTensor, QuantizedExperts, PackedWeights, PackedExperts)):
        expected = f"an array [..., K]. The weights come second: {call}(x, weights)."
        raise DTypeError(bad_argument(call, "x", type_of(x), expected))
    return float_input(call, "x", x)


def _check_absent(call: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise FormatError(failure(call, f"a QuantizedTensor has its own {name}", f"Leave {name}= out."))


def _from_words(
    call: str, packed: Any, scales: Any, zeros: Any, format: str | Format, group_size: int | None
) -> QuantizedTensor:
    format = get_format(format, call)
    if not isinstance(format, WordFormat):
        expected = "a format of packed words such as 'fp4', or a QuantizedTensor"
        raise FormatError(bad_argument(call, "format", repr(format.name), expected))
    if scales is None:
        raise DTypeError(bad_argument(call, "scales", "None", "float16 [K/g, N] beside packed weights"))
    if format.has_zeros != (zeros is not None):
        problem = f"the format {format.name} {'needs zeros= [K/g, N]' if zeros is None else 'has no zeros='}"
        raise FormatError(failure(call, problem, "zeros= belongs to u4 alone."))
    arrays = {"weight": packed, "scales": scales} | ({"zeros": zeros} if format.has_zeros else {})
    taken = {name: Input(call, name, array).numpy() for name, array in arrays.items()}
    check_array(call, "weight", taken["weight"], (np.uint32,), 2)
    storage = {"packed": taken.pop("weight"), **taken}
    return QuantizedTensor.borrowing(format, storage, group_size, call=call)


@overload
def gemm_w4a8(
    x_q8: NDArray[Any] | QuantizedTensor,
    w_q4: AnyArray | QuantizedTensor,
    *,
    format: FormatLike | None = None,
    backend: str | None = None,
) -> NDArray[np.float32]: ...
@overload
def gemm_w4a8(
    x_q8: ArrayT,
    w_q4: AnyArray | QuantizedTensor,
    *,
    format: FormatLike | None = None,
    backend: str | None = None,
) -> ArrayT: ...


def gemm_w4a8(x_q8: Any, w_q4: Any, *, format: FormatLike | None = None, backend: str | None = None) -> Any:
    """Multiply with both sides already quantized: y = x @ W.T in float32.

    x_q8: q8_0 or q8_1 blocks, uint8 [M, K/32 * 34 or 36], or a QuantizedTensor of one of those formats.
    w_q4: blocks uint8 [N, ...] of `format`, or a QuantizedTensor of any format.
    format: of blocks; "q4_0" by default.
    backend: a name of BACKENDS; None takes the best that can.

    Returns y [M, N]. Raises ShapeError for rows of another length, and FormatError for other formats.

        >>> x, w = np.ones((2, 32), np.float32), np.eye(32, dtype=np.float32)
        >>> bf.gemm_w4a8(bf.quantize_q8_0(x), bf.quantize_q4_0(w)).shape
        (2, 32)
    """
    call = "gemm_w4a8"
    if isinstance(w_q4, QuantizedTensor):
        _check_absent(call, format=format)
        weight = w_q4
    else:
        weight = _from_blocks(call, "w_q4", w_q4, format or "q4_0")
    k = weight.shape[1]
    if k % 32:
        raise ShapeError(bad_argument(call, "K of w_q4", k, "a multiple of 32, as in x_q8"))
    if weight.permutation is not None:
        why = "w_q4 has permuted columns (act-order), and x_q8 has one scale per 32 columns"
        raise FormatError(failure(call, why, "Use bf.quantized_linear."))
    if isinstance(x_q8, QuantizedTensor):
        given, like = x_q8, None
        if given.format.name not in ("q8_0", "q8_1") or given.shape[1] != k:
            found = f"{given.format.name} with K = {given.shape[1]}"
            raise FormatError(bad_argument(call, "x_q8", found, f"q8_0 or q8_1 with K = {k}"))
        blocks, name, m = Input(call, "x_q8", given.storage["blocks"]), given.format.name, given.shape[0]
    else:
        like = blocks = Input(call, "x_q8", x_q8)
        # K is known from the weights, so the length of a row tells q8_0 and q8_1 apart.
        by_row_bytes = {k // 32 * 34: "q8_0", k // 32 * 36: "q8_1"}
        row_bytes = like.shape[-1] if like.shape else 0
        if row_bytes not in by_row_bytes:
            expected = " or ".join(f"{size} ({name})" for size, name in by_row_bytes.items()) + f" for K = {k}"
            raise ShapeError(bad_argument(call, "row size of x_q8", f"{row_bytes} bytes", expected))
        if like.shape[0] == 0:
            return like.like(np.empty((0, weight.shape[0]), np.float32))
        name, m = by_row_bytes[row_bytes], like.shape[0]
    float32 = np.dtype(np.float32)
    problem = Problem("matmul", weight.format, weight.group_size, m, *weight.shape, float32, activations="given")
    if blocks.device == "cuda" and backend in (None, "cuda"):
        there = problem._replace(kind=blocks.kind, device="cuda")
        if backend == "cuda" or BACKENDS["cuda"].can_run(there)[0]:  # other formats go to CPU memory and back
            problem = there
    chosen = choose(call, problem, backend)
    if chosen.reads_blocks and blocks.dtype_name == "uint8" and len(blocks.shape) == 2:
        (y,) = chosen.linears([Product(blocks, packed_for(weight, chosen, blocks), weight.shape[0])], "given")
        return y
    planes = (_from_blocks(call, "x_q8", x_q8, name) if like is not None else given).planes
    weights = weight.made((chosen.name, "cpu"), lambda: chosen.pack(weight))
    rows = IntegerActivations(planes["codes"].view(np.int8), planes["scale"].astype(np.float32))
    (y,) = chosen.linears([Product(rows, weights, weight.shape[0])], "given")
    return y if like is None else like.like(y)


def _from_blocks(call: str, argument: str, array: Any, format: str | Format) -> QuantizedTensor:
    blocks = check_array(call, argument, Input(call, argument, array).numpy(), (np.uint8,), 2)
    return QuantizedTensor.borrowing(format, {"blocks": blocks}, call=call)
