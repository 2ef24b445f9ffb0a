"""What the layers of every framework share: how a layer is found, checked and described."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import BackendUnavailable, DTypeError, FormatError, ShapeError, bad_argument, failure, type_of
from billfish.core.format import Format, get_format
from billfish.core.storage import ArraySpec
from billfish.core.tensor import QuantizedTensor, check_permutation
from billfish.core.typing import Activations, ArrayT, FormatLike

if TYPE_CHECKING:
    import mlx.core as mx
    import torch
    from mlx.nn.layers.base import Module as MlxModule
    from mlx.nn.layers.linear import Linear as MlxLinear
    from typing_extensions import Self


class MarlinLinear:
    """A linear layer with quantized weights: y = x @ W.T + bias, x [..., K] -> y [..., N]. `QuantizedLinear` is the
    same class.

    ``bf.QuantizedLinear(in_features, out_features, format="fp4")`` makes a layer of zeros, and
    ``bf.QuantizedLinear.from_linear(linear, format="fp4", group_size=128)`` quantizes one. Both give the layer of a
    framework, :class:`billfish.nn.torch.MarlinLinear` or :class:`billfish.nn.mlx.MarlinLinear`, subclasses of this
    one.

    arguments, settings: sizes and options, which the layer of the framework takes.
    framework: "torch" or "mlx", where both are imported, or both installed and none imported.

        >>> import torch
        >>> layer = bf.QuantizedLinear.from_linear(torch.nn.Linear(64, 8), format="fp4", group_size=32)
        >>> layer(torch.ones(2, 64)).shape
        torch.Size([2, 8])
    """

    kind: str  # as in billfish.core.arrays
    in_features: int
    out_features: int
    format: str
    group_size: int
    activations: Activations

    if TYPE_CHECKING:  # what both frameworks' layers have

        def __call__(self, x: ArrayT) -> ArrayT: ...
        def quantized(self) -> QuantizedTensor: ...
        def set_storage(self, storage: Any) -> None: ...
        @property
        def storage_bytes(self) -> int: ...

        @property
        def has_order(self) -> bool: ...  # whether columns are stored in another order
        @property
        def weights_identity(self) -> int: ...  # the same for layers that share their weights

    @overload
    def __new__(cls, *arguments: Any, framework: Literal["torch"], **settings: Any) -> TorchLayer: ...
    @overload
    def __new__(cls, *arguments: Any, framework: Literal["mlx"], **settings: Any) -> MlxLayer: ...
    @overload
    def __new__(cls, *arguments: Any, framework: None = None, **settings: Any) -> Self: ...

    def __new__(cls, *arguments: Any, framework: str | None = None, **settings: Any) -> Any:
        """Of a framework's class, whose `__init__` comes next and gets all arguments.

        framework: "torch" or "mlx"; needed where both are imported, or none of them and both are installed.
        """
        if cls is MarlinLinear:
            chosen = layer_of(framework)
            return chosen.__new__(chosen)
        return super().__new__(cls)

    @overload
    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, format: FormatLike = "fp4", **settings: Any) -> TorchLayer: ...
    @overload
    @classmethod
    def from_linear(cls, linear: MlxLinear, format: FormatLike = "fp4", **settings: Any) -> MlxLayer: ...

    @classmethod
    def from_linear(cls, linear: Any, format: FormatLike = "fp4", **settings: Any) -> Any:
        """Quantize a torch.nn.Linear or an mlx.nn.Linear.

        linear: the layer. format: as in :func:`billfish.quantize`. settings: those of the framework's class:
        group_size, method, importance, hessian, cross, activations.
        """
        return layer_class("from_linear", linear).from_linear(linear, format, **settings)

    def saved_layers(self) -> dict[str, Self]:
        """For :func:`billfish.save`, see :class:`billfish.checkpoints.in_memory.SavedLayer`."""
        return {"": self}

    def weights_key(self) -> Hashable:
        """Equal for layers that share their weights."""
        return "weights", self.weights_identity

    def describe(self, bias: bool, act_order: bool) -> str:
        """What a repr says: sizes, format, group and bits."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        bits = get_format(self.format).bits_per_weight(self.group_size)
        activations = "" if self.activations == "exact" else f", activations={self.activations}"
        order = ", act_order=True" if act_order else ""
        return f"{sizes}, format={self.format}, group_size={self.group_size}, bits={bits:g}{activations}{order}"


