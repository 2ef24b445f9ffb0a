"""How much it hurts a model to quantize some of its matrices: the divergence of its predictions of a text.

To measure each matrix in each format takes too many passes. A pass has one kind of matrix, such as all `ffn_down`, in
one format; further passes have one layer each, all its matrices in the smallest format. The damage of a matrix is taken
to be that of its kind, shared out to layers in proportion to what each layer hurts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import load as load_checkpoint
from billfish.checkpoints.write.engine import identity
from billfish.checkpoints.write.selection import Quantization
from billfish.core.errors import DataError, complaint
from billfish.core.files import write_atomically
from billfish.core.format import Format, get_format
from billfish.core.progress import Progress
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.llm.config import read_config
from billfish.llm.evaluation import Truth, evaluate
from billfish.llm.model import load
from billfish.llm.model_files import open_source
from billfish.ops.linear import dequantize
from billfish.ops.quantization import quantize
from billfish.quantizing.bit_plan import BitPlan, Choice, Matrix, choose_formats, plan_of
from billfish.quantizing.calibration_text import named_text, windows_of
from billfish.statistics.statistics import Statistics

CALL = "quantize"
FORMATS = ("mxfp4", "iq4_nl", "q5_0", "q8_0")
TOKENS, WINDOW = 2048, 512
PLACE = re.compile(r"blk\.(\d+)\.(.+)\.weight")


@dataclass(frozen=True)
class Candidate:
    """A format with a group size, as people write it."""

    name: str
    format: Format
    group_size: int

    @classmethod
    def of(cls, name: str) -> Candidate:
        written, _, size = name.partition(":")
        format = get_format(written, CALL)
        if size and not size.isdigit():
            raise DataError(complaint(CALL, "--formats", repr(name), "FORMAT, or FORMAT:GROUP"))
        return cls(name, format, format.check_group_size(CALL, int(size) if size else None, None))

    @property
    def bits(self) -> float:
        return self.format.bits_per_weight(self.group_size)


class Damage:
    """Measures by passes of a text through the model, each with other matrices quantized.

    kept: a file with what was measured before. A run that was stopped goes on behind it.
    """

    def __init__(
        self,
        path: Path,
        formats: Sequence[str],
        *,
        statistics: Statistics | None,
        text: Path | None,
        requantize: bool,
        device: str,
        kept: Path | None,
        progress: bool,
    ) -> None:
        self._path, self._device, self._statistics, self._progress = path, device, statistics, progress
        self._requantize, self._kept = requantize, kept
        self.candidates = [Candidate.of(name) for name in formats]
        self._source = open_source(path)
        self.matrices = self._matrices()
        content, self._text = named_text(text)
        context = read_config(self._source.fields, self._source.vocabulary).context
        self._window = min(WINDOW, context)
        windows = windows_of(self._source.tokenizer(), content, TOKENS, self._window)
        self._tokens = [token for window in windows for token in window]
        self._run = self._digest()
        self._known = self._read()

    def _matrices(self) -> dict[str, Matrix]:
        """Those that `billfish quantize` would quantize, by GGUF's names. Stacks that the file has as one are one."""
        checkpoint = self._source.tensors
        how = Quantization(self.candidates[0].format, None, "mse", statistics=self._statistics)
        how.check_statistics(load_checkpoint(self._path))
        found: dict[str, Matrix] = {}
        by_origin: dict[str, list[str]] = {}
        for name in checkpoint:
            about, place = checkpoint.describe(name), PLACE.fullmatch(name)
            plain = about.format is None and len(about.shape) > 1
            if place and how.choice(name, name, about.shape) and (plain or self._requantize):
                origin, weights = checkpoint.origins.get(name, name), int(np.prod(about.shape))
                found[name] = Matrix(origin, int(place[1]), place[2], weights)
                by_origin.setdefault(origin, []).append(name)
        for same in by_origin.values():
            whole = found[same[0]]._replace(
                kind=" and ".join(found[name].kind for name in same), weights=sum(found[name].weights for name in same)
            )
            found |= dict.fromkeys(same, whole)
        if not found:
            takes = "plain weights, or --requantize for weights that are quantized already"
            raise DataError(complaint(CALL, str(self._path), "no matrix to quantize", takes))
        return found

    # ---- what was measured --------------------------------------------------------------------------------------

    def _digest(self) -> str:
        known = None if self._statistics is None else self._statistics.digest
        content = [identity(self._source.tensors.files), self._tokens, known, self._requantize]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _read(self) -> dict[str, float]:
        if self._kept is None or not self._kept.exists():
            return {}
        try:
            content = json.loads(self._kept.read_bytes())
            return dict(content["divergences"]) if content["run"] == self._run else {}
        except (ValueError, KeyError, TypeError):  # of another program, or damaged: passes are measured anew
            return {}

    def _measure_pass(self, what: str, chosen: set[Matrix], candidate: Candidate, truth: Truth) -> None:
        if what not in self._known:
            convert = self._converter(chosen, candidate)
            model = load(self._path, device=self._device, convert=convert, progress=False)
            found = evaluate(model, self._tokens, against=truth).divergence
            assert found is not None
            self._known[what] = found
            if self._kept is not None:
                content = json.dumps({"run": self._run, "divergences": self._known})
                write_atomically(self._kept, content.encode())

    def _converter(self, chosen: set[Matrix], candidate: Candidate) -> Callable[[str, Any], Any]:
        """What becomes of the tensors of a model in a pass."""

        def convert(name: str, tensor: Any) -> Any:
            matrix = self.matrices.get(name)
            if matrix not in chosen or not fits(candidate, tensor.shape):
                return tensor
            w = dequantize(tensor) if isinstance(tensor, (QuantizedTensor, QuantizedExperts)) else tensor
            known: dict[str, Any] = {}
            if self._statistics is not None:
                _, known = self._statistics.settings(CALL, name, w.shape, "mse")
            return quantize(w, candidate.format, group_size=candidate.group_size, **known)

        return convert

    def measure(self) -> dict[Matrix, list[Choice]]:
        """For each matrix all formats that it may have."""
        kinds, layers = (_grouped(self.matrices.values(), field) for field in ("kind", "layer"))
        least = min(self.candidates, key=lambda candidate: candidate.bits)
        truth = Truth(load(self._path, device=self._device, progress=False), self._tokens, self._window)
        passes = [(f"{kind} in {c.name}", chosen, c) for kind, chosen in kinds.items() for c in self.candidates]
        passes += [(f"layer {layer} in {least.name}", chosen, least) for layer, chosen in layers.items()]
        with Progress(len(passes), "passes", enabled=self._progress) as bar:
            for what, chosen, candidate in passes:
                bar.advance(0, what)
                self._measure_pass(what, chosen, candidate, truth)
                bar.advance(1)
        by_kind = {(kind, c.name): self._known[f"{kind} in {c.name}"] for kind in kinds for c in self.candidates}
        by_layer = {layer: self._known[f"layer {layer} in {least.name}"] for layer in layers}
        return self._shared_out(by_kind, by_layer)

    def _shared_out(
        self, by_kind: dict[tuple[Any, str], float], by_layer: dict[Any, float]
    ) -> dict[Matrix, list[Choice]]:
        """The damage of each matrix: that of its kind, in proportion to its layer's among the layers that have it."""
        choices: dict[Matrix, list[Choice]] = {}
        for name, matrix in self.matrices.items():
            shape = self._source.tensors.describe(name).shape
            alike = [m for m in dict.fromkeys(self.matrices.values()) if m.kind == matrix.kind]
            all_layers = sum(by_layer[m.layer] for m in alike)
            share = by_layer[matrix.layer] / all_layers if all_layers else 1.0
            choices[matrix] = [
                Choice(candidate.name, candidate.bits * matrix.weights, share * by_kind[matrix.kind, candidate.name])
                for candidate in self.candidates
                if fits(candidate, shape)
            ]
            if not choices[matrix]:
                got, takes = f"K = {shape[-1]}, which none of the formats holds", "a format that does, in --formats"
                raise DataError(complaint(CALL, matrix.name, got, takes))
        return choices

    def remarks(self, chosen: dict[Matrix, Choice]) -> list[str]:
        """What a reader of the plan may want to know."""
        weights = sum(matrix.weights for matrix in chosen)
        average = sum(choice.bits for choice in chosen.values()) / weights
        lines = [f"{average:.3f} bits per weight. KL divergence with one kind quantized, {self._text}:"]
        for kind in _grouped(self.matrices.values(), "kind"):
            cells = [
                f"{candidate.name} {self._known[f'{kind} in {candidate.name}']:.4g}" for candidate in self.candidates
            ]
            lines.append(f"  {kind}: {', '.join(cells)}")
        return lines


