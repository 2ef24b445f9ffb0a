"""MarlinLinear for MLX: the mirror image of billfish.nn.torch.linear."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from numpy.typing import NDArray

from billfish.backends import BACKENDS, Problem, choose
from billfish.backends.cpu.experts import PackedExperts
from billfish.backends.cpu.packed import PackedWeights
from billfish.core.activations import DIGITS, check_activations
from billfish.core.arrays import FLOATS, MlxArrays, bfloat16
from billfish.core.errors import BillfishError, DTypeError, FormatError, ShapeError, bad_argument, type_of
from billfish.core.format import Format, get_format
from billfish.core.format_tag import ABOUT, About
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor, check_permutation
from billfish.core.typing import Activations, AnyArray, FormatLike, Method
from billfish.nn import layer_base
from billfish.nn.mlx.decode import decode, round_activations
from billfish.ops.matmul import dequantize, quantized_linear
from billfish.ops.quantization import quantize

ARRAYS = MlxArrays()


Matrix = QuantizedTensor | QuantizedExperts | PackedWeights | PackedExperts  # what products take
ORDER = "permutation"
VERSION = "_version"  # an empty array whose shape counts writes: mx.compile with the layer's state then traces anew
PENDING = ""  # among the arrays that a load replaced: those that had come, and were not packed yet


def is_traced(error: Exception) -> bool:
    """Whether MLX refused to show values: mx.compile or mx.vmap is tracing, and arrays are placeholders."""
    return str(error).startswith("[eval]")


def view_of(array: mx.array) -> NDArray[Any]:
    """The memory of an array."""
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(bfloat16)
    return np.asarray(array)


def decoded(matrix: Matrix) -> NDArray[np.float32]:
    """The numbers of a layer's matrix [N, K], or of its stack [E, N, K], columns in stored order."""
    if isinstance(matrix, PackedExperts):
        return np.stack([decoded(matrix.matrix(e)) for e in range(len(matrix))])
    if isinstance(matrix, PackedWeights):
        about = matrix.format, matrix.shape, matrix.group_size
        matrix = QuantizedTensor.packed_only(*about, {("cpu", "cpu"): matrix})
    return dequantize(matrix)


