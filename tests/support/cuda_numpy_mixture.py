"""Kernels of mixtures of experts in NumPy, for the fake GPU of cuda_numpy.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mixture_oracle
import numpy as np
import pytest
from cuda_views import finite, gated, rms, rows_at, sigmoid, view

import billfish as bf
from billfish.backends.cuda.experts import DeviceExperts
from billfish.backends.cuda.memory import address


class MixtureKernels:
    """Methods as the kernels of their names. The table of tiles is not written: who sorts the visits remembers them."""

    weights: dict[int, np.ndarray]

    def remember_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep the numbers of stacks beside their bricks."""
        together, plain = DeviceExperts.pack_together, DeviceExperts.pack_plain

        def pack_together(cls: type, stacks: Any, place: str, gated: bool = False, rows: Any = None) -> DeviceExperts:
            made = together(stacks, place, gated, rows)
            dense = [np.stack([bf.dequantize(stack[e]) for e in range(stack.shape[0])]) for stack in stacks]
            whole = np.concatenate(dense, axis=1)
            self.weights[address(made.bricks)] = whole if rows is None else whole[:, rows]
            return made

        def pack_plain(cls: type, matrices: Iterable[Any], *about: Any) -> DeviceExperts:
            listed = list(matrices)
            made = plain(listed, *about)
            self.weights[address(made.bricks)] = np.stack([np.asarray(each, np.float32) for each in listed])
            return made

        monkeypatch.setattr(DeviceExperts, "pack_together", classmethod(pack_together))
        monkeypatch.setattr(DeviceExperts, "pack_plain", classmethod(pack_plain))

    def router(
        self, macros: dict[str, str], grid: tuple[int, ...], bricks: int, _: int, bias: int, selection_bias: int,
        expert_scale: int, x: int, logits: int, ids: int, routing: int, tickets: int, table: int, order: int,
        copies: int, rows: int, experts: int, outputs: int, k: int, chosen: int, groups: int, groups_used: int,
        width: int, scale: float,
    ) -> None:  # fmt: skip
        found = view(x, np.float16, rows, k).astype(np.float32) @ self.weights[bricks].T
        if bias:
            found[:, :experts] += view(bias, np.float32, experts)
        view(logits, np.float32, rows, outputs)[:] = found
        how = mixture_oracle.Router(
            chosen,
            macros["SIGMOIDAL"] == "1",
            macros["RENORMALIZED"] == "1",
            scale,
            groups,
            groups_used,
            view(selection_bias, np.float32, experts) if selection_bias else None,
            view(expert_scale, np.float32, experts) if expert_scale else None,
        )
        taken, weights = how.chosen_of(found[:, :experts])
        shared = int(macros["SHARED"])
        more = {0: np.zeros((rows, 0)), 1: np.ones((rows, 1)), 2: sigmoid(found[:, -1:])}[shared]
        view(ids, np.int32, rows, chosen)[:] = taken
        view(routing, np.float32, rows, chosen + (shared > 0))[:] = np.concatenate([weights, more], axis=1)
        if macros["SORTED"] == "1":
            self._sort(ids, order, rows * chosen)
            if rows == 1:
                stride = -(-k // 8) * 8
                rows_at(copies, np.float16, chosen, k, stride)[:] = view(x, np.float16, 1, k)

    def route(
        self, macros: dict[str, str], grid: tuple[int, ...], ids: int, table: int, order: int, visits: int,
        experts: int, width: int,
    ) -> None:  # fmt: skip
        self._sort(ids, order, visits)

    def _sort(self, ids: int, order: int, visits: int) -> None:
        taken = view(ids, np.int32, visits)
        sorted = np.argsort(taken, kind="stable")
        view(order, np.int32, visits)[:] = sorted
        self._experts = taken[sorted]

    def gather(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, table: int, order: int, out: int, y: int,
        visits: int, k: int, x_stride: int, out_stride: int, together: int, n: int,
    ) -> None:  # fmt: skip
        tokens = view(order, np.int32, visits) // together
        rows = rows_at(x, np.float16, int(tokens.max()) + 1, k, x_stride)
        rows_at(out, np.float16, visits, k, out_stride)[:] = rows[tokens]

    def experts(
        self, macros: dict[str, str], grid: tuple[int, ...], _map: Any, bricks: int, _scale: int, x: int, bias: int,
        y: int, table: int, order: int, visits: int, n: int, k: int, x_stride: int,
    ) -> None:  # fmt: skip
        rows = rows_at(x, np.float16, visits, k, x_stride).astype(np.float32)
        out = np.einsum("vk,vnk->vn", rows, self.weights[bricks][self._experts])
        if bias:
            own = view(bias, np.float32, int(self._experts.max()) + 1, n)[self._experts]
            if "GATE" in macros:  # those of all gates come first
                own = own.reshape(visits, 2, -1, 8).transpose(0, 2, 1, 3).reshape(visits, n)
            out += own
        if "GATE" in macros:
            pairs = out.reshape(visits, -1, 2, 8)
            out = gated(macros["GATE"], pairs[:, :, 0].reshape(visits, -1), pairs[:, :, 1].reshape(visits, -1))
        place = view(order, np.int32, visits) if order else np.arange(visits)
        view(y, np.float16, *out.shape)[place] = finite(out)

    def mix(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, ids: int, weights: int, shared: int, y: int,
        experts: int, chosen: int, apart: int, n: int,
    ) -> None:  # fmt: skip
        tokens = len(self._experts) // chosen
        by = view(weights, np.float32, tokens, apart)
        out = np.einsum("tc,tcn->tn", by[:, :chosen], view(x, np.float16, tokens, chosen, n).astype(np.float32))
        if shared:
            out += by[:, chosen:] * view(shared, np.float16, tokens, n).astype(np.float32)
        view(y, np.float16, tokens, n)[:] = finite(out)

    def add_norms(
        self, macros: dict[str, str], grid: tuple[int, ...], a: int, a_weight: int, b: int, b_weight: int, y: int,
        epsilon: float,
    ) -> None:  # fmt: skip
        rows, hidden = grid[0], int(macros["HIDDEN"])
        parts = [
            rms(view(at, np.float16, rows, hidden).astype(np.float32), epsilon) * view(weight, np.float32, hidden)
            for at, weight in ((a, a_weight), (b, b_weight))
        ]
        view(y, np.float16, rows, hidden)[:] = finite(parts[0] + parts[1])
