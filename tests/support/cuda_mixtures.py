"""Mixtures with random weights on a GPU, and what they should give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mixture_oracle import Router, RouterKind, mixture
from numpy.typing import NDArray

import billfish as bf
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.experts import DeviceExperts, by_turns, pack_gate_up
from billfish.backends.cuda.launcher import DeviceMatrix, sent
from billfish.backends.cuda.mixture_step import TICKETS, DeviceMixture, DeviceRouter
from billfish.backends.cuda.step_memory import StepMemory, largest

Numbers = NDArray[Any]


class RandomMixture:
    """`part` on the device, and its weights as numbers.

    formats: of gate, up and down; "f16" is unquantized. shared: None, "plain" or "gated".
    """

    def __init__(
        self,
        kind: RouterKind,
        formats: tuple[str, str, str] = ("q4_0",) * 3,
        *,
        hidden: int = 256,
        size: int = 64,
        experts: int = 8,
        activation: str = "silu",
        biased: bool = False,
        shared: str | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.hidden, self.experts, self.activation, self.gated = hidden, experts, activation, shared == "gated"
        self.router: Router = kind.made(rng, experts)
        self.router_matrix = (rng.standard_normal((experts, hidden)) / np.sqrt(hidden)).astype(np.float16)
        self.router_bias = rng.standard_normal(experts).astype(np.float32) if biased else None
        shapes = (experts, size, hidden), (experts, size, hidden), (experts, hidden, size)
        plain = [(rng.standard_normal(shape) / np.sqrt(shape[2])).astype(np.float16) for shape in shapes]
        stacks = [
            w if f == "f16" else bf.quantize(w.astype(np.float32), f, method="rtn")
            for w, f in zip(plain, formats, strict=True)
        ]
        self.gate, self.up, self.down = (w if isinstance(w, np.ndarray) else bf.dequantize(w) for w in stacks)
        self.biases = None
        if biased:
            widths = size, size, hidden
            self.biases = tuple(rng.standard_normal((experts, width)).astype(np.float32) for width in widths)
        self.shared_matrices = (
            [(rng.standard_normal(s[1:]) / np.sqrt(s[2])).astype(np.float16) for s in shapes] if shared else []
        )
        self.shared_gate = (rng.standard_normal(hidden) / np.sqrt(hidden)).astype(np.float16)
        self.part = self._packed(stacks, size)

    def _packed(self, stacks: list[Any], size: int) -> DeviceMixture:
        if isinstance(stacks[0], np.ndarray):
            rows = np.concatenate(stacks[:2], axis=1)[:, by_turns(size)]
            gate_up = [DeviceExperts.pack_plain(rows, rows.shape, "cpu", gated=True)]
        else:
            gate_up = pack_gate_up(stacks[:2], "cpu")
        down = stacks[2]
        plain = isinstance(down, np.ndarray)
        biases: tuple[Buffer | None, ...] = (None,) * len(gate_up)
        if self.biases is not None:
            own = [np.concatenate(self.biases[:2], axis=1)] if len(gate_up) == 1 else self.biases[:2]
            biases = tuple(sent(bias, 0) for bias in own)
        return DeviceMixture(
            self._router(),
            size,
            tuple(gate_up),
            DeviceExperts.pack_plain(down, down.shape, "cpu") if plain else DeviceExperts.pack(down, "cpu"),
            biases,
            self.activation,
            None if self.biases is None else sent(self.biases[2], 0),
            self._shared(size) if self.shared_matrices else None,
        )

    def _router(self) -> DeviceRouter:
        r = self.router
        rows = np.concatenate([self.router_matrix, self.shared_gate[None]]) if self.gated else self.router_matrix
        vectors = [None if v is None else sent(v, 0) for v in (self.router_bias, r.selection_bias, r.expert_scale)]
        return DeviceRouter(
            DeviceWeights.pack_plain(rows, "cpu"),
            self.experts,
            r.chosen,
            sent(np.zeros(TICKETS, np.uint32), 0),
            vectors[0],
            r.sigmoid,
            r.renormalized,
            r.scale,
            vectors[1],
            vectors[2],
            r.groups,
            r.groups_used,
        )

    def _shared(self, size: int) -> DeviceDense:
        gate, up, down = self.shared_matrices
        gate_up = DeviceWeights.pack_plain(np.concatenate([gate, up])[by_turns(size)], "cpu")
        matrices = DeviceMatrix(gate_up), DeviceMatrix(DeviceWeights.pack_plain(down, "cpu"))
        return DeviceDense(size, matrices[:1], matrices[1], self.activation)

    def routed(self, x: Numbers) -> tuple[Numbers, Numbers]:
        """ids and weights of x [rows, hidden], in float64."""
        logits = x.astype(np.float64) @ self.router_matrix.T.astype(np.float64)
        return self.router.chosen_of(
            (logits if self.router_bias is None else logits + self.router_bias).astype(np.float32)
        )

    def expected(self, x: Numbers, ids: Numbers, weights: Numbers) -> Numbers:
        y = mixture(x, ids, weights, self.gate, self.up, self.down, self.activation, self.biases)
        if self.shared_matrices:
            gate, up, down = (w[None] for w in self.shared_matrices)
            every = np.zeros((len(x), 1), np.int32), np.ones((len(x), 1))
            more = mixture(x, *every, gate, up, down, self.activation)
            y = y + (more / (1 + np.exp(-(x.astype(np.float64) @ self.shared_gate)))[:, None] if self.gated else more)
        return y


def step_for(memory: Callable[[int], dict[str, int]], rows: int, hidden: int) -> StepMemory:
    """A step's memory for one part of a model."""
    own = {"x": 2 * rows * hidden, "added": 2 * rows * hidden, "hidden": 4 * rows * hidden, "work": 16, "ordered": 16}
    own["factors"] = 8 * rows
    sizes = largest([own, memory(rows)])
    return StepMemory(sizes, 0, rows=rows, sequences=1, pages_of_sequence=1, tables=1, scored=1)
