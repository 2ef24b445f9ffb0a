"""Experts of transformers as quantized layers: in quantize_model, in the plug-in, and what a torch module must do."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from typing import Any

import expert_models
import numpy as np
import pytest
import torch
from common import gaussian
from expert_models import CONFIGS, assert_near, decoded, logits, random_model
from safetensors.torch import load_file, save_file

import billfish as bf
from billfish.nn.torch.expert_layers import (
    PROJECTIONS,
    ExpertStack,
    MarlinExperts,
    activation_of,
    is_experts,
    plain_biases,
    plain_stacks,
    to_plain,
)
from billfish.nn.torch.expert_operator import EXPERTS
from billfish.nn.transformers import BillfishConfig, load_model

BY_MODEL = pytest.mark.parametrize("name", CONFIGS)


def quantized_model(name: str, format: str = "q8_0") -> tuple[Any, Any]:
    """(quantized, as it was)."""
    plain = random_model(name)
    model = copy.deepcopy(plain)
    bf.quantize_model(model, format, progress=False)
    return model, plain


def layer(biases: bool = True, format: str = "q4_0", activation: Any = "silu") -> MarlinExperts:
    """5 experts, H = 64, I = 96."""
    shapes = {"gate_proj": (5, 96, 64), "up_proj": (5, 96, 64), "down_proj": (5, 64, 96)}
    stacks = [bf.quantize(gaussian(shape, i), format) for i, shape in enumerate(shapes.values())]
    given = {name: torch.from_numpy(gaussian(shape[:2], 7)) for name, shape in shapes.items()} if biases else {}
    return MarlinExperts.from_quantized(*stacks, given, hidden_act=activation)


def routing(tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(tokens)])
    return torch.randn(tokens, 64, generator=generator), ids, torch.rand(tokens, 2, generator=generator)


def dense(layer: MarlinExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same block by torch's operations on decoded weights."""
    gate, up, down = (torch.from_numpy(bf.dequantize(stack.quantized()))[ids] for stack in layer.stacks)
    biases = [0 if stack.bias is None else stack.bias[ids] for stack in layer.stacks]
    g = torch.einsum("th,tkih->tki", x, gate) + biases[0]
    u = torch.einsum("th,tkih->tki", x, up) + biases[1]
    if layer.activation == "clamped_silu":
        g, u = g.clamp(max=7), u.clamp(-7, 7)
        h = g * torch.sigmoid(1.702 * g) * (u + 1)
    elif layer.activation == "gelu":
        h = torch.nn.functional.gelu(g, approximate="tanh") * u
    else:
        h = torch.nn.functional.silu(g) * u
    y = torch.einsum("tki,tkhi->tkh", h, down) + biases[2]
    return (y * weights[..., None]).sum(1)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "mxfp4"])
@BY_MODEL
def test_quantized_models_compute_with_their_decoded_weights(name, format):
    model, plain = quantized_model(name, format)
    blocks = [module for module in model.modules() if isinstance(module, MarlinExperts)]
    assert len(blocks) == 2
    assert all(stack.format == format for block in blocks for stack in block.stacks)
    assert_near(logits(model), logits(decoded(model, plain)))


@BY_MODEL
def test_gradients_go_through_models(name):
    model, plain = quantized_model(name)
    embedded, gradients = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)), []
    for each in (model, decoded(model, plain)):
        x = embedded.clone().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    assert_near(gradients[0], gradients[1], 1e-4)


@BY_MODEL
def test_saved_and_loaded_models_keep_their_bits(name, tmp_path):
    """Quantized while it is loaded; saved; loaded by transformers, by load_model and by bf.load."""
    random_model(name).save_pretrained(tmp_path / "plain")
    config = BillfishConfig("q4_0", modules_to_not_convert=["lm_head"])
    auto = expert_models.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "plain", quantization_config=config).eval()
    blocks = {path: module for path, module in model.named_modules() if isinstance(module, MarlinExperts)}
    assert len(blocks) == 2
    assert_near(logits(model), logits(decoded(model, auto.from_pretrained(tmp_path / "plain").eval())))
    model.save_pretrained(tmp_path / "quantized")
    for again in (auto.from_pretrained(tmp_path / "quantized"), load_model(tmp_path / "quantized")):
        for path, block in blocks.items():
            assert_same_stacks(again.get_submodule(path), block)
        assert torch.equal(logits(again.eval()), logits(model))
    saved = bf.load(tmp_path / "quantized")
    stacks = [n for n in saved if ".experts." in n and saved.describe(n).format is not None]
    assert len(stacks) == 6
    assert all(len(saved.describe(n).shape) == 3 for n in stacks)


@BY_MODEL
def test_models_that_were_quantized_in_memory_are_saved_and_loaded(name, tmp_path):
    model, _ = quantized_model(name, "q4_0")
    model.save_pretrained(tmp_path / "quantized")
    again = expert_models.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").eval()
    for path, module in model.named_modules():
        if isinstance(module, MarlinExperts):
            assert_same_stacks(again.get_submodule(path), module)
    assert torch.equal(logits(again), logits(model))


