"""MarlinLinear for MLX: storage in parameters, the mirror image of billfish.nn.torch.linear."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from billfish.backends import BACKENDS, Problem
from billfish.core.activations import DIGITS, check_activations
from billfish.core.arrays import FLOATS, MlxArrays, bfloat16
from billfish.core.errors import BillfishError, DTypeError, complaint
from billfish.core.format import Format, get_format
from billfish.core.format_tag import ABOUT, About
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor, check_permutation
from billfish.core.typing import Activations, AnyArray, FormatLike, Method
from billfish.nn import layer_base
from billfish.nn.mlx.decode import decode, round_activations
from billfish.ops.linear import dequantize, quantized_linear
from billfish.ops.quantization import quantize

ARRAYS = MlxArrays()


class Made:
    """The matrix of a layer's storage arrays, and in it what backends made of it, as long as the arrays are the same.

    An MLX array is a handle on memory. Writing to it, as in `a[0] = 1` or `a *= 2`, gives it other memory, unless
    nobody else has a handle on the old: MLX then reuses that. So `handles` are kept here, and addresses tell.
    """

    def __init__(self) -> None:
        self.addresses: list[object] = []
        self.handles: list[mx.array] = []
        self.matrix: QuantizedTensor | QuantizedExperts | None = None

    def current(self, format: Format, group_size: int, arrays: Sequence[mx.array], order: mx.array | None) -> Any:
        """The matrix of these storage arrays. Raises unless `order` is one of its columns."""
        everything = [*arrays, *([] if order is None else [order])]
        addresses = [address_of(array) for array in everything]
        if self.matrix is None or addresses != self.addresses:
            handles = [copy.copy(array) for array in everything]
            views = [view_of(handle) for handle in handles]
            storage = dict(zip(format.storage_names, views, strict=False))
            kind = QuantizedExperts if views[0].ndim == 3 else QuantizedTensor
            matrix = kind.borrowing(format, storage, group_size, call="MarlinLinear")
            if order is not None:
                check_permutation("MarlinLinear", views[-1], matrix.shape[-1])
            # Handles first: without them an address might be that of memory which was reused.
            self.handles, self.addresses, self.matrix = handles, [address_of(handle) for handle in handles], matrix
        return self.matrix

    def __reduce__(self) -> Any:
        """Copies and pickles of a layer have nothing of this."""
        return Made, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Made:
        return Made()


def address_of(array: mx.array) -> object:
    """Where an array's memory is. An array with gaps has none that could be compared."""
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # it has one
    except TypeError:
        return object()


def view_of(array: mx.array) -> NDArray[Any]:
    """The memory of an array."""
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view(bfloat16)
    return np.asarray(array)


def _product(tensor: QuantizedTensor, activations: Activations) -> Any:
    """x, bias -> y by our kernels, as a function whose derivative MLX knows."""

    @mx.custom_function
    def linear(x: mx.array, bias: mx.array | None) -> mx.array:
        return quantized_linear(x, tensor, bias=bias, activations=activations)

    @linear.vjp
    def vjp(primals: Any, cotangent: mx.array, _: mx.array) -> Any:
        """d/dx is cotangent @ W, in float32 on the decoded weights. Integer activations pass it straight through."""
        x, bias = primals
        wide = cotangent.astype(mx.float32)
        for_x = (wide @ mx.array(dequantize(tensor))).astype(x.dtype)
        for_bias = None if bias is None else wide.reshape(-1, wide.shape[-1]).sum(0).astype(bias.dtype)
        return for_x, for_bias

    return linear


