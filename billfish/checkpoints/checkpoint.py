"""Checkpoint: the mapping that `bf.open_checkpoint` returns."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.detect import open_path
from billfish.checkpoints.entry import Description, Entry, Span, Tensor
from billfish.core.errors import CheckpointError, failure, readable
from billfish.core.files import path_of


class UnknownTensor(KeyError):
    """A name that no tensor of a checkpoint has."""

    def __init__(self, name: object, checkpoint: Checkpoint) -> None:
        near = difflib.get_close_matches(str(name)[:200], list(checkpoint), 3)
        hint = f"Close names: {', '.join(map(repr, near))}." if near else "list(checkpoint) has all names."
        super().__init__(name)
        self.message = f"{checkpoint.path.name} has no tensor {readable(repr(name))}. {readable(hint)}"

    def __str__(self) -> str:
        return self.message


class Checkpoint(Mapping[str, Tensor]):
    """A checkpoint on disk: a mapping from names to tensors, read when asked for. See :mod:`billfish.checkpoints`.

    path: a file or a folder, as :func:`billfish.open_checkpoint` takes it.

        >>> checkpoint = bf.open_checkpoint("model.gguf")
        >>> checkpoint.layouts, checkpoint.describe("output_norm.weight").shape
        ({'gguf'}, (64,))
        >>> checkpoint.read("blk.0.attn_q.weight", rows=(0, 32)).shape
        (32, 64)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of("load", path)
        self.files, self._entries, self.metadata, self.config = open_path(self.path)
        # Where the files that belong to the model are, such as its tokenizer; None for tensors in memory.
        self.folder: Path | None = self.path if self.path.is_dir() else self.path.parent
        self.origins: dict[str, str] = {}  # names in the file of tensors that are looked at under other ones

    @classmethod
    def of_entries(cls, name: str, entries: Mapping[str, Entry], config: Mapping[str, Any]) -> Checkpoint:
        """Of tensors in memory; `name` stands for the path."""
        checkpoint = cls.__new__(cls)
        checkpoint.path, checkpoint.folder, checkpoint.files = Path(name), None, []
        checkpoint._entries, checkpoint.origins = dict(entries), {}
        checkpoint.metadata, checkpoint.config = {}, dict(config)
        return checkpoint

    def view(self, entries: Mapping[str, Entry], origins: Sequence[str]) -> Checkpoint:
        """The same files with other entries; `origins` are their names here."""
        other = copy.copy(self)
        other._entries, other.origins = dict(entries), dict(zip(entries, origins, strict=True))
        return other

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # a Mapping would read the tensor to know that

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry:
        """What reads a tensor."""
        found = self._entries.get(name)
        if found is None:
            raise UnknownTensor(name, self)
        return found

    def describe(self, name: str) -> Description:
        """What a tensor is; reads nothing but headers."""
        return self.entry(name).description

    def read(
        self, name: str, *, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None
    ) -> Tensor:
        """A tensor, or W[a:b, c:d] of it for rows=(a, b), columns=(c, d). Only that part is read.

        Columns are cut where groups end. With act-order they are columns of the sorted matrix, see :meth:`permutation`,
        and the part that is read does not know where they were; a whole tensor, or rows of it, does. Of a plain array
        rows are its first axis and columns its last. Of a stack [E, N, K], experts=(e, f) are some of its matrices,
        and rows and columns are the same of each.
        """
        try:
            return self.entry(name).read(rows, columns, experts)
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            problem = f"the arrays of {name} do not fit together ({error})"
            raise CheckpointError(failure("read", problem, "The file is damaged.")) from None

    def permutation(self, name: str) -> NDArray[np.int64] | None:
        """p [K] where columns were sorted by group, so that stored column j is W[:, p[j]]; None where they were not."""
        return self.entry(name).permutation()

    def is_reordered(self, name: str) -> bool:
        """Whether columns were sorted. Headers only say where they may be; this looks."""
        return self.describe(name).act_order and self.permutation(name) is not None

    @property
    def layouts(self) -> set[str]:
        """The layouts that its tensors are in."""
        return {entry.description.layout for entry in self._entries.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.description.nbytes for entry in self._entries.values())

    def release(self) -> None:
        """Give back the memory of what was read. Tensors stay valid; the system reads them again when they are used."""
        for file in self.files:
            file.release()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors, {', '.join(sorted(self.layouts))})"


Source = Checkpoint | str | os.PathLike[str]  # what is read from


def opened(source: Source) -> Checkpoint:
    """The checkpoint at a path; a checkpoint as it is."""
    return source if isinstance(source, Checkpoint) else open_checkpoint(source)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint. Reads headers only; a tensor is read when it is asked for.

    path: a GGUF file, a safetensors file, or a folder of shards with its config.json. The layout is recognised by
    content: GGUF; GPTQ, AWQ, compressed-tensors, ModelOpt NVFP4, gpt-oss MXFP4, MLX, billfish's own layout and
    unquantized arrays in safetensors. See :mod:`billfish.checkpoints`.

    Returns a :class:`Checkpoint`, a mapping from names to tensors. Raises CheckpointError for a file that is damaged or
    of an unknown layout, and for a path where there is none.

        >>> checkpoint = bf.open_checkpoint("model.gguf")
        >>> checkpoint["blk.0.attn_q.weight"]
        QuantizedTensor(q8_0, [128, 64], group_size=32, 8704 bytes)
    """
    return Checkpoint(path)


load = open_checkpoint  # the older name
