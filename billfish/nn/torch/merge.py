"""Joint products: query, key and value, or gate and up, of a torch model as one layer over the rows of all.

    self_attn   q_proj, k_proj, v_proj   ->   qkv_proj
    mlp         gate_proj, up_proj       ->   gate_up_proj

The forward of such a module stays the model's own. For each call it gets another `self`, on which q_proj, k_proj and
v_proj are parts of one product. So nothing is kept from one call to the next. A state dict has the ordinary names.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Hashable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from billfish.core.errors import DTypeError, complaint
from billfish.core.format import get_format
from billfish.core.format_tag import ABOUT
from billfish.core.tensor import QuantizedTensor, join_rows
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.torch.weights import ORDER

JOINTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Arguments of a forward that may bring keys and values of something else than the first one.
OTHERS = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "kv_hidden_states"}


class Joint(NamedTuple):
    """Linear layers of one module that multiply the same x."""

    path: str  # of the joint layer
    module: torch.nn.Module
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def paths(self) -> list[str]:
        """Of the parts."""
        return [self.path.removesuffix(self.name) + part for part in self.parts]

    @property
    def layers(self) -> list[Any]:
        return [self.module._modules[part] for part in self.parts]

    @property
    def is_quantized(self) -> bool:
        return all(isinstance(layer, MarlinLinear) for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Of the weights, as they are."""
        return sum(layer.storage_bytes if self.is_quantized else layer.weight.nbytes for layer in self.layers)

    def why_not(self) -> str:
        """Why they cannot be joined, in words for the user, or nothing."""
        layers, module = self.layers, self.module
        own_class = module.own_class if isinstance(module, Merged) else type(module)
        others = OTHERS.intersection(inspect.signature(own_class.forward).parameters)
        if others:
            return f"forward takes {others.pop()}, which some of them may multiply"
        if "forward" in self.module.__dict__:
            return "somebody has put another forward in the place of the module's own"
        if method := calls_super(own_class):
            return f"{method} calls super()"
        if len({layer.in_features for layer in layers}) > 1:
            return "its parts have different K"
        if len({layer.bias is None for layer in layers}) > 1:
            return "some of its parts have a bias"
        if self.is_quantized:
            if len({(layer.format, layer.group_size, layer.activations) for layer in layers}) > 1:
                return "its parts have different settings"
            if any(layer.has_order for layer in layers):
                return "its parts have columns in orders of their own (act-order)"
            if any(axis is None for name, axis in axes(layers[0]).items() if name in layers[0].storage_names):
                return f"each of its parts has a scale for all of its weights, as {layers[0].format} has"
        return ""

    def make(self, settings: dict[str, Any] | None) -> MarlinLinear:
        """One layer with the rows of all: quantized by these settings, or of layers that are quantized already."""
        if not self.is_quantized:
            return MarlinLinear.from_linear(self._linear(), **(settings or {}))
        layers: list[MarlinLinear] = self.layers
        tensor, first = join_rows([layer.quantized() for layer in layers]), layers[0]
        bias, device = self._bias(), first.device
        joint = MarlinLinear.from_quantized(tensor, bias, activations=first.activations, device=device)
        return joint.train(first.training)

    def _linear(self) -> torch.nn.Linear:
        layers, bias = self.layers, self._bias()
        n, k = sum(layer.out_features for layer in layers), layers[0].in_features
        linear = torch.nn.Linear(k, n, False, "meta")
        linear.weight = torch.nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
        linear.register_parameter("bias", bias)
        return linear.train(layers[0].training)

    def _bias(self) -> torch.nn.Parameter | None:
        biases = [layer.bias for layer in self.layers]
        if biases[0] is None:
            return None
        wanted = any(bias.requires_grad for bias in biases)
        return torch.nn.Parameter(torch.cat([bias.detach() for bias in biases]), wanted)

    def put(self, layer: MarlinLinear) -> None:
        """The joint layer in the place of its parts."""
        module, sizes = self.module, [part.out_features for part in self.layers]
        own_class: Any = type(module)
        if not isinstance(module, Merged):
            module.__class__ = merged_class(own_class)
        assert isinstance(module, Merged)
        module.joints = {**getattr(module, "joints", {}), self.name: dict(zip(self.parts, sizes, strict=True))}
        children = {self.name if name == self.parts[0] else name: child for name, child in module._modules.items()}
        module._modules.clear()
        module._modules.update({name: child for name, child in children.items() if name not in self.parts})
        module._modules[self.name] = layer


