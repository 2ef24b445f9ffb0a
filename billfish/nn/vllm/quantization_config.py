"""The quantization method `billfish`: what each layer of a model gets, by the headers of the model's files."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper

from billfish.core.activations import check_activations
from billfish.core.errors import CheckpointError, failure
from billfish.core.typing import Activations
from billfish.nn.vllm.checkpoint_folder import CALL, FolderMatrix, matrices_of, open_folder, patterns_of_arrays
from billfish.nn.vllm.expert_method import BillfishExpertsMethod
from billfish.nn.vllm.linear_method import BillfishLinearMethod, BillfishVocabMethod
from billfish.nn.vllm.shares import names_of_experts, names_of_parts
from billfish.nn.vllm.versions import METHOD

VARIABLE = "BILLFISH_ACTIVATIONS"  # says what config.json does not: how x is multiplied
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")


class BillfishConfig(QuantizationConfig):
    """What vLLM asks. It is copied to all processes, so it holds names, and no open files."""

    def __init__(self, activations: Activations = "exact") -> None:
        super().__init__()
        self.activations = activations
        self.folder = ""
        self.matrices: dict[str, FolderMatrix] = {}  # by the path of vLLM's module, or of the part of a merged one
        self.placed: set[str] = set()  # of these, the ones that a layer has
        self.is_tied = False
        self.layers = 0  # of the model; files may have more, which predict further tokens

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BillfishConfig:
        """config: `quantization_config` of config.json, of whatever layout the folder is."""
        said = os.environ.get(VARIABLE) or config.get("activations", "exact")
        return cls(check_activations(CALL, said))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """`--quantization billfish` also where config.json names another method."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        self.folder = model_name
        self.matrices = matrices_of(open_folder(model_name))
        self.is_tied = bool(getattr(hf_config, "tie_word_embeddings", False))
        self.layers = getattr(hf_config, "num_hidden_layers", 0)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Modules under the names that vLLM's model has for them."""
        self.matrices = hf_to_vllm_mapper.apply_dict(self.matrices)

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Drops the arrays of quantized matrices from what vLLM loads: our methods read them, each rank its share.

        vLLM's own is static, and called on the object.
        """
        self._refuse_others()
        patterns = patterns_of_arrays(open_folder(self.folder))
        return WeightsMapper(orig_to_new_regex={re.compile(f"^(?:{'|'.join(patterns)})$"): None})

    def _refuse_others(self) -> None:
        """Raise CheckpointError if no layer uses a matrix: vLLM would go on with random weights."""
        left = [path for path in self.matrices if path not in self.placed and not is_beyond(path, self.layers)]
        if left and get_pp_group().world_size == 1:  # else other processes have other layers
            more = f" (nor {len(left) - 1} others)" if left[1:] else ""
            problem = f"no layer of vLLM's model uses the {self.matrices[left[0]].format} matrix {left[0]}{more}"
            raise CheckpointError(failure(CALL, problem, "Leave it unquantized: billfish quantize --keep."))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, VocabParallelEmbedding):
            return self._for_vocabulary(layer, prefix)
        if isinstance(layer, RoutedExperts):
            stacks = [self.matrices[name] for name in self._place(names_of_experts(prefix, self.matrices))]
            return BillfishExpertsMethod(layer, self.folder, stacks, self.activations) if stacks else None
        if not isinstance(layer, LinearBase):
            return None
        names = self._place(names_of_parts(prefix, self.packed_modules_mapping, self.matrices))
        if not names:
            return UnquantizedLinearMethod()
        return BillfishLinearMethod(self.folder, prefix, [self.matrices[name] for name in names], self.activations)

    def _place(self, names: list[str]) -> list[str]:
        """The same names; a layer has their matrices now."""
        self.placed.update(names)
        return names

    def _for_vocabulary(self, layer: VocabParallelEmbedding, prefix: str) -> Any:
        """For an embedding or a head. A tied head has no name in a folder, and is the embedding's matrix."""
        name = prefix
        if prefix not in self.matrices and self.is_tied:
            name = next((path for path in self.matrices if path.rpartition(".")[2] in EMBEDDINGS), "")
        if name not in self.matrices:
            return None
        self._place([name])
        # Eight bits cost most before the head: billfish.llm multiplies it with q16, too.
        activations: Activations = "q16" if self.activations == "q8" else self.activations
        return BillfishVocabMethod(self.folder, prefix, [self.matrices[name]], activations)


def is_beyond(path: str, layers: int) -> bool:
    """Whether a module predicts further tokens: it is behind the model's own layers, and vLLM leaves it out."""
    number = re.search(r"\blayers\.(\d+)\.", path)
    return "mtp" in path.split(".") or (number is not None and 0 < layers <= int(number[1]))
