"""The memory of a step on a GPU, and the rows that a step has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.driver import Buffer, check, current, driver, synchronize

PAGE = 64  # positions; pages.cuh has the same number
# How the token of a row is chosen, as choose.cu has it. slot: where in `chosen` the token goes.
CHOICE = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("slot", "i4"), ("unused", "i4"),
     ("random", "f8")]
)  # fmt: skip
NEW_PAGE = np.dtype([("place", "u8"), ("page", "u8")])  # an entry of the page tables, as in set_pages.cu
MOST_NEW_PAGES = 1 << 12  # entries in one copy and launch
ALIGNED = 16  # bytes


@dataclass(frozen=True)
class Batch:
    """The rows of a step: first `decoding` next tokens of sequences, and drafted ones behind these, then the rows of
    `prompts` sequences.

    rows: of both. blocks: of queries, which the rows of prompts are cut into. chunks: of recurrent layers, likewise.
    scored: rows that get logits. parts: CTAs that share the keys of a sequence that decodes; None: as many as keep all
    multiprocessors at work. long: such a sequence has many positions, so that more CTAs for its keys pay.
    """

    rows: int
    decoding: int
    prompts: int = 0
    blocks: int = 0
    chunks: int = 0
    scored: int = 0
    parts: int | None = None
    long: bool = False

    @property
    def sequences(self) -> int:
        return self.decoding + self.prompts


@lru_cache(maxsize=1024)
def input_layout(batch: Batch) -> tuple[dict[str, tuple[int, Any, tuple[int, ...]]], int]:
    """What the host sends for a step, as one piece of memory: offset, type and shape of each part, and all bytes."""
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tokens": (np.int32, (batch.rows,)),
        "positions": (np.int32, (batch.rows,)),
        "sequences": (np.int32, (batch.rows,)),
        "blocks": (np.int32, (batch.decoding + batch.blocks, 4)),
        "scored": (np.int32, (batch.scored,)),
        "choices": (CHOICE, (batch.scored,)),
        "states": (np.uint64, (batch.sequences,)),
        "counts": (np.int32, (batch.decoding,)),
        "chunks": (np.int32, (batch.chunks, 4)),
        "chunk_saves": (np.uint64, (batch.chunks,)),
        "chunk_ranges": (np.int32, (batch.prompts, 2)),
    }
    places, end = dict[str, tuple[int, Any, tuple[int, ...]]](), 0
    for name, (dtype, shape) in shapes.items():
        places[name] = end, dtype, shape
        end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
    return places, end


def input_views(batch: Batch, memory: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """The parts of a step's inputs as arrays in that memory."""
    views = dict[str, NDArray[Any]]()
    for name, (offset, dtype, shape) in input_layout(batch)[0].items():
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        views[name] = memory[offset : offset + nbytes].view(dtype).reshape(shape)
    return views


def input_bytes(rows: int, sequences: int, scored: int) -> int:
    """Of a step of up to so many."""
    most = Batch(rows, sequences, sequences, blocks=rows, chunks=rows, scored=scored)
    return input_layout(most)[1]


class StepMemory:
    """What a step reads, and all between its products. `at(name)` is the address of a part.

    The host sends these for each step, behind each other; where they are depends on the batch that `use` was told:
        tokens int32 [rows]: or ~slot, for the token that the step before chose for that slot
        positions, sequences int32 [rows]: a row's position in its sequence, and the sequence's row in tables of pages
        blocks int32 [decoding + blocks, 4]: of queries: the first row, how many positions, the sequence as above, and
        the first position. Those of sequences that decode come first.
        scored int32 [scored]: the rows that get logits
        choices CHOICE [scored]: how a token is chosen
        states uint64 [decoding + prompts]: addresses of recurrent states; those of a drafted row are other memory
        counts int32 [decoding]: how many rows the sequence has that begins with each row; 0 for its drafted rows
        chunks int32 [chunks, 4], chunk_saves uint64 [chunks], chunk_ranges int32 [prompts, 2]: see recurrent.py
    These stay from step to step:
        pages uint64 [tables, sequences, pages_of_sequence]: addresses of pages of the KV cache; a table for each kind
        chosen int32 [sequences]: the token that was chosen last, by slot
        new_pages NEW_PAGE [MOST_NEW_PAGES]: entries of `pages` on their way there
    and these are written by a step:
        hidden float32 [rows, hidden]: the residual stream
        x [rows, hidden], 16 bits: the input of a part of a block, normalized
        added [rows, hidden], 16 bits: its output, which the next norm adds to `hidden`
        squares float32 [rows, hidden / 16], factors float32 [rows, 2]: of norms that are folded (folded_norm.cuh)
        logits float32 [scored, vocabulary]; picked int32 [scored]: the chosen tokens
    Other parts are what blocks ask for in `memory`. All of it begins as zeros: rows that fill up a batch read what
    other steps have left, which must be numbers.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        ordinal: int,
        *,
        rows: int,
        sequences: int,
        pages_of_sequence: int,
        tables: int,
        scored: int,
    ) -> None:
        """sequences: rows of the tables of pages."""
        self.rows, self.sequences, self.scored = rows, sequences, scored
        self.pages_of_sequence = pages_of_sequence
        self.input_bytes = input_bytes(rows, sequences, scored)
        own = {
            "inputs": self.input_bytes,
            "pages": 8 * tables * sequences * pages_of_sequence,
            "new_pages": NEW_PAGE.itemsize * MOST_NEW_PAGES,
            "chosen": 4 * sequences,
            "picked": 4 * scored,
        }
        self._parts = {name: Buffer(size, ordinal) for name, size in (own | sizes).items()}
        self._inputs: dict[str, int] = {}
        with current(ordinal):
            for part in self._parts.values():
                check(driver().cuMemsetD8(part.pointer, 0, max(16, part.nbytes)), "clearing")
            synchronize(0)  # no other stream waits for this one

    def use(self, batch: Batch) -> None:
        """From now on `at` tells where the inputs of such a step are."""
        self._inputs = {name: self.at("inputs") + place[0] for name, place in input_layout(batch)[0].items()}

    def at(self, name: str) -> int:
        """The address of a part."""
        found = self._inputs.get(name)
        return self._parts[name].pointer if found is None else found

    def pages(self, table: int, sequence: int = 0) -> int:
        """The address of a sequence's row in a table of pages."""
        return self.at("pages") + 8 * self.page_place(table, sequence)

    def page_place(self, table: int, sequence: int) -> int:
        """The index of a sequence's first entry in the page tables."""
        return (table * self.sequences + sequence) * self.pages_of_sequence


def largest(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The bytes that serve all parts, one after the other: by name, the most that any asks for."""
    sizes = dict[str, int]()
    for part in parts:
        for name, size in part.items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes
