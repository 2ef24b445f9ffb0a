"""A language model on a GPU: the launches of one step, in their order.

    embed, then for each block
        normalize (RMSNorm), token mixer,
        normalize, feed-forward part;
    at last normalize, LM head, choose (sampling)

A block's parts launch their own kernels: attention.py, dense.py and their neighbours. Matrices of one kind that share x
are one GEMM: q, k and v, or gate and up, whose rows alternate by eights, so that SwiGLU is the epilogue. Others are
GEMMs one after the other.

Hidden states are float32, inputs and outputs of GEMMs have 16 bits. KV caches are in pages of 64 positions (pages.cuh).
backends/cpu/decoder is the CPU's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.attention import DeviceAttention, power_of_two
from billfish.backends.cuda.block import DeviceBlock
from billfish.backends.cuda.driver import Buffer, KernelLaunch, check, compile_together, copy_in, copy_out, driver
from billfish.backends.cuda.embedding import DeviceEmbedding, DeviceLayerInputs
from billfish.backends.cuda.late_rows import LateMemory
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, Observe
from billfish.backends.cuda.plans import most_work
from billfish.backends.cuda.step_memory import Batch, StepMemory, largest

CHOOSE_THREADS, CHOOSE_PARTS = 1024, 8  # of a CTA; CTAs of a cluster that share a row of logits
CAP_THREADS = 256
ADJUST_THREADS, ADJUST_PARTS = 256, 32  # of a CTA; CTAs that share a row
SCORE_THREADS = 1024
PAGE_THREADS = 256


class DeviceDecoder:
    """All blocks on one device. Numbers between products are float16, or bfloat16.

    last_norm: divided by the scale of logits. logit_cap: c, where logits become c tanh(s / c); 0: none. tables: kinds
    of pages that keys and values are in. batch_invariant: a sequence gets the same bits in any batch. projection: of an
    MTP block, see `run_beside`.
    """

    def __init__(
        self,
        blocks: Sequence[DeviceBlock],
        embedding: DeviceEmbedding,
        head: DeviceMatrix,
        last_norm: Buffer,
        *,
        epsilon: float,
        layer_inputs: DeviceLayerInputs | None = None,
        logit_cap: float = 0.0,
        tables: int = 1,
        bfloat16: bool = False,
        batch_invariant: bool = False,
        projection: DeviceMatrix | None = None,
        ordinal: int = 0,
    ) -> None:
        self.blocks, self.embedding, self.head, self.last_norm = blocks, embedding, head, last_norm
        self.layer_inputs, self.logit_cap, self.tables, self.ordinal = layer_inputs, logit_cap, tables, ordinal
        self.projection = projection
        self.vocabulary, self.hidden = head.weights.shape
        self._launcher = Launcher(self.hidden, epsilon, bfloat16=bfloat16, ordinal=ordinal)
        self._launcher.batch_invariant = batch_invariant
        # Blocks with one key have the same kernels, if their neighbours are of one kind, too.
        keys = [None, *(block.key for block in blocks), None]
        self._different = sorted({tuple(keys[i : i + 3]): i for i in range(len(blocks))}.values())

    @property
    def batch_invariant(self) -> bool:
        return self._launcher.batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, value: bool) -> None:
        self._launcher.batch_invariant = value

    @property
    def bfloat16(self) -> bool:
        return self._launcher.bfloat16

    @property
    def query_block(self) -> int:
        """Positions of a block of queries, such that all layers have room for their heads."""
        mixers = [block.mixer for block in self.blocks if isinstance(block.mixer, DeviceAttention)]
        return min((mixer.sizes.query_block for mixer in mixers), default=1)

    def step(self, rows: int, sequences: int, pages_of_sequence: int, scored: int) -> StepMemory:
        """Memory for steps of up to so many rows. sequences: rows of the tables of pages."""
        parts = [part for block in self.blocks for part in block.parts]
        more = [] if self.layer_inputs is None else [self.layer_inputs.projection]
        more += [] if self.projection is None else [self.projection]
        matrices = [self.head, *more, *(matrix for part in parts for matrix in part.matrices)]
        own = {
            "x": 2 * max(rows, scored) * self.hidden,
            "added": 2 * rows * self.hidden,
            "squares": rows * self.hidden // 4,
            "factors": 8 * rows,
            "logits": 4 * scored * self.vocabulary,
            "ordered": 2 * rows * max((m.weights.shape[1] for m in matrices if m.order is not None), default=0),
            "work": most_work(rows, max(matrix.weights.shape[1] for matrix in matrices)),
        }
        if self.projection is not None:
            own["projected"] = 2 * rows * self.projection.weights.shape[1]
        before = [self.embedding.memory(rows)]
        if self.layer_inputs is not None:
            before.append(self.layer_inputs.memory(rows))
        sizes = largest([own, *before, *(part.memory(rows) for part in parts)])
        about = {"rows": rows, "sequences": sequences, "scored": scored, "tables": self.tables}
        return StepMemory(sizes, self.ordinal, pages_of_sequence=pages_of_sequence, **about)

    # ---- a step: the device is current ----------------------------------------------------------------------------

    def run(self, stream: int, step: StepMemory, batch: Batch, *, activations: str = "exact") -> None:
        """All blocks; then the logits of the batch's `scored` rows.

        activations: "fp8" or "q8" for products of many rows, where the kind of their weights can (plans.py).
        """
        self._launcher.activations = activations
        self._run(stream, step, batch, range(len(self.blocks)))

    @contextmanager
    def observed(self, observe: Observe) -> Iterator[None]:
        """Steps meanwhile tell what matrices multiply; see `Launcher`."""
        self._launcher.observe = observe
        try:
            yield
        finally:
            self._launcher.observe = None

    def run_from(self, stream: int, step: StepMemory, batch: Batch, states: NDArray[np.float32]) -> None:
        """All blocks, from hidden states [rows, hidden] of the host instead of embeddings. A batch may have more
        rows."""
        self._launcher.activations = "exact"
        step.use(batch)
        self.embedding.run(self._launcher, stream, step, batch.rows)  # for the angles
        copy_in(step.at("hidden"), states, stream)
        self._run_blocks(stream, step, batch, range(len(self.blocks)))

    def run_beside(
        self, stream: int, step: StepMemory, batch: Batch, norm: Buffer, beside: NDArray[np.float16]
    ) -> None:
        """All blocks, from the projection of embeddings behind their norm and of what the host has beside each of the
        first rows [rows, hidden]."""
        assert self.projection is not None
        launcher = self._launcher
        launcher.activations = "exact"
        step.use(batch)
        self.embedding.run(launcher, stream, step, batch.rows)
        launcher.normalize(stream, step, batch.rows, norm)
        both = np.empty((len(beside), 2, self.hidden), np.float16)
        embedded = np.empty((len(beside), self.hidden), np.float16)
        copy_out(embedded, step.at("x"), stream)
        both[:, 0], both[:, 1] = embedded, beside
        copy_in(step.at("projected"), both, stream)
        matrices, projected = (self.projection,), step.at("projected")
        launcher.products(stream, step, matrices, projected, step.at("hidden"), batch.rows, float_y=True)
        self._run_blocks(stream, step, batch, range(len(self.blocks)))

    def _run(self, stream: int, step: StepMemory, batch: Batch, blocks: Sequence[int]) -> None:
        launcher = self._launcher
        step.use(batch)
        self.embedding.run(launcher, stream, step, batch.rows)
        if self.layer_inputs is not None:
            self.layer_inputs.run(launcher, stream, step, batch.rows)
        self._run_blocks(stream, step, batch, blocks)
        if batch.scored:
            self.finish(stream, step, batch.scored, which=step.at("scored"))
            self.score(stream, step, batch.scored)

    def _run_blocks(self, stream: int, step: StepMemory, batch: Batch, blocks: Sequence[int]) -> None:
        around = [None, *self.blocks, None]
        for i in blocks:
            self.blocks[i].run(self._launcher, stream, step, batch, around[i], around[i + 2])

    def finish(self, stream: int, step: StepMemory, rows: int, *, added: bool = True, which: int = 0) -> None:
        """Take in the last block's output, and normalize rows for the head: all, or those at `which`."""
        residual = self.blocks[-1].residual if added else None
        self._launcher.normalize(stream, step, rows, self.last_norm, residual, which=which)

    def score(self, stream: int, step: StepMemory, rows: int) -> None:
        """Logits of normalized rows of x."""
        logits = step.at("logits")
        self._launcher.products(stream, step, (self.head,), step.at("x"), logits, rows, float_y=True)
        if self.logit_cap:
            grid = (-(-self.vocabulary // CAP_THREADS), rows)
            self._launcher.launch(stream, "cap", {}, grid, CAP_THREADS, logits, self.vocabulary, float(self.logit_cap))

    def set_pages(self, stream: int, step: StepMemory, count: int) -> None:
        """Write the first `count` entries of `new_pages` into the page tables."""
        pointers, grid = (step.at("new_pages"), step.at("pages")), (-(-count // PAGE_THREADS),)
        self._launcher.launch(stream, "set_pages", {}, grid, PAGE_THREADS, *pointers, count)

    def prepare(self, step: StepMemory, batch: Batch, *, activations: str = "exact") -> None:
        """Compile what `run` and `choose` will launch."""
        heard: set[KernelLaunch] = set()
        self._launcher.heard, self._launcher.activations = heard, activations
        try:
            self._run(0, step, batch, self._different)
            if batch.scored:
                self.choose(0, step, batch.scored)
        finally:
            self._launcher.heard = None
        compile_together(heard, self.ordinal)

    def choose(self, stream: int, step: StepMemory, rows: int) -> None:
        """Sample the next token of each row of logits, as `choices` say: to `picked`, and to `chosen` by slot."""
        self._choose(stream, rows, step.at("logits"), step.at("choices"), step.at("picked"), step.at("chosen"))

    def _choose(self, stream: int, rows: int, logits: int, choices: int, picked: int, chosen: int) -> None:
        parts, device, launch = 1, self._launcher.device, self._launcher.launch
        if device.capability >= (9, 0):
            parts = power_of_two(device.multiprocessors // rows, CHOOSE_PARTS)
        pointers = logits, self.vocabulary, choices, picked, chosen
        launch(stream, "choose", {}, (parts, rows), CHOOSE_THREADS, *pointers, cluster=parts)

    def choose_late(self, stream: int, step: StepMemory, late: LateMemory, rows: int, *, scored: bool) -> None:
        """Sample rows of logits that `late` describes, with penalties, biases and masks, to `late.picked`, and to
        `chosen` by slot. scored: log probabilities are wanted."""
        logits, launch = (step.at("logits"), self.vocabulary), self._launcher.launch
        launch(stream, "adjust", {}, (ADJUST_PARTS, rows), ADJUST_THREADS, *logits, late.rows, late.logits)
        self._choose(stream, rows, late.logits, late.choices, late.picked, step.at("chosen"))
        if scored:
            pointers = *logits, late.rows, late.picked, late.scored
            launch(stream, "log_probabilities", {}, (rows,), SCORE_THREADS, *pointers)

    def prepare_late(self, step: StepMemory) -> None:
        """Compile what `choose_late` will launch."""
        self._launcher.heard = heard = set[KernelLaunch]()
        try:
            self.choose_late(0, step, LateMemory(0, 0, 0, 0, 0), 1, scored=True)
        finally:
            self._launcher.heard = None
        compile_together(heard, self.ordinal)


def captured(work: Callable[[int], None], stream: int) -> Any:
    """A graph of the launches that `work(stream)` makes, for cuGraphLaunch. The device is current."""
    d, collecting = driver(), gc.isenabled()
    gc.disable()  # memory that is freed meanwhile would end the capture
    try:
        check(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capturing")
        try:
            work(stream)
        except BaseException:
            d.cuGraphDestroy(check(d.cuStreamEndCapture(stream), "capturing"))
            raise
        graph = check(d.cuStreamEndCapture(stream), "capturing")
        try:
            return check(d.cuGraphInstantiate(graph, 0), "a graph")
        finally:
            check(d.cuGraphDestroy(graph), "a graph")
    finally:
        if collecting:
            gc.enable()
