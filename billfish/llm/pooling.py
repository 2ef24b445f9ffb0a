"""One vector of a text's hidden states, or the scores of its classifier."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from billfish.llm.kv_cache import Floats
from billfish.llm.model_weights import ModelTensors
from billfish.models.description import LayerNorm, Pooling, Vector

Doubles = NDArray[np.float64]
ERF = np.vectorize(math.erf, otypes=[np.float64])


class Pooler:
    """As the model's description says. A text has few numbers here, so they are float64."""

    def __init__(self, tensors: ModelTensors) -> None:
        config = tensors.config
        self._config, self._tensors = config, tensors
        self._norm = self._numbers(config.final_norm)
        about = None if config.encoder is None else config.encoder.classifier
        self._classifier = about
        if about is not None:
            self._output = tensors.numbers(about.output)
            self._dense = None if about.dense is None else tensors.numbers(about.dense)
            self._dense_norm = None if about.norm is None else self._numbers(about.norm)

    def __call__(self, hidden: Floats) -> Floats:
        """hidden: [tokens, hidden], before the last norm."""
        config = self._config
        states = self._normalize(hidden.astype(np.float64), self._norm)
        if config.pooling == "rank":
            return self._scores(states)
        vector = _pool(states, config.pooling)
        return (vector / np.linalg.norm(vector) if config.normalized else vector).astype(np.float32)

    def _scores(self, states: Doubles) -> Floats:
        about = self._classifier
        assert about is not None  # the architecture refuses others
        x = _pool(states, about.pooling)
        if self._dense is not None:
            x = _product(x, self._dense)
            x = np.tanh(x) if about.activation == "tanh" else x * (1 + ERF(x / math.sqrt(2))) / 2
        if self._dense_norm is not None:
            x = self._normalize(x, self._dense_norm)
        return _product(x, self._output).astype(np.float32)

    def _numbers(self, norm: Vector) -> tuple[bool, Floats, Floats | None]:
        """Whether it is LayerNorm, its weight and its bias."""
        centered = isinstance(norm, LayerNorm)
        bias = self._tensors.vector(norm.bias) if isinstance(norm, LayerNorm) else None
        return centered, self._tensors.vector(norm), bias

    def _normalize(self, x: Doubles, norm: tuple[bool, Floats, Floats | None]) -> Doubles:
        centered, weight, bias = norm
        if centered:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self._config.norm_epsilon) * weight
        return x if bias is None else x + bias


def _pool(states: Doubles, pooling: Pooling) -> Doubles:
    vector: Doubles = states.mean(axis=0) if pooling == "mean" else states[-1] if pooling == "last" else states[0]
    return vector


def _product(x: Doubles, matrix: tuple[Floats, Floats | None]) -> Doubles:
    weights, bias = matrix
    y: Doubles = weights.astype(np.float64) @ x
    return y if bias is None else y + bias