def find_joints(model: torch.nn.Module) -> list[Joint]:
    """The layers of a model that multiply the same x; raises for a model that is cut over processes."""
    cut = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    cut += [
        path for path, module in model.named_modules() if isinstance(module, MarlinLinear) and hasattr(module, "mesh")
    ]
    if cut:
        got = f"a model that is cut over processes, as {cut[0]} is"
        raise DTypeError(complaint("quantize_model", "merge", got, "a model that this process has all of"))
    return [
        Joint(f"{path}.{name}" if path else name, module, parts)
        for path, module in model.named_modules()
        for name, parts in JOINTS.items()
        for kind in (torch.nn.Linear, MarlinLinear)
        if all(isinstance(module._modules.get(part), kind) for part in parts)
    ]


def calls_super(own_class: type[torch.nn.Module]) -> str:
    """The name of a method that calls super(), which takes no stand-in for a module, or nothing."""
    written = [each for each in own_class.__mro__ if each not in torch.nn.Module.__mro__]
    for name, method in itertools.chain.from_iterable(vars(each).items() for each in written):
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is not None and takes_stand_in(name) and ("super" in code.co_names or "__class__" in code.co_freevars):
            return name
    return ""


def takes_stand_in(name: str) -> bool:
    """Whether a method of this name gets a stand-in for its module: the methods that a model's author adds."""
    return name == "forward" or not hasattr(torch.nn.Module, name)


# ---- a module with joint products ------------------------------------------------------------------------------------


class JointProduct:
    """The product of a joint layer, for the parts that take it, within one call of their module."""

    def __init__(self, layer: torch.nn.Module, sizes: list[int]) -> None:
        self.layer, self.sizes = layer, sizes
        self.x: Tensor | None = None
        self.version: int | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, number: int, x: Tensor) -> Tensor:
        # How often x was written to. Inference tensors do not count that, nor do compilers: there, a forward must not
        # write to x between its products.
        version = None if torch.compiler.is_compiling() or x.is_inference() else x._version
        if x is not self.x or version != self.version:
            parts = self.layer(x).split(self.sizes, -1)
            # For autograd, a write to one part would be a write to all of them.
            self.parts = tuple(part.clone() for part in parts) if torch.is_grad_enabled() else parts
            self.x, self.version = x, version
        return self.parts[number]


class Projection:
    """A projection of a joint product: x [..., K] -> y [..., its rows]."""

    def __init__(self, product: JointProduct, number: int) -> None:
        self.product, self.number = product, number

    def __call__(self, x: Tensor) -> Tensor:
        return self.product.part(self.number, x)


class StandIn:
    """Stands in for a module while its forward runs: all of the module, but for the parts of its joint layers."""

    def __init__(self, module: Merged) -> None:
        object.__setattr__(self, "_module", module)
        for name, sizes in module.joints.items():
            product = JointProduct(module.get_submodule(name), list(sizes.values()))
            for number, part in enumerate(sizes):
                object.__setattr__(self, part, Projection(product, number))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if inspect.ismethod(found) and found.__self__ is self._module and takes_stand_in(name):
            return partial(found.__func__, self)  # compilers do not take types.MethodType
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class JointPart(NamedTuple):
    """Rows of a joint layer."""

    layer: MarlinLinear
    start: int
    end: int

    @property
    def format(self) -> str:
        return self.layer.format

    @property
    def group_size(self) -> int:
        return self.layer.group_size

    @property
    def in_features(self) -> int:
        return self.layer.in_features

    @property
    def out_features(self) -> int:
        return self.end - self.start

    def weights_key(self) -> Hashable:
        """See :class:`billfish.checkpoints.in_memory.SavedLayer`."""
        return self.layer.weights_key(), self.start

    def quantized(self) -> QuantizedTensor:
        """A copy of the weights [its rows, K]."""
        return self.layer.quantized().take_rows(range(self.start, self.end))


