"""Quantized layers for torch."""

from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.torch.peft_registration import register_with_peft

QuantizedLinear = MarlinLinear

__all__ = ["MarlinExperts", "MarlinLinear", "QuantizedLinear"]

register_with_peft()
