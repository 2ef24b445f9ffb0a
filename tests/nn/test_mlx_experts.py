"""mlx-lm's stacks of experts as quantized layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import expert_models
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from common import assert_same_bits, gaussian
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import mixtral, qwen3_moe
from mlx_lm.models.switch_layers import SwitchLinear

import billfish as bf
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.nn.mlx.expert_layers import MarlinSwitchLinear

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    "mixtral": lambda: mixtral.Model(mixtral.ModelArgs("mixtral", **SIZES, num_local_experts=4)),
    "qwen3_moe": lambda: qwen3_moe.Model(
        qwen3_moe.ModelArgs(
            "qwen3_moe",
            **SIZES,
            num_experts=6,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=32,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            max_position_embeddings=64,
            norm_topk_prob=True,
            head_dim=16,
        )
    ),
}


def random_model(name: str) -> Any:
    mx.random.seed(2)
    model = MODELS[name]()
    mx.eval(model.parameters())
    return model


def logits(model: Any, length: int = 9) -> np.ndarray:
    return np.array(model(mx.array(np.arange(2 * length).reshape(2, length) * 7 % 48)))


def decoded(model: Any, plain: Any) -> Any:
    """The model `plain` with the weights that `model` stands for."""
    dense = copy.deepcopy(plain)
    plainly = lambda module: module.to_linear() if isinstance(module, bf.MarlinLinear) else module  # noqa: E731
    dense.update_modules(tree_map(plainly, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return dense


def layer(bias: bool = True) -> tuple[MarlinSwitchLinear, SwitchLinear]:
    """(quantized, decoded): 5 experts [96, 64]."""
    linear = SwitchLinear(64, 96, 5, bias=bias)
    if bias:
        linear.bias = mx.array(gaussian((5, 96), 3))
    quantized = MarlinSwitchLinear.from_switch(linear, "q4_0")
    return quantized, quantized.to_linear()


def near(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    a, b = np.array(a), np.array(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("length", [3, 40])  # mlx-lm sorts from 64 ids on
@pytest.mark.parametrize("format", ["q8_0", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_quantized_models_compute_with_their_decoded_weights(name, format, length):
    plain = random_model(name)
    model = copy.deepcopy(plain)
    report = bf.quantize_model(model, format, progress=False)
    stacks = [path for path, module in model.named_modules() if isinstance(module, MarlinSwitchLinear)]
    assert len(stacks) == 6
    assert set(stacks) <= {replaced.path for replaced in report.replaced}
    near(logits(model, length), logits(decoded(model, plain), length))


@pytest.mark.parametrize("own_row", [False, True])
def test_values_and_gradients(own_row):
    ours, dense = layer()
    indices = mx.array(np.array([[0, 3], [4, 1], [3, 3]], np.uint32))
    x = mx.array(gaussian((3, 2 if own_row else 1, 1, 64), 1))
    near(ours(x, indices), dense(x, indices))

    def loss(module: Any) -> Any:
        return lambda x: (module(x, indices) ** 2).sum()

    near(mx.grad(loss(ours))(x), mx.grad(loss(dense))(x), 1e-4)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """In float16 a sum of ones stops at 2048."""
    ours, _ = layer()
    x, indices = mx.zeros((2500, 1, 1, 64), mx.float16), mx.zeros((2500, 1), mx.uint32)

    def loss(bias: mx.array) -> mx.array:
        ours.bias = bias
        return ours(x, indices).sum()

    near(mx.grad(loss)(mx.zeros((5, 96), mx.float16))[0], np.full(96, 2500), 0)


def test_compiled():
    ours, _ = layer()
    indices, x = mx.array([[0, 3], [4, 1]]), mx.array(gaussian((2, 1, 1, 64), 1))
    near(mx.compile(lambda x: ours(x, indices))(x), ours(x, indices))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_have_the_same_bits(way):
    ours, _ = layer()
    other = way(ours)
    for a, b in zip(ours.storage().values(), other.storage().values(), strict=True):
        assert mx.array_equal(a, b)


def test_weights_are_saved_and_loaded(tmp_path):
    model = random_model("mixtral")
    bf.quantize_model(model, "q4_0", progress=False)
    model.save_weights(str(tmp_path / "weights.safetensors"))
    other = random_model("mixtral")
    bf.quantize_model(other, "q4_0", method="rtn", progress=False)
    other.load_weights(str(tmp_path / "weights.safetensors"))
    for (name, a), (_, b) in zip(tree_flatten(model.parameters()), tree_flatten(other.parameters()), strict=True):
        assert mx.array_equal(a, b), name
    np.testing.assert_array_equal(logits(model), logits(other))


@pytest.mark.parametrize("target", ["billfish", "mlx"])
def test_a_checkpoint_loads_into_mlx_lm(target, tmp_path):
    """Matrices of each expert, as Mixtral's files have them, or MLX's stacks: not a bit changes."""
    expert_models.random_model("mixtral").save_pretrained(tmp_path / "plain")
    bf.quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", format="affine4", progress=False)
    folder = tmp_path / "quantized"
    if target == "mlx":
        bf.convert(folder, tmp_path / "mlx", to="mlx", progress=False)
        folder = tmp_path / "mlx"
    model = random_model("mixtral")
    report = bf.load_into(model, folder, progress=False)
    stacks = {path: module for path, module in model.named_modules() if isinstance(module, MarlinSwitchLinear)}
    assert len(stacks) == 6
    assert set(stacks) <= {replaced.path for replaced in report.replaced}
    source = by_stacks(bf.load(tmp_path / "quantized"))
    for path, module in stacks.items():
        expected = source[f"{path.replace('switch_mlp', 'experts')}.weight"]
        assert_same_bits(bf.dequantize(module.quantized()), bf.dequantize(expected))
    assert np.isfinite(logits(model)).all()


def test_rows_that_do_not_fit_are_refused():
    ours, _ = layer()
    with pytest.raises(bf.ShapeError, match="x"):
        ours(mx.zeros((3, 1, 2, 64)), mx.zeros((3, 2), mx.uint32))
    with pytest.raises(bf.DTypeError, match="SwitchLinear"):
        MarlinSwitchLinear.from_switch(nn.Linear(64, 96))
    assert "num_experts=5" in repr(ours)
