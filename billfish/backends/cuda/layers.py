"""What a language model is on a GPU: its sizes, the weights of its layers, and the memory of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from billfish.backends.cuda.driver import Buffer, check, current, driver, synchronize
from billfish.backends.cuda.weights import DeviceWeights

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
class Matrix:
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
    qkv: tuple[Matrix, ...]
    o: Matrix
    gate_up: tuple[Matrix, ...]
    down: Matrix
    q_norm: Buffer | None = None
    k_norm: Buffer | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (*self.qkv, self.o, *self.gate_up, self.down)


class Step:
    """The memory of a step: what it reads (tokens, positions, texts, pages, blocks, scored), and all between products.

    tokens, positions, texts int32 [rows]: a token, where it is in its text, and the text's number
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