@layer_base.register_layer
class MarlinLinear(layer_base.MarlinLinear, Module):
    """y = x @ W.T + bias with W [out_features, in_features] in one of billfish's formats.

    Parameters are the format's storage arrays under their own names (`packed`, `scales`, `blocks`, ...), bit for bit,
    `permutation` int32 [K] where columns are stored in another order (act-order), `about`, which says the format, and
    `bias`. All start frozen.
    """

    kind = "mlx"
    _replaced: dict[str, mx.array]

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
        storage = {name: ARRAYS.from_numpy(np.zeros(spec.shape, spec.dtype)) for name, spec in specs.items()}
        permutation = mx.arange(in_features, dtype=mx.int32) if act_order else None
        zeros = mx.zeros((out_features,), dtype) if bias else None
        self._set_up(known, (out_features, in_features), group, storage, zeros, permutation, activations)

    def _set_up(
        self,
        format: Format,
        shape: tuple[int, int],
        group_size: int,
        storage: dict[str, mx.array],
        bias: mx.array | None,
        permutation: mx.array | None,
        activations: Activations,
    ) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self.format, self.group_size = format.name, group_size
        self.out_features, self.in_features = shape
        self.activations = check_activations("MarlinLinear", activations, DIGITS)
        self._made = Made()
        # The arrays before those of a load that is under way: it is over when the layer computes, or has all arrays.
        self.__dict__["_replaced"] = {}  # not as an attribute, which would make a part of the layer's state of it
        for name in format.storage_names:
            self[name] = storage[name]
        self[ABOUT] = mx.array(About(format.name, group_size).array())
        if permutation is not None:
            self.permutation = permutation
        if bias is not None:
            self.bias = bias
        self.freeze()

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
        activations: Activations = "exact",
        **options: str,
    ) -> MarlinLinear:
        """Quantize an mlx.nn.Linear. The bias is kept as it is."""
        if not isinstance(linear, Linear):
            raise DTypeError(complaint("from_linear", "linear", f"a {type(linear).__name__}", "an mlx.nn.Linear"))
        tensor = quantize(
            linear.weight,
            format,
            group_size=group_size,
            method=method,
            importance=importance,
            hessian=hessian,
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
        order = None if taken is None else mx.array(taken)
        storage = {name: ARRAYS.from_numpy(array) for name, array in tensor.storage.items()}
        layer = cls.__new__(cls)
        layer._set_up(tensor.format, tensor.shape, tensor.group_size, storage, bias, order, activations)
        return layer

    def with_bias(self, bias: mx.array | None) -> MarlinLinear:
        """Another layer with the very same weight arrays: tied weights."""
        format = get_format(self.format)
        storage = dict(zip(format.storage_names, self.storage, strict=True))
        shape = (self.out_features, self.in_features)
        layer = type(self).__new__(type(self))
        order = self.get("permutation")
        layer._set_up(format, shape, self.group_size, storage, bias, order, self.activations)
        layer._made = self._made
        layer.train(self.training)
        return layer

    @staticmethod
    def walk(model: Module) -> layer_base.Walk:
        """The Linear layers of a model, and who else holds a weight."""
        from billfish.nn.mlx.expert_layers import is_switch  # which is made of this module

        linears: list[layer_base.Place] = []
        experts: list[layer_base.Place] = []
        others: dict[int, str] = {}

        def visit(container: Any, path: str) -> None:
            for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
                where = f"{path}.{key}" if path else str(key)
                if isinstance(value, Linear):
                    linears.append(layer_base.Place(where, value, partial(container.__setitem__, key)))
                elif is_switch(value):
                    experts.append(layer_base.Place(where, value, partial(container.__setitem__, key)))
                elif isinstance(value, (dict, list)):  # a Module is a dict
                    visit(value, where)
                elif isinstance(value, mx.array):
                    others[id(value)] = where

        visit(model, "")
        return layer_base.Walk(Linear, linears, others, experts)

    @staticmethod
    def parameter_arrays(model: Module) -> dict[str, mx.array]:
        """All parameters by their paths."""
        return dict(tree_flatten(model.parameters()))  # type: ignore[no-untyped-call]

    @staticmethod
    def set_parameter(model: Module, name: str, value: mx.array) -> None:
        """Put a value in the place of one of them."""
        model.load_weights([(name, value)], strict=False)

    @property
    def storage(self) -> list[mx.array]:
        """The storage arrays, in the order of the format's `storage_names`."""
        return [self[name] for name in get_format(self.format).storage_names]

    @property
    def storage_bytes(self) -> int:
        """Of storage."""
        return sum(array.nbytes for array in self.storage)

    @staticmethod
    def joints(model: Module) -> list[Any]:
        """Raises: only torch models have joint layers."""
        raise DTypeError(complaint("quantize_model", "merge", "True with an MLX model", "False, or a torch model"))

    @staticmethod
    def note_layers(model: Module) -> None:
        """MLX has no models that save their own configuration."""

    @staticmethod
    def place_of(linear: Module) -> dict[str, Any]:
        """Where `from_quantized` is to put the layer that takes the place of `linear`: MLX has one memory."""
        return {}

    def _matrix(self) -> QuantizedTensor:
        """The weights [N, K] in stored order, as the arrays are now."""
        arrays, order = self.storage, self.get("permutation")
        matrix = self._made.current(get_format(self.format), self.group_size, arrays, order)
        self._replaced.clear()
        return matrix

    def quantized(self) -> QuantizedTensor:
        """A copy of the weights [N, K] with their permutation."""
        matrix = self._matrix()
        order = np.array(self.permutation) if "permutation" in self else None
        storage = {name: np.array(array) for name, array in matrix.storage.items()}
        return QuantizedTensor.owning(matrix.format, matrix.shape, matrix.group_size, storage, order)

    def repack(self) -> None:
        """Pack the weights anew at the next call, whatever they were: for writes that no layer can notice."""
        self._made = Made()

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> Linear:
        """A plain layer with the decoded weights, columns in their original order."""
        linear = Linear(1, 1, bias=False)
        linear.weight = dequantize(self.quantized(), dtype)
        if "bias" in self:
            linear.bias = self.bias.astype(dtype)
        linear.train(self.training)
        return linear

    def __call__(self, x: mx.array) -> mx.array:  # type: ignore[override]  # one kind is what this one takes
        bias = self.get("bias")
        try:
            matrix = self._matrix()
            ordered = self._ordered(x)
            if self._runs_on_metal(ordered):  # as part of MLX's graph, with a gradient of its own
                return quantized_linear(ordered, matrix, bias=bias, activations=self.activations)
            return _product(matrix, self.activations)(ordered, bias)
        except (ValueError, RuntimeError) as error:
            # mx.compile or mx.vmap is tracing: arrays are placeholders, and MLX refuses to show their values.
            if not str(error).startswith("[eval]"):
                raise
            return self._by_operations(self._ordered(x), bias)

    def _ordered(self, x: mx.array) -> mx.array:
        """x in the order of the stored columns."""
        return mx.take(x, self.permutation, axis=-1) if "permutation" in self else x

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
        y = wide @ decode(get_format(self.format), self.storage, self.group_size).T
        return (y if bias is None else y + bias).astype(x.dtype)

    def _extra_repr(self) -> str:
        return self.describe("bias" in self, "permutation" in self)

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> Module:
        """As of any module; weights that do not say their format are taken to be in the layer's."""
        given: Any = mx.load(file_or_weights) if isinstance(file_or_weights, str) else file_or_weights
        return super().load_weights(list({ABOUT: self[ABOUT], **dict(given)}.items()), strict)

    def __setitem__(self, name: str, value: Any) -> None:
        """What `update` and `load_weights` come down to: storage is bits, and another type would be other weights.

        MLX hands over array by array. If one of them is refused, those that came before it go back.
        """
        held = self.get(name)
        if held is not None and value is not held:
            self._replaced.setdefault(name, held)
            try:
                value = self._checked(name, value, held)
            except BillfishError:
                for earlier, array in self._replaced.items():
                    super().__setitem__(earlier, array)
                self._made = Made()
                raise
            if name in get_format(self.format).storage_names:
                self._made = Made()
            if self._replaced.keys() == self.keys():
                self._replaced.clear()
        super().__setitem__(name, value)

    def _checked(self, name: str, value: Any, held: mx.array) -> Any:
        """An array in the type that the layer holds; raises if it would make other weights."""
        if name == ABOUT:
            _look(value, lambda about: About(self.format, self.group_size).check("MarlinLinear", about))
        if name == "permutation":  # MLX would read what lies beside x
            _look(value, lambda order: check_permutation("MarlinLinear", order, self.in_features))
        if name not in get_format(self.format).storage_names or value.dtype == held.dtype:
            return value
        if {value.dtype, held.dtype} == {mx.int32, mx.uint32}:  # torch layers hold words as int32
            return value.view(mx.uint32)
        takes = f"{held.dtype}, or a layer made for another type; set_dtype() comes before quantizing"
        raise DTypeError(complaint("MarlinLinear", name, f"dtype {value.dtype}", takes))


def _look(value: mx.array, check: Callable[[NDArray[Any]], object]) -> None:
    """Have the numbers of an array checked. A placeholder of mx.compile has none."""
    try:
        check(np.array(value))
    except (ValueError, RuntimeError) as error:
        if not str(error).startswith("[eval]"):
            raise
