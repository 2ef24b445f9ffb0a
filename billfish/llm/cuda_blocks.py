"""A model's description made ready for a GPU: blocks of backends/cuda with their weights in its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from billfish.backends.cuda.attention import DeviceAttention, HeadSizes, PagePlace, Rotation
from billfish.backends.cuda.block import BlockPart, DeviceBlock, LayerInput
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.driver import device
from billfish.backends.cuda.embedding import DeviceLayerInputs, RopeTables
from billfish.backends.cuda.mixture_step import DeviceDenseAndMixture, DeviceMixture
from billfish.core.errors import BackendUnavailable, failure
from billfish.core.typing import CacheType
from billfish.llm.cuda_mixture import pack_mixture
from billfish.llm.cuda_recurrent import recurrent_mixer
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.model_weights import CALL
from billfish.models.description import (
    Attention,
    Dense,
    DenseAndMixture,
    Mixture,
    Model,
    PerLayerEmbedding,
    PerLayerInput,
)

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class PageTable:
    """Layers whose keys and values share pages. window: positions that the layers attend to, 0 for all; pages before
    it are given back."""

    window: int
    page_bytes: int


@dataclass(frozen=True)
class SequenceLayout:
    """Where a sequence's memory is: a place in pages for each layer with keys and values, and an offset in its
    recurrent state for each layer that has one."""

    tables: tuple[PageTable, ...]
    places: dict[int, PagePlace]
    state_offsets: dict[int, int]
    state_bytes: int


def sequence_layout(model: Model, cache_type: CacheType) -> SequenceLayout:
    """Layers with one window share a table of pages. A layer that others share keys with needs the widest window."""
    windows = dict[int, list[int]]()
    for i, block in enumerate(model.blocks):
        if isinstance(block.mixer, Attention):
            windows.setdefault(i if block.mixer.shares is None else block.mixer.shares, []).append(block.mixer.window)
    widest = {i: 0 if 0 in found else max(found) for i, found in windows.items()}
    kinds = sorted({*widest.values()}) or [0]
    sizes, places, states, offset = [0] * len(kinds), dict[int, PagePlace](), dict[int, int](), 0
    for i, block in enumerate(model.blocks):
        mixer = block.mixer
        if not isinstance(mixer, Attention):
            states[i] = offset
            offset += -(-4 * mixer.state_numbers // 256) * 256
        elif mixer.shares is None:
            table = kinds.index(widest[i])
            places[i] = PagePlace(table, sizes[table])
            sizes[table] += head_sizes(mixer, cache_type).page_bytes
        else:
            places[i] = places[mixer.shares]
    tables = tuple(PageTable(window, max(size, 16)) for window, size in zip(kinds, sizes, strict=True))
    return SequenceLayout(tables, places, states, offset)


def head_sizes(attention: Attention, cache_type: CacheType) -> HeadSizes:
    return HeadSizes(attention.heads, attention.kv_heads, attention.head_size, cache_type == "fp8")


class BlockMaker:
    """Makes device blocks of a description, with weights that `weights` packs."""

    def __init__(self, model: Model, weights: GpuWeights, cache_type: CacheType = "float16") -> None:
        self._model, self._weights, self._cache_type = model, weights, cache_type
        self.layout = sequence_layout(model, cache_type)
        pairs = [rope.size // 2 for rope in model.ropes]
        self._rotations = [
            Rotation(sum(pairs[:i]), pairs[i], sum(pairs), rope.adjacent) for i, rope in enumerate(model.ropes)
        ]

    def ropes(self) -> RopeTables:
        tables = [self._weights.tensors.frequencies(rope) for rope in self._model.ropes]
        magnitudes = [np.full(len(t), r.scaling.magnitude) for t, r in zip(tables, self._model.ropes, strict=True)]
        frequencies = np.concatenate([*tables, np.zeros(1)])  # a table for models without any
        together = np.concatenate([*magnitudes, np.zeros(1)])
        return RopeTables(len(frequencies) - 1, self._weights.send(frequencies), self._weights.send(together))

    def block(self, i: int) -> DeviceBlock:
        block, weights = self._model.blocks[i], self._weights
        layer_input, scale = block.per_layer_input, block.output_scale
        made = DeviceBlock(
            self.mixer(i),
            self.feed_forward(i),
            weights.vector(block.mixer_norm),
            weights.vector(block.feed_forward_norm),
            weights.vector(block.mixer_post_norm),
            weights.vector(block.feed_forward_post_norm),
            block.residual_scale,
            None if layer_input is None else self._layer_input(layer_input, i),
            1.0 if scale is None else float(weights.tensors.vector(scale)[0]),
        )
        weights.tensors.source.tensors.release()
        return made

    def layer_inputs(self, part: PerLayerEmbedding) -> DeviceLayerInputs:
        embedding, projection = self._weights.table(part.embedding), self._weights.matrix(part.projection)
        norm = self._weights.vector(part.norm)
        assert norm is not None
        sizes = part.size, self._model.layers
        return DeviceLayerInputs(*sizes, embedding, projection, norm, part.scale, part.projection_scale)

    def mixer(self, i: int) -> BlockPart:
        mixer = self._model.blocks[i].mixer
        if isinstance(mixer, Attention):
            return self._attention(mixer, i)
        return recurrent_mixer(self._weights, mixer, self.layout.state_offsets[i])

    def feed_forward(self, i: int) -> BlockPart:
        part = self._model.blocks[i].feed_forward
        if isinstance(part, Dense):
            return self._dense(part)
        if isinstance(part, Mixture):
            return self._mixture(part)
        return self._dense_and_mixture(part)

    def _attention(self, a: Attention, i: int) -> DeviceAttention:
        weights, gpu = self._weights, device(self._weights.ordinal)
        sizes = head_sizes(a, self._cache_type)
        if sizes.least_bytes > gpu.shared_bytes:
            problem = f"{gpu.name} has too little shared memory for heads of {a.head_size} numbers"
            raise BackendUnavailable(failure(CALL, problem, "Use device cpu."))
        matrices = [matrix for matrix in (a.q, a.k, a.v) if matrix is not None]
        sinks = weights.tensors.vector(a.sinks)
        return DeviceAttention(
            sizes,
            weights.matrices(matrices),
            weights.matrix(a.output),
            self.layout.places[i],
            a.scale,
            None if a.rope is None else self._rotations[a.rope],
            a.window,
            a.cap,
            weights.vector(a.q_norm),
            weights.vector(a.k_norm),
            joint_norms=a.q_norm is not None and a.q_norm.size != a.head_size,
            v_norm=a.v_norm,
            sinks=None if sinks is None else weights.send(sinks * np.float32(LOG2_E)),
            temperature=a.temperature,
            gated=a.gated,
            has_keys=a.k is not None,
            has_values=a.v is not None,
        )

    def _dense(self, part: Dense) -> DeviceDense:
        assert part.up is not None  # only encoders have no gate
        gate_up = self._weights.alternating(part.gate, part.up)
        return DeviceDense(part.size, gate_up, self._weights.matrix(part.down), part.activation)

    def _mixture(self, part: Mixture) -> DeviceMixture:
        shared = None if part.shared is None else self._dense(part.shared)
        made = pack_mixture(self._weights.tensors, part, shared, self._weights.ordinal)
        self._weights.nbytes += made.nbytes
        return made

    def _dense_and_mixture(self, part: DenseAndMixture) -> DeviceDenseAndMixture:
        norms = part.dense_post_norm, part.router_norm, part.mixture_norm, part.mixture_post_norm
        sent = [self._weights.send(self._weights.tensors.vector(norm)) for norm in norms]
        return DeviceDenseAndMixture(self._dense(part.dense), self._mixture(part.mixture), *sent)

    def _layer_input(self, part: PerLayerInput, i: int) -> LayerInput:
        gate, projection = self._weights.matrix(part.gate), self._weights.matrix(part.projection)
        norm = self._weights.vector(part.post_norm)
        assert norm is not None
        return LayerInput(i, gate, projection, norm, part.activation)
