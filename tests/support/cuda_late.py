"""Late rows on a device, real or fake, beside the sampler in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from billfish.backends.cuda.decoder import DeviceDecoder
from billfish.backends.cuda.driver import Stream, copy_in, current
from billfish.backends.cuda.step_memory import StepMemory
from billfish.llm.cuda_sampling import LateRow, LateSampling
from billfish.llm.sampler import RequestSampler, Sampling, choose_token, with_best

STEPS, NEAR = 12, 1e-5  # NEAR: of random numbers, to the end of a token's share


class RandomGrammar:
    """Allows other tokens in each step, and only these are taken."""

    complete = False

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._rng = vocabulary, np.random.default_rng(seed)
        self._next()

    def _next(self) -> None:
        self._allowed = self._rng.random(self._vocabulary) < self._rng.choice([0.9, 0.5, 5 / self._vocabulary])
        self._allowed[self._rng.integers(self._vocabulary)] = True

    def allowed(self) -> np.ndarray:
        return self._allowed

    def bits(self) -> np.ndarray:
        return np.packbits(self._allowed, bitorder="little")

    def take(self, token: int) -> None:
        assert self._allowed[token]
        self._next()


def samplers(count: int, vocabulary: int) -> list[RequestSampler]:
    """Of all kinds; equal ones each time."""
    rng, made = np.random.default_rng(count), list[RequestSampler]()
    options: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 0.3, 1.0, 5.0),
        "top_k": (0, 40),
        "top_p": (1.0, 0.95),
        "min_p": (0.0, 0.05),
        "presence_penalty": (0.0, 0.7),
        "frequency_penalty": (0.0, -0.4, 1.1),
        "repetition_penalty": (1.0, 1.3, 0.8),
    }
    for i in range(count):
        how = {name: rng.choice(values).item() for name, values in options.items()}
        biased = rng.integers(0, vocabulary, rng.choice([0, 1, 300])).tolist()
        how |= {"seed": i, "logit_bias": {token: float(rng.choice([-100.0, -0.3, 2.5])) for token in biased}}
        prompt = rng.integers(0, vocabulary, rng.choice([1, 400])).tolist()
        grammar: Any = RandomGrammar(vocabulary, i) if i % 2 else None
        made.append(RequestSampler(Sampling(**how), prompt, grammar, (None, 0, 5, 20)[i % 4]))
    return made


def check_late_rows(decoder: DeviceDecoder, step: StepMemory, stream: Stream, count: int) -> None:
    """Answers of `count` rows of random logits, whose order in the step changes. step: of so many sequences.

    Each token is the one that the sampler in NumPy draws, or its neighbour where the random number is near the end of
    its share; each log probability is within a few units of float32.
    """
    rng, vocabulary = np.random.default_rng(count), decoder.vocabulary
    late, ours, alone = LateSampling(decoder, stream), samplers(count, vocabulary), samplers(count, vocabulary)
    exact = chosen = 0
    for number in range(STEPS):
        logits = (3 * rng.standard_normal((count, vocabulary))).astype(np.float32)
        logits[:, ::3] = np.rint(logits[:, ::3])  # some are equal
        places = rng.permutation(count)
        with current(stream.ordinal):
            copy_in(step.at("logits"), logits, stream.pointer)
            rows = {i: LateRow(int(place), i) for i, place in enumerate(places) if count == 1 or (i + number) % 5}
            result = late.launch(step, rows, ours)
        for i, (token, scored) in zip(rows, result.read(), strict=True):
            row, mine = logits[places[i]], alone[i]
            adjusted, random = mine.adjusted(row), mine.peek()
            drawn = [choose_token(adjusted, mine.how, min(max(0.0, random + d), 1 - NEAR)) for d in (0, -NEAR, NEAR)]
            assert token in drawn, (number, i)
            exact, chosen = exact + (token == drawn[0]), chosen + 1
            best = [] if mine.alternatives is None else with_best(row, token, mine.alternatives)
            assert [each for each, _ in scored] == [each for each, _ in best]
            assert np.allclose([each for _, each in scored], [each for _, each in best], rtol=1e-6, atol=4e-6)
            ours[i].took(token, scored)
            mine.took(token, best)
            assert not ours[i].error
        late.give_back(result)
    assert exact >= 0.98 * chosen > 0
