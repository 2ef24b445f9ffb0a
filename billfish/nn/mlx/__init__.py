"""Quantized layers for MLX."""

from billfish.nn.mlx.expert_layers import MarlinSwitchLinear
from billfish.nn.mlx.linear import MarlinLinear

QuantizedLinear = MarlinLinear

__all__ = ["MarlinLinear", "MarlinSwitchLinear", "QuantizedLinear"]
