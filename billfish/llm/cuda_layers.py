"""The layers of a model on a GPU, one at a time: what a text's activations are, for statistics.

A layer's weights are read when it runs, so the device holds one layer, its sums, and a step's memory. Hidden states
come from the host and go back to it. Methods are as those of the CPU's decoder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np

from billfish.backends.cuda.block import DeviceBlock
from billfish.backends.cuda.compile import check_compiler
from billfish.backends.cuda.decoder import DeviceDecoder
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, OutOfMemory, Stream, copy_in, copy_there, current, device, synchronize
from billfish.backends.cuda.embedding import DeviceEmbedding
from billfish.backends.cuda.experts import DeviceExperts
from billfish.backends.cuda.input_sums import DeviceRows, DeviceSums
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, RoutedRows
from billfish.backends.cuda.memory import as_tensor
from billfish.backends.cuda.mixture_step import DeviceDenseAndMixture, DeviceMixture, DeviceRouter
from billfish.backends.cuda.step_memory import PAGE, Batch
from billfish.core.errors import BackendUnavailable, failure
from billfish.llm.cpu import Enough
from billfish.llm.cuda import CHUNK, FEW_CHUNK
from billfish.llm.cuda_blocks import BlockMaker
from billfish.llm.cuda_kv_cache import CudaCache, SequencePool
from billfish.llm.cuda_steps import CudaSteps, Fed, Scratch
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.kv_cache import Floats
from billfish.llm.model_weights import ModelTensors
from billfish.statistics.inputs import CALL, InputStatistics

# Gets a layer, one of its inputs, -1 for no expert, and rows that are there until it returns.
ObserveRows = Callable[[int, int, int, DeviceRows], object]


class CudaLayers:
    """tensors: of a model that `devices.why_not_layers` says nothing about. It has the tensors that it has when a layer
    is read."""

    def __init__(self, tensors: ModelTensors, ordinal: int) -> None:
        gpu = device(ordinal)
        check_compiler()
        self.tensors, self.config, self._ordinal, self._name = tensors, tensors.config, ordinal, gpu.name
        self.device, self.chunk = f"cuda:{ordinal}", CHUNK if gpu.capability == (9, 0) else FEW_CHUNK
        self._launcher = Launcher(self.config.hidden, self.config.norm_epsilon, ordinal=ordinal)
        self._layer, self._turn = -1, 0
        with self._room():
            weights = GpuWeights(tensors, ordinal)
            self._maker = BlockMaker(self.config, weights)
            self._stream = Stream(ordinal)
            self._pool = SequencePool(self._maker.layout, self._stream, RLock())
            self._scratch = Scratch(self._maker.layout, ordinal)
            # Hidden states take the place of its rows, so it has one.
            self._nothing = DeviceWeights.pack_plain(np.zeros((1, self.config.hidden), np.float16), f"cpu:{ordinal}")
            self._ropes = self._maker.ropes()
            last_norm = tensors.vector(self.config.final_norm) / np.float32(self.config.logit_scale)
            self._last_norm = weights.send(last_norm)
            size = 2 * self.chunk * self.config.hidden
            self._normalized = [Buffer(size, ordinal) for _ in range(2)]

    def cache(self, capacity: int) -> CudaCache:
        return CudaCache(self.config, self._pool, capacity)

    def embed(self, tokens: list[int]) -> Floats:
        return self.tensors.embed(tokens)

    def run_layer(
        self, layer: int, tokens: list[int], x: Floats, source: Floats | None, cache: CudaCache,
        observe: ObserveRows | None,
    ) -> None:  # fmt: skip
        """The hidden states x [tokens, hidden] of a text, from its beginning, through one layer, in place.

        observe: gets what the layer's products multiply. Where it raises `Enough`, x has no meaning afterwards.
        """
        assert source is None, "no layer has keys of another one"
        with self._room(), current(self._ordinal), cache.lock:
            steps = self._read(layer)
            cache.rollback(0)
            cache.reserve(len(x))
            for start in range(0, len(x), self.chunk):
                part = x[start : start + self.chunk]
                with contextlib.suppress(Enough):
                    part[:] = steps.leaving(cache, part, observe)
                cache.tokens += [0] * len(part)
                if cache.states is not None:
                    cache.states.done(len(cache.tokens))

    def read_layer_again(self, layer: int, inputs: Sequence[int] = (0, 2)) -> None:
        """When tensors have changed that multiply these inputs of a layer, by number: the mixer's, or others."""
        if self._layer != layer:
            return
        with self._room():
            assert self._steps is not None
            block = self._steps.block
            self._layer, self._steps = -1, None
            if min(inputs) < 2:
                block = replace(block, mixer=self._maker.mixer(layer))
            if max(inputs) >= 2:
                block = replace(block, feed_forward=self._maker.feed_forward(layer))
            self._take(layer, block)

    @staticmethod
    def take_back() -> None:
        """Have the memory that torch keeps for GPTQ, which no buffer of ours can use otherwise."""
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def normalize(self, hidden: Floats) -> DeviceRows:
        """Hidden states [m, hidden] behind the last norm, up to `chunk` of them: there until the call after the
        next."""
        with self._room(), current(self._ordinal):
            steps = self._read(self._layer if self._layer >= 0 else self.config.layers - 1)
            self._turn = 1 - self._turn
            return steps.normalized(hidden, self._normalized[self._turn].pointer)

    def sums(self, shape: Sequence[int], outer: bool, cross: bool) -> CudaSums | CudaExpertSums:
        """For the inputs [K] of a layer's matrices, or [E, K] of stacks of experts."""
        *experts, k = shape

        def made() -> CudaSums:
            with self._room():
                return CudaSums(DeviceSums(k, outer, cross, self._ordinal), self._launcher, self._stream)

        return CudaExpertSums(experts[0], k, outer, made) if experts else made()

    def keep(self, widths: Mapping[int, int], tokens: int) -> KeptRows:
        """Memory for inputs [tokens, width], by number."""
        with self._room():
            return KeptRows(widths, tokens, self._stream)

    def _read(self, layer: int) -> LayerSteps:
        """The steps of one layer, whose weights are on the device then."""
        if self._layer != layer:
            self._layer, self._steps = -1, None  # the memory of the one before first
            self._take(layer, self._maker.block(layer))
        assert self._steps is not None
        return self._steps

    def _take(self, layer: int, block: DeviceBlock) -> None:
        nothing, config = self._nothing, self.config
        decoder = DeviceDecoder(
            [block],
            DeviceEmbedding(nothing, self._ropes),
            DeviceMatrix(nothing),
            self._last_norm,
            epsilon=config.norm_epsilon,
            tables=len(self._maker.layout.tables),
            ordinal=self._ordinal,
        )
        self._steps = LayerSteps(layer, decoder, self._stream, self._scratch, self.chunk, config.context)
        with current(self._ordinal):
            self._steps.grow(1)
        self._layer = layer

    _steps: LayerSteps | None = None

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """Says what to do where memory ends."""
        try:
            yield
        except OutOfMemory:
            problem = f"{self._name} has no memory for one layer and the sums of its inputs"
            raise BackendUnavailable(
                failure(CALL, problem, "Use device cpu, or a GPU that nobody else uses.")
            ) from None


