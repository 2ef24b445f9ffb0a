"""How well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, ModelError, bad_argument, failure
from billfish.core.machine import map_rows
from billfish.core.progress import Progress
from billfish.core.typing import Activations
from billfish.llm.model import Model

CALL = "llm.evaluate"
WINDOW = 512
ROWS = 64  # of scores at a time: a vocabulary is wide

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """Means over all predicted tokens, in nats, and their standard errors. :func:`evaluate` returns one.

    loss: cross-entropy; its exponential is the perplexity. divergence: KL divergence from the other model's
    predictions.
    divergence_999: that of the token at the 99.9 percentile.
    same_best: the share of tokens where both have the same most likely token. All of these are None without another
    model.

        >>> bf.llm.Evaluation(tokens=10, loss=2.0, loss_error=0.1).divergence is None
        True
    """

    tokens: int
    loss: float  # of the true token: -log p
    loss_error: float  # the standard error of `loss`
    divergence: float | None = None  # KL(other || model): what is lost by predicting with this model instead
    divergence_error: float | None = None  # of `divergence`
    same_best: float | None = None  # how often both think the same token likeliest
    same_best_error: float | None = None  # of `same_best`
    divergence_999: float | None = None  # which one token of a thousand exceeds

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def perplexity_error(self) -> float:
        return self.perplexity * self.loss_error


class Truth:
    """What a model predicts for a text, as exactly as its device can, for other models to be compared with.

    The hidden states [tokens, hidden] are computed once and kept. Scores, which take more memory, are made anew for
    each comparison.
    """

    def __init__(self, model: Model, tokens: Sequence[int], window: int | None = None) -> None:
        self.model = model
        self.window = usual_window(model) if window is None else window
        self.windows = cut_windows(model, tokens, self.window)
        self._hidden: dict[int, NDArray[np.float32]] = {}

    def scores(self, window: int, rows: slice) -> NDArray[np.float32]:
        """Of some tokens of a window, [rows, vocabulary]."""
        if window not in self._hidden:
            self._hidden[window] = self.model.hidden(self.windows[window])
        return self.model.decoder.logits(self._hidden[window][rows], self.model.decoder.exact)


def evaluate(
    model: Model,
    tokens: Sequence[int],
    *,
    against: Model | Truth | None = None,
    activations: Activations | None = None,
    window: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure how well a model predicts a text, and how far it is from another model.

    model: from :func:`load`. tokens: of the text, at least 2.
    against: a model that predicts the same, as exactly as its device can; `model` is compared with it. For several
    comparisons, a :class:`billfish.llm.evaluation.Truth` of the same tokens and window spares the time to predict
    again.
    activations: as in :func:`billfish.quantized_linear`; None is what the model generates with.
    window: tokens that see each other; None is 512, or the model's context. progress: whether to draw a bar on
    terminals.

    Returns an Evaluation. Raises DataError for a window or tokens that do not fit, and for models of other
    vocabularies.

        >>> model = bf.llm.load("model.gguf")
        >>> found = bf.llm.evaluate(model, list(range(10, 42)), against=model, window=16)
        >>> found.tokens, found.divergence < 0.01
        (30, True)
    """
    checked = model.decoder.check_activations(CALL, activations, model.decoder.usual)
    if window is None:
        window = against.window if isinstance(against, Truth) else usual_window(model)
    windows = cut_windows(model, tokens, window)
    truth = Truth(against, tokens, window) if isinstance(against, Model) else against
    if truth is not None:
        check_vocabularies(model.tokenizer.pieces, truth.model.tokenizer.pieces)
        if truth.windows != windows:
            problem = "against= was computed for other tokens or windows"
            raise DataError(failure(CALL, problem, "Compute it with the same tokens and window."))
    found: list[Compared] = []
    with Progress(sum(map(len, windows)), "tokens", enabled=progress) as bar:
        for i, part in enumerate(windows):
            hidden = model.hidden(part, checked)
            for row in range(0, len(part) - 1, ROWS):
                rows = slice(row, min(row + ROWS, len(part) - 1))
                scores = model.decoder.logits(hidden[rows], checked)
                true_scores = None if truth is None else truth.scores(i, rows)
                found += compare(scores, part[rows.start + 1 : rows.stop + 1], true_scores)
            bar.advance(len(part))
    loss, loss_error = _mean(np.concatenate([part.loss for part in found]))
    count = sum(len(part.loss) for part in found)
    if truth is None:
        return Evaluation(count, loss, loss_error)
    divergence, same = (np.concatenate([getattr(part, name) for part in found]) for name in ("divergence", "same_best"))
    tail = float(np.quantile(divergence, 0.999))
    return Evaluation(count, loss, loss_error, *_mean(divergence), *_mean(same), tail)


def usual_window(*models: Model) -> int:
    """512 tokens, or what the context of each model has room for."""
    return min(WINDOW, *(model.config.context for model in models))


def cut_windows(model: Model, tokens: Sequence[int], window: int) -> list[list[int]]:
    """The tokens in lists of `window`. A last token that stands alone predicts nothing, and is left out."""
    ids = [int(token) for token in tokens]
    if not 2 <= window <= model.config.context:
        raise DataError(bad_argument(CALL, "window", window, f"2 to {model.config.context}, the model's context"))
    if len(ids) < 2:
        raise DataError(bad_argument(CALL, "len(tokens)", len(ids), "2 or more"))
    return [ids[start : start + window] for start in range(0, len(ids) - 1, window)]


class Compared(NamedTuple):
    """What some predictions came to, one number for each of them."""

    loss: Numbers
    divergence: Numbers | None = None
    same_best: Numbers | None = None


def compare(
    scores: NDArray[np.float32], true_tokens: Sequence[int], true_scores: NDArray[np.float32] | None
) -> list[Compared]:
    """Scores [m, vocabulary] beside the tokens that came, and beside another model's scores; in slices of rows."""
    tokens = np.asarray(true_tokens)

    def compare_rows(start: int, stop: int) -> Compared:
        q = log_softmax(scores[start:stop])
        loss = -q[np.arange(len(q)), tokens[start:stop]]
        if true_scores is None:
            return Compared(loss)
        p = log_softmax(true_scores[start:stop])
        same = (p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64)
        q -= p
        return Compared(loss, -np.einsum("mv,mv->m", np.exp(p), q), same)

    return map_rows(compare_rows, *scores.shape)


def _mean(values: Numbers) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def check_vocabularies(pieces: Sequence[str], others: Sequence[str]) -> None:
    """Raises unless both models mean the same by every token."""
    if len(pieces) != len(others):
        problem = f"against= has a vocabulary of {len(others)} tokens, and the model of {len(pieces)}"
        raise ModelError(failure(CALL, problem))
    for token, (piece, other) in enumerate(zip(pieces, others, strict=True)):
        if piece != other:
            problem = f"against= has another vocabulary: token {token} is {other!r}, and {piece!r} in the model"
            raise ModelError(failure(CALL, problem))


def log_softmax(logits: NDArray[np.float32]) -> Numbers:
    """Scores [..., vocabulary] to logarithms of probabilities."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
