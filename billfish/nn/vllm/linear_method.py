"""How vLLM's linear layers, embeddings and heads hold billfish's weights, and multiply with them.

A layer of vLLM's gets MarlinLinear in the place of its weight: one with the rows of all parts of a merged layer, or one
for each part. So torch.compile and CUDA graphs see `torch.ops.billfish.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from billfish.core.typing import Activations
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.vllm.checkpoint_folder import FolderMatrix, open_folder
from billfish.nn.vllm.shares import Share, parts_of, read_shares, shares_of, span_of
from billfish.nn.vllm.thread_count import use_all_cores


class BillfishLinearMethod(LinearMethodBase):
    """For one layer: y = x @ W.T + bias, x [..., K] -> y [..., N]. vLLM exchanges what ranks have to exchange."""

    requires_device_loading = False  # weights come from the files, after vLLM has loaded everything else

    def __init__(self, folder: str, path: str, matrices: Sequence[FolderMatrix], activations: Activations) -> None:
        self.folder, self.path, self.matrices, self.activations = folder, path, matrices, activations
        self.shares: list[Share] = []
        self.device = torch.device("cpu")

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Nothing is to be loaded by vLLM; says which shares this rank has, and refuses those that cannot be cut."""
        columns = span_of(layer.tp_rank, input_size_per_partition, input_size)
        same = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) else 1
        is_cut = sum(output_partition_sizes) < output_size
        parts = parts_of(output_partition_sizes, layer.tp_rank, layer.tp_size if is_cut else 1, same)
        self.shares = shares_of(self.path, self.matrices, parts, columns)
        self.device = torch.empty(0).device  # where vLLM makes a model

    def process_weights_after_loading(self, layer: Module) -> None:
        layer.add_module("billfish", ModuleList(self.layers()))

    def layers(self) -> list[MarlinLinear]:
        """The products of the layer."""
        use_all_cores()
        tensors = read_shares(open_folder(self.folder), self.shares)
        settings: dict[str, Any] = {"activations": self.activations, "device": self.device}
        return [MarlinLinear.from_quantized(tensor, **settings) for tensor in tensors]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        products = [product(x) for product in layer.billfish]
        y = products[0] if len(products) == 1 else torch.cat(products, -1)
        return y if bias is None else y + bias


class BillfishVocabMethod(BillfishLinearMethod):
    """An embedding, a head, or one that is both. Rows are looked up in a decoded table."""

    def create_weights(self, layer: Any, *sizes: Any, **_: Any) -> None:
        indices = layer.shard_indices
        rows = indices.org_vocab_start_index, indices.org_vocab_end_index
        self.shares = [Share(matrix, rows) for matrix in self.matrices]
        self.device = torch.empty(0).device
        self.is_head = isinstance(layer, ParallelLMHead)
        self.is_looked_up = not self.is_head

    def tie_weights(self, layer: Module, embed_tokens: Any) -> Module:
        """The embedding in the place of the head, unless the folder has another matrix for the head."""
        method = embed_tokens.quant_method
        if not isinstance(method, BillfishVocabMethod) or method.matrices != self.matrices:
            return layer
        method.is_head = True
        return embed_tokens

    def process_weights_after_loading(self, layer: Any) -> None:
        (weights,) = products = self.layers()
        if self.is_looked_up:
            table = torch.zeros(
                layer.num_embeddings_per_partition, layer.embedding_dim, dtype=layer.params_dtype, device=self.device
            )
            table[: weights.out_features] = weights.to_linear(layer.params_dtype).weight.detach()
            layer.register_parameter("weight", Parameter(table, requires_grad=False))
        if self.is_head:
            layer.add_module("billfish", ModuleList(products))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits; columns that the vocabulary was padded with are zeros."""
        y = super().apply(layer, x)
        if y.shape[-1] < layer.num_embeddings_per_partition:
            y = torch.nn.functional.pad(y, (0, layer.num_embeddings_per_partition - y.shape[-1]))
        return y if bias is None else y + bias

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return torch.nn.functional.embedding(input_, layer.weight)
