"""The layers of a model on an Apple GPU, one at a time: what a text's activations are, for statistics.

A layer's weights are read when it runs. Hidden states and inputs are NumPy's, as those of the CPU's decoder, whose
methods these are: its memory is the GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from billfish.backends import BACKENDS
from billfish.backends.metal import EmulatorBackend, MetalBackend
from billfish.llm.cpu import Enough, Observe
from billfish.llm.kv_cache import Floats
from billfish.llm.metal import CHUNK
from billfish.llm.metal_cache import MetalCache, State
from billfish.llm.metal_parts import MetalBlock, Parts, Pass, Residual, Span
from billfish.llm.model_weights import ModelTensors


class MetalLayers:
    """tensors: of a model that `devices.why_not_layers` says nothing about. It has the tensors that it has when a layer
    is read."""

    chunk = CHUNK

    def __init__(self, tensors: ModelTensors, device: str) -> None:
        backend = BACKENDS[device]
        assert isinstance(backend, (MetalBackend, EmulatorBackend))
        self.tensors, self.config, self.device = tensors, tensors.config, device
        self._parts = Parts(tensors, backend.kernels)
        self._last_norm = mx.array(tensors.vector(self.config.final_norm) / np.float32(self.config.logit_scale))
        self._layer = -1
        self._block: MetalBlock | None = None
        self._observe: Observe | None = None

    def cache(self, capacity: int) -> MetalCache:
        return MetalCache(self.config, capacity)

    def embed(self, tokens: list[int]) -> Floats:
        return self.tensors.embed(tokens)

    def run_layer(
        self, layer: int, tokens: list[int], x: Floats, source: Floats | None, cache: MetalCache,
        observe: Observe | None,
    ) -> None:  # fmt: skip
        """The hidden states x [tokens, hidden] of a text, from its beginning, through one layer, in place.

        observe: gets what the layer's products multiply. Where it raises `Enough`, x has no meaning afterwards.
        """
        assert source is None, "no layer has keys of another one"
        block, self._observe = self._read(layer), observe
        states: dict[int, State] = {}
        with cache.lock:
            cache.reset()
            for start in range(0, len(x), self.chunk):
                part = x[start : start + self.chunk]
                after: dict[int, State] = {}
                span = Span(cache, 0, start, len(part), states, (len(part),), (after,))
                stream = Residual(self._parts, mx.array(part))
                with contextlib.suppress(Enough):
                    block(stream, Pass([span]), layer, None)
                    part[:] = np.array(stream.value())
                states = after

    def read_layer_again(self, layer: int, inputs: Sequence[int] = ()) -> None:
        """When tensors of a layer have changed: now, as they are others later."""
        if self._layer == layer:
            self._block = None
            self._read(layer)

    def normalize(self, hidden: Floats) -> Floats:
        """Hidden states [m, hidden] behind the last norm: what the head multiplies."""
        return np.array(self._parts.norm(mx.array(hidden), self._last_norm))

    def _read(self, layer: int) -> MetalBlock:
        if self._layer != layer or self._block is None:
            self._layer, self._block = -1, None  # the memory of the one before first
            self._block = MetalBlock(self._parts, self.config.blocks[layer])
            self._block.watch(self._seen)
            self._layer = layer
        return self._block

    def _seen(self, number: int, x: mx.array) -> None:
        if self._observe is not None:
            self._observe(self._layer, number, -1, np.array(x.astype(mx.float32)))
