"""What is known of the inputs of matrices: sums over the tokens of a text, by the name of each matrix."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from billfish.checkpoints.names.expert_stacks import stacks_in
from billfish.checkpoints.names.gguf_names import EMBEDDING, HEAD, gguf_name, is_gguf_name, is_part, module_name
from billfish.checkpoints.safetensors_files import MappedFile
from billfish.checkpoints.write.resumable_writer import digest_of
from billfish.core.errors import DataError, bad_argument, failure
from billfish.core.files import path_of
from billfish.models import Architecture
from billfish.models.difference import Order
from billfish.statistics.inputs import CALL, InputStatistics, refused
from billfish.statistics.statistics_file import About, read_statistics, write_statistics

LAYER_NAME = re.compile(r"(?:blk|model\.layers)\.(\d{1,9})\.")
OTHER_MODEL = "Compute statistics of this very model: `billfish calibrate`."
UP_STACK, GATE_STACK = "ffn_up_exps", "ffn_gate_exps"


class Statistics(Mapping[str, InputStatistics]):
    """Statistics of the inputs of a model's matrices, by name. :func:`billfish.calibrate` makes them.

    Names are those of GGUF, of a folder, or of a module. Matrices that multiply the same inputs, as q, k and v do,
    share one InputStatistics.

    inputs: by the names of the matrices.
    architecture: of the model, GGUF's or the configuration's name of its kind; "" where nobody knows it.
    shapes: [N, K] of each matrix; None where nobody knows them. llama.cpp's files know neither.
    window: tokens that saw each other. texts: names of the texts.
    run: a digest of all that the statistics were computed from.

        >>> from billfish.statistics import InputStatistics, Statistics
        >>> known = InputStatistics(np.ones(32), np.array(10))
        >>> Statistics({"layer.weight": known})["layer.weight"].counts
        array(10)
    """

    def __init__(
        self,
        inputs: Mapping[str, InputStatistics],
        *,
        architecture: str = "",
        shapes: Mapping[str, Sequence[int]] | None = None,
        window: int = 512,
        texts: Sequence[str] = (),
        run: str = "",
    ) -> None:
        if not 1 <= window < 1 << 32:
            raise DataError(bad_argument(CALL, "window", window, "1 token or more"))
        self._inputs = dict(inputs)
        self._own_names = {_key(name): name for name in reversed(self._inputs)}
        self.architecture, self.window, self.texts, self.run = architecture, window, tuple(texts), run
        self._by_module = {self._module(name): name for name in reversed(self._inputs)}
        self.shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        self.file: MappedFile | None = None  # where the arrays are
        for name, known in self._inputs.items():
            known.check(name)

    def __getitem__(self, name: str) -> InputStatistics:
        return self._inputs[self._own(name)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._own(name) in self._inputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    def _own(self, name: str) -> str:
        """The name that a matrix has here."""
        if name in self._inputs:
            return name
        return self._own_names.get(_key(name)) or self._by_module.get(self._module(name), name)

    def _module(self, name: str) -> str:
        """What a folder has for a matrix, which may be one with others: all of them have the same inputs."""
        return module_name(name if name.endswith(".weight") else f"{name}.weight", self.architecture)

    @property
    def has_outer(self) -> bool:
        """Whether there is X^T X for every matrix."""
        return all(known.outer is not None for known in self._inputs.values())

    @property
    def tokens(self) -> int:
        """How many the statistics are of."""
        return max((int(known.counts.max()) for known in self._inputs.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """Of all that is here: other statistics make other weights."""
        if self.file is not None:
            return digest_of(self.file)
        digest = hashlib.blake2b(repr((sorted(self._inputs), self.architecture)).encode(), digest_size=32)
        for name in sorted(self._inputs):
            known = self._inputs[name]
            for array in (known.squares, known.counts, known.outer, known.cross):
                digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    # ---- for one matrix -----------------------------------------------------------------------------------------

    def check_model(self, call: str, architecture: str, names: Iterable[str]) -> None:
        """Raises if they are of another kind of model, or of layers that a model with these tensors does not have."""
        if self.architecture and architecture and self.architecture != architecture:
            problem = f"the statistics are of the architecture {self.architecture!r}, and the model is {architecture!r}"
            raise DataError(failure(call, problem, OTHER_MODEL))
        layers = {int(found[1]) for name in names if (found := LAYER_NAME.match(name))}
        for name in self:
            found = LAYER_NAME.match(name)
            if found and layers and int(found[1]) not in layers:
                raise refused(call, name, f"the model has {len(layers)} layers, and not this one", OTHER_MODEL)

    def check_matrix(self, call: str, name: str, shape: Sequence[int], method: str) -> None:
        """Raises unless these are statistics of a model with such a matrix, enough for the method."""
        stack, expert, experts = self._stack_of(name, shape)
        if expert is not None:
            if expert >= experts:
                raise refused(call, name, f"there are statistics of {experts} experts only", OTHER_MODEL)
            self.check_matrix(call, stack, (experts, *shape), method)
            return
        if name not in self:
            if not _may_be_missing(name):
                raise refused(call, name, f"there are none. There are some of {self._examples()}", OTHER_MODEL)
            return
        known, expected = self[name], self.shapes.get(self._own(name), ())
        if len(shape) == 2 and expected not in ((), tuple(shape)) and not is_part(name, self.architecture):
            raise refused(call, name, f"they are of a matrix {expected}, and the model has {shape}", OTHER_MODEL)
        wanted = (shape[0], shape[2]) if len(shape) == 3 else (shape[-1],)
        if known.squares.shape != wanted and not _is_flat_stack(known, shape):
            problem = f"they are of {known.squares.shape[-1]} inputs, and the model has {tuple(shape)}"
            raise refused(call, name, problem, OTHER_MODEL)
        if method == "gptq" and known.outer is None:
            known.hessian(name, call)

    def settings(
        self,
        call: str,
        name: str,
        shape: Sequence[int],
        method: str,
        expert: int | None = None,
        columns: Order | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """The method and the further arguments of `quantize_matrix` for a matrix, or for one of a stack. Embeddings and
        the last layer, which llama.cpp's files may lack, are searched for without.

        columns: the order of the matrix's columns, for statistics that have it under its other name: GGUF's, or that of
        its module."""
        self.check_matrix(call, name, shape, method)
        stack, one, experts = self._stack_of(name, shape)
        if one is not None:
            return self.settings(call, stack, (experts, *shape), method, one)
        if name not in self:
            return "mse" if method == "gptq" else method, {}
        known = self[name]
        if _is_flat_stack(known, shape):
            known = InputStatistics(known.squares.reshape(shape[0], -1), np.repeat(known.counts, shape[0]))
        further: dict[str, Any] = {"importance": known.importance(expert)}
        if method == "gptq":
            further["hessian"] = known.hessian(name, call, expert)
            cross = known.mean_cross(name, call)
            if cross is not None:
                further["cross"] = cross
            if self.file is not None:
                self.file.release()  # the mean is a copy
        if columns is not None and self._own(name) != name:
            further = {what: np.take(array, columns, -1) for what, array in further.items()}
            for what in further.keys() & {"hessian", "cross"}:
                further[what] = np.take(further[what], columns, -2)
        return method, further

    def check_columns(self, call: str, name: str) -> None:
        """Raise for statistics by GGUF's names where GGUF may have the columns of the module's matrix in another order:
        only a model's files tell the order."""
        own, known = self._own(name), [each for each in Architecture.known if self.architecture in ("", each.gguf)]
        if own != name and own.split(".")[-2] in {module for each in known for module in each.reordered_columns}:
            fix = "Calibrate the module itself (calibrate=, bf.calibrate), or use `billfish quantize` on its folder."
            raise refused(call, name, "they are in GGUF's order of columns, which is not the module's", fix)

    def _stack_of(self, name: str, shape: Sequence[int]) -> tuple[str, int | None, int]:
        """Of a matrix [N, K] that a file has for one expert: the name of its stack, the expert, and how many experts
        the statistics know. None for a matrix that is no expert's, or that has statistics of its own."""
        stacks, expert = stacks_in(name)
        if expert is None or name in self:
            return name, None, 0
        [stack] = stacks
        return stack, expert, self[stack].squares.size // shape[-1] if stack in self else 0

    def _examples(self) -> str:
        return ", ".join([*self._inputs][:3])

    # ---- files --------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Statistics from a file that :meth:`save` or `billfish calibrate` wrote, or from an imatrix file of llama.cpp
        (GGUF, or the older .dat). Arrays are views of the file."""
        inputs, file, window, texts, architecture, shapes, run = read_statistics(path)
        statistics = cls(inputs, architecture=architecture, shapes=shapes, window=window, texts=texts, run=run)
        statistics.file = file
        return statistics

    def save(self, path: str | os.PathLike[str]) -> None:
        """To one file. Its name says in which layout: .safetensors is ours; .gguf and .dat are llama.cpp's, which have
        no place for X^T X."""
        # Of matrices whose N nobody knows, only K.
        shapes = {name: self.shapes.get(name, (known.squares.shape[-1],)) for name, known in self.items()}
        about = About(self.architecture, shapes, self.window, self.texts, self.run, self.tokens)
        write_statistics(path_of(CALL, path), self, about)

    def __deepcopy__(self, memo: dict[int, Any]) -> Statistics:
        return self  # nobody changes them, and they may be large

    def __repr__(self) -> str:
        outer = ", with X^T X" if self.has_outer else ""
        return f"Statistics({len(self)} matrices, {self.tokens} tokens{outer})"


def _key(name: str) -> str:
    """One name for all that a matrix is called: GGUF's, where there is one. Gate and up of experts, which a model may
    have as one stack, have the same inputs and the gate's name."""
    weight = name if name.endswith(".weight") else f"{name}.weight"
    stacks, expert = stacks_in(weight)
    stack = stacks[0] if stacks and expert is None else weight
    found = weight if is_gguf_name(weight) else gguf_name(stack)
    return weight if found is None else found.replace(UP_STACK, GATE_STACK)


def _may_be_missing(name: str) -> bool:
    return _key(name) in (EMBEDDING, HEAD)


def _is_flat_stack(known: InputStatistics, shape: Sequence[int]) -> bool:
    """Whether the numbers of all experts lie in one row, as in files of llama.cpp that do not know their count."""
    return len(shape) == 3 and known.counts.ndim == 0 and known.squares.size == shape[0] * shape[2]
