"""The perplexity of GGUF files in llama.cpp and in billfish, on the same windows of a text.

    pip install llama-cpp-python==0.3.36
    python -m benchmarks.in_llama_cpp FILE... --json benchmarks/results/in_llama_cpp.json

llama.cpp rounds activations to 8 bits for a quantized file, so its predictions are not exact. Its own quantizer
therefore decodes each file to float32, too: predictions of that file differ from billfish's exact ones by the order of
sums alone. The same command goes on where it was stopped.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, pages, records
from benchmarks.sweep import news
from billfish.llm import Model, load
from billfish.llm.evaluation import WINDOW, cut_windows, evaluate, log_softmax

RESULTS = records.RESULTS / "in_llama_cpp.json"
F32 = 0  # ggml's number


@functools.cache
def silent() -> Any:
    """What takes llama.cpp's messages, one for each tensor."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


def decoded(path: Path, out: Path) -> Path:
    """The file with float32 weights, written by llama.cpp."""
    import llama_cpp

    llama_cpp.llama_log_set(silent(), None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama_cpp.LLAMA_FTYPE_ALL_F32, True, 1
    if llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), params) != 0:
        raise SystemExit(f"llama.cpp does not decode {path}")
    return out


def loss_in_llama_cpp(path: Path, windows: Sequence[Sequence[int]]) -> float:
    """The mean of -log p of the tokens, with keys and values in float32."""
    import llama_cpp

    longest = max(map(len, windows))
    settings: Any = {"type_k": F32, "type_v": F32, "flash_attn": False, "logits_all": True, "verbose": False}
    settings |= {"n_ctx": longest, "n_batch": longest, "n_ubatch": longest, "n_threads": 1, "n_threads_batch": 1}
    model, losses = llama_cpp.Llama(str(path), **settings), list[float]()
    for tokens in windows:
        model.reset()
        model.eval(tokens)
        logs = log_softmax(np.array(model.scores[: len(tokens) - 1]))
        losses += [-float(row[token]) for row, token in zip(logs, tokens[1:], strict=True)]
    model.close()
    return float(np.mean(losses))


def measured(path: Path, tokens: Sequence[int], window: int = WINDOW) -> records.Record:
    """The record of a file."""
    model: Model = load(path, device="cpu", progress=False)
    windows = cut_windows(model, tokens, window)
    ours = {a: evaluate(model, tokens, activations=a, window=window) for a in ("exact", "q8")}
    with tempfile.TemporaryDirectory() as folder:
        floats = loss_in_llama_cpp(decoded(path, Path(folder) / "floats.gguf"), windows)
    return {
        "file": path.stem,
        "tokens": ours["exact"].tokens,
        "bits_per_weight": model.decoder.tensors.bits_per_weight,
        "exact": ours["exact"].perplexity,
        "llama_cpp_floats": float(np.exp(floats)),
        "q8": ours["q8"].perplexity,
        "llama_cpp": float(np.exp(loss_in_llama_cpp(path, windows))),
    }


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="GGUF file")
    parser.add_argument("--text", metavar="FILE", help="text to predict (default: news of gensim's wheel)")
    parser.option("--tokens", "tokens of the text", 1024, command.positive, "N")
    flags = parser.parse_args()
    text = Path(flags.text or news()).read_text()
    results = records.Growing(flags.json or Path(tempfile.mkdtemp()) / "in_llama_cpp.json", records=[])
    for path in flags.files:
        if results.lacks("records", {"file": path.stem}):
            model = load(path, device="cpu", progress=False)
            results.add("records", measured(path, model.tokenizer.encode(text, special=False)[: flags.tokens]))
            print(results.content["records"][-1], flush=True)
    if flags.json == RESULTS:
        pages.main()


if __name__ == "__main__":
    main()
