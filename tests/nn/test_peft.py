"""LoRA by peft on quantized layers: training, saving, loading and merging, and transformers' Trainer."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import write_folder
from common import gaussian
from llm_models import Small, write_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import billfish as bf
from billfish.core.errors import MissingPackage
from billfish.nn.peft import MarlinLoraLinear
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.transformers import BillfishConfig, load_model

TARGETS = ["q_proj", "v_proj", "down_proj"]
TOKENS = torch.tensor([[1, 5, 7, 9, 11, 3], [2, 4, 6, 8, 10, 12]])

# torch says so once where the processor has no instructions for bfloat16.
SLOW_BFLOAT16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def quantized_model(folder: Path, **settings: Any) -> Any:
    write_folder(folder, "plain")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BillfishConfig("fp4"), **settings)


def bits(model: torch.nn.Module) -> list[bytes]:
    """All that layers store, in their order."""
    layers = [module for module in model.modules() if isinstance(module, MarlinLinear)]
    return [array.tobytes() for layer in layers for array in layer.quantized().storage.values()]


def train(model: Any, steps: int = 8, rate: float = 2e-2, autocast: bool = False) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_and_the_weights_stay(checkpointing, tmp_path):
    torch.manual_seed(0)
    model = quantized_model(tmp_path)
    before, first = bits(model), logits(model)
    model = get_peft_model(model, LoraConfig(target_modules=TARGETS, r=4))
    assert sum(isinstance(module, MarlinLoraLinear) for module in model.modules()) == 2 * len(TARGETS)
    assert torch.equal(logits(model), first)  # B is zero at first
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    losses = train(model)
    assert losses[-1] < 0.7 * losses[0]
    assert bits(model) == before
    with model.disable_adapter():
        assert torch.equal(logits(model), first)


def test_checkpointing_gives_the_same_gradients(tmp_path):
    model = get_peft_model(quantized_model(tmp_path), LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    model.train()
    gradients = []
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        model.zero_grad()
        model.activation_checkpointing_enable({"use_reentrant": False})
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_are_those_of_peft_on_plain_layers(tmp_path):
    ours = get_peft_model(quantized_model(tmp_path), LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    plain = quantized_model(tmp_path).dequantize()
    theirs = get_peft_model(plain, LoraConfig(target_modules=TARGETS, r=4))
    theirs.load_state_dict({name: p for name, p in ours.named_parameters() if "lora_" in name}, strict=False)
    gradients = []
    for model in (ours, theirs):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


def test_adapters_are_saved_and_loaded(tmp_path):
    model = get_peft_model(quantized_model(tmp_path), LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size < 40_000  # the adapters alone
    again = PeftModel.from_pretrained(quantized_model(tmp_path), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    # transformers' own way to put adapters into a model
    model = quantized_model(tmp_path)
    model.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(model), logits(again))


@SLOW_BFLOAT16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_decodes_and_unmerging_brings_the_bits_back(dtype, tmp_path):
    model = quantized_model(tmp_path, dtype=dtype)
    before = bits(model)
    model = get_peft_model(model, LoraConfig(target_modules=TARGETS, r=4, init_lora_weights=False))
    expected = logits(model)
    tolerance = {"rtol": 0, "atol": {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype] * expected.abs().max().item()}
    model.merge_adapter()
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    assert type(layer.base_layer) is torch.nn.Linear
    torch.testing.assert_close(logits(model), expected, **tolerance)
    model.unmerge_adapter()
    assert bits(model) == before
    assert torch.equal(logits(model), expected)
    plain = model.merge_and_unload()
    assert type(plain.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(plain.model.layers[0].mlp.up_proj) is MarlinLinear
    torch.testing.assert_close(logits(plain.to(dtype)), expected, **tolerance)


def test_adapters_that_are_broken_do_not_merge(tmp_path):
    model = get_peft_model(quantized_model(tmp_path), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    before = bits(model)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    with pytest.raises(ValueError, match="seems to be broken"):
        model.merge_adapter(safe_merge=True)
    assert bits(model) == before


def test_several_adapters_and_unloading(tmp_path):
    model = quantized_model(tmp_path)
    first, before = logits(model), bits(model)
    model = get_peft_model(model, LoraConfig(target_modules=TARGETS, init_lora_weights=False))
    model.add_adapter("other", LoraConfig(target_modules=TARGETS, init_lora_weights=False))
    one = logits(model)
    model.set_adapter("other")
    assert not torch.equal(logits(model), one)
    plain = model.unload()
    assert bits(plain) == before
    assert torch.equal(logits(plain), first)


def test_models_that_are_not_of_transformers():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    bf.quantize_model(model, "q4_0", progress=False)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0", "2"]))
    wrapped(torch.from_numpy(gaussian((3, 64)))).sum().backward()
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trained) == 4


@SLOW_BFLOAT16
def test_autocast(tmp_path):
    model = get_peft_model(quantized_model(tmp_path), LoraConfig(target_modules=TARGETS, r=4))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(TOKENS).logits.dtype == torch.bfloat16
    losses = train(model, autocast=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": TOKENS[index % 2], "labels": TOKENS[index % 2]}


def test_the_trainer_of_transformers(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "runs"),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = quantized_model(tmp_path)
    with pytest.raises(ValueError, match="purely quantized models"):
        Trainer(model, arguments, train_dataset=Sentences())
    before = bits(model)
    model = get_peft_model(model, LoraConfig(target_modules=TARGETS, r=4))
    trainer = Trainer(model, arguments, train_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert bits(model) == before
    assert list((tmp_path / "runs").glob("checkpoint-8/adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, r"use_dora.*quantized layers.*LoRA"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights.*'pissa'.*True, False or 'gaussian'"),
    ],
)
def test_wrong_arguments(settings, message):
    model = torch.nn.Sequential(bf.MarlinLinear.from_linear(torch.nn.Linear(64, 8), "q4_0"))
    with pytest.raises(bf.FormatError, match=message):
        get_peft_model(model, LoraConfig(target_modules=["0"], **settings))


def test_without_peft_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "billfish.nn.peft", raising=False)
    with pytest.raises(MissingPackage, match=r"peft is not installed.*pip install '\.\[peft\]'"):
        importlib.import_module("billfish.nn.peft")


def test_the_example_learns(tmp_path, monkeypatch, capsys):
    """On a small model, in a few steps: the loss falls, and the weights are still those of the file."""
    write_model(tmp_path / "model.gguf", Small(quantization="Q4_1"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    options = ["--steps", "8", "--passages", "2", "--tokens", "16", "--rate", "0.05"]
    out = tmp_path / "adapters"
    main = importlib.import_module("finetune_lora").main
    model = main(["--model", str(tmp_path / "model.gguf"), "--out", str(out), *options])
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 8
    assert losses[-2] < 0.8 * losses[0]
    assert losses[-1] < 0.8 * losses[1]
    assert bits(model) == bits(load_model(tmp_path / "model.gguf"))
    again = PeftModel.from_pretrained(load_model(tmp_path / "model.gguf"), out)
    assert torch.equal(logits(again), logits(model))
