"""Texts of which no row is near a tie of its router, so that rounding makes no row take another expert."""

from __future__ import annotations

import numpy as np
import pytest
from mixture_oracle import Router

from billfish.backends.cuda.driver import Buffer, copy_out
from billfish.backends.cuda.launcher import Launcher
from billfish.backends.cuda.mixture_step import DeviceRouter
from billfish.backends.cuda.plans import ExpertRouting
from billfish.backends.cuda.step_memory import Batch, StepMemory
from billfish.llm import Model
from billfish.llm.cuda_steps import CudaSteps

CLEAR = 0.02  # of the standard deviation of a row's logits: so far may each move. x in float16 moves them by 0.005
SHAKEN = 16  # times that all logits move at random


def clear_text(model: Model, text: list[int], vocabulary: range) -> list[int]:
    """The text, where other tokens of the vocabulary replace those whose row is near a tie in some layer."""
    rng, text = np.random.default_rng(0), list(text)
    for _ in range(100):
        near = near_ties(model, text)
        if not near.any():
            return text
        for row in np.flatnonzero(near):
            text[row] = int(rng.choice(vocabulary))
    raise AssertionError("no text is clear")


def near_ties(model: Model, text: list[int]) -> np.ndarray:
    """Which rows of a text would take other experts in some layer, if the router's logits moved a little."""
    near, run = np.zeros(len(text), bool), DeviceRouter.run

    def watched(
        router: DeviceRouter, launcher: Launcher, stream: int, step: StepMemory, routing: ExpertRouting, x: int, *,
        shared: int,
    ) -> None:  # fmt: skip
        run(router, launcher, stream, step, routing, x, shared=shared)
        if launcher.heard is None:  # or it is only compiled
            logits = np.empty((routing.tokens, router.outputs), np.float32)
            copy_out(logits, step.at("router_logits"), stream)
            near[:] |= moves(router, logits[: len(text), : router.experts], stream)

    def issue(steps: CudaSteps, batch: Batch, activations: str) -> None:  # not as a program: each layer is looked at
        steps._layers.prepare(steps.memory, batch, activations=activations)
        steps._layers.run(steps._stream.pointer, steps.memory, batch, activations=activations)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DeviceRouter, "run", watched)
        patched.setattr(CudaSteps, "_issue", issue)
        model.hidden(text)
    return near


def moves(router: DeviceRouter, logits: np.ndarray, stream: int) -> np.ndarray:
    """Of which rows the chosen experts change."""

    def vector(buffer: Buffer | None) -> np.ndarray | None:
        numbers = None if buffer is None else np.empty(router.experts, np.float32)
        if buffer is not None:
            copy_out(numbers, buffer.pointer, stream)
        return numbers

    oracle = Router(
        router.chosen, router.sigmoid, groups=router.groups, groups_used=router.groups_used,
        selection_bias=vector(router.selection_bias),
    )  # fmt: skip
    rng, moved = np.random.default_rng(0), np.zeros(len(logits), bool)
    chosen = np.sort(oracle.chosen_of(logits)[0], axis=1)
    size = CLEAR * logits.std(axis=1, keepdims=True)
    for _ in range(SHAKEN):
        shaken = oracle.chosen_of(logits + size * rng.uniform(-1, 1, logits.shape))[0]
        moved |= (np.sort(shaken, axis=1) != chosen).any(axis=1)
    return moved
