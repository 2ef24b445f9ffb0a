"""billfish in vLLM gives the tokens of transformers with our layers. `make test-vllm` runs it.

python tests/in_vllm/run.py PYTHON [--json FILE] [--only WORD]

PYTHON: of an environment with vLLM and billfish. This file itself runs in the environment of the tests: it writes the
folders, and generates with transformers what vLLM has to generate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import billfish as bf
from billfish.core.files import write_atomically
from billfish.nn.transformers import load_model

HERE = Path(__file__).parent
PROMPTS = [[1, 5, 7, 9], list(range(3, 20)), [42]]
COUNT = 16
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RANDOM = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=3),
}


NUMBERS = "in numbers"


class Recipe(NamedTuple):
    """How a folder is made: SmolLM2, or one of RANDOM, in a format and a layout."""

    model: str
    format: str
    group_size: int | None = None
    to: Any = None

    @property
    def name(self) -> str:
        group = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.model}, {self.format}{group}, {self.to or 'billfish'}"

    def write(self, folder: Path) -> None:
        settings: dict[str, Any] = {"group_size": self.group_size, "to": self.to, "requantize": True, "method": "rtn"}
        source = bf.llm.default_model() if self.model == "smollm2" else folder.with_name(self.model)
        if self.model != "smollm2" and not source.exists():
            write_random(source, self.model)
        if self.format == NUMBERS:
            bf.convert(source, folder, "plain", progress=False)
        else:
            bf.quantize_checkpoint(source, folder, self.format, progress=False, **settings)


def write_random(folder: Path, name: str) -> None:
    """A small random model, whose biases count."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(RANDOM[name])
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


class Case(NamedTuple):
    """A folder, and how vLLM is to serve it."""

    recipe: Recipe
    arguments: dict[str, Any]
    refused: str = ""  # what vLLM must say, where it must not serve

    @property
    def told(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.arguments.items())

    @property
    def name(self) -> str:
        return f"{self.recipe.name}: {self.told}"

    @property
    def together(self) -> str:
        """Cases with the same word are served one after the other by one process."""
        return f"alone {self.name}" if self.refused else f"{self.arguments.get('tensor_parallel_size', 1)} ranks"


EAGER: dict[str, Any] = {"enforce_eager": True}
ASKED = {**EAGER, "quantization": "billfish"}
TWO = {**EAGER, "tensor_parallel_size": 2}
CASES = [
    Case(Recipe("smollm2", "fp4", 32), EAGER),  # its head is tied, and stays in q8_0
    Case(Recipe("smollm2", "u4b8", 64, "gptq"), ASKED),
    Case(Recipe("smollm2", "u4", 64, "awq"), ASKED),
    Case(Recipe("smollm2", "u4b8", 32, "compressed-tensors"), ASKED),
    Case(Recipe("llama", "q4_0"), EAGER),
    Case(Recipe("mixtral", "q4_0"), EAGER),
    Case(Recipe("llama", "q4_0"), {"enforce_eager": False}),
    Case(Recipe("qwen3_moe", "fp4", 32), {"enforce_eager": False}),
    Case(Recipe("llama", "q4_0"), TWO),
    Case(Recipe("llama", "u4", 32, "awq"), {**ASKED, **TWO}),
    Case(Recipe("mixtral", "q4_0"), TWO),
    Case(Recipe("mixtral", "q4_0"), {**TWO, "enable_expert_parallel": True}),
    Case(Recipe("llama", "q4_k"), TWO, "where q4_k can be cut: 1 ranks"),  # 256 columns, which are one block
    Case(Recipe("llama", NUMBERS), ASKED, "takes quantized ones: billfish quantize"),
]


def in_transformers(folder: Path) -> list[list[int]]:
    """What transformers adds to each prompt with our layers, greedily."""
    model = load_model(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # a token like any other, as vLLM is told
    answers = []
    for prompt in PROMPTS:
        told: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
        answers.append(model.generate(torch.tensor([prompt]), **told)[0, len(prompt) :].tolist())
    return answers


def in_vllm(python: str, cases: list[Case], folders: dict[str, Path]) -> tuple[list[list[list[int]]], str]:
    """What vLLM adds, for each case that was served, and all that it printed."""
    room = {"max_model_len": 64, "enable_prefix_caching": False}
    tasks = [[{"model": str(folders[case.recipe.name]), **room, **case.arguments}, PROMPTS, COUNT] for case in cases]
    command = [python, str(HERE / "served.py"), json.dumps(tasks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = [line.removeprefix("tokens ") for line in done.stdout.splitlines() if line.startswith("tokens ")]
    return [json.loads(line) for line in lines], done.stdout


def verdicts(python: str, cases: list[Case], folders: dict[str, Path]) -> list[str]:
    """For cases of one process: "equal", "refused", or what is wrong."""
    answers, printed = in_vllm(python, cases, folders)
    found = []
    for i, case in enumerate(cases):
        if case.refused:
            found.append("refused" if case.refused in printed and not answers else "not refused as it should be")
        elif i >= len(answers):
            found.append("vLLM did not serve it")
        else:
            found.append("equal" if answers[i] == in_transformers(folders[case.recipe.name]) else "other tokens")
    if not all(verdict in ("equal", "refused") for verdict in found):
        print(printed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--only", default="", help="cases with this word in their names; the record keeps the others")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in case.name]
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {case.recipe.name: Path(place, case.recipe.name.replace(" ", "_")) for case in chosen}
        for recipe in {case.recipe.name: case.recipe for case in chosen}.values():
            recipe.write(folders[recipe.name])
        for word in dict.fromkeys(case.together for case in chosen):
            cases = [case for case in chosen if case.together == word]
            for case, verdict in zip(cases, verdicts(options.python, cases, folders), strict=True):
                found.append({"folder": case.recipe.name, "arguments": case.told, "verdict": verdict})
                print(f"{verdict:8} {case.name}", flush=True)
    if options.json is not None:
        about = "import json, vllm, torch; print(json.dumps([vllm.__version__, torch.__version__]))"
        versions = json.loads(subprocess.check_output([options.python, "-c", about], text=True).splitlines()[-1])
        kept = json.loads(options.json.read_text())["records"] if options.only and options.json.exists() else []
        by_name = {(record["folder"], record["arguments"]): record for record in (*kept, *found)}
        records = [by_name[name] for case in CASES if (name := (case.recipe.name, case.told)) in by_name]
        record = {"vllm": versions[0], "torch": versions[1], "tokens": COUNT * len(PROMPTS), "records": records}
        write_atomically(options.json, json.dumps(record, indent=2).encode() + b"\n")
    return 0 if all(record["verdict"] in ("equal", "refused") for record in found) else 1


if __name__ == "__main__":
    sys.exit(main())
