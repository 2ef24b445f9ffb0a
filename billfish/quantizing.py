"""A matrix to a QuantizedTensor, where the matrix is: in CPU memory, or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import FLOATS, Input
from billfish.backends import BACKENDS, Problem
from billfish.device_array import DeviceArray
from billfish.errors import DataError, DTypeError, FormatError, ShapeError, complaint
from billfish.format import METHODS, Format, Planes, get_format
from billfish.gptq import quantize_gptq
from billfish.tensor import LaterStorage, QuantizedTensor

ASYMMETRY = 1e-3  # of the largest number of the diagonal: sums in float32 may differ by their order
ASYMMETRY_ROWS = 256


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
) -> QuantizedTensor:
    """The checks and the work of :func:`quantize`, for all the calls that quantize a matrix [N, K].

    w: a NumPy array, or a DeviceArray. GPTQ runs in CPU memory, wherever w is.
    importance, hessian: arrays of any library, or None.
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
        got, takes = ("None", f"[{k}, {k}]") if hessian is None else ("a value", "none")
        raise FormatError(complaint(call, "hessian", got, f"{takes} for method {method!r}"))
    if hessian is not None:
        w = w.numpy() if isinstance(w, DeviceArray) else w
        planes = quantize_gptq(call, format, w, group_size, _hessian(call, hessian, k), weights, options)
    else:
        planes = format.quantize(w, group_size, method, weights, **options)
    for name, plane in planes.items():
        if plane.dtype.kind == "f" and not np.isfinite(plane).all():
            got = f"weights whose {name} overflows {plane.dtype}"
            raise DataError(complaint(call, argument, got, "smaller weights"))
    if isinstance(planes["codes"], DeviceArray):
        return _packed_there(format, planes, group_size, options)
    return QuantizedTensor.owning(format, (n, k), group_size, format.pack(planes))


def _check_finite(call: str, argument: str, w: Any) -> None:
    finite = np.isfinite(w)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        got = f"{float(w[where])} at row {where[0]}, k {where[1]}"
        raise DataError(complaint(call, argument, got, "finite numbers"))


def _importance(call: str, given: Any, k: int) -> NDArray[Any]:
    importance = _statistics(call, "importance", given, (k,))
    if (importance < 0).any():
        at = int(np.argmax(importance < 0))
        raise DataError(complaint(call, "importance", f"{importance[at]} at k {at}", "numbers of at least 0"))
    return importance


def _hessian(call: str, given: Any, k: int) -> NDArray[Any]:
    hessian = _statistics(call, "hessian", given, (k, k))
    takes = "X^T X of the inputs X [tokens, K]"
    diagonal = np.diagonal(hessian)
    if (diagonal < 0).any():
        at = int(np.argmax(diagonal < 0))
        raise DataError(complaint(call, "hessian", f"{diagonal[at]} at [{at}, {at}]", takes))
    largest = float(np.abs(diagonal).max())
    for start in range(0, k, ASYMMETRY_ROWS):  # the whole difference would be another matrix of this size
        rows = slice(start, start + ASYMMETRY_ROWS)
        if (np.abs(hessian[rows] - hessian[:, rows].T) > ASYMMETRY * largest).any():
            raise DataError(complaint(call, "hessian", "a matrix that is not symmetric", takes))
    return hessian


def _statistics(call: str, argument: str, given: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Float32 or float64 of a shape, finite."""
    taken = Input(call, argument, given)
    if taken.kind == "torch":
        taken = taken.with_source(given.detach().cpu())
    array = taken.numpy()
    if array.dtype not in (np.float32, np.float64):
        raise DTypeError(complaint(call, argument, f"dtype {taken.dtype_name}", "float32 or float64"))
    if array.shape != shape:
        raise ShapeError(complaint(call, argument, f"shape {array.shape}", f"{shape} for weights [N, {shape[0]}]"))
    finite = np.isfinite(array)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise DataError(complaint(call, argument, f"{array[where]} at {list(where)}", "finite numbers"))
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


def check_method(call: str, method: str) -> None:
    """Raises unless there is such a method."""
    if method not in METHODS:
        raise FormatError(complaint(call, "method", repr(method), " or ".join(map(repr, METHODS))))
