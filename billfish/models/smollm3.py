"""SmolLM3: a Llama that does not rotate in every fourth layer."""

from __future__ import annotations

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import Architecture, Config
from billfish.models.description import Attention
from billfish.models.fields import CONFIG_CALL, Fields

STEP = 4  # every so many-th layer does not rotate


class SmolLM3(Architecture):
    """SmolLM3 3B: no RoPE in every fourth layer."""

    gguf, model_type, transformers = "smollm3", "smollm3", "SmolLM3ForCausalLM"
    reordered = adjacent = True
    fixed = {"use_sliding_window": False}
    theta = 2e6

    def check(self, config: Config) -> None:
        super().check(config)
        step, listed = config.get("no_rope_layer_interval", STEP), config.get("no_rope_layers")
        usual = [int((i + 1) % STEP != 0) for i in range(config["num_hidden_layers"])]
        if (listed is None and step != STEP) or (listed is not None and listed != usual):
            got = repr(listed)[:80] if listed is not None else f"every {step}th layer"
            expected = f"every {STEP}th layer, because GGUF has no field for it"
            raise CheckpointError(bad_argument(CONFIG_CALL, "no_rope_layers", got, expected))

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, rope=None if (i + 1) % STEP == 0 else 0)
