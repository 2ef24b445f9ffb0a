"""How vLLM's mixtures hold billfish's experts: MarlinExperts in the place of the stacks of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from billfish.core.errors import FormatError, failure
from billfish.core.typing import Activations, Gate
from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.vllm.checkpoint_folder import CALL, FolderMatrix, open_folder
from billfish.nn.vllm.shares import Span, check_columns, read_stack, span_of
from billfish.nn.vllm.thread_count import use_all_cores

GATES: dict[str, Gate] = {"silu": "silu", "gelu_tanh": "gelu"}  # vLLM's names, and ours


class BillfishExpertsMethod(FusedMoEMethodBase):
    """For one layer: the rows of each expert's gate and up, and the columns of its down, that this rank has."""

    requires_device_loading = False

    def __init__(self, layer: Any, folder: str, stacks: Sequence[FolderMatrix], activations: Activations) -> None:
        super().__init__(layer.moe_config)
        self.folder, self.stacks, self.activations = folder, stacks, activations
        self.rows: Span | None = None  # of gate and up, columns of down
        self.device = torch.device("cpu")
        self.activation = gate_of(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # it is for vLLM's own kernels

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, **_: Any
    ) -> None:
        gate, down = self.stacks[0], self.stacks[2]
        self.rows = span_of(self.moe.tp_rank, intermediate_size_per_partition, gate.shape[1])
        check_columns(down, self.rows)
        self.device = torch.empty(0).device

    def process_weights_after_loading(self, layer: Any) -> None:
        use_all_cores()
        checkpoint, experts = open_folder(self.folder), local_experts(layer)
        spans = (self.rows, None), (self.rows, None), (None, self.rows)
        gate, up, down = (
            read_stack(checkpoint, stack, rows, columns, experts)
            for stack, (rows, columns) in zip(self.stacks, spans, strict=True)
        )
        block = MarlinExperts.from_quantized(
            gate, up, down, hidden_act=self.activation, activations=self.activations, device=self.device
        )
        layer.add_module("billfish", block)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """y [T, H]; the sum of all ranks' is vLLM's matter. An expert of another rank counts nothing here."""
        ids, routing = topk_ids, topk_weights
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.long()]
            routing = routing.masked_fill(ids < 0, 0)
            ids = ids.clamp_min(0)
        if routing.device.type != "cpu":
            y: Tensor = layer.billfish(x, ids, routing)
            return y
        # Before it serves, vLLM runs rows that nobody has written. Weights that are not finite give rows of NaN.
        known = routing.isfinite().all(dim=1, keepdim=True)
        y = layer.billfish(x, ids, routing.masked_fill(~known, 0))
        return y.masked_fill(~known, torch.nan)


def gate_of(layer: Any) -> Gate:
    """Return our name of a layer's activation. Raise FormatError for experts that are not supported."""
    problem = ""
    if layer.activation.value not in GATES:
        problem = f"the activation {layer.activation.value!r}"
    elif layer.apply_router_weight_on_input:
        problem = "routing weights that multiply the input"
    elif layer.moe_config.has_bias:
        problem = "experts with biases"
    if problem:
        fix = f"Supported are {' or '.join(GATES)}, without biases, and routing weights that multiply the output."
        raise FormatError(failure(CALL, f"{layer.layer_name} has {problem}", fix))
    return GATES[layer.activation.value]


def local_experts(layer: Any) -> Span:
    """The experts that this rank has; raises unless they are neighbours."""
    if layer.expert_map is None:
        return 0, layer.global_num_experts
    own = (layer.expert_map >= 0).nonzero().flatten().tolist()
    if own != list(range(own[0], own[-1] + 1)):
        problem = f"{layer.layer_name} has the experts {own} on one rank, which are not consecutive"
        raise FormatError(failure(CALL, problem, "Start vLLM with --expert-placement-strategy linear."))
    return own[0], own[-1] + 1
