"""As much of vLLM as billfish.nn.vllm imports: the classes that it is handed, and none of what they do.

`make test-vllm` runs the plug-in in the real one.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

RANKS = 2


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class LinearBase(torch.nn.Module):
    """A layer of a rank, as its method sees it."""

    tp_size = RANKS

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.tp_rank = rank


class QKVParallelLinear(LinearBase):
    num_kv_head_replicas = 1


class VocabParallelEmbedding(torch.nn.Module):
    """Some rows of a vocabulary, padded."""

    params_dtype = torch.float32

    def __init__(self, start: int, end: int, padded: int, columns: int) -> None:
        super().__init__()
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        self.num_embeddings_per_partition, self.embedding_dim = padded, columns


class ParallelLMHead(VocabParallelEmbedding):
    pass


class FusedMoEMethodBase:
    def __init__(self, moe: Any) -> None:
        self.moe = moe


class RoutedExperts(torch.nn.Module):
    """The experts of a rank."""

    apply_router_weight_on_input = False
    layer_name = "model.layers.0.mlp.experts"

    def __init__(self, count: int, rank: int = 0, activation: str = "silu", expert_map: Any = None) -> None:
        super().__init__()
        self.moe_config = SimpleNamespace(tp_rank=rank, has_bias=False)
        self.global_num_experts, self.expert_map = count, expert_map
        self.activation = SimpleNamespace(value=activation)


class WeightsMapper:
    def __init__(self, orig_to_new_regex: dict[Any, Any]) -> None:
        self.orig_to_new_regex = orig_to_new_regex

    def keeps(self, name: str) -> bool:
        """Whether vLLM would load a tensor of this name."""
        return not any(pattern.search(name) for pattern in self.orig_to_new_regex)


REGISTERED: dict[str, Any] = {}


def register_quantization_config(name: str) -> Any:
    return lambda config: REGISTERED.setdefault(name, config)


LAYERS = "vllm.model_executor.layers"
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0+cpu"},
    "vllm.distributed": {"get_pp_group": lambda: SimpleNamespace(world_size=1)},
    f"{LAYERS}.fused_moe": {"RoutedExperts": RoutedExperts},
    f"{LAYERS}.fused_moe.fused_moe_method_base": {"FusedMoEMethodBase": FusedMoEMethodBase},
    f"{LAYERS}.linear": {
        "LinearBase": LinearBase,
        "LinearMethodBase": object,
        "QKVParallelLinear": QKVParallelLinear,
        "UnquantizedLinearMethod": type("UnquantizedLinearMethod", (), {}),
    },
    f"{LAYERS}.quantization": {"register_quantization_config": register_quantization_config},
    f"{LAYERS}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    f"{LAYERS}.vocab_parallel_embedding": {
        "ParallelLMHead": ParallelLMHead,
        "VocabParallelEmbedding": VocabParallelEmbedding,
    },
    "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
}


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0+cpu") -> None:
    """Let `import vllm` find these until the test ends, and billfish's plug-in be imported anew."""
    for path, names in MODULES.items():
        module = ModuleType(path)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    for part in ("config", "experts", "linear", "refusal"):
        monkeypatch.delitem(sys.modules, f"billfish.nn.vllm.{part}", raising=False)
    monkeypatch.setattr(sys.modules[__name__], "REGISTERED", {})
