"""The README's examples for frameworks, and the commands of docs/scaling.md, do what they say."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from checkpoint_folders import write_folder
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import billfish as bf
from billfish.cli.main import main
from billfish.nn.transformers import load_model

ROOT = Path(__file__).parents[2]


def examples(page: str, word: str) -> list[str]:
    """The Python blocks of a page that import something."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [block for block in blocks if re.search(rf"^(import|from) {word}\b", block, re.MULTILINE)]


def test_the_torch_example(capsys):
    (example,) = examples("README.md", "torch")
    names: dict = {}
    exec(example, names)
    assert names["y"].shape == (8, 1024)
    assert isinstance(names["model"][2], bf.MarlinLinear)
    assert "q4_0, group_size=32: 2 layers, 16.8 MB -> 2.4 MB" in capsys.readouterr().out


def test_the_transformers_example(tmp_path, monkeypatch):
    (example,) = examples("README.md", "transformers")
    write_folder(tmp_path / "smol", "plain")
    truth = write_folder(tmp_path / "smol-gptq", "gptq", act_order=True)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "smol-q4")
    assert again.model.layers[0].mlp.up_proj.format == "q4_0"
    assert bf.load("smol-q4").describe("model.layers.0.mlp.up_proj.weight").group_size == 32
    weight = names["model"].model.layers[0].mlp.up_proj.to_linear().weight.detach().numpy()
    assert (weight == truth["model.layers.0.mlp.up_proj.weight"]).all()


@pytest.mark.filterwarnings("ignore")  # of compressed-tensors and transformers
def test_the_commands_for_vllm(tmp_path, capsys):
    """Every command of the page but vLLM's own, in order; transformers reads what they write as we do."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^    (billfish .*)$", page, re.MULTILINE)]
    assert [command[1] for command in commands] == ["quantize", "convert", "verify"]
    write_folder(tmp_path / "plain", "plain")
    write_folder(tmp_path / "gptq", "gptq")
    places = [{"IN": "plain", "OUT": "a"}, {"GPTQ_FOLDER": "gptq", "OUT": "b"}, {"GPTQ_FOLDER": "gptq", "OUT": "b"}]
    for (_, *arguments), names in zip(commands, places, strict=True):
        assert main([str(tmp_path / names[word]) if word in names else word for word in arguments]) == 0
    tokens = torch.tensor([[1, 5, 7, 9]])
    with torch.no_grad():
        # The second has zero points, which transformers 5.23 reads only if weights are decoded, to float16.
        for folder, decoded, error in (("a", False, 1e-5), ("b", True, 1e-3)):
            how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if decoded else {}
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder, **how)(tokens).logits
            ours = load_model(tmp_path / folder)(tokens).logits
            torch.testing.assert_close(ours, theirs, rtol=0, atol=error * theirs.abs().max().item())
        assert torch.equal(ours, load_model(tmp_path / "gptq")(tokens).logits)


def test_the_example_of_tensor_parallelism(tmp_path, monkeypatch, capsys):
    """With one process, as torchrun would start it; test_parallel.py has more."""
    write_folder(tmp_path, "gptq", act_order=True)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    importlib.import_module("tensor_parallel").main([str(tmp_path), "1 5 7 9"])
    assert re.match(r"1 processes, 0\.\d MB in this one: \[1, 5, 7, 9, ", capsys.readouterr().out)
