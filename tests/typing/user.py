"""A user's program, for type checkers that test_typing.py checks with mypy --strict and pyright. It is not run."""

from typing import Literal

import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
from mlx.nn.layers.linear import Linear  # mlx.nn does not say that it exports it
from numpy.typing import NDArray
from typing_extensions import assert_type

import billfish as bf
from billfish.core.typing import Activations, FormatName, Method

w: NDArray[np.float32] = np.zeros((64, 64), np.float32)
half: NDArray[np.float16] = np.zeros((8, 64), np.float16)
t, m = torch.zeros(8, 64), mx.zeros((8, 64))

# quantize takes every kind; a product gives back the kind that came in.
q = bf.quantize(w, "fp4", group_size=32, method="mse")
assert_type(q, bf.QuantizedTensor)
assert_type(bf.quantize(t, "q4_0"), bf.QuantizedTensor)
assert_type(bf.quantize(m, "a format of somebody else"), bf.QuantizedTensor)
assert_type(bf.quantized_linear(w, q, bias=w[0], activations="q8"), NDArray[np.float32])
assert_type(bf.quantized_linear(half, q), NDArray[np.float16])
assert_type(bf.quantized_linear(t, q, bias=t[0]), torch.Tensor)
assert_type(bf.quantized_linear(m, bf.prepack(q)), mx.array)
assert_type(bf.quantized_linears(t, [q, q], biases=[t[0], None]), list[torch.Tensor])
assert_type(bf.quantized_linears([m, m], [q, q]), list[mx.array])

# Numbers, in the library that was asked for.
assert_type(bf.dequantize(q), NDArray[np.float32])
bf.dequantize(q, ml_dtypes.bfloat16)
bf.dequantize(q, np.float16)
bf.dequantize(q, np.dtype("float32"))
assert_type(bf.dequantize(q, torch.bfloat16), torch.Tensor)
assert_type(bf.dequantize(q, mx.float16), mx.array)
assert_type(bf.dequantize(q, "float16", like="torch"), torch.Tensor)
assert_type(bf.dequantize(q, like="mlx"), mx.array)
assert_type(bf.dequantize(q, like=t), torch.Tensor)
assert_type(bf.dequantize(q, out=t), torch.Tensor)
assert_type(bf.dequantize(q, like=w), NDArray[np.float32])

# Experts. The type of an array may tell how many axes it has.
matrices: np.ndarray[tuple[int, int, int], np.dtype[np.float32]] = np.zeros((2, 64, 64), np.float32)
assert_type(bf.quantize(matrices, "fp4"), bf.QuantizedExperts)
stack = bf.QuantizedExperts.from_tensors([q, q])
assert_type(stack[0], bf.QuantizedTensor)
assert_type(bf.prepack(stack), bf.PackedExperts)
assert_type(bf.dequantize(stack, like="torch"), torch.Tensor)
assert_type(bf.expert_linear(t, stack, t), torch.Tensor)
assert_type(bf.experts(m, (stack, stack), stack, m, m, hidden_act="clamped_silu"), mx.array)

# Packed arrays and blocks.
assert_type(bf.pack_fp4_weights(w), tuple[NDArray[np.uint32], NDArray[np.float16]])
assert_type(bf.pack_u4_weights(t, zero_point="fractional"), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
assert_type(bf.unpack_s4_weights(m, m, dtype=mx.float16), mx.array)
assert_type(bf.quantize_q4_0(w), NDArray[np.uint8])
assert_type(bf.quantize_q8_0(t, method="mse"), torch.Tensor)
assert_type(bf.dequantize_q4_0(np.zeros((8, 18), np.uint8)), NDArray[np.float32])
assert_type(bf.dequantize_q5_1(m), mx.array)
assert_type(bf.gemm_w4a8(bf.quantize_q8_0(w), q), NDArray[np.float32])
assert_type(bf.gemm_w4a8(t, q), torch.Tensor)

# Layers.
layer = bf.MarlinLinear.from_linear(torch.nn.Linear(64, 8), format="fp4", group_size=32)
assert_type(layer.weight, torch.Tensor)
assert_type(bf.MarlinLinear.from_linear(Linear(64, 8), "q4_0").to_linear(), Linear)
assert_type(bf.MarlinLinear(64, 8, format="fp4", framework="torch").to_linear(), torch.nn.Linear)
assert_type(bf.QuantizedLinear(64, 8, format="fp4").group_size, int)
assert_type(bf.quantize_model(torch.nn.Sequential(), "q4_0"), bf.ModelReport)

# Checkpoints.
assert_type(bf.open_checkpoint("model.gguf"), bf.Checkpoint)
assert_type(bf.load("model.gguf"), bf.Checkpoint)

# Language models.
with bf.llm.load("model.gguf") as model:
    assert_type(model, bf.llm.Model)
    answer = model.generate("Hello", stop=["."], logprobs=2, response_format={"type": "json_object"})
    assert_type(answer.text, str)
    assert_type(answer.tokens, list[int])
    assert_type(answer.finish_reason, Literal["stop", "length"] | None)
    assert_type(answer.logprobs, list[bf.llm.Token] | None)
    for piece in model.stream("Hello", chat_template_kwargs={"enable_thinking": False}):
        assert_type(piece, str)
    assert_type(model.detokenize(model.tokenize("Hello")), str)

# Names, for settings of one's own.
format_name: FormatName = "mxfp4"
method: Method = "rtn"
activations: Activations = "q16"
bf.quantized_linear(w, bf.quantize(w, format_name, method=method), activations=activations)
