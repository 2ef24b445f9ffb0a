"""Train the scales of a quantized model so that it predicts a text as another model does.

Codes stay as they are. The result is an ordinary file: the same formats, the same size, the same
speed. The loss is the KL divergence of the predictions, as `billfish eval --against` measures it, and Adam takes a step
for each window of the text. The other model's hidden states are computed once, by our kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.conversion import target_named
from billfish.checkpoints.derived import Renamed
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.in_memory import HeldMatrix
from billfish.checkpoints.names.gguf_names import is_gguf
from billfish.checkpoints.reports import ConversionReport
from billfish.checkpoints.write.export import TARGETS, check_export, export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.checkpoints.write.resumable_writer import identity
from billfish.core.errors import BackendUnavailable, DataError, bad_argument, failure
from billfish.core.files import path_of, replacing
from billfish.core.format import Format
from billfish.core.progress import Progress
from billfish.core.tensor import QuantizedTensor
from billfish.core.version import __version__
from billfish.llm.evaluation import check_vocabularies
from billfish.llm.model import Model, load
from billfish.llm.model_files import Source, open_source
from billfish.llm.model_weights import ModelTensors
from billfish.models import describe
from billfish.models.description import Matrix
from billfish.quantizing.calibrate_checkpoint import TOKENS, WINDOW, named_text, windows_of

if TYPE_CHECKING:
    import torch

    from billfish.quantizing.torch_decoder import TorchDecoder, TorchHead
    from billfish.quantizing.trained_matrix import TrainedMatrix

CALL = "tune"
LOG = logging.getLogger(__name__)
EPOCHS, RATE = 2, 0.001
ROWS = 128  # of logits at a time: a vocabulary is wide
SAVE_SECONDS = 60.0


def tune_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str],
    text: str | os.PathLike[str] | None = None,
    tokens: int = TOKENS,
    window: int | None = None,
    epochs: int = EPOCHS,
    rate: float = RATE,
    device: str = "auto",
    overwrite: bool = False,
    progress: bool = True,
) -> ConversionReport:
    """Train the scales of a quantized model by its KL divergence from another one: what `billfish tune` does.

    Formats, codes and all other tensors stay as they are. If the process is killed, the same call continues from the
    last minute.

    src: a quantized model of attention and dense feed-forward layers: a GGUF file or a folder.
    dst: a file or folder to create, in the same layout.
    against: the model to be like, usually the float model that src was made of.
    text: a file in UTF-8; None is a text that the package carries. tokens: at most so many, from its beginning.
    window: tokens that see each other (512, or the context). Each window is a step.
    epochs: how often the text is read. rate: the step size of Adam, about the relative change of a scale in a step; it
    falls to zero.
    device: "cpu", "cuda" or "cuda:N"; "auto" is a GPU if torch has one.
    overwrite: whether a `dst` that exists is replaced. progress: whether to draw a bar on terminals.

    Returns a ConversionReport. Raises ModelError for a model that cannot be trained and for two vocabularies, and
    DataError if no scale can move.

        >>> report = bf.tune_checkpoint("model.gguf", "tuned.gguf", against="model.gguf", tokens=64, progress=False)
        >>> bf.open_checkpoint("tuned.gguf")["blk.0.attn_q.weight"]
        QuantizedTensor(q8_0, [128, 64], group_size=32, 8704 bytes)
    """
    place = _checked_device(device)
    if tokens < 2 or epochs < 1 or not 0 < rate <= 1:
        name, value = ("tokens", tokens) if tokens < 2 else ("epochs", epochs) if epochs < 1 else ("rate", rate)
        raise DataError(
            bad_argument(CALL, name, value, {"tokens": "2 or more", "epochs": "1 or more"}.get(name, "0 to 1"))
        )
    path, out = path_of(CALL, src), Path(dst)
    checkpoint, source = Checkpoint(path), open_source(path)
    settings = OutputSettings(target_named(CALL, _layout(checkpoint)), overwrite=overwrite)
    check_export(CALL, checkpoint, out, settings)
    content, _ = named_text(text)
    context = describe(source.fields, source.vocabulary, source.tensors).context
    window = min(WINDOW, context) if window is None else window
    if not 2 <= window <= context:
        raise DataError(bad_argument(CALL, "window", window, f"2 to {context}, the model's context"))
    windows = [part for part in windows_of(source.tokenizer(), content, tokens, window) if len(part) > 1]
    truth = identity(Checkpoint(path_of(CALL, against)).files)
    settings_of_run = [__version__, identity(checkpoint.files), truth, windows, epochs, rate]
    kept = Path(f"{os.path.abspath(out)}.partial-tuning")
    training = Training(source, checkpoint, Path(against), windows, Steps(epochs, rate), place)
    training.run(kept, hashlib.sha256(json.dumps(settings_of_run).encode()).hexdigest(), progress)
    report = export(CALL, training.result(), out, settings, False)
    kept.unlink(missing_ok=True)
    return report


def _checked_device(device: str) -> torch.device:
    """The torch device of `device`. Raises for another name, and for a GPU that torch does not see."""
    try:
        import torch
    except ImportError:
        raise BackendUnavailable("tune: torch is not installed. Run: pip install torch") from None
    gpus = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if gpus else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise DataError(bad_argument(CALL, "device", repr(device), "cpu, cuda, cuda:N or auto"))
    if device != "cpu" and int(found[1] or 0) >= gpus:
        raise BackendUnavailable(failure(CALL, f"torch sees {gpus} GPUs, and not {device}", "Use device cpu."))
    return torch.device(device)


@dataclass(frozen=True)
class Steps:
    """`epochs` times through the windows, with step sizes that fall from `rate` to zero."""

    epochs: int
    rate: float


@dataclass
class Truth:
    """What a model predicts for windows of tokens. Its hidden states are computed once and kept."""

    model: Model
    windows: Sequence[Sequence[int]]
    head: TorchHead
    _hidden: dict[int, torch.Tensor] = field(default_factory=dict)

    def logits(self, window: int, rows: slice) -> torch.Tensor:
        """Of some tokens of a window, [rows, vocabulary]."""
        import torch

        if window not in self._hidden:
            self._hidden[window] = torch.from_numpy(self.model.hidden(self.windows[window]))
        with torch.no_grad():
            return self.head.logits(self._hidden[window][rows].to(self.head.device))


class Training:
    """Quantized matrices of a model, and what they are to achieve."""

    def __init__(
        self,
        source: Source,
        checkpoint: Checkpoint,
        against: Path,
        windows: Sequence[Sequence[int]],
        steps: Steps,
        device: torch.device,
    ) -> None:
        from billfish.quantizing.torch_decoder import TorchDecoder

        self._source, self._checkpoint, self._device = source, checkpoint, device
        self._windows, self._steps = windows, steps
        self._bar = Progress(steps.epochs * len(windows), "steps", enabled=False)
        tensors = ModelTensors(source, describe(source.fields, source.vocabulary, source.tensors))
        self._fixed: dict[Matrix, torch.Tensor] = {}
        self.trained = self._movable(tensors)
        self.decoder: TorchDecoder = TorchDecoder(tensors, self._weights, device, self._computed)
        self.truth = self._truth(against)

    def _movable(self, tensors: ModelTensors) -> dict[Matrix, TrainedMatrix]:
        """The matrices of layers that can be trained; raises if there are none."""
        from billfish.quantizing.torch_decoder import check_supported
        from billfish.quantizing.trained_matrix import TrainedMatrix, why_fixed

        check_supported(tensors)
        found: dict[Matrix, TrainedMatrix] = {}
        reasons: dict[str, str] = {}
        for matrix in tensors.matrices:
            tensor = tensors.matrix(matrix)
            if matrix == tensors.config.head or not isinstance(tensor, QuantizedTensor):
                continue
            reason = "it is part of another matrix" if matrix.joined else why_fixed(tensor)
            if not reason and self._rows(matrix) is None:
                reason = "the file has it in another form"
            if reason:
                reasons[matrix.name] = reason
            else:
                found[matrix] = TrainedMatrix(tensor, self._device)
        if not found:
            name, reason = next(iter(reasons.items()), ("", "no matrix of a layer is quantized"))
            problem = f"{self._checkpoint.path} has no scales to train: {reason}{f' ({name})' if name else ''}"
            fix = "Train a format with scales in float16, such as iq4_nl."
            raise DataError(failure(CALL, problem, fix))
        return found

    def _rows(self, matrix: Matrix) -> np.ndarray[Any, Any] | None:
        """Where the file has the rows of a matrix; None if it is not a matrix of its own there."""
        name = f"{matrix.name}.weight"
        entry, own = self._source.tensors.entry(name), self._source.tensors.origins.get(name, name)
        if own not in self._checkpoint:
            return None
        rows, about = np.arange(matrix.rows), self._checkpoint.describe(own)
        while isinstance(entry, Renamed):
            if entry.columns is not None:
                return None
            rows, entry = rows if entry.rows is None else entry.rows[rows], entry.entry
        alike = (about.shape, about.format) == (matrix.shape, entry.description.format)
        return rows if alike and entry.description.name == own else None

    def _weights(self, matrix: Matrix) -> torch.Tensor:
        if matrix in self.trained:
            return self.trained[matrix].weights()
        if matrix not in self._fixed:
            self._fixed[matrix] = self.decoder.floats(self.decoder.tensors.matrix(matrix))
        return self._fixed[matrix]

    def _truth(self, against: Path) -> Truth:
        from billfish.quantizing.torch_decoder import TorchHead

        model = load(against, device=str(self._device), progress=False)
        check_vocabularies(self._source.tokenizer().pieces, model.tokenizer.pieces)
        longest = max(map(len, self._windows))
        if longest > model.config.context:
            raise DataError(
                bad_argument(CALL, "window", longest, f"at most {model.config.context}, the context of {against}")
            )
        return Truth(model, self._windows, TorchHead(model.decoder.tensors, self._device))

    # ---- steps ----------------------------------------------------------------------------------------------------

    def run(self, kept: Path, run: str, progress: bool) -> None:
        """All steps, or those that an earlier run has not taken."""
        import torch

        parameters = [each for matrix in self.trained.values() for each in matrix.parameters]
        optimizer = torch.optim.Adam(parameters, lr=self._steps.rate, betas=(0.9, 0.95))
        count = self._steps.epochs * len(self._windows)
        done, losses = self._continued(kept, run, optimizer)
        saved = time.monotonic()
        with Progress(count, "steps", enabled=progress) as self._bar:
            self._bar.advance(done, "computing what is to be predicted")
            for step in range(done, count):
                for group in optimizer.param_groups:
                    group["lr"] = self._steps.rate * (1 - step / count)
                optimizer.zero_grad(set_to_none=True)
                losses.append(self._gradients(step % len(self._windows)))
                optimizer.step()
                self._bar.advance(0, f"KL divergence {losses[-1]:.4f}")
                if time.monotonic() - saved >= SAVE_SECONDS:
                    self._keep(kept, run, step + 1, losses, optimizer)
                    saved = time.monotonic()
        first, last = (float(np.mean(part)) for part in (losses[: len(self._windows)], losses[-len(self._windows) :]))
        LOG.info("KL divergence on the text: %.4f in the first epoch, %.4f in the last", first, last)

    def _computed(self) -> None:
        """A layer, which is computed twice in a step."""
        self._bar.advance(0.5 / self.decoder.config.layers)

    def _gradients(self, window: int) -> float:
        """Of the mean divergence of a window, which is returned. Logits come in parts, gradients of layers at once."""

        tokens = self._windows[window]
        hidden = self.decoder.hidden(tokens)
        behind = hidden.detach().requires_grad_()
        total = 0.0
        for start in range(0, len(tokens), ROWS):
            rows = slice(start, min(start + ROWS, len(tokens)))
            p, q = self.truth.logits(window, rows).log_softmax(-1), self.decoder.logits(behind[rows]).log_softmax(-1)
            divergence = (p.exp() * (p - q)).sum() / len(tokens)
            divergence.backward()  # type: ignore[no-untyped-call]
            total += divergence.item()
        hidden.backward(behind.grad)  # type: ignore[no-untyped-call]
        return total

    @property
    def _state(self) -> list[torch.Tensor]:
        return [each for matrix in self.trained.values() for each in matrix.parameters]

    def _keep(self, kept: Path, run: str, step: int, losses: list[float], optimizer: Any) -> None:
        import torch

        content = {"run": run, "step": step, "losses": losses, "optimizer": optimizer.state_dict()}
        with replacing(kept) as file:
            torch.save(content | {"trained": [each.detach() for each in self._state]}, file)

    def _continued(self, kept: Path, run: str, optimizer: Any) -> tuple[int, list[float]]:
        """The steps that an earlier run has taken, and their losses."""
        import torch

        if not kept.exists():
            return 0, []
        try:
            content = torch.load(kept, map_location=self._device, weights_only=True)
        except (
            OSError,
            RuntimeError,
            ValueError,
            EOFError,
            KeyError,
            UnpicklingError,
        ):  # of another program, or damaged
            return 0, []
        if content.get("run") != run:
            return 0, []
        optimizer.load_state_dict(content["optimizer"])
        with torch.no_grad():
            for trained, before in zip(self._state, content["trained"], strict=True):
                trained.copy_(before)
        return content["step"], content["losses"]

    # ---- the result -----------------------------------------------------------------------------------------------

    def result(self) -> Checkpoint:
        """The checkpoint with the trained matrices, to be written."""
        entries: dict[str, Entry] = {name: self._checkpoint.entry(name) for name in self._checkpoint}
        for matrix, trained in self.trained.items():
            name, rows = f"{matrix.name}.weight", self._rows(matrix)
            assert rows is not None
            own = self._source.tensors.origins.get(name, name)
            tensor = trained.tensor().take_rows(np.argsort(rows))
            entries[own] = _held(own, tensor)
        view = self._checkpoint.view(entries, [*entries])
        view.origins, view.files = {}, []  # no file has these bytes, so that no other run may continue with them
        return view


def _held(name: str, tensor: QuantizedTensor) -> HeldMatrix:
    format: Format = tensor.format
    return HeldMatrix(name, format, tensor.shape, tensor.group_size, False, lambda: tensor)


def _layout(checkpoint: Checkpoint) -> str:
    """The layout of the quantized matrices of a checkpoint."""
    if is_gguf(checkpoint):
        return "gguf"
    found: Mapping[str, None] = dict.fromkeys(
        about.layout for about in map(checkpoint.describe, checkpoint) if about.format is not None
    )
    return next((layout for layout in found if layout in TARGETS), "billfish")