def _grouped(matrices: Iterable[Matrix], field: str) -> dict[Any, set[Matrix]]:
    """By kind, or by layer."""
    found: dict[Any, set[Matrix]] = {}
    for matrix in sorted(matrices, key=lambda matrix: getattr(matrix, field)):
        found.setdefault(getattr(matrix, field), set()).add(matrix)
    return found


def fits(candidate: Candidate, shape: Sequence[int]) -> bool:
    """Whether rows of this length can have the format."""
    return shape[-1] % candidate.format.block_size == 0


def plan_bits(
    path: Path,
    bits: float,
    *,
    formats: Sequence[str] = FORMATS,
    statistics: Statistics | None = None,
    text: Path | None = None,
    requantize: bool = False,
    device: str = "auto",
    kept: Path | None = None,
    progress: bool = True,
) -> BitPlan:
    """A format of the list for each matrix of a model, at most `bits` for a weight on average, scales included.

    text: what to predict while damage is measured; None is the text that the package carries.
    kept: a file for what was measured, while it is being measured; it is gone at the end.
    """
    if not formats or len(set(formats)) < len(formats):
        raise DataError(complaint(CALL, "--formats", ",".join(formats), "formats, each of them once"))
    options = {"statistics": statistics, "text": text, "requantize": requantize, "device": device, "kept": kept}
    damage = Damage(path, formats, progress=progress, **options)  # type: ignore[arg-type]
    least = min(candidate.bits for candidate in damage.candidates)
    if not least <= bits:
        raise DataError(complaint(CALL, "--bits", bits, f"at least {least:g}, the bits of the smallest format"))
    chosen = choose_formats(damage.measure(), bits)
    if kept is not None:
        kept.unlink(missing_ok=True)
    return plan_of(chosen, damage.remarks(chosen))
