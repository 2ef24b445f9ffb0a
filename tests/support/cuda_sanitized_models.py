"""Steps of the small model of each architecture, for compute-sanitizer. `make sanitize-cuda` runs them under all tools.

    python tests/support/cuda_sanitized_models.py                # the names
    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/support/cuda_sanitized_models.py NAME...

A step has two prompts, the next two a token of each; then a sequence is decoded alone. llama3:fp8 has an FP8 cache, and
mtp drafts with its MTP block. Layers are in q4_0 where their sizes allow it. What they compute is compared by
tests/llm/test_cuda.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from llm_architectures import MODELS, TOKENS, write_model, write_mtp_model

from billfish.llm import load
from billfish.llm.sampler import Sampling

NAMES = (*MODELS, "llama3:fp8", "mtp")


def run(name: str) -> list[int]:
    """The tokens that are chosen in the last step of two sequences, and of one alone."""
    architecture, _, cache_type = name.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        if name == "mtp":
            write_mtp_model(Path(folder))
        else:
            write_model(Path(folder), architecture, max_position_embeddings=256)
        with load(Path(folder), device="cuda", quantize="q4_0", cache_type=cache_type or None, progress=False) as model:
            if name == "mtp":
                return model.generate(TOKENS[:7], max_tokens=6, draft="mtp", draft_length=3).tokens
            samplers = [Sampling().sampler() for _ in range(2)]
            caches, alone = [model.cache() for _ in range(2)], model.cache()
            fed = [TOKENS[:7], TOKENS[:20]]
            for _ in range(3):
                chosen = model.decoder.choose(list(zip(caches, fed, strict=True)), samplers, None)
                fed = [[token] for token in chosen]
            for part in (TOKENS[:5], TOKENS[5:6], TOKENS[6:7]):
                last = model.decoder.choose([(alone, part)], samplers[:1], None)
            return [*chosen, *last]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, *run(name), flush=True)
    if len(sys.argv) == 1:
        print(*NAMES, sep="\n")
