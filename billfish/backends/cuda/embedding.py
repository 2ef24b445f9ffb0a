"""What comes before the first block on a GPU: rows of the embedding, angles of RoPE, and inputs of each layer."""

from __future__ import annotations

from dataclasses import dataclass

from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.step_memory import StepMemory


@dataclass(frozen=True)
class RopeTables:
    """All tables behind each other, float64 [pairs]: radians from one position to the next, and what cosine and sine
    are multiplied with."""

    pairs: int
    frequencies: Buffer
    magnitudes: Buffer


@dataclass(frozen=True)
class DeviceEmbedding:
    """weights: a row for each token."""

    weights: DeviceWeights
    ropes: RopeTables
    scale: float = 1.0

    def memory(self, rows: int) -> dict[str, int]:
        return {"hidden": 4 * rows * self.weights.shape[1], "angles": 8 * rows * self.ropes.pairs}

    def run(self, launcher: Launcher, stream: int, step: StepMemory, rows: int) -> None:
        """`hidden` from `tokens`, and `angles` from `positions`."""
        at, (n, k), ropes = step.at, self.weights.shape, self.ropes
        table = address(self.weights.bricks), address(self.weights.row_scale)
        read = at("tokens"), at("chosen"), at("positions"), ropes.frequencies.pointer, ropes.magnitudes.pointer
        numbers = at("hidden"), at("angles"), n, k, ropes.pairs, float(self.scale)
        macros, grid = self.weights.kind.macros(), (-(-k // 128), rows)
        launcher.launch(stream, "embed", macros, grid, 32, *table, *read, *numbers)


@dataclass(frozen=True)
class DeviceLayerInputs:
    """For each token and layer `size` numbers: (norm(projection_scale projection(x)) + scale embedding) / sqrt(2),
    where x is the scaled embedding of the model."""

    size: int
    layers: int
    embedding: DeviceWeights
    projection: DeviceMatrix
    norm: Buffer
    scale: float
    projection_scale: float

    def memory(self, rows: int) -> dict[str, int]:
        size = 2 * rows * self.layers * self.size
        return {"layer_projections": size, "layer_inputs": size}

    def run(self, launcher: Launcher, stream: int, step: StepMemory, rows: int) -> None:
        """`layer_inputs` [layers, rows, size], in 16 bits, from `tokens` and `hidden`."""
        at, (n, k) = step.at, self.embedding.shape
        launcher.normalize(stream, step, rows, None)
        launcher.products(stream, step, (self.projection,), at("x"), at("layer_projections"), rows)
        table = address(self.embedding.bricks), address(self.embedding.row_scale)
        pointers = at("tokens"), at("chosen"), at("layer_projections"), self.norm.pointer, at("layer_inputs")
        numbers = n, k, rows, launcher.epsilon, float(self.scale), float(self.projection_scale)
        macros = self.embedding.kind.macros() | {"NUMBER": launcher.type, "SIZE": str(self.size)}
        launcher.launch(stream, "layer_inputs", macros, (self.layers, rows), 32, *table, *pointers, *numbers)