class Merged(torch.nn.Module):
    """A module with joint layers; mixed in before its own class."""

    joints: dict[str, dict[str, int]]  # by the name of the joint layer: its parts, in order, and the rows of each
    own_class: type[Any]  # before it was merged

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.own_class.forward(StandIn(self), *arguments, **named)

    def state_dict(self, *arguments: Any, prefix: str = "", keep_vars: bool = False, **named: Any) -> Any:
        """With the parts under their own names. They are copies, unless `keep_vars`."""
        state = super().state_dict(*arguments, prefix=prefix, keep_vars=keep_vars, **named)
        for name, layer, sizes in self._joint_layers():
            for array, axis in axes(layer).items():
                whole = state.pop(f"{prefix}{name}.{array}", None)
                if whole is not None:
                    parts = [whole] * len(sizes) if axis is None else whole.split(list(sizes.values()), axis)
                    for part, share in zip(sizes, parts, strict=True):
                        state[f"{prefix}{part}.{array}"] = share if keep_vars else share.clone().contiguous()
        return state

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Joins what is given for the parts. torch hands the same dict on to the joint layer."""
        for name, layer, sizes in self._joint_layers():
            for array, axis in axes(layer).items():
                keys = [f"{prefix}{part}.{array}" for part in sizes]
                if all(key in state_dict for key in keys):
                    parts = [state_dict.pop(key) for key in keys]
                    whole = joined(parts, list(sizes.values()), axis)
                    if whole is None:
                        got = " and ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
                        takes = f"parts of {layer.out_features} rows in one format, as the model is merged"
                        error_msgs.append(complaint("load_state_dict", ", ".join(keys), got, takes))
                    else:
                        state_dict[f"{prefix}{name}.{array}"] = whole
        rest = strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _joint_layers(self) -> Iterator[tuple[str, MarlinLinear, dict[str, int]]]:
        """Those that nobody has wrapped, as peft does; a wrapper has names of its own."""
        for name, sizes in self.joints.items():
            layer = self._modules[name]
            if isinstance(layer, MarlinLinear):
                yield name, layer, sizes

    def saved_layers(self) -> dict[str, JointPart]:
        """The parts of joint layers by their names, for :func:`billfish.save`."""
        found: dict[str, JointPart] = {}
        for _, layer, sizes in self._joint_layers():
            ends = itertools.accumulate(sizes.values())
            found |= {part: JointPart(layer, end - sizes[part], end) for part, end in zip(sizes, ends, strict=True)}
        return found

    def __reduce__(self) -> Any:
        return empty, (self.own_class,), self.__dict__


@cache
def merged_class(own_class: Any) -> type[Merged]:
    """The class of modules of `own_class` with joint layers, under the same name: they compute the same."""
    about = {"own_class": own_class, "__module__": own_class.__module__, "__doc__": own_class.__doc__}
    return type(own_class.__name__, (Merged, own_class), about)


def empty(own_class: Any) -> Merged:
    """For pickle and copy, which fill it."""
    merged = merged_class(own_class)
    return merged.__new__(merged)


def axes(layer: MarlinLinear) -> dict[str, int | None]:
    """The axis of the rows of W, by the name of an array in a layer's state dict; None where all rows share it."""
    specs = get_format(layer.format).storage_spec(layer.out_features, layer.in_features, layer.group_size)
    return {"bias": 0, ORDER: None, ABOUT: None} | {name: spec.n_axis for name, spec in specs.items()}


def joined(parts: list[Tensor], sizes: list[int], axis: int | None) -> Tensor | None:
    """An array of a joint layer, of those of its parts; None if they do not fit together."""
    first = parts[0]
    if axis is None:
        return first if all(torch.equal(part, first) for part in parts[1:]) else None
    shapes = [(*first.shape[:axis], size, *first.shape[axis + 1 :]) for size in sizes]
    fits = [tuple(part.shape) for part in parts] == shapes and len({part.dtype for part in parts}) == 1
    return torch.cat(parts, axis) if fits else None
