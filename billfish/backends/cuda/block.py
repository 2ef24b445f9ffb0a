"""A block on a GPU: a token mixer and a feed-forward part, each a class that launches its own kernels.

A part reads its normalized input at `x` of the step's memory [rows, hidden] and writes its output to `added`, which
the next norm adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.launcher import UNFOLDED, DeviceMatrix, FoldedNorms, Launcher, NextNorm, Residual
from billfish.backends.cuda.step_memory import Batch, StepMemory


class BlockPart(Protocol):
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


@runtime_checkable
class FoldingPart(BlockPart, Protocol):
    """A part that nothing but products with `ends[0]` read `x` of, and whose output is a product with `ends[1]`: these
    may take over the norms around it."""

    @property
    def ends(self) -> tuple[tuple[DeviceMatrix, ...], DeviceMatrix]: ...

    def run(
        self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, folded: FoldedNorms = UNFOLDED
    ) -> None: ...


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

    mixer: BlockPart
    feed_forward: BlockPart
    mixer_norm: Buffer | None
    feed_forward_norm: Buffer | None
    mixer_post_norm: Buffer | None = None
    feed_forward_post_norm: Buffer | None = None
    residual_scale: float = 1.0
    layer_input: LayerInput | None = None
    output_scale: float = 1.0

    @property
    def parts(self) -> tuple[BlockPart, ...]:
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

    def run(
        self,
        launcher: Launcher,
        stream: int,
        step: StepMemory,
        batch: Batch,
        before: DeviceBlock | None,
        following: DeviceBlock | None,
    ) -> None:
        """before, following: its neighbours. What is between two blocks may be done by products of both."""
        rows, residual = batch.rows, Residual(self.mixer_post_norm, self.residual_scale)
        norms = self.mixer_norm, self.feed_forward_norm
        first = None if before is None else before.norm_of_next(launcher, self, rows)
        if first is None:
            launcher.normalize(stream, step, rows, self.mixer_norm, None if before is None else before.residual)
        second = _folded(launcher, self.mixer, self.feed_forward, residual, *norms, rows)
        _run(self.mixer, launcher, stream, step, batch, FoldedNorms(first is not None, second))
        if second is None:
            launcher.normalize(stream, step, rows, self.feed_forward_norm, residual)
        last = None if following is None else self.norm_of_next(launcher, following, rows)
        _run(self.feed_forward, launcher, stream, step, batch, FoldedNorms(second is not None, last))
        if self.layer_input is not None:
            residual = Residual(self.feed_forward_post_norm, self.residual_scale)
            launcher.normalize(stream, step, batch.rows, None, residual)
            self.layer_input.run(launcher, stream, step, batch)

    def norm_of_next(self, launcher: Launcher, following: DeviceBlock, rows: int) -> NextNorm | None:
        """The first norm of the next block, if products of both blocks take it over."""
        if self.layer_input is not None:
            return None
        norms = self.feed_forward_norm, following.mixer_norm
        return _folded(launcher, self.feed_forward, following.mixer, self.residual, *norms, rows)


def _folded(
    launcher: Launcher,
    first: BlockPart,
    second: BlockPart,
    residual: Residual,
    norm_before: Buffer | None,
    norm: Buffer | None,
    rows: int,
) -> NextNorm | None:
    """The norm between two parts, if their products take it over. They need the factor of the norm before it."""
    if norm_before is None or not isinstance(first, FoldingPart) or not isinstance(second, FoldingPart):
        return None
    return launcher.folded(rows, first.ends[1], second.ends[0], residual, norm)


def _run(part: BlockPart, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, folded: FoldedNorms) -> None:
    if isinstance(part, FoldingPart):
        part.run(launcher, stream, step, batch, folded)
    else:
        part.run(launcher, stream, step, batch)
