"""What quantize_model says of what it leaves, and how it answers what other tools would take."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from cases import first
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import billfish as bf
from billfish.nn.transformers import BillfishConfig


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.up, self.lm_head = torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
        self.conv = torch.nn.Conv2d(1, 1, 3)


def test_all_that_has_a_matrix_and_stays_is_in_the_report():
    report = bf.quantize_model(Model(), "q4_0", progress=False)
    assert [layer.path for layer in report.replaced] == ["up"]
    assert set(report.left) == {"wte", "lm_head", "conv"}
    assert "Embedding" in report.left["wte"]
    assert "Conv2d" in report.left["conv"]
    tiny = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=40, n_positions=16))
    report = bf.quantize_model(tiny, "q4_0", progress=False)
    assert "Conv1D" in report.left["transformer.h.0.attn.c_attn"]
    assert "nothing was quantized" in str(report)


def test_an_output_layer_is_left_unless_a_predicate_takes_it():
    model = Model()
    bf.quantize_model(model, "q4_0", predicate=lambda path, layer: path == "lm_head", progress=False)
    assert isinstance(model.lm_head, bf.MarlinLinear)
    assert not isinstance(model.up, bf.MarlinLinear)


def test_a_model_that_is_quantized_already_says_so():
    model = Model()
    bf.quantize_model(model, "q4_0", progress=False, predicate=lambda path, layer: True)
    report = bf.quantize_model(model, "q4_0", progress=False)
    assert report.left["up"] == "it is quantized already"
    assert "nothing was quantized" in str(report)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"predicate": "lm_head"}, r"predicate.*'lm_head'.*a function"),
        ({"skip": ["lm_head"]}, r"skip=.*predicate="),
        ({"bits": 4}, r"bits=4.*format"),
    ],
)
def test_arguments_of_other_tools_get_a_hint(settings, words):
    with pytest.raises(bf.BillfishError, match=words):
        bf.quantize_model(Model(), "q4_0", **settings)


def test_a_setting_of_a_module_that_does_not_exist_is_refused():
    with pytest.raises(bf.FormatError, match=r"'fromat'.*modules\['lm_head'\].*format, group_size"):
        BillfishConfig(modules={"lm_head": {"fromat": "q8_0"}})


def test_t5_looks_at_the_type_of_a_weight(tmp_path):
    torch.manual_seed(0)
    config = T5Config(vocab_size=40, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = {"input_ids": torch.tensor([[1, 2, 3]]), "decoder_input_ids": torch.tensor([[0, 4]])}
    with torch.no_grad():
        plain = model(**tokens).logits
        bf.quantize_model(model, "q8_0", progress=False)
        torch.testing.assert_close(model(**tokens).logits, plain, rtol=0.1, atol=0.1 * float(plain.abs().max()))
        loaded = T5ForConditionalGeneration.from_pretrained(tmp_path, quantization_config=BillfishConfig("q8_0"))
        wo = loaded.encoder.block[0].layer[1].DenseReluDense.wo
        assert loaded(**tokens).logits.shape == plain.shape
    assert wo.weight.shape == (64, 96)


LORA = """
{first}
import torch
{second}
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
bf.quantize_model(model, "q4_0", progress=False)
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(target_modules=["0"]))
print(type(model.base_model.model[0]).__name__)
"""


@pytest.mark.parametrize(
    ("one", "other"), first(1, [("import peft", "import billfish as bf"), ("import billfish as bf", "")])
)
def test_peft_knows_the_layer_without_another_import(one, other):
    script = LORA.format(first=one, second=other)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "MarlinLoraLinear", done.stderr
