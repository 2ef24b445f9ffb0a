"""Quantized layers for torch."""

from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.torch.linear import MarlinLinear

__all__ = ["MarlinExperts", "MarlinLinear"]
