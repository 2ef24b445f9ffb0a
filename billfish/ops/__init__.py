"""The verbs: quantize, dequantize, linear products and mixtures of experts."""