QuantizedLinear = MarlinLinear  # the name that MLX and others have for such a layer


if TYPE_CHECKING:  # the frameworks' layers, as this class makes them: their files import this one

    class TorchLayer(MarlinLinear, torch.nn.Module):
        @property
        def weight(self) -> torch.Tensor: ...
        def storage(self) -> dict[str, torch.Tensor]: ...
        def to_linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear: ...

    class MlxLayer(MarlinLinear, MlxModule):
        @property
        def weight(self) -> mx.array: ...
        def storage(self) -> dict[str, mx.array]: ...
        def to_linear(self, dtype: mx.Dtype = mx.float32) -> MlxLinear: ...


# ---- which framework -------------------------------------------------------------------------------------------------


class Framework(NamedTuple):
    """A framework that we have a layer for, before anybody needs it."""

    modules: str  # the module whose `Module` all its layers are; whoever has a layer has imported it
    layer: str  # the module that registers our layer
    kit: str  # the module that is its `Kit`


FRAMEWORKS = {  # by the name of the package
    "torch": Framework("torch.nn", "billfish.nn.torch.linear", "billfish.nn.torch.modules"),
    "mlx": Framework("mlx.nn", "billfish.nn.mlx.linear", "billfish.nn.mlx.modules"),
}
_layers: dict[str, Any] = {}

LayerClass = TypeVar("LayerClass", bound=type[MarlinLinear])


def register_layer(cls: LayerClass) -> LayerClass:
    """Class decorator: this is the layer of the framework that `kind` names."""
    _layers[cls.kind] = cls
    return cls


def layer_of(framework: str | None) -> Any:
    """Our layer for a framework by its name; without one, for the only one that is imported or, else, installed."""
    call, expected = "MarlinLinear", " or ".join(f"framework={kind!r}" for kind in FRAMEWORKS)
    if framework is None:
        imported = [kind for kind in FRAMEWORKS if sys.modules.get(kind) is not None]
        present = imported or [kind for kind in FRAMEWORKS if importlib.util.find_spec(kind)]
        if len(present) != 1:
            if not present:
                raise BackendUnavailable(failure(call, "neither torch nor mlx is installed", "Install one of them."))
            problem = f"{' and '.join(present)} are {'imported' if imported else 'installed'}"
            raise BackendUnavailable(failure(call, problem, f"Choose with {expected}."))
        (framework,) = present
    if framework not in FRAMEWORKS:
        raise FormatError(bad_argument(call, "framework", repr(framework), expected))
    try:
        importlib.import_module(FRAMEWORKS[framework].layer)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(failure(call, f"framework={framework!r} is not installed ({error})")) from None
    return _layers[framework]


def check_framework(framework: str, kind: str) -> None:
    """Raises unless a layer was asked for that is of the framework of its class."""
    if framework != kind:
        expected = f"{kind!r}. billfish.MarlinLinear accepts both"
        raise FormatError(bad_argument("MarlinLinear", "framework", repr(framework), expected))


def framework_of(call: str, module: object) -> str:
    """The framework that a module belongs to."""
    for kind, framework in FRAMEWORKS.items():
        theirs = sys.modules.get(framework.modules)
        if theirs is not None and isinstance(module, theirs.Module):
            return kind
    expected = "a torch.nn.Module or an mlx.nn.Module"
    if isinstance(module, (str, os.PathLike)):
        expected += ". For files, use bf.quantize_checkpoint"
    raise DTypeError(bad_argument(call, "module", type_of(module), expected))


def layer_class(call: str, module: object) -> Any:
    """Our layer for the framework that a module belongs to."""
    return layer_of(framework_of(call, module))


def kit_of(call: str, model: object) -> Kit:
    """What is to be known of models of the framework that a model belongs to."""
    layer_class(call, model)
    kit: Kit = importlib.import_module(FRAMEWORKS[framework_of(call, model)].kit)
    return kit


class Place(NamedTuple):
    """A Linear layer in a model, and how to put another module in its place."""

    path: str
    linear: Any
    put: Callable[[Any], None]


class Walk(NamedTuple):
    """What quantize_model needs to know about a model, whatever its framework."""

    linear_type: Any
    linears: list[Place]
    others: dict[int, str]  # id of a weight that something else than a Linear holds -> the path of that
    experts: list[Place]  # modules with stacks of experts
    matrices: dict[str, str]  # path of any other module with a matrix -> its class
    quantized: list[str]  # paths of layers of ours


