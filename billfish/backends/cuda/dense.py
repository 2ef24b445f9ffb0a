"""A dense feed-forward part on a GPU: down(activation(gate x) * up x)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from billfish.backends.cuda.launcher import UNFOLDED, DeviceMatrix, FoldedNorms, Launcher
from billfish.backends.cuda.step_memory import Batch, StepMemory


@dataclass(frozen=True)
class DeviceDense:
    """gate_up: one matrix, of eight rows of gate, eight of up, and so on, whose epilogue is the gate; or two."""

    size: int
    gate_up: tuple[DeviceMatrix, ...]
    down: DeviceMatrix
    activation: str = "silu"

    @property
    def key(self) -> Hashable:
        return "dense", self.activation, self.size, *(matrix.weights.kind for matrix in self.matrices)

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return *self.gate_up, self.down

    @property
    def ends(self) -> tuple[tuple[DeviceMatrix, ...], DeviceMatrix]:
        return self.gate_up, self.down

    def memory(self, rows: int) -> dict[str, int]:
        apart = 2 * 2 * rows * self.size if len(self.gate_up) > 1 else 0
        return {"opened": 2 * rows * self.size, "apart": apart}

    def run(
        self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch, folded: FoldedNorms = UNFOLDED
    ) -> None:
        rows, at, normed = batch.rows, step.at, folded.before
        if len(self.gate_up) == 1:
            gate = self.activation
            launcher.products(stream, step, self.gate_up, at("x"), at("opened"), rows, gate=gate, normed=normed)
        else:
            launcher.products(stream, step, self.gate_up, at("x"), at("apart"), rows, normed=normed)
            up = at("apart") + 2 * rows * self.size
            launcher.gate(stream, self.activation, at("apart"), up, at("opened"), rows, self.size)
        launcher.output(stream, step, self.down, at("opened"), rows, folded.after)
