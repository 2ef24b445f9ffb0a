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

from billfish.about import ABOUT
from billfish.checkpoints import Checkpoint, Description
from billfish.checkpoints.names import model_config
from billfish.errors import CheckpointError, complaint
from billfish.nn import parallel
from billfish.nn.torch import MarlinLinear
from billfish.nn.torch_watch import to_torch
from billfish.ops import dequantize
from billfish.tensor import QuantizedTensor
from billfish.typing import Activations


class Places(NamedTuple):
    """Where the matrices of a checkpoint go: for each layer its name in the checkpoint, and its share if it is cut."""

    names: dict[str, str]
    shares: parallel.Plan
    mesh: DeviceMesh | None

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
    return Places(names, {}, None)


def refuse_others(model: Any, source: Checkpoint, places: Places) -> None:
    """Raises for quantized matrices that are wanted by what is no Linear: embeddings, experts, GPT-2's Conv1D.

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
        more = f", as do {len(lost) - 1} others" if lost[1:] else ""
        got = f"a {format.name} matrix that belongs to no Linear{more}"
        takes = "billfish.nn.transformers.load_model, which decodes it"
        raise CheckpointError(complaint("from_pretrained", lost[0], got, takes))


def says_format(source: Checkpoint, name: str) -> bool:
    """Whether the file has an array beside a matrix that says its format, as files of layers have."""
    return any(part.rpartition(".")[2] == ABOUT for part in source.entry(name).parts)


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
        raise CheckpointError(complaint("load_model", about.name, f"shape {about.shape}", f"({n}, {k})"))
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
        got, takes = f"values of {values}", f"{size}, the size of keys"
        raise CheckpointError(complaint("load_model", f"{architecture}.attention.value_length", got, takes))
    del about["torch_dtype"]  # the layers that are not quantized are float32 unless the caller says otherwise
    return AutoConfig.for_model(architecture, **about)
