"""Numbers to quantized weights, where the numbers are: in CPU memory, or on a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

import billfish.backends.cpu.backend  # noqa: F401  (provides the native search, and the floating-point mode)
from billfish.backends import BACKENDS, Problem
from billfish.core.arrays import FLOATS, Input, float_input
from billfish.core.device_array import DeviceArray
from billfish.core.errors import DataError, DTypeError, FormatError, ShapeError, bad_argument, failure
from billfish.core.format import METHODS, Format, Planes, get_format
from billfish.core.gptq_solver import quantize_gptq
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import LaterStorage, QuantizedTensor
from billfish.core.typing import AnyArray, FormatLike, Method

Matrix = np.ndarray[tuple[int, int], np.dtype[Any]]
MatrixStack = np.ndarray[tuple[int, int, int], np.dtype[Any]]
ASYMMETRY = 1e-3  # of the largest number of the diagonal: sums in float32 may differ by their order
ASYMMETRY_ROWS = 256


@overload
def quantize(
    w: Matrix,
    format: FormatLike,
    *,
    group_size: int | None = None,
    method: Method = "mse",
    importance: AnyArray | None = None,
    hessian: AnyArray | None = None,
    cross: AnyArray | None = None,
    **options: str,
) -> QuantizedTensor: ...
@overload
def quantize(
    w: MatrixStack,
    format: FormatLike,
    *,
    group_size: int | None = None,
    method: Method = "mse",
    importance: AnyArray | None = None,
    hessian: AnyArray | None = None,
    cross: AnyArray | None = None,
    **options: str,
) -> QuantizedExperts: ...
@overload
def quantize(
    w: AnyArray,
    format: FormatLike,
    *,
    group_size: int | None = None,
    method: Method = "mse",
    importance: AnyArray | None = None,
    hessian: AnyArray | None = None,
    cross: AnyArray | None = None,
    **options: str,
) -> QuantizedTensor: ...


def quantize(
    w: Any,
    format: FormatLike,
    *,
    group_size: int | None = None,
    method: Method = "mse",
    importance: AnyArray | None = None,
    hessian: AnyArray | None = None,
    cross: AnyArray | None = None,
    **options: str,
) -> Any:
    """Quantize a weight matrix to a format.

    w: [N, K] in float32, float16 or bfloat16; NumPy, torch or MLX. A stack [E, N, K] of the matrices of E experts is
    quantized expert by expert. A torch tensor on an NVIDIA GPU is quantized and packed there, and its storage comes to
    the CPU when somebody asks for it.
    format: a name such as "fp4" or "q4_k"; `billfish formats` lists all.
    group_size: how many consecutive weights along K share a scale; -1 for all of K, None for the format's default.
    method: "mse" searches the scale (and offset) of least squared error in each group. "rtn" rounds to nearest:
    faster, and with the same bits on every device. "gptq" takes the scales of "mse" and rounds column after column,
    with the error of each carried on to the next.
    importance: [K], the weight of an error in each column: the mean square of the inputs there, at least 0. "mse"
    minimizes the weighted error; "rtn" fits each scale once more where that lowers it. All zeros are as None. Of a
    stack, also [E, K].
    hessian: [K, K], X^T X of the inputs X [tokens, K], times any factor. For "gptq" only, where its diagonal is the
    importance unless that is given. Of a stack, also [E, K, K]. GPTQ runs where the hessian is: a torch tensor on an
    NVIDIA GPU makes it run there, and `cross` is there, too.
    cross: [K, K], X^T Y, where X are inputs of a model whose layers before are quantized, those of the hessian too, and
    Y are the float model's in their place. "gptq" then makes up for the errors of these layers. Not of a stack.
    options: zero_point="integer" | "fractional" for u4.

    Returns a QuantizedTensor, or QuantizedExperts of a stack. A type checker knows the latter of a NumPy array whose
    type has three axes; of others it expects a QuantizedTensor.

    Raises FormatError for an unknown format or option, ShapeError for a K that the format cannot store, and DataError
    for weights that are not finite.

        >>> w = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
        >>> bf.quantize(w, "q4_0")
        QuantizedTensor(q4_0, [8, 64], group_size=32, 288 bytes)
        >>> bf.quantize(np.stack([w, -w]), "fp4", group_size=32).shape
        (2, 8, 64)
    """
    taken = float_input("quantize", "w", w)
    weights: Any = DeviceArray.of(taken) if taken.kind == "torch" and taken.device == "cuda" else taken.numpy()
    if weights.ndim not in (2, 3) or 0 in weights.shape[:-1]:
        expected = "a matrix [N, K], or a stack [E, N, K], with E > 0 and N > 0"
        raise ShapeError(bad_argument("quantize", "w.shape", weights.shape, expected))
    if weights.ndim == 2:
        given = (importance, hessian, cross)
        return quantize_matrix("quantize", "w", weights, format, group_size, method, options, *given)
    if cross is not None:
        raise FormatError(failure("quantize", "cross= is for a matrix [N, K], and w is a stack", "Leave it out."))
    known = [_of_each(importance, 1, weights.shape[0]), _of_each(hessian, 2, weights.shape[0])]
    matrices = [
        quantize_matrix("quantize", f"w[{e}]", weights[e], format, group_size, method, options, *own)
        for e, own in enumerate(zip(*known, strict=True))
    ]
    return QuantizedExperts.from_tensors(matrices)


def _of_each(known: Any, axes: int, experts: int) -> list[Any]:
    """What is known of the inputs of each expert: its own, or the same for all."""
    if known is None or len(getattr(known, "shape", ())) <= axes:  # what is no array is refused with each matrix
        return [known] * experts
    if known.shape[0] != experts:
        problem = f"w has {experts} experts, and the statistics of its inputs have {known.shape[0]}"
        raise ShapeError(failure("quantize", problem))
    return [known[e] for e in range(experts)]


def quantize_matrix(
    call: str,
    argument: str,
    w: Any,
    format: str | Format,
    group_size: int | None,
    method: str,
    options: dict[str, str],
    importance: Any = None,
    hessian: Any = None,
    cross: Any = None,
) -> QuantizedTensor:
    """The checks and the work of :func:`quantize`, for all the calls that quantize a matrix [N, K].

    w: a NumPy array, or a DeviceArray. GPTQ runs where the hessian is.
    importance, hessian, cross: arrays of any library, or None.
    """
    format = get_format(format, call)
    check_method(call, method)
    n, k = w.shape
    format.check_k(call, k)
    group_size = format.check_group_size(call, group_size, k)
    options = format.check_options(call, options)
    _check_finite(call, argument, w)
    weights = None if importance is None else _importance(call, importance, k)
    if (method == "gptq") != (hessian is not None):
        if hessian is None:
            needed = f"hessian=, an array [{k}, {k}]: X^T X, where X [tokens, {k}] are inputs of this layer"
            raise FormatError(failure(call, f"method 'gptq' needs {needed}"))
        raise FormatError(failure(call, f"hessian= is for method 'gptq', and method is {method!r}", "Leave it out."))
    if cross is not None and hessian is None:
        raise FormatError(failure(call, "cross= is for method 'gptq', beside hessian=", "Leave it out."))
    if hessian is not None and _is_on_gpu(hessian):
        planes = _gptq_there(call, format, w, group_size, hessian, weights, options, cross)
    elif hessian is not None:
        w = w.numpy() if isinstance(w, DeviceArray) else w
        beside = None if cross is None else _statistics(call, "cross", cross, (k, k))
        planes = quantize_gptq(call, format, w, group_size, _hessian(call, hessian, k), weights, options, beside)
    else:
        planes = format.quantize(w, group_size, method, weights, **options)
    for name, plane in planes.items():
        if plane.dtype.kind == "f" and not np.isfinite(plane).all():
            problem = f"the {name} of {argument} overflows {plane.dtype}"
            raise DataError(failure(call, problem, "Scale the weights down, or use a format with a wider scale."))
    if isinstance(planes["codes"], DeviceArray):
        return _packed_there(format, planes, group_size, options)
    return QuantizedTensor.owning(format, (n, k), group_size, format.pack(planes))


def gptq_device(device: str) -> str:
    """Where GPTQ runs beside a model on a device, as torch names it: a GPU if torch is there and sees it, or "cpu"."""
    if device == "cpu" or importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return device if torch.cuda.is_available() else "cpu"


def sent_for_gptq(call: str, matrix: NDArray[Any], device: str) -> Any:
    """A matrix of sums as a torch tensor on a device: `quantize` runs GPTQ there."""
    import torch

    from billfish.backends.cuda.device_gptq import memory_for_gptq  # here: it imports torch

    with memory_for_gptq(call, matrix.shape[-1]):
        return torch.from_numpy(np.require(matrix, requirements="W")).to(device)


def _gptq_there(
    call: str,
    format: Format,
    w: Any,
    group_size: int,
    hessian: Any,
    importance: NDArray[Any] | None,
    options: dict[str, str],
    cross: Any,
) -> Planes:
    """The planes, on the GPU of the Hessian where `w` is on one."""
    from billfish.backends.cuda.device_gptq import memory_for_gptq, quantize_gptq_there  # here: it imports torch

    k = w.shape[1]
    with memory_for_gptq(call, k):
        known = _hessian(call, hessian, k).tensor
        beside = None if cross is None else _statistics(call, "cross", cross, (k, k), there=True).tensor
        planes = quantize_gptq_there(call, format, w, group_size, known, importance, options, beside)
        if isinstance(w, DeviceArray):
            return planes
        return {name: plane.numpy() if isinstance(plane, DeviceArray) else plane for name, plane in planes.items()}


def _is_on_gpu(array: Any) -> bool:
    """Whether it is a torch tensor of an NVIDIA GPU."""
    return getattr(getattr(array, "device", None), "type", "") == "cuda"


def _check_finite(call: str, argument: str, w: Any) -> None:
    finite = np.isfinite(w)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        value = f"{float(w[where])} at row {where[0]}, k {where[1]}"
        raise DataError(bad_argument(call, argument, value, "finite numbers"))


def _importance(call: str, given: Any, k: int) -> NDArray[Any]:
    importance = _statistics(call, "importance", given, (k,))
    if (importance < 0).any():
        at = int(np.argmax(importance < 0))
        raise DataError(bad_argument(call, f"importance[{at}]", importance[at], "0 or more"))
    return importance


def _hessian(call: str, given: Any, k: int) -> Any:
    """A NumPy array, or a DeviceArray of what is on a GPU."""
    hessian = _statistics(call, "hessian", given, (k, k), there=_is_on_gpu(given))
    expected = "X^T X of the inputs X [tokens, K]"
    diagonal = hessian.tensor.diagonal().cpu().numpy() if isinstance(hessian, DeviceArray) else np.diagonal(hessian)
    if (diagonal < 0).any():
        at = int(np.argmax(diagonal < 0))
        raise DataError(bad_argument(call, f"hessian[{at}, {at}]", diagonal[at], f"0 or more, as in {expected}"))
    largest = float(np.abs(diagonal).max())
    for start in range(0, k, ASYMMETRY_ROWS):  # the whole difference would be another matrix of this size
        rows = slice(start, start + ASYMMETRY_ROWS)
        if (np.abs(hessian[rows] - hessian[:, rows].T) > ASYMMETRY * largest).any():
            raise DataError(bad_argument(call, "hessian", "not symmetric", expected))
    return hessian


def _statistics(call: str, argument: str, given: Any, shape: tuple[int, ...], *, there: bool = False) -> Any:
    """Float32 or float64 of a shape, finite: a NumPy array. there: as a DeviceArray, of what is on a GPU or not."""
    taken = Input(call, argument, given)
    if taken.dtype_name not in ("float32", "float64"):
        raise DTypeError(bad_argument(call, f"dtype of {argument}", taken.dtype_name, "float32 or float64"))
    if there and taken.kind == "torch":
        array: Any = DeviceArray.of(taken)
    else:
        array = (taken.with_source(given.detach().cpu()) if taken.kind == "torch" else taken).numpy()
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if there and not isinstance(array, DeviceArray):
        import torch

        array = DeviceArray(torch.from_numpy(np.require(array, requirements="W")))
    if array.shape != shape:
        raise ShapeError(bad_argument(call, f"shape of {argument}", array.shape, f"{shape} for [N, {shape[0]}]"))
    finite = np.isfinite(array)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise DataError(bad_argument(call, argument, f"{float(array[where])} at {list(where)}", "finite numbers"))
    return array


def _packed_there(format: Format, planes: Planes, group_size: int, options: dict[str, str]) -> QuantizedTensor:
    """Of planes on a GPU. Where no kernel there reads the format, of storage in CPU memory."""
    codes: Any = planes["codes"]
    (n, k), device = codes.shape, codes.tensor.device
    backend, place = BACKENDS["cuda"], f"{device.type}:{device.index or 0}"
    problem = Problem("matmul", format, group_size, 1, n, k, FLOATS["float16"], "torch", device.type)
    if not backend.can_run(problem)[0]:
        here = {name: plane.numpy() if isinstance(plane, DeviceArray) else plane for name, plane in planes.items()}
        return QuantizedTensor.owning(format, (n, k), group_size, format.pack(here))
    packed = backend.pack_planes(format, planes, group_size, place)
    specs = format.storage_spec(n, k, group_size, options)
    storage = LaterStorage(specs, lambda: backend.unpack(packed, format, (n, k), group_size))
    return QuantizedTensor.packed_only(format, (n, k), group_size, {(backend.name, place): packed}, storage)


def check_method(call: str, method: str, *, takes_hessian: bool = True) -> None:
    """Raises unless there is such a method. GPTQ is only for calls that take a Hessian."""
    known = [repr(name) for name in METHODS if takes_hessian or name != "gptq"]
    if repr(method) not in known:
        elsewhere = ". bf.quantize has 'gptq', with hessian=" if method == "gptq" else ""
        raise FormatError(bad_argument(call, "method", repr(method), " or ".join(known) + elsewhere))