class Kit(Protocol):
    """What quantize_model, load_into and warm_up have to know of a framework: a Python module with these names."""

    layer_type: Any

    def walk(self, model: Any) -> Walk:
        """What is in a model."""

    def note_layers(self, model: Any) -> None:
        """Layers of ours were put into a model."""

    def parameter_arrays(self, model: Any) -> dict[str, Any]:
        """Parameters and buffers by name, without the weights of quantized layers."""

    def set_parameter(self, model: Any, name: str, value: Any) -> None:
        """Write a value into one of them."""

    def place_of(self, linear: Any) -> dict[str, Any]:
        """Where `from_quantized` is to put the layer that takes the place of `linear`."""

    def calibrate(self, model: Any, batches: Any, *, hessian: bool, progress: bool) -> Any:
        """Statistics of the inputs of a model's layers."""

    def warm_layers(self, model: Any, dtype: str, chosen: int) -> Iterator[tuple[object, Callable[[int], None]]]:
        """(What its kernels depend on, a product with so many rows of zeros) of each of our layers."""

    # ---- modules with experts -----

    def why_not(self, module: Any) -> str:
        """Why such a module must stay as it is; empty if it need not."""

    def stack_shapes(self, path: str, module: Any) -> dict[str, tuple[int, ...]]:
        """[E, N, K] of its stacks, by the paths that they have as layers."""

    def stack_biases(self, path: str, module: Any) -> dict[str, Any]:
        """[E, N] of the stacks that have biases, by the same paths."""

    def stack_bytes(self, module: Any) -> int:
        """Of its stacks."""

    def quantize_experts(self, module: Any, *, known: Any, **settings: Any) -> Any:
        """A layer in its place. known: further arguments for each stack."""

    def layer_of_stacks(self, module: Any, stacks: Any, biases: Any, activations: Activations) -> Any:
        """A layer of QuantizedExperts in its place."""

    def stacked(self, checkpoint: Any) -> Any:
        """A checkpoint with all experts as stacks, under the names of stack_shapes."""


# ---- what a layer is made of -----------------------------------------------------------------------------------------


def check_weights(call: str, tensor: Any, bias: Any) -> None:
    """Raise unless a layer can be made of these."""
    if not isinstance(tensor, QuantizedTensor):
        raise DTypeError(bad_argument(call, "tensor", type_of(tensor), "a QuantizedTensor"))
    n = tensor.shape[0]
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(bad_argument(call, "bias.shape", tuple(bias.shape), f"({n},)"))


def order_of(
    call: str, tensor: QuantizedTensor, permutation: Any, features: int | None = None
) -> NDArray[np.int32] | None:
    """The order of a layer's columns: the tensor's own, or the one given for a tensor that has none."""
    if permutation is None:
        return tensor.permutation
    if tensor.permutation is not None:
        raise FormatError(failure(call, "the tensor has its own permutation", "Leave permutation= out."))
    return check_order(call, permutation, tensor.shape[1], features)


def check_order(call: str, order: Any, k: int, features: int | None = None) -> NDArray[np.int32]:
    """The features of x [..., features] that k stored columns multiply: each once, or k different ones of more."""
    if features is None or features == k:
        return check_permutation(call, order, k)
    order = np.asarray(order)
    fits = order.shape == (k,) and order.dtype.kind in "iu" and len(np.unique(order)) == k
    if not fits or order.min() < 0 or order.max() >= features:
        found = f"{order.dtype} of shape {order.shape}" + (f", up to {order.max()}" if order.size else "")
        raise ShapeError(bad_argument(call, "permutation", found, f"{k} different indices of 0 to {features - 1}"))
    return order.astype(np.int32)


def empty_weights(
    format: FormatLike, n: int, k: int, group_size: int | None, options: dict[str, str]
) -> tuple[Format, int, dict[str, ArraySpec]]:
    """The format, its group size, and the arrays of its storage, from what a layer is told."""
    call = "MarlinLinear"
    format = get_format(format, call)
    format.check_k(call, k)
    group_size = format.check_group_size(call, group_size, k)
    return format, group_size, format.storage_spec(n, k, group_size, format.check_options(call, options))
