"""Layers with quantized weights for torch and MLX, and whole models made of them.

    bf.QuantizedLinear.from_linear(linear, format="fp4", group_size=128)
    bf.quantize_model(model, format="fp4", group_size=128)
    bf.load_into(model, "a folder or file that bf.open_checkpoint opens")
    bf.warm_up(model)

`billfish.nn.torch` and `billfish.nn.mlx` hold the layers, `billfish.nn.transformers` the plug-in for that library, and
`billfish.nn.parallel` layers that are spread over several processes. None is imported unless it is used.
"""

from billfish.nn.layer_base import MarlinLinear, QuantizedLinear
from billfish.nn.loading import load_into
from billfish.nn.quantize_model import ModelReport, quantize_model
from billfish.nn.warming import WarmUp, warm_up

__all__ = ["MarlinLinear", "ModelReport", "QuantizedLinear", "WarmUp", "load_into", "quantize_model", "warm_up"]
