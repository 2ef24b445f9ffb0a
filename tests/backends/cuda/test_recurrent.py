"""Recurrent mixers of the CUDA decoder on the CPU (fibers.h), against float64; and that their kernels compile.

test_recurrent_device.py has more of it on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_compiled import ADA, H200, resources
from recurrent_parts import LARGE, SMALL, TINY, OnFibers, Part, Sequences, Sizes, chunks_between

from billfish.backends.cuda.recurrent import Chunk

LIMIT = 2e-3  # outputs are float16
FEW_BYTES = replace(ADA, shared_bytes=20000)  # too few for the chunkwise form


def fed(sizes: Sizes, device=H200, count: int = 2) -> Sequences:
    part = Part(sizes)
    return Sequences(part, OnFibers(part, device), count)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, id=name, marks=() if name in ("tiny", "short") else pytest.mark.full)
        for name, sizes in ({"tiny": TINY} | SMALL).items()
    ],
)
def test_decode_steps_are_exact(sizes):
    sequences = fed(sizes)
    for _ in range(3):
        sequences.feed([1, 1], decode=True)
    assert max(sequences.errors) < LIMIT
    assert max(sequences.state_errors()) < 1e-5


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
def test_drafted_rows_have_the_bits_that_they_have_alone(sizes):
    sequences = fed(sizes)
    sequences.feed([1, 1], decode=True)
    for made, expected in zip(*sequences.drafted_rows(), strict=True):
        assert np.array_equal(made, expected)


def test_a_chunk_and_a_row_are_exact():
    sequences = fed(TINY, count=1)
    sequences.feed([65])
    assert "chunk_scan" in sequences.place.launcher.launches
    assert sequences.errors[0] < LIMIT
    assert sequences.state_errors()[0] < LIMIT


@pytest.mark.full
@pytest.mark.parametrize("device", [H200, FEW_BYTES], ids=["chunks", "tokens"])
@pytest.mark.parametrize("name", SMALL)
def test_prompts_in_pieces_are_exact(name, device):
    """Pieces end anywhere; a checkpoint is behind a chunk's middle; then a decode step."""
    sequences = fed(SMALL[name], device)
    save = sequences.place.state()
    sequences.feed([3, 1])
    sequences.feed([67, 2], {10: save.pointer})
    sequences.feed([1, 1], decode=True)
    assert ("chunk_scan" in sequences.place.launcher.launches) == (device is H200 and name != "short")
    assert max(sequences.errors) < LIMIT
    assert max(sequences.state_errors()) < LIMIT
    assert np.isfinite(sequences.place.read(save)).all()


@pytest.mark.full
@pytest.mark.parametrize("name", SMALL)
def test_a_checkpoint_goes_on_with_the_same_bits(name):
    sequences = fed(SMALL[name])
    place, save, x = sequences.place, sequences.place.state(), sequences.inputs(70)
    whole = place.state()
    made = place.run(x, [whole], [chunks_between(0, 70, {9: save.pointer})])
    assert np.array_equal(place.run(x[9:], [save], [chunks_between(9, 70, {})]), made[9:])
    assert np.array_equal(place.read(save), place.read(whole))


def test_chunks_end_at_multiples_of_64_and_at_checkpoints():
    assert chunks_between(0, 64, {}) == [Chunk(64)]
    assert chunks_between(60, 200, {}) == [Chunk(4), Chunk(64), Chunk(64), Chunk(8)]
    assert chunks_between(64, 150, {70: 8, 128: 16, 64: 24, 150: 32}) == [Chunk(6, 8), Chunk(58, 16), Chunk(22, 32)]


class Collected:
    """A launcher that notes what it would launch."""

    type, epsilon = "F16", 1e-6

    def __init__(self, device) -> None:
        self.device, self.kernels = device, []

    def products(self, *_) -> None:
        pass

    def launch(self, _, name, macros, grid, threads, *arguments, shared_bytes=0) -> None:
        assert threads <= 1024
        assert shared_bytes <= self.device.shared_bytes
        self.kernels.append((f"{name}.cu", {key: str(value) for key, value in macros.items()}))


SIZES = {**SMALL, **LARGE, "state-256": Sizes("mamba", 1, 4, 256, 64, tiled=False)}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(
            name,
            device,
            id=f"{name}-{device.arch}",
            marks=() if name == "qwen3.5-27b" and device is H200 else pytest.mark.full,
        )
        for name in SIZES
        for device in (H200, ADA)
    ],
)
def test_kernels_compile_without_spills(name, device):
    place = OnFibers(Part(replace(SIZES[name], hidden=64)), device)
    place.launcher = Collected(device)
    x = np.zeros((5, 64), np.float16)
    for texts, rows in ((1, 5), (200, 200)):
        x = np.zeros((rows, 64), np.float16)
        states = [place.state()] * texts
        place.run(x, states, [chunks_between(0, rows // texts, {})] * texts)
        place.run(x[:texts], states, None)
    for source, macros in {(source, tuple(macros.items())) for source, macros in place.launcher.kernels}:
        resources(source, dict(macros), device.arch)
