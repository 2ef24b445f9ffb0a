"""A language model's layers on a GPU: the launches of one step, in their order.

    embed, then for each layer
        normalize (RMSNorm), q k v, rotate (RoPE), attend, o,
        normalize, gate up, down;
    at last normalize, LM head, choose (sampling)

Matrices of one kind that share x are one GEMM: q, k and v, or gate and up, whose rows alternate by eights, so that
SwiGLU is the epilogue. Others are GEMMs one after the other.

Hidden states are float32, inputs and outputs of GEMMs have 16 bits. A step has rows, one for each token. A row belongs
to a *text*, a sequence, whose KV cache is in pages of 64 positions (pages.cuh). backends/cpu/decoder is the CPU's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import (
    Buffer,
    KernelLaunch,
    check,
    compile_together,
    copy_in,
    current,
    device,
    driver,
    synchronize,
)
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, Gemm, gate_ctas, launches, most_work
from billfish.core.errors import BackendUnavailable

PAGE = 64  # positions; pages.cuh has the same number
# How the token of a row is chosen, as choose.cu has it.
CHOICE = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("top_k", "i4"), ("unused", "i4"), ("random", "f8")])


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    epsilon: float
    frequencies: tuple[float, ...]  # radians from one position to the next, for each pair of a head that rotates
    adjacent: bool = False  # how pairs of a head rotate: 2i with 2i + 1, or i with i + half
    gate: str = "silu"  # or "gelu"
    head_norms: bool = False  # an RMSNorm of every head's q and k
    embedding_scale: float = 1.0

    @property
    def group(self) -> int:
        """Heads that share keys and values."""
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        """Rows of the matrices q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def wide(self) -> int:
        """Numbers of a head in a page, as pages.cuh has them."""
        return -(-self.head_size // 64) * 64

    @property
    def page_bytes(self) -> int:
        """Of keys and values of PAGE positions, in all layers."""
        return self.layers * 2 * self.kv_heads * PAGE * self.wide * 2


@dataclass(frozen=True)
class DeviceMatrix:
    """Weights, the float32 bias of their product, and the int32 order in which they have the columns of x."""

    weights: DeviceWeights
    bias: Buffer | None = None
    order: Buffer | None = None


@dataclass(frozen=True)
class Layer:
    """Norms are float32. qkv: q, k and v, or neighbours of these in one. gate_up: one matrix, of eight rows of gate,
    eight of up, and so on; or two."""

    attention_norm: Buffer
    feed_forward_norm: Buffer
    qkv: tuple[DeviceMatrix, ...]
    o: DeviceMatrix
    gate_up: tuple[DeviceMatrix, ...]
    down: DeviceMatrix
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return (*self.qkv, self.o, *self.gate_up, self.down)


class StepMemory:
    """The memory of a step: what it reads (tokens, positions, texts, pages, blocks, scored), and all between products.

    tokens, positions, texts int32 [rows]: a token, its position in its sequence, and the sequence's number
    pages uint64 [texts, pages_of_text]: addresses
    blocks int32 [blocks, 4]: of queries, where a text has several rows: the first row, how many positions, the text,
    and the first position
    scored int32 [scored]: the rows that get scores, where a text has several
    scores float32 [scored, vocabulary]
    choices CHOICE [scored]: how a token is chosen

    apart: gate and up are two products somewhere. ordered: the most columns of a matrix that has an order. work: bytes
    for x in 8 bits.
    """

    def __init__(
        self,
        shape: Shape,
        rows: int,
        texts: int,
        pages_of_text: int,
        scored: int,
        ordinal: int,
        *,
        apart: bool,
        ordered: int,
        work: int = 0,
    ) -> None:
        self.pages_of_text = pages_of_text
        sizes = {
            "tokens": 4 * rows,
            "positions": 4 * rows,
            "texts": 4 * rows,
            "pages": 8 * texts * pages_of_text,
            "blocks": 16 * (rows + texts),
            "scored": 4 * scored,
            "hidden": 4 * rows * shape.hidden,
            "angles": 8 * rows * len(shape.frequencies),
            "x": 2 * rows * shape.hidden,
            "qkv": 2 * rows * shape.qkv,
            "attended": 2 * rows * shape.heads * shape.head_size,
            "opened": 2 * rows * shape.feed_forward,
            "apart": 2 * 2 * rows * shape.feed_forward * apart,
            "ordered": 2 * rows * ordered,
            "work": work,
            "added": 2 * rows * shape.hidden,
            "scores": 4 * scored * shape.vocabulary,
            "choices": CHOICE.itemsize * scored,
        }
        self._parts = {name: Buffer(size, ordinal) for name, size in sizes.items()}
        with current(ordinal):
            for name in ("tokens", "positions", "texts", "pages", "choices"):
                check(driver().cuMemsetD8(self.at(name), 0, self._parts[name].nbytes), "clearing")
            synchronize(0)  # no other stream waits for this one

    def at(self, name: str) -> int:
        """The address of a part."""
        return self._parts[name].pointer


# ---- the decoder -----------------------------------------------------------------------------------------------------


FEW_WARPS, MANY_WARPS, STAGES = 4, 8, 2  # of attend.cu
MOST_PARTS = 8  # CTAs of a cluster that share the keys of a text
CHOOSE_THREADS = 1024
ROTATED_ROWS = 8  # of a CTA of rotate.cu, where there are many and heads have 64 numbers
THREADS = 256  # of reorder.cu


class DeviceDecoder:
    """All layers on one device. Numbers between products are float16, or bfloat16.

    batch_invariant: a sequence gets the same bits in any batch.
    """

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Layer],
        embedding: DeviceWeights,
        head: DeviceMatrix,
        last_norm: Buffer,
        *,
        bfloat16: bool = False,
        batch_invariant: bool = False,
        ordinal: int = 0,
    ) -> None:
        self.shape, self.layers, self.embedding, self.head, self.last_norm = shape, layers, embedding, head, last_norm
        self.ordinal, self.bfloat16, self.batch_invariant = ordinal, bfloat16, batch_invariant
        self.device = device(ordinal)
        # Layers whose products have the same kinds of weights have the same kernels.
        kinds = {tuple(matrix.weights.kind for matrix in layer.matrices): i for i, layer in enumerate(layers)}
        self._different = sorted({0, *kinds.values()})
        self._heard: set[KernelLaunch] | None = None  # launches that are to be compiled, not launched
        self._activations = "exact"  # of the step that runs
        self._type = "BF16" if bfloat16 else "F16"
        self._frequencies = sent(np.asarray(shape.frequencies, np.float64), ordinal)

    def step(self, rows: int, texts: int, pages_of_text: int, scored: int) -> StepMemory:
        """Memory for steps of up to so many rows."""
        matrices = [self.head, *(matrix for layer in self.layers for matrix in layer.matrices)]
        apart = any(len(layer.gate_up) > 1 for layer in self.layers)
        ordered = max((matrix.weights.shape[1] for matrix in matrices if matrix.order is not None), default=0)
        work = most_work(rows, max(matrix.weights.shape[1] for matrix in matrices))
        return StepMemory(
            self.shape, rows, texts, pages_of_text, scored, self.ordinal, apart=apart, ordered=ordered, work=work
        )

    @property
    def query_block(self) -> int:
        """Positions of a block of queries."""
        return MANY_WARPS * 16 // self.shape.group

    # ---- a step: the device is current ----------------------------------------------------------------------------

    def run(
        self,
        stream: int,
        step: StepMemory,
        rows: int,
        *,
        blocks: int = 0,
        scored: int = 0,
        parts: int | None = None,
        activations: str = "exact",
    ) -> None:
        """All layers, for `rows` rows; then scores for `scored` rows.

        blocks: of queries, for passages of several rows. 0: row i is the next token of text i. All rows or none get
        scores then, and `parts` CTAs share the keys of each text. activations: "fp8" or "q8" for products of many rows,
        where the kind of their weights can (plans.py).
        """
        self._activations = activations
        parts = self.parts_for(rows) if parts is None else parts
        self._run(stream, step, rows, range(len(self.layers)), blocks, scored, parts)

    def _run(
        self, stream: int, step: StepMemory, rows: int, layers: Sequence[int], blocks: int, scored: int, parts: int
    ) -> None:
        at = step.at
        self.embed(stream, step, rows)
        for i in layers:
            layer = self.layers[i]
            self.normalize(stream, step, rows, layer.attention_norm, added=i > 0)
            self.products(stream, step, layer.qkv, at("x"), at("qkv"), rows)
            self.rotate(stream, step, rows, i)
            self.attend(stream, step, rows, i, blocks=blocks, parts=parts)
            self.products(stream, step, (layer.o,), at("attended"), at("added"), rows)
            self.normalize(stream, step, rows, layer.feed_forward_norm)
            self.open(stream, step, layer.gate_up, rows)
            self.products(stream, step, (layer.down,), at("opened"), at("added"), rows)
        if scored:
            self.normalize(stream, step, scored, self.last_norm, which=at("scored") if blocks else 0)
            self.score(stream, step, scored)

    def score(self, stream: int, step: StepMemory, rows: int) -> None:
        """Logits of normalized rows of x."""
        self.products(stream, step, (self.head,), step.at("x"), step.at("scores"), rows, float_y=True)

    def parts_for(self, rows: int) -> int:
        """CTAs that share the keys of each of `rows` texts: as many as keep all multiprocessors at work.

        The order of additions depends on it.
        """
        if self.device.capability < (9, 0):
            return 1
        if self.batch_invariant:
            return 2
        ctas = rows * self.shape.kv_heads * -(-self.shape.group // 16)
        return power_of_two(self.device.multiprocessors // ctas, MOST_PARTS)

    def prepare(
        self, step: StepMemory, rows: int, *, blocks: int = 0, scored: int = 0, activations: str = "exact"
    ) -> None:
        """Compile what `run` and `choose` will launch."""
        heard: set[KernelLaunch] = set()
        self._heard, self._activations = heard, activations
        try:
            self._run(0, step, rows, self._different, blocks, scored, self.parts_for(rows))
            if scored:
                self.choose(0, step, scored)
        finally:
            self._heard = None
        compile_together(heard, self.ordinal)

    def embed(self, stream: int, step: StepMemory, rows: int) -> None:
        s, at = self.shape, step.at
        n, k = self.embedding.shape
        table = address(self.embedding.bricks), address(self.embedding.row_scale)
        read = at("tokens"), at("positions"), self._frequencies.pointer
        written = at("hidden"), at("angles")
        numbers = n, k, len(s.frequencies), float(s.embedding_scale)
        macros = self.embedding.kind.macros()
        self._launch(stream, "embed", macros, (-(-k // 128), rows), 32, *table, *read, *written, *numbers)

    def normalize(
        self, stream: int, step: StepMemory, rows: int, weight: Buffer, *, added: bool = True, which: int = 0
    ) -> None:
        """Add the last GEMM's output to the residual stream and normalize it for the next (RMSNorm)."""
        s, at = self.shape, step.at
        threads = min(1024, max(32, -(-s.hidden // 8 // 32) * 32))
        macros = {"TYPE": self._type, "HIDDEN": s.hidden, "THREADS": threads, "ADD": int(added)}
        pointers = at("hidden"), at("added"), weight.pointer, which, at("x")
        self._launch(stream, "normalize", macros, (rows,), threads, *pointers, s.epsilon)

    def products(
        self,
        stream: int,
        step: StepMemory,
        matrices: Sequence[DeviceMatrix],
        x: int,
        y: int,
        rows: int,
        *,
        gate: str | None = None,
        float_y: bool = False,
    ) -> None:
        """Each product's [rows, n] behind the one before it, from y on."""
        ordered = None
        for matrix in matrices:
            (n, k), bias, read = matrix.weights.shape, matrix.bias, x
            if matrix.order is not None:
                read = step.at("ordered")
                if matrix.order is not ordered:
                    self._launch(stream, "reorder", {}, (rows,), THREADS, x, matrix.order.pointer, read, k)
                    ordered = matrix.order
            about = (self.bfloat16, bias is not None, None, self.batch_invariant, gate, float_y, self._activations)
            gemm, added = Gemm(matrix.weights.kind, rows, n, k, *about), 0 if bias is None else bias.pointer
            heard = launches(gemm, self.device) if self._heard is not None else None
            if heard and self._heard is not None:
                self._heard.update(heard)
            elif not matrix.weights.multiply(stream, gemm, read, k, added, y, step.at("work")):
                raise BackendUnavailable(f"cuda: kernels for {self.device.name} support batches up to 64, not {rows}.")
            y += 2 * rows * n

    def open(self, stream: int, step: StepMemory, gate_up: Sequence[DeviceMatrix], rows: int) -> None:
        """activation(gate) * up of the feed-forward network."""
        s, at = self.shape, step.at
        if len(gate_up) == 1:
            self.products(stream, step, gate_up, at("x"), at("opened"), rows, gate=s.gate)
            return
        self.products(stream, step, gate_up, at("x"), at("apart"), rows)
        count, macros = rows * s.feed_forward, {"TYPE": self._type, "GATE": GATES[s.gate]}
        pointers = at("apart"), at("apart") + 2 * count, at("opened")
        self._launch(
            stream,
            "gate",
            macros,
            (gate_ctas(rows, s.feed_forward),),
            GATE_COLUMNS,
            *pointers,
            rows,
            s.feed_forward,
            s.feed_forward,
        )

    def heads_at(self, step: StepMemory, rows: int, layer: Layer) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Where q, k and v of the first row are, and how many numbers further on those of the next one."""
        s, places, strides, at = self.shape, [], [], step.at("qkv")
        sizes = [s.heads * s.head_size, s.kv_heads * s.head_size, s.kv_heads * s.head_size]
        for matrix in layer.qkv:
            n, column = matrix.weights.shape[0], 0
            while column < n:
                places.append(at + 2 * column)
                strides.append(n)
                column += sizes[len(places) - 1]
            at += 2 * rows * n
        (q, k, v), (q_stride, k_stride, v_stride) = places, strides
        return (q, k, v), (q_stride, k_stride, v_stride)

    def rotate(self, stream: int, step: StepMemory, rows: int, i: int) -> None:
        """RoPE of queries and keys of layer i; keys and values go to their pages of the KV cache."""
        s, at, layer = self.shape, step.at, self.layers[i]
        together = 1 if rows < ROTATED_ROWS else max(1, ROTATED_ROWS * 64 // s.wide)
        macros = {
            "TYPE": self._type,
            "HEAD": s.head_size,
            "PAIRS": len(s.frequencies),
            "ADJACENT": int(s.adjacent),
            "NORMED": int(s.head_norms),
            "ROWS": together,
        }
        norms = [0 if norm is None else norm.pointer for norm in (layer.q_norm, layer.k_norm)]
        places, strides = self.heads_at(step, rows, layer)
        pointers = at("angles"), at("positions"), at("texts"), at("pages"), *norms
        grid, threads = (s.heads + 2 * s.kv_heads, -(-rows // together)), s.wide // 2 * together
        numbers = s.epsilon, s.heads, s.kv_heads, i, step.pages_of_text, rows
        self._launch(stream, "rotate", macros, grid, threads, *places, *strides, *pointers, *numbers)

    def attend(self, stream: int, step: StepMemory, rows: int, i: int, *, blocks: int, parts: int) -> None:
        s, at, few = self.shape, step.at, not blocks
        warps, tile = FEW_WARPS if few else MANY_WARPS, 2 * PAGE * s.wide * 2  # of keys and of values
        stages = STAGES if STAGES * tile <= self.device.shared_bytes else 1
        macros = {
            "TYPE": self._type,
            "HEAD": s.head_size,
            "GROUP": s.group,
            "WARPS": warps,
            "STAGES": stages,
            "FEW": int(few),
        }
        tiles, sums = stages * tile, warps * 16 * (s.wide + 2) * 4  # the sums take the tiles' place
        grid = (parts, s.kv_heads * -(-s.group // 16), rows) if few else (blocks, s.kv_heads)
        (q, _, _), (q_stride, _, _) = self.heads_at(step, rows, self.layers[i])
        pointers = q, at("positions"), at("blocks"), at("pages"), at("attended")
        numbers = q_stride, s.heads, s.kv_heads, i, step.pages_of_text
        shape = {"shared_bytes": max(tiles, sums) if few else tiles, "cluster": parts if few else 1}
        self._launch(stream, "attend", macros, grid, warps * 32, *pointers, *numbers, **shape)

    def choose(self, stream: int, step: StepMemory, rows: int) -> None:
        """Sample the next token of each row of logits, as `choices` say, and increment the positions."""
        at, parts = step.at, 1
        if self.device.capability >= (9, 0):
            parts = power_of_two(self.device.multiprocessors // rows, MOST_PARTS)
        pointers = at("choices"), at("tokens"), at("positions")
        numbers = at("scores"), self.shape.vocabulary
        self._launch(stream, "choose", {}, (parts, rows), CHOOSE_THREADS, *numbers, *pointers, cluster=parts)

    def _launch(
        self,
        stream: int,
        name: str,
        macros: dict[str, Any],
        grid: tuple[int, ...],
        threads: int,
        *arguments: int | float,
        **shape: int,
    ) -> None:
        defined = tuple(sorted((macro, str(value)) for macro, value in macros.items()))
        overlap = self.device.capability >= (9, 0)
        launch = KernelLaunch(f"{name}.cu", f"marlin_{name}", defined, grid, threads, overlap=overlap, **shape)
        if self._heard is None:
            launch(self.ordinal, stream, *arguments)
        else:
            self._heard.add(launch)


def power_of_two(number: int, most: int) -> int:
    """The largest that is not above either, and at least 1."""
    return 1 << max(0, min(number, most).bit_length() - 1)


def sent(array: NDArray[Any], ordinal: int) -> Buffer:
    """A copy of an array on a device."""
    buffer = Buffer(array.nbytes, ordinal)
    with current(ordinal):
        copy_in(buffer.pointer, array, 0)
    return buffer


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