def _product(tensor: Any, activations: Activations) -> Any:
    """x, bias -> y by our kernels, as a function whose derivative MLX knows."""

    @mx.custom_function
    def linear(x: mx.array, bias: mx.array | None) -> mx.array:
        return quantized_linear(x, tensor, bias=bias, activations=activations)

    @linear.vjp
    def vjp(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        """d/dx is cotangent @ W, in float32 on the decoded weights. Integer activations pass it straight through."""
        x, bias = primals
        wide = cotangent.astype(mx.float32)
        for_x = (wide @ mx.array(decoded(tensor))).astype(x.dtype)
        for_bias = None if bias is None else wide.reshape(-1, wide.shape[-1]).sum(0).astype(bias.dtype)
        return for_x, for_bias

    return linear


@layer_base.register_layer
class MarlinLinear(layer_base.MarlinLinear, Module):
    """An MLX layer with quantized weights: y = x @ W.T + bias with W [out_features, in_features].

    The layer holds the weights once: on the CPU in the form that products read. Its parameters are made when asked
    for: the format's storage arrays under their own names (`packed`, `scales`, `blocks`, ...), bit for bit,
    `permutation` int32 [K] where columns are stored in another order (act-order), and `about`, which says the format.
    A write to one of them does not change the layer; `update`, `load_weights` and `set_storage` do. `bias` is an
    ordinary parameter. All start frozen.

    in_features, out_features, bias: as of mlx.nn.Linear. dtype: of the bias.
    format, group_size, options: as in :func:`billfish.quantize`. activations: as in :func:`billfish.quantized_linear`.
    act_order: whether to make room for a permutation. framework: "mlx".

        >>> import mlx.core as mx
        >>> import mlx.nn
        >>> from billfish.nn.mlx import MarlinLinear
        >>> layer = MarlinLinear.from_linear(mlx.nn.Linear(64, 8), "q8_0")
        >>> layer(mx.ones((2, 64))).shape
        (2, 8)
    """

    kind = "mlx"
    _replaced: dict[str, Any]  # what the arrays of a load that is under way came after

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: FormatLike = "fp4",
        group_size: int | None = None,
        activations: Activations = "exact",
        act_order: bool = False,
        dtype: mx.Dtype = mx.float32,
        framework: Literal["mlx"] = "mlx",
        **options: str,
    ) -> None:
        """A layer of zeros, to load weights into. `act_order` makes room for a permutation."""
        layer_base.check_framework(framework, self.kind)
        known, group, specs = layer_base.empty_weights(format, out_features, in_features, group_size, options)
        order = np.arange(in_features, dtype=np.int32) if act_order else None
        zeros = mx.zeros((out_features,), dtype) if bias else None
        self._set_up(known, (out_features, in_features), group, None, zeros, order, activations)
        self.__dict__["_specs"] = specs

    def _set_up(
        self,
        format: Format,
        shape: tuple[int, ...],
        group_size: int,
        matrix: Matrix | None,
        bias: mx.array | None,
        order: NDArray[np.int32] | None,
        activations: Activations,
    ) -> None:
        """matrix: None for zeros, of arrays that `_specs` says."""
        # Not as attributes, which would make parts of the layer's state of them.
        self.__dict__.update({"_matrix": matrix, "_order": order, "_pending": {}, "_specs": {}, "_replaced": {}})
        self.__dict__.update({"format": format.name, "group_size": group_size, "_shape": shape})
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self.out_features, self.in_features = shape[-2:]
        self.activations = check_activations("MarlinLinear", activations, DIGITS)
        if bias is not None:
            self.bias = bias
        self._no_grad.update(self.keys())
        self._bump()

    # ---- parameters that are made when asked for ---------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        """The parameters that are made."""
        order = (ORDER,) if self._order is not None or ORDER in self._pending else ()
        return (*get_format(self.format).storage_names, ABOUT, *order)

    def storage(self) -> dict[str, mx.array]:
        """A copy of the storage arrays, bit for bit."""
        names, pending = get_format(self.format).storage_names, self._pending
        if all(name in pending for name in names):
            made: Any = {}
        elif self._matrix is None:
            made = {n: mx.zeros(spec.shape, mlx_type(spec.dtype)) for n, spec in self._specs.items()}
        else:
            made = {name: ARRAYS.from_numpy(array) for name, array in self._stored().items()}
        return {name: copy.copy(pending[name]) if name in pending else made[name] for name in names}

    def _stored(self) -> Storage:
        matrix: Any = self._matrix
        if isinstance(matrix, (QuantizedTensor, QuantizedExperts)):
            return matrix.storage
        return BACKENDS["cpu"].unpack(matrix, get_format(self.format), matrix.shape, self.group_size)

    def set_storage(self, storage: Mapping[str, Any]) -> None:
        """Take other weights of the same format and shape: all storage arrays by name."""
        names = get_format(self.format).storage_names
        if storage.keys() != set(names):
            expected = f"a dict with {', '.join(names)}, all arrays of {self.format}"
            raise FormatError(bad_argument("set_storage", "storage", f"a dict with {', '.join(storage)}", expected))
        for name in names:
            value = storage[name]
            self[name] = value if isinstance(value, mx.array) else ARRAYS.from_numpy(np.asarray(value))
        self._current()

    def _made(self, name: str) -> mx.array:
        if name == ABOUT:
            return mx.array(About(self.format, self.group_size).array())
        if name == ORDER:
            return copy.copy(self._pending[ORDER]) if ORDER in self._pending else mx.array(self._order)
        return self.storage()[name]

    def __getitem__(self, name: str) -> Any:
        return self._made(name) if name in self._names else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> Any:
        return dict.fromkeys([*self._names, *super().keys()]).keys()

    def items(self) -> Any:
        storage = self.storage()
        made = {name: storage[name] if name in storage else self._made(name) for name in self._names}
        return {**made, **dict(super().items())}.items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def __setitem__(self, name: str, value: Any) -> None:
        """What `update` and `load_weights` come down to: storage is bits, and another type would be other weights.

        MLX hands over array by array. If one of them is refused, those that came before it go back, unless the layer
        has computed since, or had all arrays.
        """
        earlier = self._replaced
        if name in self._names:
            try:
                value = self._checked(name, value)
            except BillfishError:
                if PENDING in earlier:
                    self.__dict__["_pending"] = earlier.pop(PENDING)
                for other, array in earlier.items():
                    if array is not None:
                        super().__setitem__(other, array)
                earlier.clear()
                raise
            earlier.setdefault(PENDING, dict(self._pending))
            earlier.setdefault(name, None)
            if name != ABOUT:
                self._pending[name] = copy.copy(value)
                self._bump()
        else:
            held = super().get(name)
            if held is not None:
                earlier.setdefault(name, held)
            super().__setitem__(name, value)
        if earlier.keys() - {PENDING} == set(self.keys()) - {VERSION}:
            earlier.clear()

    def _bump(self) -> None:
        count = super().__getitem__(VERSION).shape[1] if super().__contains__(VERSION) else 0
        super().__setitem__(VERSION, mx.zeros((0, count + 1)))

    def _checked(self, name: str, value: Any) -> Any:
        """An array in the type that the layer has; raises if it would make other weights."""
        if name == ABOUT:
            _look(value, lambda about: About(self.format, self.group_size).check("MarlinLinear", about))
        if name == ORDER:  # MLX would read what lies beside x
            _look(value, lambda order: check_permutation("MarlinLinear", order, self.in_features))
        if name in (ABOUT, ORDER):
            return value
        wanted = self._type_of(name)
        if value.dtype == wanted:
            return value
        if {value.dtype, wanted} == {mx.int32, mx.uint32}:  # torch layers hold words as int32
            return value.view(mx.uint32)
        expected = f"{wanted}. Call set_dtype() before quantizing"
        raise DTypeError(bad_argument("MarlinLinear", f"dtype of {name}", value.dtype, expected))

    def _type_of(self, name: str) -> mx.Dtype:
        return self.__dict__.setdefault("_types", {n: a.dtype for n, a in self.storage().items()})[name]

    def _current(self) -> Any:
        """The matrix for products, of the arrays that came last. Raises unless they fit the layer."""
        if not self._pending and self._matrix is not None:
            self._replaced.clear()
            return self._matrix
        format, pending = get_format(self.format), self._pending
        storage = {name: view_of(array) for name, array in self.storage().items()}
        order = view_of(pending[ORDER]) if ORDER in pending else self._order
        if order is not None:
            order = check_permutation("MarlinLinear", order, self.in_features)
        kind = QuantizedExperts if len(self._shape) == 3 else QuantizedTensor
        whole_row = format.whole_row_groups and self.group_size == self.in_features
        matrix = kind.borrowing(format, storage, -1 if whole_row else self.group_size, call="MarlinLinear")
        if matrix.shape != self._shape:
            argument = f"shape of the weights ({', '.join(storage)})"
            raise ShapeError(bad_argument("MarlinLinear", argument, list(matrix.shape), f"{list(self._shape)}"))
        self.__dict__.update({"_matrix": packed(matrix), "_order": order})
        pending.clear()
        self._replaced.clear()
        return self._matrix

    def __reduce__(self) -> Any:
        """Pickles and copies have the storage."""
        hidden = {name: value for name, value in self.__dict__.items() if name not in ("_matrix", "_pending", "_types")}
        made = {name: view_of(array) for name, array in self.storage().items()}
        order = np.array(self[ORDER]) if ORDER in self else None
        parameters = {name: array for name, array in super().items() if name != VERSION}
        return _restored, (type(self), hidden, made, order, parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, (kind, hidden, *rest) = self.__reduce__()
        return make(kind, copy.deepcopy(hidden, memo), *rest)

    @classmethod
    def from_linear(  # type: ignore[override]  # the front takes the layers of all frameworks
        cls,
        linear: Linear,
        format: FormatLike = "fp4",
        *,
        group_size: int | None = None,
        method: Method = "mse",
        importance: AnyArray | None = None,
        hessian: AnyArray | None = None,
        cross: AnyArray | None = None,
        activations: Activations = "exact",
        **options: str,
    ) -> MarlinLinear:
        """Quantize an mlx.nn.Linear. The bias is kept as it is."""
        if not isinstance(linear, Linear):
            raise DTypeError(bad_argument("from_linear", "linear", type_of(linear), "an mlx.nn.Linear"))
        tensor = quantize(
            linear.weight,
            format,
            group_size=group_size,
            method=method,
            importance=importance,
            hessian=hessian,
            cross=cross,
            **options,
        )
        layer = cls.from_quantized(tensor, linear.get("bias"), activations=activations)
        layer.train(linear.training)
        return layer

    @classmethod
    def from_quantized(
        cls,
        tensor: QuantizedTensor,
        bias: mx.array | None = None,
        *,
        permutation: Any = None,
        activations: Activations = "exact",
    ) -> MarlinLinear:
        """A layer with a copy of these weights.

        permutation [K]: stored column j takes x[..., permutation[j]]; a tensor with act-order has its own.
        """
        layer_base.check_weights("from_quantized", tensor, bias)
        taken = layer_base.order_of("from_quantized", tensor, permutation)
        layer = cls.__new__(cls)
        layer._set_up(tensor.format, tensor.shape, tensor.group_size, packed(tensor), bias, taken, activations)
        return layer

    def with_bias(self, bias: mx.array | None) -> MarlinLinear:
        """Another layer with the very same weights: tied weights."""
        layer = type(self).__new__(type(self))
        matrix, about = self._current(), (self._order, self.activations)
        layer._set_up(get_format(self.format), self._shape, self.group_size, matrix, bias, *about)
        layer.train(self.training)
        return layer

    @property
    def storage_bytes(self) -> int:
        """Of storage, without making it."""
        *experts, n, k = self._shape
        specs = get_format(self.format).storage_spec(n, k, self.group_size)
        return math.prod(experts) * sum(spec.nbytes for spec in specs.values())

    @property
    def has_order(self) -> bool:
        """Whether columns are stored in another order than that of x's features."""
        return ORDER in self

    @property
    def weights_identity(self) -> int:
        """The same for layers that share their weights, as long as one of them lives."""
        return id(self._current())

    @property
    def weight(self) -> mx.array:
        """W [N, K] decoded, for code that asks a Linear for its weight."""
        return self.to_linear().weight

    def quantized(self) -> QuantizedTensor:
        """A copy of the weights [N, K] with their permutation."""
        self._current()
        storage = {name: np.array(array) for name, array in self._stored().items()}
        return QuantizedTensor.owning(get_format(self.format), self._shape, self.group_size, storage, self._order)

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> Linear:
        """A plain layer with the decoded weights, columns in their original order."""
        linear = Linear(1, 1, bias=False)
        linear.weight = dequantize(self.quantized(), dtype)
        if "bias" in self:
            linear.bias = self.bias.astype(dtype)
        linear.train(self.training)
        return linear

    def __call__(self, x: mx.array) -> mx.array:  # type: ignore[override]  # one kind is what this one takes
        bias = super().get("bias")
        try:
            matrix = self._current()
            ordered = self._ordered(x)
            if self._runs_on_metal(ordered):  # as part of MLX's graph, with a gradient of its own
                return quantized_linear(ordered, matrix, bias=bias, activations=self.activations)
            return _product(matrix, self.activations)(ordered, bias)
        except (ValueError, RuntimeError) as error:
            if not is_traced(error):
                raise
            return self._by_operations(self._ordered(x), bias)

    def _ordered(self, x: mx.array) -> mx.array:
        """x in the order of the stored columns."""
        return mx.take(x, self[ORDER], axis=-1) if ORDER in self else x

    def _runs_on_metal(self, x: mx.array) -> bool:
        rows, dtype = math.prod(x.shape[:-1]), FLOATS.get(str(x.dtype).rsplit(".", 1)[-1], np.dtype(np.float32))
        shape = (rows, self.out_features, self.in_features)
        format = get_format(self.format)
        problem = Problem("matmul", format, self.group_size, *shape, dtype, "mlx", activations=self.activations)
        return BACKENDS["metal"].can_run(problem)[0]

    def _by_operations(self, x: mx.array, bias: mx.array | None) -> mx.array:
        """The same product as a graph of MLX operations, decoded weights and all."""
        wide = x.astype(mx.float32)
        if self.activations != "exact":
            wide = round_activations(wide, self.activations, self.group_size)
        y = wide @ decode(get_format(self.format), list(self.storage().values()), self.group_size).T
        return (y if bias is None else y + bias).astype(x.dtype)

    def _extra_repr(self) -> str:
        return self.describe("bias" in self, ORDER in self)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Module:
        """As of any module; weights that do not say their format are taken to be in the layer's."""
        given: Any = mx.load(file_or_weights) if isinstance(file_or_weights, str) else file_or_weights
        return super().load_weights(list({ABOUT: self[ABOUT], **dict(given)}.items()), strict)


def packed(matrix: QuantizedTensor | QuantizedExperts) -> Matrix:
    """As a layer holds it: packed for the CPU where products run there; else a copy of it, which Metal's packs keep."""
    *experts, n, k = matrix.shape
    count, float32 = (experts[0] if experts else 0), np.dtype(np.float32)
    problem = Problem(
        "matmul", matrix.format, matrix.group_size, 1, n, k, float32, "mlx", experts=count, chosen=min(count, 1)
    )
    backend = choose("MarlinLinear", problem)
    if isinstance(matrix, QuantizedExperts) and backend.unpacks_experts:
        return backend.pack_experts(matrix)
    if isinstance(matrix, QuantizedTensor) and backend.unpacks:
        return replace(backend.pack(matrix), permutation=None)  # x comes in stored order
    storage = {name: np.array(array) for name, array in matrix.storage.items()}
    return type(matrix).owning(matrix.format, matrix.shape, matrix.group_size, storage)  # type: ignore[arg-type]


def mlx_type(dtype: np.dtype[Any]) -> mx.Dtype:
    """MLX's type of the same name."""
    return ARRAYS.from_numpy(np.empty(0, dtype)).dtype


def _restored(kind: Any, hidden: Any, storage: Any, order: Any, parameters: Any) -> Any:
    layer = kind.__new__(kind)
    dict.update(layer, parameters)
    layer.__dict__.update({**hidden, "_matrix": None, "_order": order})
    layer.__dict__["_pending"] = {name: ARRAYS.from_numpy(array) for name, array in storage.items()}
    return layer


def _look(value: mx.array, check: Callable[[NDArray[Any]], object]) -> None:
    """Have the numbers of an array checked. A placeholder of mx.compile has none."""
    try:
        check(np.array(value))
    except (ValueError, RuntimeError) as error:
        if not is_traced(error):
            raise
