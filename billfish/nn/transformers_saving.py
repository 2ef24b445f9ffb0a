"""Models of transformers whose layers were replaced in memory: `save_pretrained` says whose layers they are.

Without that, `from_pretrained` would look for the weights of other layers, and leave random numbers in their place.
"""

from __future__ import annotations

from typing import Any

from billfish.nn.torch.stored import Stored
from billfish.nn.transformers import BillfishConfig, BillfishQuantizer


def note_layers(model: Any) -> None:
    """A transformers.PreTrainedModel with layers of ours saves them as one that was quantized while it was loaded. A
    model of another project's quantizer stays its own."""
    quantizer = getattr(model, "hf_quantizer", None)
    layers = [module for module in model.modules() if isinstance(module, Stored)]
    if quantizer is None and layers:
        ways = {layer.activations for layer in layers}
        config = BillfishConfig(layers[0].format, activations=ways.pop() if len(ways) == 1 else "exact")
        quantizer = model.hf_quantizer = BillfishQuantizer(config, pre_quantized=True)
        model.config.quantization_config = config
    if isinstance(quantizer, BillfishQuantizer):
        quantizer.note_layers(model)
