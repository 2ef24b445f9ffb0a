"""The kernels of rows that are sampled late, compiled for the CPU, beside the NumPy sampler."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_compiled import H200
from cuda_fibers import FiberLauncher, Memory

from billfish.backends.cuda.late_rows import LATE_ROW, MOST_SCORED, SCORED_TOKEN
from billfish.llm.sampler import Sampling, with_best

SETTINGS = (
    Sampling(),
    Sampling(presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(repetition_penalty=1.3, logit_bias={0: 5.0, 9: -100.0}),
    Sampling(repetition_penalty=0.7, presence_penalty=-1.0, logit_bias={6: 0.1}),
)


def rows_of_logits(vocabulary: int) -> np.ndarray:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((6, vocabulary)) * 3).astype(np.float32)
    logits[:, ::5] = np.rint(logits[:, ::5])  # some are equal
    return logits


@pytest.mark.parametrize("vocabulary", [29, 1000, 4097])
def test_logits_are_adjusted_to_the_bit(vocabulary):
    rng, logits = np.random.default_rng(0), rows_of_logits(vocabulary)
    samplers = [how.sampler(rng.integers(0, vocabulary, 20).tolist()) for how in SETTINGS]
    for sampler in samplers:
        for token in rng.integers(0, min(vocabulary, 40), 60).tolist():
            sampler.took(token)
    masks = [
        None,
        rng.integers(0, 256, -(-vocabulary // 32) * 4).astype(np.uint8),
        None,
        np.full(vocabulary, 255, np.uint8),
    ]
    memory = [None if s.adjustments is None else Memory(s.adjustments.entries) for s in samplers]
    bits = [None if mask is None else Memory(mask) for mask in masks]
    rows, which = np.zeros(len(samplers), LATE_ROW), [3, 0, 5, 2]
    rows["row"] = which
    for row, sampler, entries, mask in zip(rows, samplers, memory, bits, strict=True):
        if entries is not None:
            row["adjustments"], row["count"] = entries.pointer, len(sampler.adjustments.entries)
            row["above"], row["below"] = sampler.adjustments.above, sampler.adjustments.below
        row["mask"] = 0 if mask is None else mask.pointer
    given, told, out = Memory(logits), Memory(rows), Memory(np.full((4, vocabulary), np.nan, np.float32))
    launcher = FiberLauncher(1e-5, H200)
    launcher.launch(0, "adjust", {}, (7, 4), 256, given.pointer, vocabulary, told.pointer, out.pointer)
    for made, sampler, mask, i in zip(out.array, samplers, masks, which, strict=True):
        expected = sampler.adjusted(logits[i])
        if mask is not None:
            expected = np.where(np.unpackbits(mask, bitorder="little", count=vocabulary) == 1, expected, -np.inf)
        assert np.array_equal(made, expected)


@pytest.mark.parametrize("vocabulary", [29, 4097])
def test_the_best_come_with_their_log_probabilities(vocabulary):
    logits, wanted = rows_of_logits(vocabulary), [0, 20, -1, 5]
    logits[2, 7:11] = logits[2].max() + 1  # the best four are equal
    logits[1] = np.rint(logits[1])  # and many, of which only some are among the best
    rows = np.zeros(4, LATE_ROW)
    rows["row"], rows["alternatives"] = [4, 1, 0, 2], wanted
    picked, scored = np.array([3, 28, 5, 11], np.int32), np.zeros((4, MOST_SCORED), SCORED_TOKEN)
    given, told, chosen, out = map(Memory, (logits, rows, picked, scored))
    launcher = FiberLauncher(1e-5, H200)
    pointers = given.pointer, vocabulary, told.pointer, chosen.pointer, out.pointer
    launcher.launch(0, "log_probabilities", {}, (4,), 1024, *pointers)
    for row, token, made in zip(rows, picked, out.array, strict=True):
        if row["alternatives"] < 0:
            assert not made["token"].any()
            continue
        expected = with_best(logits[row["row"]], int(token), int(row["alternatives"]))
        assert [each["token"] for each in made[: len(expected)]] == [token for token, _ in expected]
        assert np.allclose(
            [each["log_probability"] for each in made[: len(expected)]], [p for _, p in expected], atol=1e-5
        )
