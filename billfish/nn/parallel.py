"""Tensor parallelism: layers cut over the processes of a torch DeviceMesh, each reading only its part of the file.

    column-parallel   a process has some rows of W, and computes those outputs from all of x
    row-parallel      a process has some columns of W, and the products of all processes are summed, in float32

Collectives, and what they do to gradients, are DTensor's. A row is never a problem to cut. Columns are cut where groups
and blocks end, which may leave shares of different sizes. With act-order the stored columns are in another order than
the features of x, so a row-parallel layer first gathers x and then takes what its columns need.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from billfish.checkpoints import Checkpoint
from billfish.core.errors import CheckpointError, ShapeError, bad_argument, failure
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import Activations
from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.torch.linear import MarlinLinear, autocast
from billfish.nn.torch.weights import ARRAYS

__all__ = ["ColumnParallelLinear", "ParallelExperts", "RowParallelLinear", "Share", "llama_plan", "parallel_layer"]

Span = tuple[int, int]


# ---- layers ----------------------------------------------------------------------------------------------------------


def part_of_a_layer(layer: MarlinLinear) -> CheckpointError:
    """The error for a layer that is to be saved, although other processes have the rest of its matrix."""
    problem = f"{type(layer).__name__} holds only a part of its matrix"
    return CheckpointError(failure("save", problem, "Save the model before it is distributed."))


class ColumnParallelLinear(MarlinLinear):
    """Some rows of W: y [..., its share of N], or all of y if `gather_output`."""

    mesh: DeviceMesh
    sizes: tuple[int, ...]  # outputs of each process
    gather_output: bool

    def saved_layers(self) -> NoReturn:
        raise part_of_a_layer(self)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(replicated(x, self.mesh))
        return gathered(y, self.sizes, self.mesh) if self.gather_output else y


class RowParallelLinear(MarlinLinear):
    """Some columns of W: takes its share of x's features [..., K], gives all of y on every process.

    The first process has the bias. Partial products are float32, summed as such, and rounded once to x's type; those of
    a GPU, whose kernels give x's type, are rounded to it before they are summed, too.
    """

    all_features = 2**31 - 1  # as many as an index can say, until `place` knows how many there are
    mesh: DeviceMesh
    sizes: tuple[int, ...]  # features of x that each process has

    def saved_layers(self) -> NoReturn:
        raise part_of_a_layer(self)

    def forward(self, x: Tensor) -> Tensor:
        x = autocast(x)
        if self.has_order:
            x = replicated(gathered(x, self.sizes, self.mesh), self.mesh)
        partial = self._product(x.float() if x.is_cpu else x).float()
        return summed(partial, self.mesh).to(x.dtype)


class ParallelExperts(MarlinExperts):
    """Some of the I rows of gate and up of every expert, and these columns of down: gives all of y on every process.

    The first process has the biases of down. Partial sums as in RowParallelLinear.
    """

    mesh: DeviceMesh

    def over(self, mesh: DeviceMesh) -> ParallelExperts:
        """The same layer, which knows who has the other shares."""
        self.mesh = mesh
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, weights = replicated(hidden_states, self.mesh), replicated(top_k_weights, self.mesh)
        rows = autocast(x.reshape(-1, x.shape[-1]))
        partial = self._block(rows.float() if rows.is_cpu else rows, top_k_index, weights).float()
        return summed(partial, self.mesh).to(rows.dtype).reshape(hidden_states.shape)


def summed(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over all processes."""
    return DTensor.from_local(partial, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()


def replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x as it is; on the way back, the sum of all processes' gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def gathered(x: Tensor, sizes: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """The shares of all processes [..., sizes[rank]], side by side: [..., sum(sizes)]."""
    most = max(sizes)
    padded = torch.nn.functional.pad(x, (0, most - x.shape[-1]))
    shared = DTensor.from_local(padded, mesh, [Shard(x.ndim - 1)], run_check=False)
    whole = shared.redistribute(mesh, [Replicate()]).to_local()
    if all(size == most for size in sizes):
        return whole
    return torch.cat([whole[..., most * rank : most * rank + size] for rank, size in enumerate(sizes)], dim=-1)


# ---- who gets what ---------------------------------------------------------------------------------------------------


def cut(total: int, unit: int, ranks: int, what: str) -> list[Span]:
    """[0, total) in one span for each rank, at multiples of `unit`, as even as that allows."""
    units = -(-total // unit)
    if units < ranks:
        expected = f"at most {units}: {what} can be split into {units} parts of {unit}"
        raise ShapeError(bad_argument("parallel", "processes", ranks, expected))
    bounds = [min(total, unit * (units * rank // ranks)) for rank in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


class Share(NamedTuple):
    """What one process holds of a layer, and what it needs to know of the others."""

    style: str  # "column" or "row"
    span: Span  # of the rows of W, or of its stored columns
    sizes: tuple[int, ...]  # outputs, or features of x, of each process
    gather_output: bool = False


Plan = dict[str, Share]


def llama_plan(weights: Checkpoint, key_value_heads: int, ranks: int, rank: int) -> Plan:
    """Plan how the layers of a Llama-shaped model are cut over processes.

    Queries, keys, values, gate and up are column-parallel, the output of attention and down row-parallel; an LM head
    is column-parallel and gathered. Stacks of experts are cut as gate, up and down. Attention is cut between key/value
    heads; gpt-oss's is not. A block of which some matrix is not quantized stays whole on every process, as does
    everything that the plan does not name.

    weights: a checkpoint under transformers' names. key_value_heads: of the model. ranks, rank: the number of
    processes, and which one this is.

    Returns shares by the path of the layer. Raises ShapeError where a matrix cannot be cut into so many parts.

        >>> from billfish.checkpoints.names.gguf_names import by_model_names
        >>> from billfish.nn.parallel import llama_plan
        >>> weights = by_model_names(bf.open_checkpoint("model.gguf"))
        >>> llama_plan(weights, key_value_heads=2, ranks=2, rank=1)["model.layers.0.self_attn.k_proj"].span
        (32, 64)
    """
    plan: Plan = {}

    def quantized(*paths: str) -> bool:
        names = [f"{path}.weight" for path in paths]
        return all(name in weights and weights.describe(name).format is not None for name in names)

    def add(style: str, path: str, spans: list[Span], sizes: list[Span], gather_output: bool = False) -> None:
        plan[path] = Share(style, spans[rank], tuple(b - a for a, b in sizes), gather_output)

    def step_of(path: str) -> int:
        """Where columns may be cut: with act-order anywhere, as features of x and stored columns are cut apart."""
        name = f"{path}.weight"
        return 1 if weights.is_reordered(name) else weights.describe(name).column_step

    def row_parallel(path: str, features: list[Span]) -> None:
        """`features`: who has which part of x. With act-order, stored columns are cut by themselves."""
        about = weights.describe(f"{path}.weight")
        columns = features
        if weights.is_reordered(f"{path}.weight"):
            columns = cut(about.shape[1], about.column_step, ranks, f"the columns of {path}")
        add("row", path, columns, features)

    blocks = sorted({match[1] for name in weights if (match := re.match(r"(.*\blayers\.\d+)\.", name))})
    for block in blocks:
        q, k, v, o = (f"{block}.self_attn.{name}_proj" for name in "qkvo")
        if quantized(q, k, v, o) and f"{block}.self_attn.sinks" not in weights:  # of which each head has its own
            rows, columns = weights.describe(f"{k}.weight").shape[0], weights.describe(f"{o}.weight").shape[1]
            # Heads that go together: what one key/value head serves, times what fills the groups of o_proj.
            features = columns // key_value_heads
            together = math.lcm(features, step_of(o)) // features
            spans = cut(key_value_heads, together, ranks, f"the key/value heads of {block}")
            queries = [(a * features, b * features) for a, b in spans]
            kv = [(a * rows // key_value_heads, b * rows // key_value_heads) for a, b in spans]
            add("column", q, queries, queries)
            add("column", k, kv, kv)
            add("column", v, kv, kv)
            row_parallel(o, queries)
        names = [f"{block}.{part}" for part in ("mlp", "mlp.experts", "block_sparse_moe.experts")]
        for gate, up, down in ([f"{part}.{name}_proj" for name in ("gate", "up", "down")] for part in names):
            if not quantized(gate, up, down):
                continue
            columns = weights.describe(f"{down}.weight").shape[-1]
            spans = cut(columns, step_of(down), ranks, f"the columns of {down}")
            add("column", gate, spans, spans)
            add("column", up, spans, spans)
            row_parallel(down, spans)
    if quantized("lm_head"):
        spans = cut(weights.describe("lm_head.weight").shape[0], 1, ranks, "the rows of lm_head")
        add("column", "lm_head", spans, spans, gather_output=True)
    return plan


# ---- a share of a layer ----------------------------------------------------------------------------------------------

STYLES: dict[str, type[ColumnParallelLinear | RowParallelLinear]] = {
    "column": ColumnParallelLinear,
    "row": RowParallelLinear,
}


def place(layer: ColumnParallelLinear | RowParallelLinear, share: Share, mesh: DeviceMesh) -> None:
    """Tell a layer, made of one process's weights, about the others."""
    layer.mesh, layer.sizes = mesh, share.sizes
    if isinstance(layer, ColumnParallelLinear):
        layer.gather_output = share.gather_output
    else:
        layer.set_features(sum(share.sizes))


def read_share(
    weights: Checkpoint, path: str, share: Share
) -> tuple[QuantizedTensor | QuantizedExperts, NDArray[np.int64] | None]:
    """(its part of W, for some columns of it the features of x that these take, if in another order).

    Reads only those bytes. Rows of W know the order of their columns themselves.
    """
    name = f"{path}.weight"
    rows, columns = (share.span, None) if share.style == "column" else (None, share.span)
    tensor = weights.read(name, rows=rows, columns=columns)
    if not isinstance(tensor, (QuantizedTensor, QuantizedExperts)):
        raise CheckpointError(bad_argument("parallel", name, "not quantized", "a quantized matrix"))
    order = None if columns is None else weights.permutation(name)
    return tensor, order if order is None or columns is None else order[slice(*columns)]


def bias_share(bias: Any, share: Share, rank: int) -> Any:
    """The part of a bias [N], or of biases [E, N], that a process adds; None where others do."""
    if share.style == "column":
        return bias[..., slice(*share.span)]
    return bias if rank == 0 else None


def parallel_layer(
    weights: Checkpoint, path: str, share: Share, mesh: DeviceMesh, *, activations: Activations = "exact"
) -> ColumnParallelLinear | RowParallelLinear:
    """Make one process's part of the layer at `path` of a checkpoint. Only its bytes are read.

    weights: the checkpoint. share: of a plan. mesh: the processes. activations: as in
    :func:`billfish.quantized_linear`.

    Returns a ColumnParallelLinear or a RowParallelLinear.

        >>> import torch.distributed as dist
        >>> from billfish.checkpoints.names.gguf_names import by_model_names
        >>> from billfish.nn.parallel import llama_plan, parallel_layer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> weights = by_model_names(bf.open_checkpoint("model.gguf"))
        >>> path = "model.layers.0.mlp.down_proj"
        >>> share = llama_plan(weights, key_value_heads=2, ranks=1, rank=0)[path]
        >>> parallel_layer(weights, path, share, mesh).out_features
        64
        >>> dist.destroy_process_group()
    """
    tensor, order = read_share(weights, path, share)
    assert isinstance(tensor, QuantizedTensor)
    name = f"{path}.bias"
    bias = bias_share(np.array(weights[name]), share, mesh.get_local_rank()) if name in weights else None
    added = None if bias is None else ARRAYS.from_numpy(np.array(bias))
    layer = STYLES[share.style].from_quantized(tensor, added, permutation=order, activations=activations)
    assert isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
    place(layer, share, mesh)
    return layer
