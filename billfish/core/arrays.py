"""Arrays of other libraries: NumPy, PyTorch, MLX and CuPy in, the same kind out. None is imported unless it is used.

Each adapter is a pair, to NumPy and back. bfloat16, which NumPy has only through ml_dtypes, crosses as its 16 bits.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import BackendUnavailable, DTypeError, bad_argument, failure, type_of

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": bfloat16}
FLOAT_NAMES = "float32, float16 or bfloat16"


def round_once(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """float64 to another type with one rounding. ml_dtypes goes to bfloat16 by way of float32, which makes two.

    Rounded to *odd* on the way (toward zero, and the last bit set if anything was lost), the float32 still tells the
    second rounding on which side of every tie the value was.
    """
    if dtype != bfloat16:
        return values.astype(dtype)
    nearest = values.astype(np.float32)
    inexact = (nearest != values) & np.isfinite(nearest)
    beyond = inexact & (np.abs(nearest) > np.abs(values))
    odd = np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest).view(np.uint32) | inexact.astype(np.uint32)
    return odd.view(np.float32).astype(bfloat16)


class Adapter(Protocol):
    """How one library's arrays become NumPy arrays and are made from them."""

    kind: str
    module: str  # which has the library's types

    def owns(self, array: object) -> bool: ...
    def owns_type(self, dtype: object) -> bool: ...
    def device(self, array: Any) -> str: ...
    def ordinal(self, array: Any) -> int: ...  # which of its devices, where there may be several
    def to_numpy(self, array: Any) -> NDArray[Any]: ...
    def from_numpy(self, array: NDArray[Any]) -> Any: ...
    def index(self, order: NDArray[np.int32], array: Any) -> Any: ...  # as an array beside `array`
    def take(self, array: Any, index: Any) -> Any: ...  # array[..., index]
    def empty_like(self, array: Any) -> Any: ...  # contiguous
    def empty(self, shape: tuple[int, ...], dtype: str, beside: Any) -> Any: ...  # where `beside` is, if it is an array