def assert_same_stacks(a: MarlinExperts, b: MarlinExperts) -> None:
    for ours, theirs in zip(a.stacks, b.stacks, strict=True):
        mine, other = ours.storage(), theirs.storage()
        assert mine.keys() == other.keys()
        for name, array in mine.items():
            assert torch.equal(array.view(torch.uint8), other[name].view(torch.uint8))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_load_model_stacks_what_a_checkpoint_has(name, tmp_path):
    """A folder that `billfish quantize` would write: matrices of each expert, or gpt-oss's stacks."""
    plain = random_model(name)
    plain.save_pretrained(tmp_path / "plain")
    bf.quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", format="q8_0", progress=False)
    model = load_model(tmp_path / "quantized").eval()
    assert sum(isinstance(module, MarlinExperts) for module in model.modules()) == 2
    assert_near(logits(model), logits(decoded(model, plain)))


def test_load_into_stacks_what_a_checkpoint_has(tmp_path):
    plain = random_model("qwen3_moe")
    plain.save_pretrained(tmp_path / "plain")
    bf.quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", format="q8_0", progress=False)
    model = random_model("qwen3_moe")
    report = bf.load_into(model, tmp_path / "quantized", progress=False)
    assert sum(isinstance(module, MarlinExperts) for module in model.modules()) == 2
    assert "model.layers.1.mlp.experts" in {layer.path for layer in report.replaced}
    assert_near(logits(model), logits(decoded(model, plain)), 0.1)
    assert_near(logits(model), logits(load_model(tmp_path / "quantized").eval()))


def test_load_into_wants_the_biases_of_experts(tmp_path):
    """Without a bias that the model has, nothing is loaded; strict=False keeps the model's own."""
    plain = random_model("gpt_oss")
    plain.save_pretrained(tmp_path / "plain")
    bf.quantize_checkpoint(tmp_path / "plain", tmp_path / "quantized", format="q8_0", progress=False)
    few = shutil.copytree(tmp_path / "quantized", tmp_path / "few")
    file = few / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "down_proj" in name and "bias" in name)]
    save_file(tensors, file)
    model = random_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(bf.CheckpointError, match=r"without 'model.layers.*down_proj.bias'.*strict=False"):
        bf.load_into(model, few, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    bf.load_into(model, few, strict=False, progress=False)
    assert_near(logits(model), logits(load_model(tmp_path / "quantized").eval()))


def test_dequantize_gives_a_plain_model_back(tmp_path):
    random_model("gpt_oss").save_pretrained(tmp_path)
    auto = expert_models.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, quantization_config=BillfishConfig("q8_0")).eval()
    before = logits(model)
    plain = model.dequantize().eval()
    assert not any(isinstance(module, MarlinExperts) for module in plain.modules())
    assert_near(logits(plain), before)


def test_reports_and_predicates():
    model = random_model("qwen3_moe")
    report = bf.quantize_model(
        model,
        "q4_0",
        predicate=lambda path, module: {"format": "q8_0"} if path == "model.layers.0.mlp.experts" else "1" not in path,
        progress=False,
    )
    replaced = {layer.path: layer for layer in report.replaced}
    assert replaced["model.layers.0.mlp.experts"].format == "q8_0"
    assert replaced["model.layers.0.mlp.experts"].bytes_before == 3 * 6 * 32 * 64 * 4
    assert report.left["model.layers.1.mlp.experts"] == "the predicate says so"


def test_columns_that_a_format_cannot_store_stay():
    model = random_model("qwen3_moe")
    report = bf.quantize_model(model, "q4_k", progress=False)
    assert "model.layers.0.mlp.experts" in report.left
    assert is_experts(model.get_submodule("model.layers.0.mlp.experts"))


