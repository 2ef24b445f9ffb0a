"""Plain matrices become quantized ones while a model is loaded: `--quantize`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint, open_checkpoint
from billfish.checkpoints.mixes import Mix, mix_named
from billfish.checkpoints.names.gguf_names import by_gguf_names, column_orders
from billfish.checkpoints.reports import Remark, by_reason
from billfish.checkpoints.write.selection import Quantization, Rule
from billfish.core.arrays import FLOATS
from billfish.core.errors import DataError, failure
from billfish.core.format import parse_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import ExpertTensor, Tensor
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
            raise DataError(failure(CALL, "method 'gptq' needs statistics= with X^T X"))
        if statistics is not None and not isinstance(statistics, Statistics):
            statistics = Statistics.load(statistics)
        mix = mix_named(wanted, "billfish", CALL)
        format, group_size = parse_format(mix.format if mix else wanted, CALL)
        self.left: list[Remark] = []
        rules = _rules(mix, path) if mix else ()
        checkpoint = open_checkpoint(path)
        columns = column_orders(by_gguf_names(checkpoint)) if statistics is not None else {}
        self._how = Quantization(format, group_size, method, rules, statistics=statistics, columns=columns)
        self._how.check_statistics(checkpoint)
        self._check_effect(wanted, by_gguf_names(checkpoint))

    def _check_effect(self, wanted: str, checkpoint: Checkpoint) -> None:
        """Raises if all that could be quantized is quantized already."""
        abouts = map(checkpoint.describe, checkpoint)
        chosen = [about for about in abouts if self._how.choice(about.name, about.name, about.shape)]
        formats = {about.format.name for about in chosen if about.format is not None}
        if formats and all(about.format is not None for about in chosen):
            held = f"{checkpoint.path.name} is already quantized ({', '.join(sorted(formats))})"
            raise DataError(
                f"{CALL}: {held}, so quantize={wanted!r} has no effect. Leave it out, or quantize the file again:"
                " billfish quantize --requantize."
            )

    def report(self, name: Callable[[str], str]) -> list[str]:
        """Return one line for each reason why matrices had to stay. name: what the file calls a tensor."""
        return by_reason([Remark(name(remark.name), remark.reason) for remark in self.left])

    def saves(self, checkpoint: Checkpoint) -> int:
        """By how many bytes the weights of a model get smaller. checkpoint: its tensors by GGUF's names."""
        saved = 0.0
        for about in map(checkpoint.describe, checkpoint):
            choice = self._how.choice(about.name, about.name, about.shape)
            if choice is None or about.format is not None or about.shape[-1] % choice[0].block_size:
                continue
            format, group_size = choice
            bits = format.bits_per_weight(format.check_group_size(CALL, group_size, about.shape[-1]))
            saved += about.nbytes - math.prod(about.shape) * bits / 8
        return int(saved)

    def __call__(self, name: str, tensor: Tensor | ExpertTensor) -> Tensor | ExpertTensor:
        """A tensor of the model, by its name in GGUF."""
        choice = self._how.choice(name, name, tensor.shape)
        if choice is not None and isinstance(tensor, (QuantizedTensor, QuantizedExperts)):
            self.left.append(Remark(name, f"already quantized ({tensor.format.name})"))
        if choice is None or not isinstance(tensor, np.ndarray) or tensor.dtype.name not in FLOATS:
            return tensor
        format, group_size = choice
        k = tensor.shape[-1]
        if k % format.block_size:
            self.left.append(Remark(name, f"K = {k} is not a multiple of {format.block_size}, as {format.name} needs"))
            return tensor

        def quantized(matrix: Array, expert: int | None = None) -> QuantizedTensor:
            method, known = self._how.settings(name, tensor.shape, expert)
            return quantize_matrix(CALL, name, matrix, format, group_size, method, {}, **known)

        if tensor.ndim == 2:
            return quantized(tensor)
        return QuantizedExperts.from_tensors([quantized(matrix, e) for e, matrix in enumerate(tensor)])


def _rules(mix: Mix, path: Path) -> tuple[Rule, ...]:
    """A mix goes by the tensors of a whole model, which headers tell."""
    checkpoint = by_gguf_names(open_checkpoint(path))
    shapes = {name: checkpoint.describe(name).shape for name in checkpoint}
    return tuple(Rule(*rule) for rule in mix.rules(CALL, shapes, shapes))
