"""Drafted answers equal plain ones, to the bit, in every format, alone and in a batch."""

from __future__ import annotations

from itertools import product

import pytest
from draft_matrix import BATCHES, CONTEXT, DRAFTERS, SAMPLING, WIDE, Matrix, long_prompts_of, prompts_of
from llm_architectures import write_model

from billfish.core.format import FORMATS
from billfish.llm import load

ACTIVATIONS = ("q8", "exact", "q16")
CASES = [*product(DRAFTERS, SAMPLING, BATCHES)]


def pairs() -> list[tuple[str, str, tuple[str, str, int]]]:
    """Each format once, with neighbours in the lists of all else, so that every two values meet."""
    made = []
    for i, format in enumerate(FORMATS):
        made.append((format, ACTIVATIONS[i % 3], CASES[5 * i % len(CASES)]))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    write_model(made, "llama3", **WIDE, max_position_embeddings=CONTEXT)
    return made


@pytest.fixture(scope="module")
def matrix_of(folder):
    made = {}

    def model(format: str):
        if format not in made:
            made[format] = load(folder, device="cpu", quantize=format, method="rtn")
            assert format in made[format].decoder.tensors.kinds
        return made[format]

    def matrix(format: str, activations: str, count: int) -> Matrix:
        prompts = prompts_of(count, model("q8_0").config.vocabulary)
        return Matrix(model(format), model("q8_0"), activations, prompts)

    return matrix


def check(counts: list[dict]) -> None:
    assert [each for each in counts if each["differing"]] == []
    assert all(each["drafted"] > each["accepted"] > 0 for each in counts if each["drafter"] == "oracle")


@pytest.mark.promise(
    "numerics",
    "a drafted answer equals the plain one to the bit, alone and in a batch (on NVIDIA GPUs with `batch_invariant`)",
)
@pytest.mark.parametrize(("format", "activations", "case"), pairs())
def test_drafted_answers_are_the_plain_ones(matrix_of, format, activations, case):
    check([matrix_of(format, activations, 6).count(*case)])


@pytest.mark.promise(
    "numerics",
    "a drafted answer equals the plain one to the bit, alone and in a batch (on NVIDIA GPUs with `batch_invariant`)",
)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_drafted_answers_pass_pages_and_slices(folder, activations):
    """64 positions, and 256, lie within answers, and so within drafts."""
    model = load(folder, device="cpu", quantize="q4_0", method="rtn")
    matrix = Matrix(model, None, activations, long_prompts_of(4, model.config.vocabulary), endless=True)
    ends = [(len(prompt), len(prompt) + len(tokens)) for prompt, tokens in matrix.texts("seeded")]
    assert all(any(first < edge < last - 1 for first, last in ends) for edge in (64, 256)), ends
    check([matrix.count("oracle", "seeded", 5)])


@pytest.mark.full
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_200_drafted_answers_are_the_plain_ones(matrix_of, format, activations):
    matrix = matrix_of(format, activations, 200)
    check([matrix.count(*case) for case in CASES])
