"""A matrix to a QuantizedTensor, where the matrix is: in CPU memory, or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.arrays import FLOATS
from billfish.backends import BACKENDS, Problem
from billfish.device_array import DeviceArray
from billfish.errors import DataError, FormatError, complaint
from billfish.format import METHODS, Format, Planes, get_format
from billfish.tensor import LaterStorage, QuantizedTensor


def quantize_matrix(
    call: str,
    argument: str,
    w: Any,
    format: str | Format,
    group_size: int | None,
    method: str,
    options: dict[str, str],
) -> QuantizedTensor:
    """The checks and the work of :func:`quantize`, for all the calls that quantize a matrix [N, K].

    w: a NumPy array, or a DeviceArray.
    """
    format = get_format(format, call)
    check_method(call, method)
    n, k = w.shape
    format.check_k(call, k)
    group_size = format.check_group_size(call, group_size, k)
    options = format.check_options(call, options)
    _check_finite(call, argument, w)
    planes = format.quantize(w, group_size, method, **options)
    for name, plane in planes.items():
        if plane.dtype.kind == "f" and not np.isfinite(plane).all():
            got = f"weights whose {name} overflows {plane.dtype}"
            raise DataError(complaint(call, argument, got, "smaller weights"))
    if isinstance(w, DeviceArray):
        return _packed_there(format, planes, group_size, options)
    return QuantizedTensor.owning(format, (n, k), group_size, format.pack(planes))


def _check_finite(call: str, argument: str, w: Any) -> None:
    finite = np.isfinite(w)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        got = f"{float(w[where])} at row {where[0]}, k {where[1]}"
        raise DataError(complaint(call, argument, got, "finite numbers"))


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