class NumpyArrays:
    kind = module = "numpy"

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def owns_type(self, dtype: object) -> bool:
        return isinstance(dtype, (np.dtype, type))

    def device(self, array: Any) -> str:
        return "cpu"

    def ordinal(self, array: Any) -> int:
        return 0

    def to_numpy(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        return array

    def index(self, order: NDArray[np.int32], array: Any) -> Any:
        return order

    def take(self, array: Any, index: Any) -> Any:
        return np.take(array, index, axis=-1)

    def empty_like(self, array: Any) -> Any:
        return np.empty(array.shape, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, beside: Any) -> Any:
        return np.empty(shape, FLOATS[dtype])


class TorchArrays:
    kind = module = "torch"

    def owns(self, array: object) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    def owns_type(self, dtype: object) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(dtype, torch.dtype)

    def device(self, array: Any) -> str:
        return "cpu" if array.is_cpu else str(array.device.type)  # each attribute takes its time in calls with one row

    def ordinal(self, array: Any) -> int:
        return int(array.device.index or 0)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        torch = sys.modules["torch"]
        is_parameter = type(array) is torch.nn.Parameter
        if is_parameter or array.requires_grad or array.is_neg() or array.is_conj():
            array = array.detach().resolve_conj().resolve_neg()
        is_bfloat16 = array.dtype is torch.bfloat16
        if is_bfloat16:
            array = array.view(torch.int16)
        # Memory of which numpy() was called cannot be freed by resize_(0), as FSDP frees that of parameters.
        numbers = np.from_dlpack(array) if is_parameter else np.asarray(array.numpy())
        return numbers.view(bfloat16) if is_bfloat16 else numbers

    def from_numpy(self, array: NDArray[Any]) -> Any:
        torch = sys.modules["torch"]
        if array.dtype == bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def index(self, order: NDArray[np.int32], array: Any) -> Any:
        return sys.modules["torch"].tensor(order, device=array.device)

    def take(self, array: Any, index: Any) -> Any:
        return array.index_select(-1, index)

    def empty_like(self, array: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(array.shape, dtype=array.dtype, device=array.device)

    def empty(self, shape: tuple[int, ...], dtype: str, beside: Any) -> Any:
        torch = sys.modules["torch"]
        device = beside.device if self.owns(beside) else "cpu"
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


class MlxArrays:
    kind, module = "mlx", "mlx.core"

    def owns(self, array: object) -> bool:
        mx = sys.modules.get("mlx.core")
        return mx is not None and isinstance(array, mx.array)

    def owns_type(self, dtype: object) -> bool:
        mx = sys.modules.get("mlx.core")
        return mx is not None and isinstance(dtype, mx.Dtype)

    def device(self, array: Any) -> str:
        return "cpu"  # memory is shared: operations have a device, arrays do not

    def ordinal(self, array: Any) -> int:
        return 0

    def to_numpy(self, array: Any) -> NDArray[Any]:
        mx = sys.modules["mlx.core"]
        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(bfloat16)
        return np.array(array)

    def from_numpy(self, array: NDArray[Any]) -> Any:
        mx = sys.modules["mlx.core"]
        if array.dtype == bfloat16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)

    def index(self, order: NDArray[np.int32], array: Any) -> Any:
        return sys.modules["mlx.core"].array(order)

    def take(self, array: Any, index: Any) -> Any:
        return sys.modules["mlx.core"].take(array, index, axis=-1)

    def empty_like(self, array: Any) -> Any:
        return sys.modules["mlx.core"].zeros(array.shape, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, beside: Any) -> Any:
        mx = sys.modules["mlx.core"]
        return mx.zeros(shape, getattr(mx, dtype))


class CupyArrays:
    kind = module = "cupy"

    def owns(self, array: object) -> bool:
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(array, cupy.ndarray)

    def owns_type(self, dtype: object) -> bool:
        return False  # they are NumPy's

    def device(self, array: Any) -> str:
        return "cuda"

    def ordinal(self, array: Any) -> int:
        return int(array.device.id)

    def to_numpy(self, array: Any) -> NDArray[Any]:
        return np.asarray(array.get())

    def from_numpy(self, array: NDArray[Any]) -> Any:
        return sys.modules["cupy"].asarray(array)

    def index(self, order: NDArray[np.int32], array: Any) -> Any:
        with array.device:
            return sys.modules["cupy"].asarray(order)

    def take(self, array: Any, index: Any) -> Any:
        with array.device:
            return array.take(index, axis=-1)

    def empty_like(self, array: Any) -> Any:
        with array.device:
            return sys.modules["cupy"].empty(array.shape, array.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, beside: Any) -> Any:
        with beside.device:
            return sys.modules["cupy"].empty(shape, FLOATS[dtype])


ADAPTERS: tuple[Adapter, ...] = (NumpyArrays(), TorchArrays(), MlxArrays(), CupyArrays())


@cache
def _name_of(dtype: Any) -> str:
    """NumPy takes microseconds to spell a type, which would show in every call with one row."""
    return str(dtype).rsplit(".", 1)[-1]


class Input:
    """An argument of ours: an array of any library, looked at without moving it."""

    __slots__ = ("adapter", "argument", "call", "device", "dtype_name", "kind", "shape", "source")

    def __init__(self, call: str, argument: str, source: Any) -> None:
        self.call, self.argument, self.source = call, argument, source
        for adapter in ADAPTERS:
            if adapter.owns(source):
                self.adapter, self.kind = adapter, adapter.kind
                self.device, self.shape = adapter.device(source), tuple(source.shape)
                self.dtype_name = _name_of(source.dtype)  # such as "float16"; torch and MLX say "torch.float16"
                return
        expected = "a NumPy array, torch.Tensor or mlx array"
        raise DTypeError(bad_argument(call, argument, type_of(source), expected))

    def numpy(self) -> NDArray[Any]:
        if self.device != "cpu":
            value = f"a {self.kind} array on {self.device}"
            raise DTypeError(bad_argument(self.call, self.argument, value, "an array in CPU memory"))
        try:
            return self.adapter.to_numpy(self.source)
        except (TypeError, RuntimeError) as error:  # sparse and other tensors that are no plain array
            value = f"a {self.kind} array that NumPy cannot read ({error})"
            raise DTypeError(bad_argument(self.call, self.argument, value, "a dense array")) from None

    def like(self, array: NDArray[Any]) -> Any:
        """`array` as an array of the same library as the argument."""
        return self.adapter.from_numpy(array)

    @property
    def place(self) -> str:
        """The device and its number: "cpu", "cuda:0"."""
        return "cpu" if self.device == "cpu" else f"{self.device}:{self.adapter.ordinal(self.source)}"

    def with_source(self, source: Any) -> Input:
        """Another array of the same kind under the same name."""
        return Input(self.call, self.argument, source)


def float_input(call: str, argument: str, source: object) -> Input:
    """An argument that holds floating-point numbers of a type we compute with."""
    taken = Input(call, argument, source)
    if taken.dtype_name not in FLOATS:
        raise DTypeError(bad_argument(call, f"dtype of {argument}", taken.dtype_name, FLOAT_NAMES))
    return taken


def float_dtype(call: str, dtype: Any) -> np.dtype[Any]:
    """The NumPy type for a name such as "bfloat16", or for a type of NumPy, torch or MLX."""
    try:
        is_foreign = any(adapter.owns_type(dtype) for adapter in ADAPTERS if adapter.kind != "numpy")
        name = dtype if isinstance(dtype, str) else _name_of(dtype) if is_foreign else np.dtype(dtype).name
        return FLOATS[name]
    except (TypeError, KeyError):
        raise DTypeError(bad_argument(call, "dtype", repr(dtype), FLOAT_NAMES)) from None


def library_for(call: str, like: Any, dtype: Any) -> Adapter:
    """The library of a result: the one that `like` names or belongs to, else that of `dtype`, else NumPy."""
    if isinstance(like, str):
        adapter = next((a for a in ADAPTERS if a.kind == like and like != "cupy"), None)
        if adapter is None:
            expected = "'numpy', 'torch', 'mlx', or an array of one of them"
            raise DTypeError(bad_argument(call, "like", repr(like), expected))
        try:
            importlib.import_module(adapter.module)
        except ImportError as error:
            raise BackendUnavailable(failure(call, f"like is {like!r}, which cannot be imported ({error})")) from None
        return adapter
    if like is not None:
        return Input(call, "like", like).adapter
    return next((adapter for adapter in ADAPTERS if adapter.owns_type(dtype)), ADAPTERS[0])
