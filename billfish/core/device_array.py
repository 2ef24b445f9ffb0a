"""DeviceArray: a torch tensor, on any device, that NumPy's functions take: formats quantize it as they do an array.

Formats are written once, in NumPy. NumPy lets another kind of array answer for its functions (`__array_ufunc__`,
`__array_function__`): `np.where(w > 0, w, 0)` calls torch where w is a DeviceArray, and nothing leaves the device.
Types are those that NumPy would compute with, and each operation is one of torch, rounded once. So the bits are
NumPy's, too. Sums alone may differ, as every device adds in an order of its own.

`array-api-compat` does not do this job. Its torch namespace keeps torch's types, where int32 times float32 is float32
and not float64. It hands uint16 and uint32 to torch, which does not shift them, find their largest or index with them,
nor add those of 16 bits: formats pack codes into such words. The standard that it follows has no ldexp, frexp, rint,
einsum or view as another type. And every format, those of users included, would have to say `xp.` instead of `np.`.

`FUNCTIONS`, `UFUNCS` and the methods are what there is. Anything else is an error that says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from billfish.core.arrays import Input, bfloat16
from billfish.core.errors import DTypeError, FormatError, bad_argument, failure

# torch computes with few unsigned integers. Those of 16 and 32 bits are signed ones with the same bits there.
TYPES = {
    np.dtype(name): name
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
} | {bfloat16: "bfloat16", np.dtype(np.uint16): "int16", np.dtype(np.uint32): "int32"}
NUMPY_TYPES = {name: dtype for dtype, name in TYPES.items() if dtype.kind != "u" or dtype == np.uint8}
DISGUISED = (np.dtype(np.uint16), np.dtype(np.uint32))


def missing(name: str) -> FormatError:
    """The error for a format that uses a NumPy function which arrays on a device do not have."""
    problem = f"this format uses {name}, which arrays on a device do not have"
    return FormatError(failure("quantize", problem, "Pass w.cpu(), or use the functions of device_array.py."))


def torch_type(dtype: np.dtype[Any]) -> Any:
    if dtype not in TYPES:
        raise missing(f"numbers of type {dtype}")
    return getattr(sys.modules["torch"], TYPES[dtype])


def widened(tensor: Any, dtype: np.dtype[Any]) -> Any:
    """Numbers of a type without a sign in int64."""
    return tensor.long() & (2 ** (8 * dtype.itemsize) - 1)


def cast(tensor: Any, dtype: np.dtype[Any], target: np.dtype[Any]) -> Any:
    kind = torch_type(target)
    if dtype == target:
        return tensor
    if dtype in DISGUISED:
        tensor = widened(tensor, dtype)
    if target in DISGUISED and tensor.dtype.is_floating_point:
        tensor = tensor.long()
    return tensor.to(kind)


def ldexp(x: Any, exponent: Any) -> Any:
    """x * 2^exponent, rounded once.

    A float64 holds 2^-1022 to 2^1023 as they are. Narrower numbers are 0 or infinite beyond. Those of 64 bits take
    three such powers, the outermost first: a product that is rounded before the last power becomes 0.
    """
    torch = sys.modules["torch"]
    rest, powers = exponent.long(), []
    for _ in range(3 if x.dtype == torch.float64 else 1):
        near = rest.clamp(-1022, 1023)
        powers.append((near + 1023 << 52).view(torch.float64))
        rest = rest - near
    product = x.double()
    for power in reversed(powers):
        product = product * power
    return product.to(x.dtype)


UFUNCS: dict[np.ufunc, str] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.divide: "true_divide",
    np.negative: "neg",
    np.absolute: "abs",
    np.maximum: "maximum",
    np.minimum: "minimum",
    np.rint: "round",
    np.floor: "floor",
    np.ceil: "ceil",
    np.trunc: "trunc",
    np.log2: "log2",
    np.copysign: "copysign",
    np.frexp: "frexp",
    np.isfinite: "isfinite",
    np.isinf: "isinf",
    np.isnan: "isnan",
    np.signbit: "signbit",
    np.greater: "gt",
    np.greater_equal: "ge",
    np.less: "lt",
    np.less_equal: "le",
    np.equal: "eq",
    np.not_equal: "ne",
    np.bitwise_and: "bitwise_and",
    np.bitwise_or: "bitwise_or",
    np.bitwise_xor: "bitwise_xor",
    np.invert: "bitwise_not",
    np.left_shift: "bitwise_left_shift",
    np.right_shift: "bitwise_right_shift",
}
# What gives the same bits whether integers have a sign or not.
SIGNLESS = {
    *(np.add, np.subtract, np.multiply, np.equal, np.not_equal),
    *(np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.left_shift),
}


class DeviceArray(NDArrayOperatorsMixin):
    """tensor: torch's. dtype: NumPy's; for uint16 and uint32 the tensor is signed."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: Any, dtype: Any = None) -> None:
        self.tensor = tensor
        self.dtype = np.dtype(dtype) if dtype is not None else NUMPY_TYPES[str(tensor.dtype).removeprefix("torch.")]

    @classmethod
    def of(cls, taken: Input) -> DeviceArray:
        """Of an argument that is a torch tensor."""
        tensor = taken.source.detach()
        if tensor.layout is not sys.modules["torch"].strided:
            layout = f"a tensor of layout {tensor.layout}"
            raise DTypeError(bad_argument(taken.call, taken.argument, layout, "a dense tensor"))
        return cls(tensor.resolve_neg())

    # ---- what an array is -------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return int(self.tensor.ndim)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def T(self) -> DeviceArray:
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.tensor[self._key(key)], self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tensor[self._key(key)] = self._operand(value, self.dtype)

    def __float__(self) -> float:
        return float(self.numpy().item())

    def __int__(self) -> int:
        return int(self.numpy().item())

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {list(self.shape)} on {self.tensor.device})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Nothing is copied to the CPU by accident."""
        problem = f"this format calls a NumPy function that does not run on {self.tensor.device}, where w is"
        raise DTypeError(failure("quantize", problem, "Pass w.cpu(), or write it as np.zeros_like(w, shape=...)."))

    def numpy(self) -> NDArray[Any]:
        """A copy in CPU memory."""
        torch = sys.modules["torch"]
        bits = self.tensor.view(torch.int16) if self.dtype == bfloat16 else self.tensor
        array: NDArray[Any] = bits.to("cpu", copy=True).numpy()
        return array.view(self.dtype)

    def bytes(self) -> Any:
        """The array's bytes, rows one after the other: a tensor uint8 [nbytes], of the same memory where it can be."""
        return self.tensor.contiguous().reshape(-1).view(sys.modules["torch"].uint8)

    # ---- methods that NumPy's arrays have ---------------------------------------------------------------------------

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> DeviceArray:
        """Of another type. order: "C" for rows one after the other."""
        target = np.dtype(dtype)
        tensor = cast(self.tensor, self.dtype, target)
        if order == "C":
            tensor = tensor.contiguous()
        if copy and tensor.data_ptr() == self.tensor.data_ptr():
            tensor = tensor.clone()
        return DeviceArray(tensor, target)

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as numbers of another type."""
        target = np.dtype(dtype)
        return DeviceArray(self.tensor.contiguous().view(torch_type(target)), target)

    def copy(self) -> DeviceArray:
        """In the order of rows."""
        return DeviceArray(self.tensor.clone(memory_format=sys.modules["torch"].contiguous_format), self.dtype)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.tensor.reshape(*shape), self.dtype)

    def ravel(self) -> DeviceArray:
        return self.reshape(-1)

    def transpose(self, *axes: int) -> DeviceArray:
        return DeviceArray(self.tensor.permute(*(axes or reversed(range(self.ndim)))), self.dtype)

    def clip(self, low: Any = None, high: Any = None) -> DeviceArray:
        given = {"min": low, "max": high}
        bounds = {name: bound for name, bound in given.items() if bound is not None}
        dtype = _common_type(self, *bounds.values())
        if not bounds or dtype.kind == "b" or dtype in DISGUISED:
            raise missing(f"clip of {dtype} to {low}, {high}")
        operands = {name: self._operand(bound, dtype) for name, bound in bounds.items()}
        return DeviceArray(self._operand(self, dtype).clamp(**operands), dtype)

    def max(self, axis: Any = None, **settings: Any) -> Any:
        return self._reduced("amax", axis, **settings)

    def min(self, axis: Any = None, **settings: Any) -> Any:
        return self._reduced("amin", axis, **settings)

    def argmax(self, axis: int) -> DeviceArray:
        """The first, of equal ones."""
        return DeviceArray(self._ordered().argmax(dim=axis))

    def argmin(self, axis: int) -> DeviceArray:
        """The first, of equal ones."""
        return DeviceArray(self._ordered().argmin(dim=axis))

    def sum(self, axis: Any = None, dtype: Any = None, **settings: Any) -> Any:
        if dtype is None and self.dtype.kind == "u":
            raise missing(f"sum of {self.dtype} without dtype=")
        wide = np.dtype(dtype) if dtype is not None else np.dtype(np.int64) if self.dtype.kind in "bi" else self.dtype
        return self.astype(wide, copy=False)._reduced("sum", axis, **settings)

    def all(self, axis: Any = None, **settings: Any) -> Any:
        return self.astype(bool, copy=False)._reduced("all", axis, **settings)

    def any(self, axis: Any = None, **settings: Any) -> Any:
        return self.astype(bool, copy=False)._reduced("any", axis, **settings)

    def _ordered(self) -> Any:
        """A tensor whose numbers torch compares as NumPy compares these."""
        return _index(self) if self.dtype in DISGUISED else self.tensor.byte() if self.dtype == bool else self.tensor

    def _reduced(self, name: str, axis: Any, *, keepdims: bool = False, **others: Any) -> Any:
        """Along an axis or several, or all of it to one number of NumPy's, which is fetched."""
        if others or self.dtype in DISGUISED:
            raise missing(f"{name} of {self.dtype}" + "".join(f", {setting}=" for setting in others))
        axes = tuple(range(self.ndim)) if axis is None else axis
        reduced = getattr(self.tensor, name)(dim=axes, keepdim=keepdims)
        found = DeviceArray(reduced.to(self.tensor.dtype), self.dtype)  # torch adds up integers in 64 bits
        return found.numpy()[()] if axis is None and not keepdims else found

    # ---- NumPy's functions ------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **settings: Any) -> Any:
        if method != "__call__" or settings or (ufunc not in UFUNCS and ufunc is not np.ldexp):
            raise missing(f"numpy.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}"))
        asked = [_type_of(x) for x in inputs]
        *taken, result = ufunc.resolve_dtypes((*asked, *[None] * ufunc.nout))[: ufunc.nin + 1]
        shared = next(x for x in inputs if isinstance(x, DeviceArray))
        operands = [shared._operand(x, dtype) for x, dtype in zip(inputs, taken, strict=True)]
        if taken[0] in DISGUISED and ufunc is np.right_shift:
            operands[0] = widened(operands[0], taken[0])
        elif taken[0] in DISGUISED and ufunc not in SIGNLESS:
            raise missing(f"numpy.{ufunc.__name__} of {taken[0]}")
        torch = sys.modules["torch"]
        if out is not None:  # x += y
            shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
            fits = getattr(out[0], "dtype", None) == result and out[0].shape == shape
            if ufunc not in UFUNCS or ufunc.nout > 1 or not fits:
                raise missing(f"numpy.{ufunc.__name__} into an array that is not {result} {list(shape)}")
            getattr(torch, UFUNCS[ufunc])(*operands, out=out[0].tensor)
            return out[0]
        found = ldexp(*operands) if ufunc is np.ldexp else getattr(torch, UFUNCS[ufunc])(*operands)
        if ufunc is np.frexp:
            return DeviceArray(found.mantissa), DeviceArray(found.exponent)
        return DeviceArray(found.to(torch_type(result)), result)

    def __array_function__(self, function: Any, types: Any, args: Any, settings: Any) -> Any:
        if function not in METHODS and function not in FUNCTIONS:
            raise missing(f"numpy.{function.__name__}")
        try:
            if function in METHODS:
                return getattr(args[0], function.__name__)(*args[1:], **settings)
            return FUNCTIONS[function](*args, **settings)
        except (TypeError, AttributeError, NotImplementedError) as error:  # an argument that NumPy takes
            raise missing(f"numpy.{function.__name__} ({error})") from error

    def _operand(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """A tensor beside this one.

        A number becomes one, too: torch divides by a number of Python's as if it multiplied by its reciprocal.
        """
        if isinstance(value, DeviceArray):
            return cast(value.tensor, value.dtype, dtype)
        kind = torch_type(dtype)
        if type(value) is int and dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise missing(f"{value} beside {dtype}")
        array = np.asarray(value).astype(dtype, copy=False)
        if array.ndim == 0:
            signed = array.view(f"i{dtype.itemsize}") if dtype in DISGUISED else array
            return sys.modules["torch"].full((), signed.item(), dtype=kind, device=self.tensor.device)
        return to_device(array, self.tensor.device).tensor

    def _key(self, key: Any) -> Any:
        if isinstance(key, tuple):
            keys = tuple(map(self._key, key))
            at = [i for i, k in enumerate(keys) if not (k is None or k is ... or isinstance(k, slice))]
            numbers = [i for i in at if not getattr(keys[i], "ndim", 0)]
            if numbers and len(numbers) < len(at) <= at[-1] - at[0]:  # for NumPy, the number is an array, too
                raise missing("a slice between a number and an array of positions")
            return keys
        if isinstance(key, np.ndarray):
            key = to_device(key, self.tensor.device)
        if isinstance(key, DeviceArray):
            return key.tensor if key.dtype == bool else _index(key)
        return key


def to_device(array: NDArray[Any], device: Any) -> DeviceArray:
    """A copy of an array on a device."""
    held = np.array(array)
    torch_type(held.dtype)
    signed = held.view(f"i{held.dtype.itemsize}") if held.dtype in DISGUISED else held
    return DeviceArray(sys.modules["torch"].from_numpy(signed).to(device), held.dtype)


def look_up(table: NDArray[Any], index: Any) -> Any:
    """table[index], beside the index."""
    if isinstance(index, DeviceArray):
        return to_device(table, index.tensor.device)[index]
    return table[index]


def _type_of(value: Any) -> Any:
    """As `ufunc.resolve_dtypes` takes it: Python's numbers have no width."""
    return type(value) if type(value) in (int, float) else np.result_type(getattr(value, "dtype", value))


def _common_type(*values: Any) -> np.dtype[Any]:
    """That NumPy gives to several values together."""
    return np.result_type(*(x if type(x) in (int, float) else np.zeros((), _type_of(x)) for x in values))


def _index(array: DeviceArray) -> Any:
    """Positions, in int64."""
    if array.dtype.kind not in "iu":
        raise missing(f"an index of type {array.dtype}")
    return cast(array.tensor, array.dtype, np.dtype(np.int64))


# ---- functions of several arrays, and those that make one ------------------------------------------------------------


def _several(name: str) -> Callable[..., DeviceArray]:
    def joined(arrays: Any, axis: int = 0) -> DeviceArray:
        dtype = _common_type(*arrays)
        beside = next(array for array in arrays if isinstance(array, DeviceArray))
        tensors = [beside._operand(array, dtype) for array in arrays]
        return DeviceArray(getattr(sys.modules["torch"], name)(tensors, dim=axis), dtype)

    return joined


def _where(condition: Any, a: Any, b: Any) -> DeviceArray:
    beside = next(x for x in (condition, a, b) if isinstance(x, DeviceArray))
    dtype = _common_type(a, b)
    tensors = (beside._operand(x, kind) for x, kind in ((condition, np.dtype(bool)), (a, dtype), (b, dtype)))
    return DeviceArray(sys.modules["torch"].where(*tensors), dtype)


def _repeat(array: DeviceArray, times: int, axis: int | None = None) -> DeviceArray:
    tensor = array.tensor.reshape(-1) if axis is None else array.tensor
    return DeviceArray(tensor.repeat_interleave(times, dim=axis or 0), array.dtype)


def _take_along_axis(array: Any, index: DeviceArray, axis: int) -> DeviceArray:
    at, size = _index(index), array.shape[axis]
    if at.transpose(0, axis).shape[1:] != array.tensor.transpose(0, axis).shape[1:]:
        raise missing(f"numpy.take_along_axis of shapes {list(array.shape)} and {list(at.shape)}")
    return DeviceArray(array.tensor.gather(axis, at.where(at >= 0, at + size)), array.dtype)


def _einsum(subscripts: str, *arrays: Any) -> DeviceArray:
    """Products of numbers, then sums: torch's own would multiply matrices, by TF32 where that is allowed."""
    given, arrow, result = subscripts.replace(" ", "").partition("->")
    if not arrow or "." in given:
        raise missing(f"numpy.einsum of {subscripts!r}")
    beside, dtype = next(array for array in arrays if isinstance(array, DeviceArray)), _common_type(*arrays)
    letters = [*result, *sorted(set(given) - {",", *result})]
    product: Any = 1
    for names, array in zip(given.split(","), arrays, strict=True):
        ordered = beside._operand(array, dtype).permute(*(names.index(letter) for letter in letters if letter in names))
        product = product * ordered[tuple(slice(None) if letter in names else None for letter in letters)]
    summed = list(range(len(result), len(letters)))
    total = product.sum(dim=summed) if summed else product
    return DeviceArray(total.to(torch_type(dtype)), dtype)


def _filled(value: float) -> Callable[..., DeviceArray]:
    def made(array: DeviceArray, dtype: Any = None, *, shape: Any = None) -> DeviceArray:
        return _full_like(array, value, dtype, shape=shape)

    return made


def _full_like(array: DeviceArray, value: Any, dtype: Any = None, *, shape: Any = None) -> DeviceArray:
    target = array.dtype if dtype is None else np.dtype(dtype)
    sizes = array.shape if shape is None else shape
    return DeviceArray(array._operand(value, target).expand(sizes).contiguous(), target)


def _array_equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _argwhere(array: DeviceArray) -> DeviceArray:
    return DeviceArray(array.tensor.nonzero())


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.concatenate: _several("cat"),
    np.stack: _several("stack"),
    np.repeat: _repeat,
    np.take_along_axis: _take_along_axis,
    np.einsum: _einsum,
    np.zeros_like: _filled(0),
    np.ones_like: _filled(1),
    np.full_like: _full_like,
    np.array_equal: _array_equal,
    np.argwhere: _argwhere,
}
# Those that an array's own methods answer.
METHODS = {np.max, np.min, np.sum, np.all, np.any, np.argmax, np.argmin, np.clip, np.reshape, np.ravel, np.transpose}
