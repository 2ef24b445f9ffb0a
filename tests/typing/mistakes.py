"""What a type checker finds wrong in a user's program: each line that ends in a comment. It is not run.

mypy --strict, which `make lint` runs, calls a comment unused where it finds nothing wrong.
"""

import numpy as np
import torch

import billfish as bf

w = np.zeros((64, 64), np.float32)
q = bf.quantize(w, "fp4")

bf.quantize([[1.0, 2.0]], "fp4")  # type: ignore[call-overload]  # a list is no array
bf.quantize(w, "fp4", method="best")  # type: ignore[call-overload]  # no such method
bf.quantized_linear(w, q, activations="int8")  # type: ignore[arg-type]  # no such activations
bf.dequantize(q, like="jax")  # type: ignore[call-overload]  # no such library
bf.dequantize(q, "float64")  # type: ignore[call-overload]  # no such type
bf.convert("a", "b", to="onnx")  # type: ignore[arg-type]  # no such layout
bf.nonsense()  # type: ignore[attr-defined]  # no such name
bf.MarlinLinear(64, 8, framework="jax")  # type: ignore[call-overload]  # no such framework
bf.llm.load("model.gguf").generate("Hello", max_new_tokens=5)  # type: ignore[arg-type]  # no such setting
y: torch.Tensor = bf.quantized_linear(w, q)  # type: ignore[assignment]  # the result is a NumPy array
