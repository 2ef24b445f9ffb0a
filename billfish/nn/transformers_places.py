"""Where the matrices of a checkpoint go in a transformers model, and how its loader gets to see them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from billfish.checkpoints import Checkpoint, Description
from billfish.checkpoints.names.expert_stacks import by_stacks, is_stack
from billfish.checkpoints.names.gguf_names import model_config
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.format_tag import ABOUT
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import Activations
from billfish.nn import parallel
from billfish.nn.torch.expert_layers import (
    PROJECTIONS,
    ExpertStack,
    MarlinExperts,
    activation_of,
    is_experts,
    plain_stacks,
    why_not,
)
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.torch.weights import to_torch
from billfish.ops.matmul import dequantize


class Places(NamedTuple):
    """Where the matrices of a checkpoint go: for each layer its name in the checkpoint, and its share if it is cut."""

    names: dict[str, str]  # stacks of experts by the paths that they will have, `P.experts.gate_proj`
    shares: parallel.Plan
    mesh: DeviceMesh | None
    experts: tuple[str, ...] = ()  # paths of modules whose experts are all quantized

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_local_rank()


def find_places(model: Any, source: Checkpoint) -> Places:
    """Each Linear of a model whose matrix a checkpoint has in a quantized format."""
    prefix = f"{model.base_model_prefix}."  # models with a head have it, models without do not
    names: dict[str, str] = {}
    for path, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            own = f"{path}.weight"
            name = next((n for n in (own, prefix + own, own.removeprefix(prefix)) if n in source), None)
            if name is not None and source.describe(name).format is not None and len(source.describe(name).shape) == 2:
                names[path] = name
    experts = _expert_places(model, source)
    return Places(
        names | {path: name for block in experts.values() for path, name in block.items()}, {}, None, (*experts,)
    )


def _expert_places(model: Any, source: Checkpoint) -> dict[str, dict[str, str]]:
    """For each module whose three stacks a checkpoint has in quantized formats: their paths, and their names there."""
    found = {_own_name(model, name): name for name in source if is_stack(name) and source.describe(name).format}
    blocks: dict[str, dict[str, str]] = {}
    for path, module in model.named_modules():
        names = {f"{path}.{part}": found.get(f"{path}.{part}.weight", "") for part in PROJECTIONS}
        if is_experts(module) and all(names.values()) and not why_not(module):
            blocks[path] = names
    return blocks


def _own_name(model: Any, name: str) -> str:
    """The name that a model has for a tensor of its files, where files keep older names."""
    renamings = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    new, _ = rename_source_key(name, renamings, [], model.base_model_prefix, {})
    return str(new)


def with_stacks(model: Any, source: Checkpoint) -> Checkpoint:
    """The same checkpoint with all experts as stacks, if they are quantized and the model has places for them."""
    stacked = by_stacks(source)
    wanted = [path for path, module in model.named_modules() if is_experts(module)]
    return stacked if wanted and set(_expert_places(model, stacked)) == set(wanted) else source


def keep_stacks(model: Any) -> None:
    """Save stacks under their own names: transformers would take them for its parameters, and rename those or take them
    apart."""
    stacks = [path for path, module in model.named_modules() if isinstance(module, ExpertStack)]

    def is_theirs(conversion: Any) -> bool:
        return any(path.endswith(target.lstrip(".")) for target in conversion.target_patterns for path in stacks)

    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [conversion for conversion in conversions if not is_theirs(conversion)]


def refuse_others(model: Any, source: Checkpoint, places: Places) -> None:
    """Raises for quantized matrices that are wanted by what is no layer of ours: embeddings, GPT-2's Conv1D, and
    experts that the file does not hold as stacks.

    from_pretrained reads arrays itself, could not decode these, and would leave random numbers in their place.
    """
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def is_wanted(name: str) -> bool:
        new, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        return new in state

    placed = set(places.names.values())
    quantized = [name for name in source if name not in placed and source.describe(name).format is not None]
    lost = [name for name in quantized if is_wanted(name)]
    if lost:
        format = source.describe(lost[0]).format
        assert format is not None
        more = f" and {len(lost) - 1} others are quantized" if lost[1:] else " is quantized"
        problem = f"{lost[0]}{more} ({format.name}), and no Linear layer has them"
        raise CheckpointError(failure("from_pretrained", problem, "Use billfish.nn.transformers.load_model."))


def tells_format(source: Checkpoint, name: str) -> bool:
    """Whether the file has an array beside a matrix that says its format, as files of layers have."""
    return any(part.rpartition(".")[2] == ABOUT for part in source.entry(name).parts)


def make_experts(
    module: torch.nn.Module, path: str, source: Checkpoint, places: Places, activations: Activations
) -> MarlinExperts:
    """A layer for the stacks of a checkpoint, or a share of them, in the place of `module`; weights are yet to come."""
    stacks = []
    for part, plain in zip(PROJECTIONS, plain_stacks(module), strict=True):
        name, share = places.names[f"{path}.{part}"], places.shares.get(f"{path}.{part}")
        about = source.describe(name)
        assert about.format is not None
        assert about.group_size is not None
        if about.shape != tuple(plain.shape):
            raise CheckpointError(bad_argument("load_model", f"shape of {name}", about.shape, f"{tuple(plain.shape)}"))
        count, n, k = about.shape
        bias = bool(module.has_bias)
        whole_row = about.group_size >= k and about.format.whole_row_groups
        if share is not None:
            size = share.span[1] - share.span[0]
            n, k = (size, k) if share.style == "column" else (n, size)
            bias = bias and (share.style == "column" or places.rank == 0)
        group_size = -1 if whole_row else about.group_size
        shape = count, n, k
        stacks.append(
            ExpertStack(shape, bias, format=about.format, group_size=group_size, device="meta", dtype=plain.dtype)
        )
    gate, up, down = stacks
    if places.mesh is None or f"{path}.down_proj" not in places.shares:
        return MarlinExperts(gate, up, down, activation_of(module), activations)
    return parallel.ParallelExperts(gate, up, down, activation_of(module), activations).over(places.mesh)


def make_layer(
    linear: torch.nn.Linear,
    about: Description,
    *,
    act_order: bool,
    activations: Activations,
    share: parallel.Share | None = None,
    mesh: DeviceMesh | None = None,
) -> MarlinLinear:
    """A layer for a matrix of a checkpoint, or a share of it, in the place of `linear`; its weights are yet to come."""
    n, k = linear.weight.shape
    assert about.format is not None
    assert about.group_size is not None
    if about.shape != (n, k):
        raise CheckpointError(bad_argument("load_model", f"shape of {about.name}", about.shape, f"({n}, {k})"))
    bias = linear.bias is not None
    whole_row = about.group_size >= k
    layer_type: type[MarlinLinear] = MarlinLinear
    if share is not None and mesh is not None:
        layer_type = parallel.STYLES[share.style]
        size = share.span[1] - share.span[0]
        n, k = (size, k) if share.style == "column" else (n, size)
        bias = bias and (share.style == "column" or mesh.get_local_rank() == 0)
    layer = layer_type(
        k,
        n,
        bias,
        format=about.format,
        group_size=-1 if whole_row and about.format.whole_row_groups else about.group_size,
        activations=activations,
        act_order=act_order,
        device="meta",
        dtype=linear.weight.dtype,
    )
    if share is not None and mesh is not None:
        assert isinstance(layer, (parallel.ColumnParallelLinear, parallel.RowParallelLinear))
        parallel.place(layer, share, mesh)
    return layer


class Lazy:
    """An array that is read when transformers asks for it, as it asks a safetensors file: by indexing with `...`."""

    def __init__(self, read: Callable[[], NDArray[Any]], dtype: str = "F32") -> None:
        self.read, self.dtype = read, dtype

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, _: Any) -> torch.Tensor:
        return to_torch(self.read())


def state_dict(weights: Checkpoint, places: Places) -> dict[str, Lazy]:
    """A checkpoint as transformers takes it: storage arrays of the layers, and everything else as numbers."""
    whole = dict.fromkeys(places.names.values())
    shares = {**whole, **{places.names[path]: share for path, share in places.shares.items()}}

    @lru_cache(maxsize=8)  # the arrays of one matrix are asked for one by one
    def matrix(name: str) -> dict[str, NDArray[Any]]:
        share = shares[name]
        if share is None:
            tensor, index = weights[name], None
        else:
            tensor, index = parallel.read_share(weights, name.removesuffix(".weight"), share)
        if isinstance(tensor, QuantizedExperts):
            return dict(tensor.storage)
        assert isinstance(tensor, QuantizedTensor)
        order = tensor.permutation if index is None else index.astype(np.int32)
        return {**tensor.storage, **({} if order is None else {"permutation": order})}

    def numbers(name: str) -> NDArray[Any]:
        tensor = weights[name]
        return tensor if isinstance(tensor, np.ndarray) else dequantize(tensor)

    arrays: dict[str, Lazy] = {}
    for name in weights:
        module, _, kind = name.rpartition(".")
        share = shares.get(f"{module}.weight")
        if name in shares:
            about = weights.describe(name)
            assert about.format is not None
            parts = [*about.format.storage_names, *(["permutation"] if weights.is_reordered(name) else [])]
            arrays |= {f"{module}.{part}": Lazy(partial(_part, matrix, name, part), "I32") for part in parts}
        elif kind == "bias" and share is not None:
            bias = parallel.bias_share(weights[name], share, places.rank)
            if bias is not None:
                arrays[name] = Lazy(partial(np.array, bias))
        else:
            about = weights.describe(name)
            arrays[name] = Lazy(partial(numbers, name), about.dtype if about.format is None else "F32")
    return arrays


def _part(matrix: Callable[[str], dict[str, NDArray[Any]]], name: str, part: str) -> NDArray[Any]:
    return matrix(name)[part]


def gguf_config(checkpoint: Checkpoint) -> Any:
    """The configuration that the fields of a GGUF file mean."""
    about, fields = model_config(checkpoint), checkpoint.metadata
    architecture = about.pop("model_type")
    # Without a size of its own, transformers would take that of the smallest Qwen3 for all Qwen3.
    size = about.setdefault("head_dim", about["hidden_size"] // about["num_attention_heads"])
    values = fields.get(f"{architecture}.attention.value_length", size)
    if values != size:
        argument = f"{architecture}.attention.value_length"
        raise CheckpointError(bad_argument("load_model", argument, values, f"{size}, the key length"))
    del about["torch_dtype"]  # the layers that are not quantized are float32 unless the caller says otherwise
    return AutoConfig.for_model(architecture, **about)
