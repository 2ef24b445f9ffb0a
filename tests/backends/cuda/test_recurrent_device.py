"""Recurrent mixers on a GPU, against float64: prompts, decode steps, checkpoints, and the bits of batches.

Without an NVIDIA GPU these are skipped; test_recurrent.py runs the same kernels on the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from recurrent_parts import LARGE, SMALL, OnDevice, Part, Sequences, chunks_between

from billfish.backends.cuda.decoder import captured
from billfish.backends.cuda.driver import check, copy_out, current, device, driver, synchronize
from billfish.core.errors import BackendUnavailable

try:
    device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

ALL = SMALL | {name: LARGE[name] for name in ("qwen3.5-0.8b", "granite-4-tiny", "lfm2")}
LIMIT = 2e-3  # the output is float16
ROWS = {1: (1, 2, 63, 64, 65, 300, 2048), 3: (65, 300), 16: (2, 65)}  # by the number of sequences


@pytest.fixture(scope="module")
def places():
    """Mixers that are batch-invariant, so that bits can be compared."""
    made = {}

    def get(name: str) -> tuple[Part, OnDevice]:
        if name not in made:
            part = Part(ALL[name])
            made[name] = part, OnDevice(part)
            made[name][1].launcher.batch_invariant = True
        return made[name]

    return get


@pytest.mark.parametrize("texts", ROWS)
@pytest.mark.parametrize("name", ALL)
def test_prompts_and_decode_steps_are_exact(places, name, texts):
    """Prompts of several lengths together, cut anywhere, then steps of a token."""
    part, place = places(name)
    for rows in ROWS[texts]:
        sequences = Sequences(part, place, texts, seed=rows)
        sequences.feed([max(1, rows - 7 * i) for i in range(texts)])
        if rows <= 300:
            sequences.feed([1 + i % 5 for i in range(texts)])
        for _ in range(3):
            sequences.feed([1] * texts, decode=True)
        assert max(sequences.errors) < LIMIT, (rows, sequences.errors)
        assert max(sequences.state_errors()) < LIMIT, rows


@pytest.mark.parametrize("name", ALL)
def test_sequences_go_back_to_checkpoints(places, name):
    """Saved behind a chunk, between two, and behind the last row; then fed again from there, with the same bits."""
    part, place = places(name)
    for saved in (64, 100, 128, 150):
        save = place.state()
        sequences = Sequences(part, place, 2)
        sequences.feed([3, 3])
        rng = np.random.default_rng(7)
        xs = [rng.standard_normal((147, part.sizes.hidden)).astype(np.float16) for _ in range(2)]
        chunks = [chunks_between(3, 150, {saved: save.pointer} if i == 0 else {}) for i in range(2)]
        made = place.run(np.concatenate(xs), sequences.states, chunks)
        if saved < 150:
            again = place.run(xs[0][saved - 3 :], [save], [chunks_between(saved, 150, {})])
            assert np.array_equal(again, made[saved - 3 : 147])
        assert np.array_equal(place.read(save), place.read(sequences.states[0]))


@pytest.mark.parametrize("name", ALL)
def test_batches_and_pieces_at_multiples_of_64_have_the_same_bits(places, name):
    part, place = places(name)
    rng = np.random.default_rng(3)
    xs = [rng.standard_normal((n, part.sizes.hidden)).astype(np.float16) for n in (300, 65, 70)]
    steps = rng.standard_normal((3, part.sizes.hidden)).astype(np.float16)
    together = [place.state() for _ in xs]
    made = place.run(np.concatenate(xs), together, [chunks_between(0, len(x), {}) for x in xs])
    stepped = place.run(steps, together, None)
    row = 0
    for i, x in enumerate(xs):
        state = place.state()
        pieces = [
            place.run(x[a : a + 128], [state], [chunks_between(a, min(a + 128, len(x)), {})])
            for a in range(0, len(x), 128)
        ]
        assert np.array_equal(np.concatenate(pieces), made[row : row + len(x)])
        assert np.array_equal(place.run(steps[i : i + 1], [state], None)[0], stepped[i])
        assert np.array_equal(place.read(state), place.read(together[i]))
        row += len(x)


@pytest.mark.parametrize("name", ALL)
def test_drafted_rows_have_the_bits_that_they_have_alone(places, name):
    sequences = Sequences(*places(name), 2)
    sequences.feed([70, 3])
    for made, expected in zip(*sequences.drafted_rows(), strict=True):
        assert np.array_equal(made, expected)


@pytest.mark.parametrize("name", ALL)
def test_decode_steps_in_a_graph(places, name):
    part, place = places(name)
    rng, states, others = np.random.default_rng(5), [place.state() for _ in range(3)], [place.state() for _ in range(3)]
    x = rng.standard_normal((3, part.sizes.hidden)).astype(np.float16)
    expected = [place.run(x, states, None) for _ in range(4)][-1]
    with current(0):
        step, batch = place.fed(x, others, None)
        stream = int(check(driver().cuStreamCreate(1), "a stream"))
        graph = captured(lambda s: place.part.run(place.launcher, s, step, batch), stream)
        for _ in range(4):
            check(driver().cuGraphLaunch(graph, stream), "a graph")
        synchronize(stream)
        made = np.empty_like(expected)
        copy_out(made, step.at("added"), 0)
        check(driver().cuGraphExecDestroy(graph), "a graph")
        check(driver().cuStreamDestroy(stream), "a stream")
    assert np.array_equal(made, expected)
    for a, b in zip(states, others, strict=True):
        assert np.array_equal(place.read(a), place.read(b))
