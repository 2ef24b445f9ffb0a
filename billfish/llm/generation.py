"""Prompts in, text out: feeding a prompt in chunks, then one token after another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from billfish.backends.cpu import _cpu
from billfish.errors import ModelError, complaint
from billfish.llm.decoder import Cache, Decoder, Floats
from billfish.llm.sampling import Sampling
from billfish.tokenizer import Tokenizer

# Rows of x that run together: enough to decode weights once for many, few enough that what lies between two products
# stays in cache.
CHUNK = 256


def feed(decoder: Decoder, cache: Cache, tokens: list[int], activations: str) -> Floats:
    """Put tokens behind what the cache holds, in chunks; the hidden state of the last, [1, hidden]."""
    hidden = decoder.run([(cache, tokens[:CHUNK])], activations)
    for start in range(CHUNK, len(tokens), CHUNK):
        hidden = decoder.run([(cache, tokens[start : start + CHUNK])], activations)
    return hidden[-1:]


def check_prompt(decoder: Decoder, tokens: list[int], call: str = "llm.generate") -> None:
    """Raises unless the model can take this prompt and answer with at least one token."""
    context, vocabulary = decoder.config.context, decoder.config.vocabulary
    if not tokens:
        raise ModelError(complaint(call, "prompt", "no tokens", "at least one"))
    if len(tokens) > context:
        raise ModelError(complaint(call, "prompt", f"{len(tokens)} tokens", f"at most {context}, the model's context"))
    odd = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if odd is not None:
        raise ModelError(complaint(call, "prompt", f"token {odd}", f"tokens from 0 to {vocabulary - 1}"))


class Generation(Iterator[str]):
    """The pieces of an answer as they come, and afterwards what it took.

    tokens: the ids so far. finished: "" while it runs, then "end" (the model's own), "length" (max_tokens) or
    "context" (no room for more). Seconds are those of the prompt, up to the first token, and of all later ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        activations: str,
        cache: Cache | None = None,
    ) -> None:
        check_prompt(decoder, prompt)
        self.prompt_tokens = len(prompt)
        self.tokens: list[int] = []
        self.finished = ""
        self.prompt_seconds = self.generation_seconds = 0.0
        self.reused_tokens = 0
        self._decoder, self._sampler, self._activations = decoder, sampling.sampler(), activations
        self._cache, self._ends = cache or Cache(decoder.config), tokenizer.ends
        self._most = min(max_tokens, decoder.config.context - len(prompt) + 1)
        self._cut = "length" if self._most == max_tokens else "context"
        self._texts = tokenizer.stream(self._ids(prompt))

    def _ids(self, prompt: list[int]) -> Iterator[int]:
        cache = self._cache
        # What the cache already holds of this prompt need not be fed again, except its last token.
        same = next((i for i, (a, b) in enumerate(zip(prompt[:-1], cache.tokens, strict=False)) if a != b), None)
        self.reused_tokens = min(len(prompt) - 1, len(cache.tokens)) if same is None else same
        del cache.tokens[self.reused_tokens :]
        started = time.perf_counter()
        cache.reserve(min(len(prompt) + self._most, self._decoder.config.context))
        hidden = feed(self._decoder, cache, prompt[self.reused_tokens :], self._activations)
        while len(self.tokens) < self._most:
            token = self._sampler.choose(self._decoder.logits(hidden, self._activations)[0])
            now = time.perf_counter()
            if self.tokens:
                self.generation_seconds += now - started
            else:
                self.prompt_seconds = now - started
            started = now
            self.tokens.append(token)
            if token in self._ends:
                self.finished = "end"
                return
            yield token
            if len(self.tokens) < self._most:
                started += time.perf_counter() - now  # the time of whoever reads the text is not ours
                hidden = self._decoder.run([(cache, [token])], self._activations)
        self.finished = self._cut

    def __next__(self) -> str:
        for text in self._texts:
            if text:  # part of a character waits for the rest
                return text
        raise StopIteration

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_rate(self) -> float:
        """Tokens per second, after the first."""
        return (len(self.tokens) - 1) / self.generation_seconds if self.generation_seconds else 0.0


def generate_batch(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    activations: str,
) -> list[str]:
    """Answers to several prompts, a token of each at a time; weights are then read once for all of them."""
    for prompt in prompts:
        check_prompt(decoder, prompt, "llm.generate_batch")
    caches = [Cache(decoder.config, len(prompt)) for prompt in prompts]
    samplers = [sampling.sampler() for _ in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    states = [feed(decoder, c, prompt, activations) for c, prompt in zip(caches, prompts, strict=True)]
    active = [i for i in range(len(prompts)) if max_tokens > 0]
    # More rows than this take another kernel in exact mode, and a text would not get the very numbers it gets alone.
    most = _cpu.FEW_ROWS if activations == "exact" else len(prompts)
    while active:
        going = []
        for start in range(0, len(active), most):
            group = active[start : start + most]
            scores = decoder.logits(np.concatenate([states[i] for i in group]), activations)
            for i, logits in zip(group, scores, strict=True):
                token = samplers[i].choose(logits)
                answers[i].append(token)
                full = len(prompts[i]) + len(answers[i]) > decoder.config.context
                if token not in tokenizer.ends and len(answers[i]) < max_tokens and not full:
                    going.append(i)
        for start in range(0, len(going), most):
            group = going[start : start + most]
            hidden = decoder.run([(caches[i], answers[i][-1:]) for i in group], activations)
            for row, i in enumerate(group):
                states[i] = hidden[row : row + 1]
        active = going
    return [tokenizer.decode(answer) for answer in answers]