class LayerSteps(CudaSteps):
    """Steps through a single layer, whose inputs somebody sees. Launches are made one by one."""

    def __init__(
        self, layer: int, decoder: DeviceDecoder, stream: Stream, scratch: Scratch, chunk: int, context: int
    ) -> None:
        super().__init__(decoder, stream, scratch, chunk=chunk, most_rows=chunk + 1, pages=-(-context // PAGE))
        self._layer, self._prepared = layer, set[Batch]()
        [self.block] = decoder.blocks
        self._numbers = numbers_of(self.block)

    def leaving(self, cache: CudaCache, states: Floats, observe: ObserveRows | None) -> Floats:
        """What leaves the layer, of hidden states [rows, hidden] behind those that the cache has."""
        self._entering, self._observe = states, observe
        return self.hidden([Fed(cache, [0] * len(states), 0, True, ())], "exact")

    def _issue(self, batch: Batch, activations: str) -> None:
        with self._layers.observed(self._seen):
            if batch not in self._prepared:
                self._layers.prepare(self.memory, batch)
                self._prepared.add(batch)
            self._layers.run_from(self._stream.pointer, self.memory, batch, self._entering)

    def _seen(self, weights: object, x: int, rows: int, routed: RoutedRows | None) -> None:
        """Report rows to the observer, without the step's padding, which comes last, also among an expert's rows."""
        number, real = self._numbers.get(id(weights)), len(self._entering)
        if self._observe is None or number is None:
            return
        if routed is None:
            assert isinstance(weights, (DeviceMatrix, DeviceRouter))
            self._observe(self._layer, number, -1, DeviceRows(x, real, weights.weights.shape[1]))
            return
        assert isinstance(weights, DeviceExperts)
        k, firsts = weights.shape[2], np.flatnonzero(np.diff(routed.experts, prepend=-1)).tolist()
        for first, end in zip(firsts, [*firsts[1:], rows], strict=True):
            count = int(np.count_nonzero(routed.tokens[first:end] < real))
            if count:
                expert = int(routed.experts[first])
                self._observe(self._layer, number, expert, DeviceRows(x + 2 * first * k, count, k))

    def normalized(self, hidden: Floats, to: int) -> DeviceRows:
        """Hidden states behind the last norm, at the address `to`."""
        stream, rows = self._stream.pointer, DeviceRows(to, *hidden.shape)
        copy_in(self.memory.at("hidden"), np.ascontiguousarray(hidden), stream)
        self._layers.finish(stream, self.memory, len(hidden), added=False)
        copy_there(to, self.memory.at("x"), rows.nbytes, stream)
        return rows


def numbers_of(block: DeviceBlock) -> dict[int, int]:
    """The LayerInput (of the CPU's decoder) that each matrix multiplies, by the id of its weights. A router is left out
    where the shared expert multiplies the same input."""
    part, found = block.feed_forward, dict[int, Sequence[object]]()
    *first, output = block.mixer.matrices
    mixture = part.mixture if isinstance(part, DeviceDenseAndMixture) else part
    dense = part.dense if isinstance(part, DeviceDenseAndMixture) else part
    if isinstance(mixture, DeviceMixture):
        found = {4: mixture.gate_up, 5: [mixture.down]}
        if mixture is not part:
            found[6] = [mixture.router]
        elif mixture.shared is None:
            found[2] = [mixture.router]
        else:
            dense = mixture.shared
    if isinstance(dense, DeviceDense):
        found |= {2: dense.gate_up, 3: [dense.down]}
    found |= {0: first, 1: [output]}
    return {id(weights): number for number, numbered in found.items() for weights in numbered}


class CudaSums:
    """What becomes InputStatistics of x [K], on a GPU: as `Sums`."""

    def __init__(self, sums: DeviceSums, launcher: Launcher, stream: Stream) -> None:
        self._sums, self._launcher, self._stream, self._count = sums, launcher, stream, 0

    def add(self, rows: DeviceRows, expert: int | None = None) -> None:
        self._count += rows.rows
        with current(self._launcher.ordinal):
            self._sums.add(self._launcher, self._stream.pointer, rows)

    def add_cross(self, rows: DeviceRows, truth: DeviceRows) -> None:
        """Inputs, and what the float model has in their place."""
        with current(self._launcher.ordinal):
            self._sums.add_cross(self._launcher, self._stream.pointer, rows, truth.at)

    def for_gptq(self) -> dict[str, Any]:
        """The mean of X^T X, and that of X^T Y or None, as torch tensors; they have the bits of InputStatistics'."""
        from billfish.backends.cuda.device_gptq import memory_for_gptq  # here: it imports torch

        torch = sys.modules["torch"]
        with current(self._launcher.ordinal):
            synchronize(self._stream.pointer)
        found = {"hessian": self._sums.outer_buffer, "cross": self._sums.cross_buffer}
        shape = self._sums.k, self._sums.k
        # By a tensor: a number of Python's would be multiplied by its reciprocal.
        with memory_for_gptq(CALL, self._sums.k):
            count = torch.full((), self._count, dtype=torch.float32, device=f"cuda:{self._launcher.ordinal}")
            return {
                name: None if buffer is None else as_tensor(buffer).view(torch.float32).view(shape) / count
                for name, buffer in found.items()
            }

    def finish(self, name: str, products: bool = True) -> InputStatistics:
        """The statistics; raises for inputs that were not finite. products: whether with X^T X and X^T Y."""
        stream = self._stream.pointer
        with current(self._launcher.ordinal):
            synchronize(stream)
            matrices = (self._sums.outer(stream), self._sums.cross(stream)) if products else (None, None)
            known = InputStatistics(self._sums.squares(stream), np.array(self._count), *matrices)
        known.check(name)
        return known


class CudaExpertSums:
    """The same for the inputs of each expert. Experts that no token chose take no GPU memory."""

    def __init__(self, experts: int, k: int, outer: bool, made: Callable[[], CudaSums]) -> None:
        self._experts, self._k, self._outer, self._made = experts, k, outer, made
        self._sums = dict[int, CudaSums]()

    def add(self, rows: DeviceRows, expert: int | None = None) -> None:
        assert expert is not None
        if expert not in self._sums:
            self._sums[expert] = self._made()
        self._sums[expert].add(rows)

    def add_cross(self, rows: DeviceRows, truth: DeviceRows) -> None:
        raise AssertionError("a stack of experts has no float model beside it")

    def finish(self, name: str) -> InputStatistics:
        """The statistics; raises for inputs that were not finite."""
        known = InputStatistics(
            np.zeros((self._experts, self._k)),
            np.zeros(self._experts, np.int64),
            np.zeros((self._experts, self._k, self._k), np.float32) if self._outer else None,
        )
        for expert, sums in self._sums.items():
            found = sums.finish(name)
            known.squares[expert], known.counts[expert] = found.squares, found.counts
            if known.outer is not None:
                known.outer[expert] = found.outer
        known.check(name)
        return known


class KeptRows:
    """Inputs of a layer in the memory of a GPU, in the order of the text: all are put, then all are taken."""

    def __init__(self, widths: Mapping[int, int], tokens: int, stream: Stream) -> None:
        self._stream, self._done = stream, dict.fromkeys(widths, 0)
        self._memory = {number: Buffer(2 * tokens * width, stream.ordinal) for number, width in widths.items()}

    def rewind(self) -> None:
        """The next rows are the first ones."""
        self._done = dict.fromkeys(self._done, 0)

    def put(self, number: int, rows: DeviceRows) -> None:
        to = self._next(number, rows)
        with current(self._stream.ordinal):
            copy_there(to.at, rows.at, rows.nbytes, self._stream.pointer)

    def take(self, number: int, like: DeviceRows) -> DeviceRows:
        """As many rows as `like` has."""
        return self._next(number, like)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.clear()

    def _next(self, number: int, rows: DeviceRows) -> DeviceRows:
        at = self._memory[number].pointer + self._done[number]
        self._done[number] += rows.nbytes
        return rows._replace(at=at)
