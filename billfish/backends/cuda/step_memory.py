"""The memory of a step on a GPU, and the rows it has.

A step has rows, one for each token. A row belongs to a *text*, a sequence. The rows of a text are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from billfish.backends.cuda.driver import Buffer, check, current, driver, synchronize

PAGE = 64  # positions; pages.cuh has the same number
# How the token of a row is chosen, as choose.cu has it.
CHOICE = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("top_k", "i4"), ("unused", "i4"), ("random", "f8")])
CLEARED = ("tokens", "positions", "texts", "spans", "pages", "states", "choices")


@dataclass(frozen=True)
class Batch:
    """What a step has.

    blocks: of queries, for passages of several rows. 0: a decode step, where row i is the next token of text i.
    parts: CTAs that share the keys of a text in a decode step; None: as many as keep all multiprocessors at work.
    long: a text of a decode step has many positions, so that more CTAs for its keys pay.
    chunks: of recurrent layers, for passages of several rows, as `feed_chunks` of recurrent.py counts them.
    """

    rows: int
    texts: int
    blocks: int = 0
    parts: int | None = None
    long: bool = False
    chunks: int = 0


class StepMemory:
    """What a step reads, and all between its products. `at(name)` is the address of a part.

    tokens, positions, texts int32 [rows]: a token, its position in its sequence, and the sequence's number
    spans int32 [texts, 2]: the first row of a text, and how many it has
    pages uint64 [tables, texts, pages_of_text]: addresses of pages of the KV cache; a table for each kind of pages
    states uint64 [texts]: addresses of the recurrent states
    blocks int32 [blocks, 4]: of queries, where a text has several rows: the first row, how many positions, the text,
    and the first position
    scored int32 [scored]: the rows that get scores, where a text has several
    scores float32 [scored, vocabulary]
    choices CHOICE [scored]: how a token is chosen
    hidden float32 [rows, hidden]: the residual stream
    x [rows, hidden], 16 bits: the input of a part of a block, normalized
    added [rows, hidden], 16 bits: its output, which the next norm adds to `hidden`

    Other parts are what blocks ask for in `memory`.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        ordinal: int,
        *,
        rows: int,
        texts: int,
        pages_of_text: int,
        tables: int,
        scored: int,
    ) -> None:
        self.texts, self.pages_of_text = texts, pages_of_text
        own = {
            "tokens": 4 * rows,
            "positions": 4 * rows,
            "texts": 4 * rows,
            "spans": 8 * texts,
            "pages": 8 * tables * texts * pages_of_text,
            "states": 8 * texts,
            "blocks": 16 * (rows + texts),
            "scored": 4 * scored,
            "choices": CHOICE.itemsize * scored,
        }
        self._parts = {name: Buffer(size, ordinal) for name, size in (own | sizes).items()}
        with current(ordinal):
            for name in CLEARED:
                check(driver().cuMemsetD8(self.at(name), 0, self._parts[name].nbytes), "clearing")
            synchronize(0)  # no other stream waits for this one

    def at(self, name: str) -> int:
        """The address of a part."""
        return self._parts[name].pointer

    def pages(self, table: int, text: int = 0) -> int:
        """The address of a text's row in a table of pages."""
        return self.at("pages") + 8 * (table * self.texts + text) * self.pages_of_text


def largest(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The bytes that serve all parts, one after the other: by name, the most that any asks for."""
    sizes = dict[str, int]()
    for part in parts:
        for name, size in part.items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes
