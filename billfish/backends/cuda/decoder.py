"""A language model's layers on a GPU: the launches of one step, in order.

    embed -> [normalize -> q, k, v -> rotate -> attend -> o -> normalize -> gate, up -> down] -> normalize -> head -> choose

Hidden states are float32; between products numbers have 16 bits. A step has rows: one for each token. A *text* is what
rows attend to: its pages hold keys and values of 64 positions each (pages.cuh).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.driver import (
    Buffer,
    KernelLaunch,
    check,
    copy_in,
    copy_out,
    current,
    device,
    driver,
    synchronize,
    tensor_map,
)
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.plans import Gemm, plan
from billfish.backends.cuda.weights import DeviceWeights, brick_kernel

PAGE = 64  # positions
FEW_WARPS, MANY_WARPS, STAGES = 4, 8, 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    layers: int
    epsilon: float
    adjacent: bool  # how pairs of a head rotate
    gate: str
    frequencies: tuple[float, ...]
    head_norms: bool = False
    embedding_scale: float = 1.0

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def wide(self) -> int:
        """Numbers of a head in a page."""
        return -(-self.head_size // 64) * 64

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * PAGE * self.wide * 2


@dataclass
class Layer:
    """Norms are float32 in memory of the device; matrices are bricks. gate_up: eight gates, eight others, and so on."""

    attention_norm: Buffer
    feed_forward_norm: Buffer
    qkv: DeviceWeights
    o: DeviceWeights
    gate_up: DeviceWeights
    down: DeviceWeights
    qkv_bias: Buffer | None = None
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None


@dataclass
class Step:
    """Memory of a step with up to `rows` rows of `texts` texts."""

    rows: int
    texts: int
    pages_of_text: int
    parts: dict[str, Buffer] = field(default_factory=dict)

    def at(self, name: str) -> int:
        return self.parts[name].pointer


class DeviceDecoder:
    """All layers on one device. x between products is float16, or bfloat16."""

    def __init__(
        self,
        shape: Shape,
        layers: Sequence[Layer],
        embedding: DeviceWeights,
        head: DeviceWeights,
        last_norm: Buffer,
        ordinal: int = 0,
        bfloat16: bool = False,
    ) -> None:
        self.shape, self.layers, self.embedding, self.head, self.last_norm = shape, layers, embedding, head, last_norm
        self.ordinal, self.bfloat16 = ordinal, bfloat16
        self.device = device(ordinal)
        self.type = "BF16" if bfloat16 else "F16"
        self.frequencies = self.send(np.asarray(shape.frequencies, np.float64))

    # ---- memory ---------------------------------------------------------------------------------------------------

    def send(self, array: NDArray[Any]) -> Buffer:
        buffer = Buffer(array.nbytes, self.ordinal)
        with current(self.ordinal):
            copy_in(buffer.pointer, array, 0)
        return buffer

    def step(self, rows: int, texts: int, pages_of_text: int, scored: int) -> Step:
        s = self.shape
        sizes = {
            "tokens": 4 * rows,
            "positions": 4 * rows,
            "texts": 4 * rows,
            "blocks": 16 * (rows + texts),
            "scored": 4 * scored,
            "pages": 8 * texts * pages_of_text,
            "hidden": 4 * rows * s.hidden,
            "angles": 8 * rows * len(s.frequencies),
            "x": 2 * rows * s.hidden,
            "qkv": 2 * rows * s.qkv,
            "attended": 2 * rows * s.heads * s.head_size,
            "opened": 2 * rows * s.feed_forward,
            "added": 2 * rows * s.hidden,
            "scores": 4 * scored * s.vocabulary,
            "bests": 8 * scored * 64,
            "ended": 4 * scored,
        }
        step = Step(rows, texts, pages_of_text, {name: Buffer(size, self.ordinal) for name, size in sizes.items()})
        with current(self.ordinal):
            for name in ("ended", "tokens", "positions", "texts", "pages"):
                check(driver().cuMemsetD8(step.at(name), 0, step.parts[name].nbytes), "clearing")
            synchronize(0)  # other streams do not wait for this one
        return step

    # ---- launches -------------------------------------------------------------------------------------------------

    def product(
        self,
        stream: int,
        weights: DeviceWeights,
        x: int,
        y: int,
        m: int,
        bias: Buffer | None = None,
        gate: str | None = None,
        float_y: bool = False,
    ) -> None:
        n, k = weights.shape
        gemm = Gemm(weights.kind, m, n, k, self.bfloat16, bias is not None, gate=gate, float_y=float_y)
        if not weights.multiply(stream, gemm, x, k, 0 if bias is None else bias.pointer, y):
            raise NotImplementedError

    def launch(
        self,
        stream: int,
        source: str,
        macros: dict[str, object],
        grid: tuple[int, ...],
        threads: int,
        *arguments: Any,
        **more: Any,
    ) -> None:
        defined = tuple(sorted((name, str(value)) for name, value in macros.items()))
        launch = KernelLaunch(f"{source}.cu", f"marlin_{source}", defined, grid, threads, overlap=True, **more)
        launch(self.ordinal, stream, *arguments)

    def normalize(self, stream: int, step: Step, m: int, weight: Buffer, added: bool, rows: int = 0) -> None:
        s = self.shape
        threads = min(1024, max(32, -(-s.hidden // 8 // 32) * 32))
        macros = {"TYPE": self.type, "HIDDEN": s.hidden, "THREADS": threads, "ADD": int(added)}
        pointers = step.at("hidden"), step.at("added"), weight.pointer, rows, step.at("x")
        self.launch(stream, "normalize", macros, (m,), threads, *pointers, s.epsilon)

    def run(self, stream: int, step: Step, m: int, blocks: int = 0, scored: int = 0, splits: int = 8) -> None:
        """All layers for m rows. blocks: of queries, for passages of several rows; 0: each row is a text of its own.
        scored: how many rows get scores: the first, or those that `scored` names where rows have blocks."""
        s, at = self.shape, step.at
        n, k = self.embedding.shape
        embed = brick_kernel("embed", self.embedding.about, 32)
        launch = KernelLaunch("embed.cu", "marlin_embed", embed.macros, (-(-k // 128), m), 32, overlap=True)
        launch(
            self.ordinal,
            stream,
            address(self.embedding.bricks),
            address(self.embedding.row_scale),
            at("tokens"),
            at("positions"),
            self.frequencies.pointer,
            at("hidden"),
            at("angles"),
            n,
            k,
            len(s.frequencies),
            float(s.embedding_scale),
        )
        for i, layer in enumerate(self.layers):
            self.normalize(stream, step, m, layer.attention_norm, i > 0)
            self.product(stream, layer.qkv, at("x"), at("qkv"), m, layer.qkv_bias)
            self.rotate(stream, step, m, i, layer)
            self.attend(stream, step, m, i, blocks, splits)
            self.product(stream, layer.o, at("attended"), at("added"), m)
            self.normalize(stream, step, m, layer.feed_forward_norm, True)
            self.product(stream, layer.gate_up, at("x"), at("opened"), m, gate=s.gate)
            self.product(stream, layer.down, at("opened"), at("added"), m)
        if scored:
            self.normalize(stream, step, scored, self.last_norm, True, at("scored") if blocks else 0)
            self.product(stream, self.head, at("x"), at("scores"), scored, float_y=True)

    def rotate(self, stream: int, step: Step, m: int, i: int, layer: Layer) -> None:
        s, at = self.shape, step.at
        macros = {
            "TYPE": self.type,
            "HEAD": s.head_size,
            "PAIRS": len(s.frequencies),
            "ADJACENT": int(s.adjacent),
            "NORMED": int(s.head_norms),
        }
        norms = [0 if norm is None else norm.pointer for norm in (layer.q_norm, layer.k_norm)]
        pointers = at("qkv"), at("angles"), at("positions"), at("texts"), at("pages"), *norms
        grid, threads = (s.heads + 2 * s.kv_heads, m), -(-s.head_size // 64) * 32
        numbers = s.heads, s.kv_heads, i, step.pages_of_text
        self.launch(stream, "rotate", macros, grid, threads, *pointers, s.epsilon, *numbers)

    def attend(self, stream: int, step: Step, m: int, i: int, blocks: int, splits: int) -> None:
        s, at = self.shape, step.at
        group, few = s.heads // s.kv_heads, not blocks
        warps = FEW_WARPS if few else MANY_WARPS
        tile = PAGE * s.wide * 2
        shared = STAGES * 2 * tile
        if few:
            shared = max(shared, warps * 16 * (s.wide + 2) * 4)
        macros = {
            "TYPE": self.type,
            "HEAD": s.head_size,
            "GROUP": group,
            "WARPS": warps,
            "STAGES": STAGES,
            "FEW": int(few),
        }
        chunks = -(-group // 16)
        grid = (splits, s.kv_heads * chunks, m) if few else (blocks, s.kv_heads)
        pointers = at("qkv"), at("positions"), at("blocks"), at("pages"), at("attended")
        numbers = s.heads, s.kv_heads, i, step.pages_of_text
        cluster = splits if few else 1
        self.launch(
            stream, "attend", macros, grid, warps * 32, *pointers, *numbers, shared_bytes=shared, cluster=cluster
        )

    def choose(self, stream: int, step: Step, m: int) -> None:
        at = step.at
        parts = max(1, min(64, 128 // m))
        pointers = at("bests"), at("ended"), at("tokens"), at("positions")
        numbers = self.shape.vocabulary
        self.launch(stream, "choose", {"THREADS": 256}, (parts, m), 256, at("scores"), numbers, *pointers)

    def query_block(self) -> int:
        """Positions of a block of queries."""
        return MANY_WARPS * 16 // (self.shape.heads // self.shape.kv_heads)


def captured(work: Callable[[int], None], stream: int) -> Any:
    """A graph of what `work` launches."""
    d = driver()
    check(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "capture")
    try:
        work(stream)
    finally:
        graph = check(d.cuStreamEndCapture(stream), "capture")
    return check(d.cuGraphInstantiate(graph, 0), "graph")


__all__ = ["DeviceDecoder", "Layer", "Shape", "captured", "copy_out", "synchronize", "tensor_map"]
