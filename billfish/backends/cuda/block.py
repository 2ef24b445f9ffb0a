"""A block on a GPU: a token mixer and a feed-forward part, each a class that launches its own kernels.

A part reads its normalized input at `x` of the step's memory [rows, hidden] and writes its output to `added`, which
the next norm adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, Residual
from billfish.backends.cuda.step_memory import Batch, StepMemory


class Part(Protocol):
    """A token mixer or a feed-forward part. A recurrent mixer has its state of sequence i at states[i] plus the bytes
    it was told when it was made."""

    @property
    def key(self) -> Hashable:
        """Parts with one key launch the same kernels."""
        ...

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        """All that `Launcher.products` multiplies with."""
        ...

    def memory(self, rows: int) -> dict[str, int]:
        """The parts of the step's memory that it uses beside `x` and `added`: bytes for so many rows. Parts with one
        name are the same memory in all blocks, as large as the largest."""
        ...

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        """Launch it, from `x` to `added`. Nothing is allocated, and nothing waits."""
        ...


@dataclass(frozen=True)
class LayerInput:
    """x += post_norm(projection(activation(gate x) * e)), where e is the layer's part of what the model computes for
    each token: `number` counts the layers."""

    number: int
    gate: DeviceMatrix
    projection: DeviceMatrix
    post_norm: Buffer
    activation: str

    @property
    def key(self) -> Hashable:
        return "layer input", self.activation, *(matrix.weights.kind for matrix in self.matrices)

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return self.gate, self.projection

    @property
    def size(self) -> int:
        return self.gate.weights.shape[0]

    def memory(self, rows: int) -> dict[str, int]:
        return {"apart": 2 * rows * self.size, "opened": 2 * rows * self.size}

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        rows, at = batch.rows, step.at
        launcher.products(stream, step, (self.gate,), at("x"), at("apart"), rows)
        numbers = at("layer_inputs") + 2 * self.number * rows * self.size
        launcher.gate(stream, self.activation, at("apart"), numbers, at("opened"), rows, self.size)
        launcher.products(stream, step, (self.projection,), at("opened"), at("added"), rows)


@dataclass(frozen=True)
class DeviceBlock:
    """x += scale post_norm(mixer(norm(x))), then the same with the feed-forward part, as models/description.py says.
    A norm that is None is left out."""

    mixer: Part
    feed_forward: Part
    mixer_norm: Buffer | None
    feed_forward_norm: Buffer | None
    mixer_post_norm: Buffer | None = None
    feed_forward_post_norm: Buffer | None = None
    residual_scale: float = 1.0
    layer_input: LayerInput | None = None
    output_scale: float = 1.0

    @property
    def parts(self) -> tuple[Part, ...]:
        more = () if self.layer_input is None else (self.layer_input,)
        return self.mixer, self.feed_forward, *more

    @property
    def key(self) -> Hashable:
        norms = self.mixer_norm, self.feed_forward_norm, self.mixer_post_norm, self.feed_forward_post_norm
        return *(part.key for part in self.parts), *(norm is None for norm in norms)

    @property
    def residual(self) -> Residual:
        """How the block's output is added."""
        post_norm = self.feed_forward_post_norm if self.layer_input is None else self.layer_input.post_norm
        return Residual(post_norm, self.residual_scale, self.output_scale)

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, before: Residual | None) -> None:
        """before: how the output of the block before is added; None for the first one."""
        launcher.normalize(stream, step, batch.rows, self.mixer_norm, before)
        self.mixer.run(launcher, stream, step, batch)
        residual = Residual(self.mixer_post_norm, self.residual_scale)
        launcher.normalize(stream, step, batch.rows, self.feed_forward_norm, residual)
        self.feed_forward.run(launcher, stream, step, batch)
        if self.layer_input is not None:
            residual = Residual(self.feed_forward_post_norm, self.residual_scale)
            launcher.normalize(stream, step, batch.rows, None, residual)
            self.layer_input.run(launcher, stream, step, batch)
