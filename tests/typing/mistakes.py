"""What a type checker finds wrong in a user's program: each line that ends in a comment. It is not run."""

import numpy as np
import torch

import billfish as bf

w = np.zeros((64, 64), np.float32)
q = bf.quantize(w, "fp4")

bf.quantize([[1.0, 2.0]], "fp4")  # a list is no array
bf.quantize(w, "fp4", method="best")  # no such method
bf.quantized_linear(w, q, activations="int8")  # no such activations
bf.dequantize(q, like="jax")  # no such library
bf.dequantize(q, "float64")  # no such type
bf.convert("a", "b", to="onnx")  # no such layout
bf.nonsense()  # no such name
bf.MarlinLinear(64, 8, framework="jax")  # no such framework
bf.llm.load("model.gguf").generate("Hello", max_new_tokens=5)  # no such setting
y: torch.Tensor = bf.quantized_linear(w, q)  # the result is a NumPy array
