"""llama.cpp's n-gram drafting for `drafting.py`: LlamaPromptLookupDecoding of llama-cpp-python, greedy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DRAFTED = (2, 10)  # tokens of a draft: what llama-cpp-python recommends for CPUs, and its default
POSITIONS = 1024


class Rate(NamedTuple):
    tokens: int
    tok_per_s: float  # after the first token


class LlamaLookup:
    """One model twice: with a drafter, llama-cpp-python keeps the logits of all rows, which plain decoding does not."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        how = {"n_ctx": POSITIONS, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        self._drafters = {count: LlamaPromptLookupDecoding(num_pred_tokens=count) for count in DRAFTED}
        self._plain = llama_cpp.Llama(str(path), **how)
        self._drafting = llama_cpp.Llama(str(path), draft_model=self._drafters[DRAFTED[0]], **how)

    def answer(self, prompt: str, most: int, stop: tuple[str, ...], drafted: int = 0) -> Rate:
        """Up to `most` tokens. drafted: of a draft, one of DRAFTED; 0 drafts nothing."""
        llama = self._plain
        if drafted:
            llama = self._drafting
            llama.draft_model = self._drafters[drafted]
        llama.reset()
        text, count, first, last = b"", 0, 0.0, 0.0
        tokens = llama.tokenize(prompt.encode(), add_bos=False)
        generated: Iterator[int] = llama.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0)
        for token in generated:
            last = time.perf_counter()
            first, count = first or last, count + 1
            text += llama.detokenize([token])
            if count == most or token == llama.token_eos() or any(each.encode() in text for each in stop):
                break
        generated.close()
        return Rate(count, (count - 1) / (last - first))
