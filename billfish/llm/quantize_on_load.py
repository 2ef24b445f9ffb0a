"""Plain matrices become quantized ones while a model is loaded: `--quantize`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import numpy as np

from billfish.checkpoints.checkpoint import load
from billfish.checkpoints.mixes import Mix, mix_named
from billfish.checkpoints.names.gguf_names import by_gguf_names
from billfish.checkpoints.reports import Remark, by_reason
from billfish.checkpoints.write.selection import Quantization, Rule
from billfish.core.arrays import FLOATS
from billfish.core.errors import DataError, FormatError, complaint
from billfish.core.format import Format, get_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import Stack, Tensor
from billfish.ops.quantization import check_method, quantize_matrix
from billfish.statistics import Statistics

CALL = "llm.load"


class Quantizer:
    """Quantizes the tensors that `billfish quantize` would: matrices, but for the embedding, the head and what is
    quantized already. `left` says which of them had to stay, and why."""

    def __init__(
        self,
        wanted: str,
        path: Path,
        method: str = "mse",
        statistics: Statistics | str | os.PathLike[str] | None = None,
    ) -> None:
        """wanted: the name of a format, with a group size if it is not the format's own: "q4_0", "fp4:64"; or a mix,
        such as "Q4_K_M", for the model at `path`. method, statistics: as in :func:`billfish.quantize_checkpoint`."""
        check_method(CALL, method)
        if method == "gptq" and statistics is None:
            raise DataError(complaint(CALL, "statistics", "None", "statistics with X^T X, for method 'gptq'"))
        if statistics is not None and not isinstance(statistics, Statistics):
            statistics = Statistics.load(statistics)
        name, colon, group = wanted.partition(":")
        mix = mix_named(name, "billfish", CALL)
        format = get_format(mix.format if mix else name, CALL)
        self.wanted, self.quantized = wanted, 0
        self.left: list[Remark] = []
        rules = _rules(mix, path) if mix else ()
        group_size = _group_size(format, group) if colon else None
        self._how = Quantization(format, group_size, method, rules, statistics=statistics)
        self._how.check_statistics(load(path))

    def report(self, out: TextIO, name: Callable[[str], str]) -> None:
        """One line for each reason why matrices had to stay. name: what the file calls a tensor."""
        for line in by_reason([Remark(name(remark.name), remark.reason) for remark in self.left]):
            print(f"not quantized: {line}", file=out)
        if not self.quantized and not self.left:
            print(f"not quantized: quantize={self.wanted!r} finds no unquantized matrix in this model", file=out)

    def __call__(self, name: str, tensor: Tensor | Stack) -> Tensor | Stack:
        """A tensor of the model, by its name in GGUF."""
        choice = self._how.choice(name, name, tensor.shape)
        if choice is None or not isinstance(tensor, np.ndarray) or tensor.dtype.name not in FLOATS:
            return tensor
        format, group_size = choice
        k = tensor.shape[-1]
        if k % format.block_size:
            self.left.append(Remark(name, f"K = {k} is no multiple of {format.block_size}, as {format.name} needs"))
            return tensor

        self.quantized += 1

        def quantized(matrix: Array, expert: int | None = None) -> QuantizedTensor:
            method, known = self._how.settings(name, tensor.shape, expert)
            return quantize_matrix(CALL, name, matrix, format, group_size, method, {}, **known)

        if tensor.ndim == 2:
            return quantized(tensor)
        return QuantizedExperts.from_tensors([quantized(matrix, e) for e, matrix in enumerate(tensor)])


def _rules(mix: Mix, path: Path) -> tuple[Rule, ...]:
    """A mix goes by the tensors of a whole model, which headers tell."""
    checkpoint = by_gguf_names(load(path))
    shapes = {name: checkpoint.describe(name).shape for name in checkpoint}
    return tuple(Rule(*rule) for rule in mix.rules(CALL, shapes, shapes))


def _group_size(format: Format, text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        raise FormatError(complaint(CALL, "quantize", f"groups of {text!r}", "FORMAT, or FORMAT:GROUP")) from None
    return size if size == -1 and format.whole_row_groups else format.check_group_size(CALL, size, None)
