"""The MTP block of a model on a GPU: one layer in steps of its own, with the model's embedding and head.

Hidden states come from the host and go back to it. The model's are kept there (`HiddenStates`), the block's are few.
"""

from __future__ import annotations

from dataclasses import replace
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.decoder import DeviceDecoder
from billfish.backends.cuda.driver import Buffer, Stream, copy_in, copy_out, current
from billfish.backends.cuda.embedding import DeviceEmbedding
from billfish.backends.cuda.launcher import DeviceMatrix
from billfish.backends.cuda.step_memory import PAGE, Batch
from billfish.llm.cuda_blocks import BlockMaker
from billfish.llm.cuda_kv_cache import CudaCache, SequencePool
from billfish.llm.cuda_steps import SCORED, CudaSteps, Fed, Scratch
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.decoder_base import MtpDecoder
from billfish.llm.kv_cache import Cache, Floats
from billfish.llm.model_weights import ModelTensors
from billfish.models.description import MtpBlock


class CudaMtpDecoder(MtpDecoder):
    """nbytes: of its weights."""

    def __init__(
        self,
        tensors: ModelTensors,
        mtp: MtpBlock,
        embedding: DeviceEmbedding,
        head: DeviceMatrix,
        stream: Stream,
        lock: RLock,
        chunk: int,
    ) -> None:
        """embedding, head: the model's. lock: for one call at a time on the stream. chunk: rows of a step."""
        self._lock, self._stream, self._chunk = lock, stream, chunk
        self._config = config = replace(tensors.config, blocks=(mtp.block,), final_norm=mtp.norm)
        norms = tensors.config.final_norm, mtp.norm
        self._model_norm, self._norm = (tensors.vector(norm) / np.float32(config.logit_scale) for norm in norms)
        self._hidden_norm, weights = tensors.vector(mtp.hidden_norm), GpuWeights(tensors, stream.ordinal)
        maker, embedding_norm = BlockMaker(config, weights), weights.vector(mtp.embedding_norm)
        self._layers = DeviceDecoder(
            [maker.block(0)],
            embedding,
            head,
            weights.send(self._norm),
            epsilon=config.norm_epsilon,
            logit_cap=config.logit_cap,
            tables=len(maker.layout.tables),
            projection=weights.matrix(mtp.projection),
            ordinal=stream.ordinal,
        )
        assert embedding_norm is not None
        self._pool = SequencePool(maker.layout, stream, lock)
        scratch, pages = Scratch(maker.layout, stream.ordinal), -(-config.context // PAGE)
        about = {"chunk": chunk, "most_rows": chunk + 1, "pages": pages}
        self._steps = MtpSteps(self._layers, stream, scratch, embedding_norm, **about)
        with current(stream.ordinal):
            self._steps.grow(1)
        self.nbytes = weights.nbytes

    def cache(self) -> CudaCache:
        return CudaCache(self._config, self._pool, 0)

    def run(self, cache: Cache, tokens: list[int], hidden: Floats) -> Floats:
        assert isinstance(cache, CudaCache)
        beside, states = self._normed(hidden, self._hidden_norm).astype(np.float16), list[Floats]()
        with self._lock, current(self._stream.ordinal):
            for start in range(0, len(tokens), self._chunk):
                part = tokens[start : start + self._chunk]
                cache.reserve(len(cache.tokens) + len(part))
                states.append(self._steps.leaving(cache, part, beside[start : start + len(part)]))
                cache.tokens += part
        return np.concatenate(states)

    def logits(self, hidden: Floats) -> Floats:
        out = np.empty((len(hidden), self._config.vocabulary), np.float32)
        step, stream = self._steps.memory, self._stream.pointer
        with self._lock, current(self._stream.ordinal):
            for start in range(0, len(hidden), SCORED):
                rows = np.ascontiguousarray(hidden[start : start + SCORED])
                copy_in(step.at("hidden"), rows, stream)
                self._layers.finish(stream, step, len(rows), added=False)
                self._layers.score(stream, step, len(rows))
                copy_out(out[start : start + len(rows)], step.at("logits"), stream)
        return out

    def normalize(self, hidden: Floats) -> Floats:
        return self._normed(hidden, self._norm)

    def normalize_model(self, hidden: Floats) -> Floats:
        return self._normed(hidden, self._model_norm)

    def _normed(self, rows: Floats, weights: Floats) -> Floats:
        squares = np.mean(rows * rows, axis=1, keepdims=True)
        normed: Floats = rows / np.sqrt(squares + np.float32(self._config.norm_epsilon)) * weights
        return normed


class MtpSteps(CudaSteps):
    """Steps through the block. Launches are made one by one."""

    def __init__(
        self,
        layers: DeviceDecoder,
        stream: Stream,
        scratch: Scratch,
        embedding_norm: Buffer,
        *,
        chunk: int,
        most_rows: int,
        pages: int,
    ) -> None:
        super().__init__(layers, stream, scratch, chunk=chunk, most_rows=most_rows, pages=pages)
        self._embedding_norm, self._prepared = embedding_norm, set[Batch]()

    def leaving(self, cache: CudaCache, tokens: list[int], beside: NDArray[np.float16]) -> Floats:
        """What leaves the layer. beside: the hidden states before the tokens, behind their norm [tokens, hidden]."""
        self._beside = beside
        return self.hidden([Fed(cache, tokens, 0, True, ())], "exact")

    def _issue(self, batch: Batch, activations: str) -> None:
        if batch not in self._prepared:
            self._layers.prepare(self.memory, batch)
            self._prepared.add(batch)
        self._layers.run_beside(self._stream.pointer, self.memory, batch, self._embedding_norm, self._beside)
