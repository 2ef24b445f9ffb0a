"""Language models for `llm_speed.py`: llama.cpp, ik_llama.cpp and billfish, at the level of single calls.

A contender holds one text, or one token after the other of several.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from billfish.llm import Model
from billfish.llm.kv_cache import Cache
from billfish.llm.sampler import Sampling

MOST_STREAMS = 16
BATCH = 512  # rows of a prompt that the peers take at a time


class Peer:
    """The C interface that llama.cpp and ik_llama.cpp have in common, which `api` has as ctypes. `choices` are fields
    of the context's parameters. Every method returns when its work is done."""

    name: str
    install: str  # what pip is told

    def __init__(self, api: Any, path: Path, threads: int, positions: int, **choices: Any) -> None:
        self.version = f"{self.install} {importlib.metadata.version(self.install)}"
        self._api = api
        api.llama_backend_init()
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        choices |= {"n_ctx": positions, "n_batch": BATCH, "n_ubatch": BATCH, "n_seq_max": MOST_STREAMS}
        for name, value in (choices | {"n_threads": threads, "n_threads_batch": threads}).items():
            setattr(params, name, value)
        self._context = api.llama_init_from_model(model, params)
        assert self._context, f"{self.version} makes no context"
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._lengths = [0] * MOST_STREAMS

    def forget(self, keep: int) -> None:
        """Keep the first tokens of the text, or, with 0, nothing of all texts."""
        if keep:
            self.remove(keep)
            self._lengths[0] = keep
        else:
            self.clear()
            self._lengths = [0] * MOST_STREAMS

    def feed(self, tokens: list[int]) -> None:
        """Go on with the text, and compute the logits after its last token."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            self._decode(part, [0] * len(part), [start + len(part) == len(tokens)] * len(part))

    def step(self, tokens: list[int]) -> None:
        """Go on with as many texts as there are tokens, each by one, and compute the logits after each."""
        self._decode(tokens, range(len(tokens)), [True] * len(tokens))

    def _decode(self, tokens: list[int], texts: Sequence[int], ends: list[bool]) -> None:
        """`ends` says of each token whether its text may end there; of one text only the last one counts."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, text) in enumerate(zip(tokens, texts, strict=True)):
            batch.token[i], batch.pos[i] = token, self._lengths[text]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
            batch.logits[i] = ends[i] and (i + 1 == len(tokens) or texts[i + 1] != text)
            self._lengths[text] += 1
        assert self._api.llama_decode(self._context, batch) == 0


class LlamaCpp(Peer):
    name, install = "llama.cpp", "llama-cpp-python"

    def __init__(self, path: Path, threads: int, positions: int) -> None:
        import llama_cpp

        # Unified: otherwise each text has a part of the positions for itself.
        super().__init__(llama_cpp, path, threads, positions, kv_unified=True)
        self._memory = llama_cpp.llama_get_memory(self._context)

    def remove(self, start: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, 0, start, -1)

    def clear(self) -> None:
        self._api.llama_memory_clear(self._memory, True)


class IkLlamaCpp(Peer):
    """Without flash attention, which fails an assertion on prompts where a CPU has no AVX-VNNI."""

    name, install = "ik_llama.cpp", "ik-llama-cpp-python"

    def __init__(self, path: Path, threads: int, positions: int) -> None:
        from ik_llama_cpp import _ctypes_api

        super().__init__(_ctypes_api, path, threads, positions, flash_attn=False)

    def remove(self, start: int) -> None:
        self._api._lib.llama_kv_cache_seq_rm(self._api.ctypes.c_void_p(self._context), 0, start, -1)

    def clear(self) -> None:
        self._api.llama_kv_cache_clear(self._context)


class Ours:
    """The same of a model of ours. `step` chooses the best token, too."""

    def __init__(self, model: Model, activations: str, positions: int) -> None:
        self.name = f"billfish {activations}"
        self._decoder, self._activations = model.decoder, activations
        self._caches: list[Cache] = [self._decoder.cache(positions if i == 0 else 256) for i in range(MOST_STREAMS)]

    def forget(self, keep: int) -> None:
        for cache in self._caches[: 1 if keep else None]:
            cache.rollback(keep)

    def feed(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), self._decoder.chunk):
            part = tokens[start : start + self._decoder.chunk]
            rows = self._decoder.run([(self._caches[0], part)], self._activations)
        self._decoder.logits(rows[-1:], self._activations)

    def step(self, tokens: list[int]) -> None:
        passages = [(cache, [token]) for cache, token in zip(self._caches, tokens, strict=False)]
        self._decoder.choose(passages, [Sampling().sampler() for _ in tokens], self._activations)


Contender = Peer | Ours