@BY_MODEL
def test_activations_are_told_by_their_numbers(name):
    experts = next(filter(is_experts, random_model(name).modules()))
    assert activation_of(experts) == ("clamped_silu" if name == "gpt_oss" else "silu")
    with torch.device("meta"):
        assert activation_of(experts) == ("clamped_silu" if name == "gpt_oss" else "silu")
    experts._apply_gate = lambda joint: joint[..., : joint.shape[-1] // 2]
    with pytest.raises(bf.FormatError, match="activation"):
        activation_of(experts)


@BY_MODEL
def test_there_and_back(name):
    """Rows of gate and up, in turn or one after the other, go to their places."""
    experts = next(filter(is_experts, random_model(name).modules()))
    layer = MarlinExperts.from_experts(experts, "q8_0")
    plain = to_plain(layer, copy.deepcopy(experts))
    for stack, numbers, before in zip(layer.stacks, plain_stacks(plain), plain_stacks(experts), strict=True):
        assert torch.equal(numbers, torch.from_numpy(bf.dequantize(stack.quantized())))
        assert_near(numbers, before, 0.01)
    for part, bias in plain_biases(experts).items():
        assert torch.equal(plain_biases(plain)[part], bias)
        assert torch.equal(layer.get_submodule(part).bias, bias)


# ---- the layer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_silu"])
@pytest.mark.parametrize("biases", [False, True])
def test_values_and_gradients(activation, biases):
    """For x, for the routing weights and for the biases."""
    block, (x, ids, weights) = layer(biases, activation=activation), routing()
    assert_near(block(x, ids, weights).detach(), dense(block, x, ids, weights).detach())
    results = []
    for function in (block, lambda *arguments: dense(block, *arguments)):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        block.zero_grad()
        function(leaves[0], ids, leaves[1]).square().sum().backward()
        results.append([*(leaf.grad for leaf in leaves), *(p.grad.clone() for p in block.parameters())])
    for a, b in zip(*results, strict=True):
        assert_near(a, b, 1e-4)


@pytest.mark.parametrize("gradient", [False, True])
def test_compiled_without_a_break(gradient):
    block, (x, ids, weights) = layer(), routing()
    expected = block(x, ids, weights).detach()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x.requires_grad_(gradient)
    y = compiled(x, ids, weights)
    assert torch.equal(y.detach(), expected)
    if gradient:
        y.sum().backward()
        assert x.grad.abs().sum() > 0


def test_derivatives_within_autocast_are_those_without():
    """Autocast rounds no product with decoded weights."""
    block, (x, ids, weights) = layer(), routing()
    found = []
    for enabled in (False, True):
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        y = block(leaf, ids, weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.square().sum().backward()
        found.append([leaf.grad, *(p.grad for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("biases", [False, True])
def test_the_operator_is_as_torch_wants_operators(biases):
    """Shapes, strides and gradients that compilers are told, for x whose columns lie one after the other."""
    block, (x, ids, weights) = layer(biases), routing()
    held = [stack._weights for stack in block.stacks]
    shapes, forms = [size for own in held for size in own.shape], [own.form for own in held]
    about = [s.format for s in block.stacks], [s.group_size for s in block.stacks], shapes, forms, "silu", "exact"
    turned = x.t().contiguous().t().requires_grad_()
    torch.library.opcheck(
        EXPERTS, (turned, ids, weights, *(own.tensors for own in held), *(s.bias for s in block.stacks), *about)
    )


@pytest.mark.parametrize("copied", ["state dict", "pickle", "deepcopy", "torch.save"])
def test_copies_have_the_same_bits(copied):
    block, given = layer(), routing()
    if copied == "state dict":
        other = layer()
        for stack in other.stacks:
            stack.set_storage({name: torch.zeros_like(array) for name, array in stack.storage().items()})
        other.load_state_dict(block.state_dict())
    elif copied == "torch.save":
        file = io.BytesIO()
        torch.save(block, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    else:
        other = copy.deepcopy(block) if copied == "deepcopy" else pickle.loads(pickle.dumps(block))
    assert_same_stacks(other, block)
    assert torch.equal(other(*given), block(*given))


def test_conversions_leave_storage_alone():
    block, (x, ids, weights) = layer(), routing()
    before = copy.deepcopy(block)
    half = block.half()
    assert half.gate_proj.bias.dtype == torch.float16
    assert_same_stacks(half, before)
    y = half(x.half(), ids, weights)
    assert y.dtype == torch.float16
    assert_near(y.float(), before(x, ids, weights), 1e-2)


@pytest.mark.promise("threads", "a layer's weights change only by `set_storage` or `load_state_dict`")
def test_writes_to_copies_change_nothing_and_set_storage_does():
    block, given = layer(), routing()
    before = block(*given)
    storage = block.down_proj.storage()
    storage["blocks"][:, :, :2] = 0  # scales
    assert torch.equal(block(*given), before)
    block.down_proj.set_storage(storage)
    after = block(*given)
    assert not torch.equal(after, before)
    assert_near(after, dense(block, *given))


def test_states_that_do_not_fit_are_refused():
    block, other = layer(), layer(format="q8_0")
    with pytest.raises(RuntimeError, match=r"about.*q8_0"):
        block.load_state_dict(other.state_dict())
    assert block.down_proj.format == "q4_0"


def test_an_empty_stack_is_filled_by_a_state_dict():
    block = layer()
    empty = MarlinExperts(*(ExpertStack(stack.shape, bias=True, format="q4_0") for stack in block.stacks))
    empty.load_state_dict(block.state_dict())
    assert_same_stacks(empty, block)


def test_batches_and_nobody():
    block, (x, ids, weights) = layer(), routing(6)
    assert torch.equal(block(x.reshape(2, 3, 64), ids, weights).reshape(6, 64), block(x, ids, weights))
    assert block(x[:0], ids[:0], weights[:0]).shape == (0, 64)
    with pytest.raises(bf.BillfishError, match="ids"):
        block(x, ids + 5, weights)


def test_repr_and_bytes():
    block = layer()
    assert "q4_0" in repr(block)
    assert block.storage_bytes == sum(stack.quantized().nbytes for stack in block.stacks)
    assert [name for name, _ in block.named_children()] == list(PROJECTIONS)
    assert np.prod(block.down_proj.shape) == 5 * 64 * 96
