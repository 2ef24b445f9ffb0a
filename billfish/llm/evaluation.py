"""How well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from billfish.errors import DataError, ModelError, complaint
from billfish.llm.model import Model
from billfish.progress import Progress
from billfish.typing import Activations

CALL = "llm.evaluate"
WINDOW = 512
ROWS = 64  # of scores at a time: a vocabulary is wide


@dataclass(frozen=True)
class Evaluation:
    """Means over all predicted tokens, in nats. The last two compare with another model's predictions."""

    tokens: int
    loss: float  # of the true token: -log p
    loss_error: float  # its standard error
    divergence: float | None = None  # KL(other || model): what is lost by predicting with this model instead
    same_best: float | None = None  # how often both think the same token likeliest

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def evaluate(
    model: Model,
    tokens: Sequence[int],
    *,
    against: Model | None = None,
    activations: Activations | None = None,
    window: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Predict each token of a text from those before it, in windows of `window` tokens (512, or the model's context)
    that know nothing of each other.

    activations: see :func:`billfish.quantized_linear`; None is what the model generates with.
    against: predicts the same, as exactly as its device can: it is the truth that `model` is compared with.
    """
    checked = model.decoder.check_activations(CALL, activations, model.decoder.usual)
    ids = [int(token) for token in tokens]
    window = min(WINDOW, model.config.context) if window is None else window
    if not 2 <= window <= model.config.context:
        raise DataError(complaint(CALL, "window", window, f"from 2 to {model.config.context}, the model's context"))
    if len(ids) < 2:
        raise DataError(complaint(CALL, "tokens", f"{len(ids)}", "at least 2: there is nothing to predict"))
    if against is not None:
        _check_vocabularies(model.tokenizer.pieces, against.tokenizer.pieces)
    losses, divergences, same = [], [], []
    with Progress(len(ids), "tokens", enabled=progress) as bar:
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            if len(part) > 1:
                hidden = model.hidden(part, checked)
                other = None if against is None else against.hidden(part)
                for row in range(0, len(part) - 1, ROWS):
                    rows = slice(row, min(row + ROWS, len(part) - 1))
                    q = log_softmax(model.decoder.logits(hidden[rows], checked))
                    losses.append(-q[np.arange(len(q)), part[rows.start + 1 : rows.stop + 1]])
                    if against is not None and other is not None:
                        p = log_softmax(against.decoder.logits(other[rows], against.decoder.exact))
                        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
                        same.append(p.argmax(axis=1) == q.argmax(axis=1))
            bar.advance(len(part))
    loss = np.concatenate(losses)
    return Evaluation(
        len(loss),
        float(loss.mean()),
        float(loss.std() / math.sqrt(len(loss))),
        float(np.concatenate(divergences).mean()) if divergences else None,
        float(np.concatenate(same).mean()) if same else None,
    )


def _check_vocabularies(pieces: Sequence[str], others: Sequence[str]) -> None:
    """Raises unless both models mean the same by every token."""
    if len(pieces) != len(others):
        got, takes = f"a vocabulary of {len(others)} tokens", f"the model's, of {len(pieces)}"
        raise ModelError(complaint(CALL, "against", got, takes))
    for token, (piece, other) in enumerate(zip(pieces, others, strict=True)):
        if piece != other:
            got, takes = f"a vocabulary whose token {token} is {other!r}", f"the model's, where it is {piece!r}"
            raise ModelError(complaint(CALL, "against", got, takes))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores [..., vocabulary] to logarithms of probabilities."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
