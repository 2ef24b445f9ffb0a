"""Records the logits that llama.cpp gives for the small models of llm_architectures.py, from GGUF files that we write.

    pip install llama-cpp-python==0.3.36        # from a source without `#define GGML_GELU_FP16` in ggml-cpu/vec.h
    python tests/support/vectors/make_architecture_vectors.py tests/support/vectors/architectures.safetensors

Weights, keys and values are float32. Prints how far we are from each, relative to the largest logit, and whether both
cut a text into the same tokens. With that line, ggml takes GELU from a table of float16 numbers, and Gemma's logits are
1e-3 apart. The file was made without it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from llm_architectures import LLAMA_CPP, POSITIONS, TOKENS, write_model

import billfish as bf
from billfish.llm import load

F32 = 0  # ggml's number
TEXT = "Xab ABab cab"


class Llama:
    """A model in llama.cpp's C interface."""

    def __init__(self, path: Path) -> None:
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path} does not load")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocabulary]."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(self.model, params)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        shape = len(tokens), llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        made = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape).copy()
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return made

    def encode(self, text: str) -> list[int]:
        room = (llama_cpp.llama_token * 64)()
        count = llama_cpp.llama_tokenize(self.vocabulary, text.encode(), len(text), room, 64, False, True)
        return list(room[:count])


def main() -> None:
    to, names = Path(sys.argv[1]), sys.argv[2:] or list(LLAMA_CPP)
    llama_cpp.llama_backend_init()
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            source, path = Path(folder) / name / "model", Path(folder) / f"{name}.gguf"  # it looks into names of models
            write_model(source, name, **LLAMA_CPP[name])
            bf.convert(source, path, "gguf")
            ours = load(path, device="cpu")
            theirs = Llama(path)
            logits = theirs.logits(TOKENS)
            apart = np.abs(logits - ours.logits(TOKENS)).max() / np.abs(logits).max()
            cut = "same" if theirs.encode(TEXT) == ours.tokenizer.encode(TEXT) else "OTHER"
            print(f"{name:20} {apart:8.1e}   {cut} tokens", flush=True)
            recorded[name] = logits[POSITIONS]
    save_file(recorded, to, {"made_by": "llama-cpp-python 0.3.36 without GGML_GELU_FP16"})


if __name__ == "__main__":
    main()
