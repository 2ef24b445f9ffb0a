"""What x in few bits costs SmolLM2-135M-Instruct in KL divergence, for GPUs and CPUs. A table of docs/cuda.md.

    pip install --no-deps gensim==4.4.0

The inputs of all matrices of the layers are rounded as billfish/core/activations.py says; the matrices, the head
and everything else stay float32. So the divergence is that of rounding alone, whatever multiplies afterwards. Weights
are those of the file, and the same in mxfp4. The text is news, as in quality.py, in windows of 512 tokens.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.quality import test_text
from billfish.core.activations import quantize_activations, quantize_rows
from billfish.llm import default_model, load

WINDOW = 512
WEIGHTS = ("as in the file", "mxfp4")
# Of whom, with how many values of x to a scale, and which kind of activations.
WAYS = (("gpu", "row", "fp8"), ("gpu", "row", "q8"), ("cpu", "32", "q8"), ("cpu", "32", "q16"))


def rounded(x: NDArray[np.float32], scale: str, kind: str) -> NDArray[np.float64]:
    """x [M, K] as its codes hold it."""
    return quantize_rows(x, kind).values() if scale == "row" else quantize_activations(x, kind, 32).values(x.shape[1])


def matrices(model: Any) -> list[Any]:
    """The modules whose inputs are rounded: all but the head."""
    return [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]


class Rounding:
    """The inputs of a model's layers are rounded in `way`, or left as they are."""

    def __init__(self, model: Any) -> None:
        self.way: tuple[str, str, str] | None = None
        for module in matrices(model):
            module.register_forward_pre_hook(self._hook)

    def _hook(self, module: Any, inputs: tuple[Any, ...]) -> Any:
        if self.way is None:
            return None
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).numpy()
        return (torch.from_numpy(rounded(x, *self.way[1:]).astype(np.float32)).reshape(inputs[0].shape),)


def quantize_layers(model: Any, format: str) -> None:
    """Every matrix of the layers takes the values that the format gives it."""
    for module in matrices(model):
        w = bf.dequantize(bf.quantize(module.weight.detach().numpy(), format))
        module.weight.data.copy_(torch.from_numpy(np.asarray(w, np.float32)))


def divergences(model: Any, tokens: list[int]) -> list[dict[str, Any]]:
    """For each way: the mean of KL(exact || rounded) in nats, and how often the best token is the same."""
    rounding = Rounding(model)
    found: dict[tuple[str, str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {way: [] for way in WAYS}
    for first in range(0, len(tokens) - WINDOW + 1, WINDOW):
        window = torch.tensor([tokens[first : first + WINDOW]])
        rounding.way = None
        exact = torch.log_softmax(model(window).logits[0].double(), dim=1)
        for way in WAYS:
            rounding.way = way
            mine = torch.log_softmax(model(window).logits[0].double(), dim=1)
            lost = (exact.exp() * (exact - mine)).sum(dim=1)
            found[way].append((lost, exact.argmax(dim=1) == mine.argmax(dim=1)))
    records = []
    for way, parts in found.items():
        lost, same = (torch.cat(each).double() for each in zip(*parts, strict=True))
        about = dict(zip(("device", "scale", "activations"), way, strict=True))
        error = float(lost.std()) / len(lost) ** 0.5
        records.append(
            about | {"divergence": float(lost.mean()), "divergence_error": error, "same_best": float(same.mean())}
        )
    return records


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.option("--tokens", "tokens of news", 4096, command.positive, "N")
    flags = parser.parse_args()
    torch.set_grad_enabled(False)
    tokens = load(default_model(), device="cpu", progress=False).tokenizer.encode(test_text(), special=False)
    found = []
    with tempfile.TemporaryDirectory() as place:
        bf.convert(default_model(), Path(place) / "plain", "plain", dtype="float32", progress=False)
        for weights in WEIGHTS:
            model = transformers.AutoModelForCausalLM.from_pretrained(Path(place) / "plain", dtype=torch.float32)
            if weights != WEIGHTS[0]:
                quantize_layers(model, weights)
            for record in divergences(model, tokens[: flags.tokens]):
                found.append({"weights": weights} | record)
                print(json.dumps(found[-1]), flush=True)
    about = {"model": "SmolLM2-135M-Instruct", "tokens": flags.tokens, "window": WINDOW} | machine.versions()
    records.write(flags.json, {"about": about, "records": found})


if __name__ == "__main__":
    main()
