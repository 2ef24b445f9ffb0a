"""How much it hurts a model to quantize some of its matrices: the divergence of its predictions of a text.

To measure each matrix in each format takes too many passes. A pass has one kind of matrix, such as all `ffn_down`, in
one format; further passes have one layer each, all its matrices in the smallest format. The damage of a matrix is taken
to be that of its kind, shared out to layers in proportion to what each layer hurts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import open_checkpoint
from billfish.checkpoints.write.resumable_writer import identity
from billfish.checkpoints.write.selection import Quantization
from billfish.core.errors import DataError, bad_argument, failure
from billfish.core.files import write_atomically
from billfish.core.format import Format, parse_format
from billfish.core.progress import Progress
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor
from billfish.llm.evaluation import Truth, evaluate
from billfish.llm.model import load
from billfish.llm.model_files import open_source
from billfish.models import describe
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize
from billfish.quantizing.bit_plan import BitPlan, FormatChoice, PlannedMatrix, choose_formats, plan_of
from billfish.quantizing.calibrate_checkpoint import named_text, windows_of
from billfish.statistics.statistics import Statistics

CALL = "quantize"
FORMATS = ("mxfp4", "iq4_nl", "q5_0", "q8_0")
TOKENS, WINDOW = 2048, 512
LONG_ROW = 1 << 20  # longer than any: the scale of a whole row costs nothing there
PLACE = re.compile(r"blk\.(\d{1,9})\.(.+)\.weight")


@dataclass(frozen=True)
class Candidate:
    """A format with a group size, as people write it."""

    name: str
    format: Format
    group_size: int  # -1: a whole row

    @classmethod
    def of(cls, name: str) -> Candidate:
        format, group_size = parse_format(name, CALL)
        return cls(name, format, format.default_group_size if group_size is None else group_size)

    def bits(self, k: int) -> float:
        """For each weight of a matrix [N, k]."""
        return self.format.bits_per_weight(k if self.group_size == -1 else self.group_size)


def candidates_of(names: Sequence[str], bits: float) -> list[Candidate]:
    """The formats of a list; raises unless they are there once each, and one of them takes no more than `bits`."""
    if not names or len(set(names)) < len(names):
        raise DataError(bad_argument(CALL, "--formats", ",".join(names) or "empty", "different formats"))
    candidates = [Candidate.of(name) for name in names]
    least = min(candidate.bits(LONG_ROW) for candidate in candidates)
    if not least <= bits:
        raise DataError(bad_argument(CALL, "--bits", bits, f"at least {least:g}, the bits of the smallest format"))
    return candidates


class Damage:
    """Measures by passes of a text through the model, each with other matrices quantized.

    kept: a file with what was measured before. A run that was stopped goes on behind it.
    """

    def __init__(
        self,
        path: Path,
        candidates: Sequence[Candidate],
        *,
        statistics: Statistics | None,
        text: Path | None,
        requantize: bool,
        device: str,
        kept: Path | None,
        progress: bool,
        wanted: Container[str] | None,
    ) -> None:
        self._path, self._device, self._statistics, self._progress = path, device, statistics, progress
        self._requantize, self._kept = requantize, kept
        self.candidates = candidates
        self._source = open_source(path)
        self.matrices = self._matrices(wanted)
        content, self._text = named_text(text)
        context = describe(self._source.fields, self._source.vocabulary, self._source.tensors).context
        self._window = min(WINDOW, context)
        windows = windows_of(self._source.tokenizer(), content, TOKENS, self._window)
        self._tokens = [token for window in windows for token in window]
        self._run = self._digest()
        self._known = self._read()

    def _matrices(self, wanted: Container[str] | None) -> dict[str, PlannedMatrix]:
        """Those that `billfish quantize` would quantize, by GGUF's names. Stacks that the file has as one are one.

        wanted: the names in the file of all that are to be quantized, if not every matrix is.
        """
        checkpoint = self._source.tensors
        how = Quantization(self.candidates[0].format, None, "mse", statistics=self._statistics)
        how.check_statistics(open_checkpoint(self._path))
        found: dict[str, PlannedMatrix] = {}
        by_origin: dict[str, list[str]] = {}
        for name in checkpoint:
            about, place = checkpoint.describe(name), PLACE.fullmatch(name)
            plain = about.format is None and len(about.shape) > 1
            origin, weights = checkpoint.origins.get(name, name), int(np.prod(about.shape))
            chosen = how.choice(name, origin, about.shape) is not None and (wanted is None or origin in wanted)
            if place and chosen and (plain or self._requantize):
                found[name] = PlannedMatrix(origin, int(place[1]), place[2], weights)
                by_origin.setdefault(origin, []).append(name)
        for same in by_origin.values():
            whole = found[same[0]]._replace(
                kind=" and ".join(found[name].kind for name in same), weights=sum(found[name].weights for name in same)
            )
            found |= dict.fromkeys(same, whole)
        if not found:
            problem = f"{self._path} has no unquantized matrices"
            raise DataError(failure(CALL, problem, "--requantize quantizes quantized ones again, with loss."))
        return found

    # ---- what was measured --------------------------------------------------------------------------------------

    def _digest(self) -> str:
        known = None if self._statistics is None else self._statistics.digest
        content = [identity(self._source.tensors.files), self._tokens, known, self._requantize, sorted(self.matrices)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _read(self) -> dict[str, float]:
        if self._kept is None or not self._kept.exists():
            return {}
        try:
            content = json.loads(self._kept.read_bytes())
            return dict(content["divergences"]) if content["run"] == self._run else {}
        except (ValueError, KeyError, TypeError):  # of another program, or damaged: passes are measured anew
            return {}

    def _measure_pass(self, what: str, chosen: set[PlannedMatrix], candidate: Candidate, truth: Truth) -> None:
        if what not in self._known:
            convert = self._converter(chosen, candidate)
            model = load(self._path, device=self._device, convert=convert, progress=False)
            found = evaluate(model, self._tokens, against=truth).divergence
            assert found is not None
            self._known[what] = found
            if self._kept is not None:
                content = json.dumps({"run": self._run, "divergences": self._known})
                write_atomically(self._kept, content.encode())

    def _converter(self, chosen: set[PlannedMatrix], candidate: Candidate) -> Callable[[str, Any], Any]:
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

    def measure(self) -> dict[PlannedMatrix, list[FormatChoice]]:
        """For each matrix all formats that it may have."""
        kinds, layers = (_grouped(self.matrices.values(), field) for field in ("kind", "layer"))
        least = min(self.candidates, key=lambda candidate: candidate.bits(LONG_ROW))
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
    ) -> dict[PlannedMatrix, list[FormatChoice]]:
        """The damage of each matrix: that of its kind, in proportion to its layer's among the layers that have it."""
        choices: dict[PlannedMatrix, list[FormatChoice]] = {}
        for name, matrix in self.matrices.items():
            shape = self._source.tensors.describe(name).shape
            alike = [m for m in dict.fromkeys(self.matrices.values()) if m.kind == matrix.kind]
            all_layers = sum(by_layer[m.layer] for m in alike)
            share = by_layer[matrix.layer] / all_layers if all_layers else 1.0
            choices[matrix] = [
                FormatChoice(
                    candidate.name,
                    candidate.bits(shape[-1]) * matrix.weights,
                    share * by_kind[matrix.kind, candidate.name],
                )
                for candidate in self.candidates
                if fits(candidate, shape)
            ]
            if not choices[matrix]:
                problem = f"none of --formats can store {matrix.name}, with K = {shape[-1]}"
                raise DataError(failure(CALL, problem, "Add one with a smaller block size, such as q8_0."))
        return choices

    def remarks(self, chosen: dict[PlannedMatrix, FormatChoice]) -> list[str]:
        """What a reader of the plan may want to know."""
        weights = sum(matrix.weights for matrix in chosen)
        average = sum(choice.bits for choice in chosen.values()) / weights
        lines = [f"{average:.3f} bits per weight. KL divergence with one kind quantized, {self._text}:"]
        for kind in _grouped(self.matrices.values(), "kind"):
            cells = [
                f"{candidate.name} {self._known[f'{kind} in {candidate.name}']:.4g}" for candidate in self.candidates
            ]
            lines.append(f"  {kind}: {', '.join(cells)}")
        roles = dict[str, list[float]]()
        for matrix, choice in chosen.items():
            known = roles.setdefault(role_of(matrix.kind), [0, 0])
            known[0], known[1] = known[0] + choice.bits, known[1] + matrix.weights
        if "experts" in roles:  # what every token uses, and what some do
            lines.append(f"bits by role: {', '.join(f'{role} {b / n:.2f}' for role, (b, n) in sorted(roles.items()))}")
        return lines


def role_of(kind: str) -> str:
    """What a matrix is for in a model with experts: those take some tokens each, all others take every token."""
    if "_shexp" in kind:
        return "shared expert"
    return "experts" if "_exps" in kind else "feed-forward" if kind.startswith("ffn") else "attention"


def _grouped(matrices: Iterable[PlannedMatrix], field: str) -> dict[Any, set[PlannedMatrix]]:
    """By kind, or by layer."""
    found: dict[Any, set[PlannedMatrix]] = {}
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
    wanted: Container[str] | None = None,
) -> BitPlan:
    """A format of the list for each matrix of a model, at most `bits` for a weight on average, scales included.

    text: what to predict while damage is measured; None is the text that the package carries.
    kept: a file for what was measured. A later call has it from there.
    wanted: the names, in the file, of all that is to be quantized; None: what `billfish quantize` takes by itself.
    """
    candidates = candidates_of(formats, bits)
    options = {"statistics": statistics, "text": text, "requantize": requantize, "device": device, "kept": kept}
    damage = Damage(path, candidates, progress=progress, wanted=wanted, **options)  # type: ignore[arg-type]
    chosen = choose_formats(damage.measure(), bits)
    return plan_of(chosen, damage.remarks(chosen))
