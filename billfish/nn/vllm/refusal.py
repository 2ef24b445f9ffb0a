"""What a vLLM that is too old or too new gets: an error for whoever asks for billfish, and nothing for anybody else."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from billfish.core.errors import BackendUnavailable
from billfish.nn.vllm.versions import METHOD, TRIED, check_version


class Refusal(QuantizationConfig):
    """A configuration that cannot be made."""

    reason = ""  # what could not be imported

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Refusal:
        check_version(vllm.__version__)
        fix = f"Install vllm {TRIED}, or a newer billfish."
        raise BackendUnavailable(f"vllm {vllm.__version__} lacks what billfish imports: {cls.reason}. {fix}")

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, *_: Any, **__: Any) -> str | None:
        return METHOD if user_quant == METHOD else None
