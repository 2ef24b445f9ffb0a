"""Prompts in, text out: feeding a prompt in chunks, then one token after another."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from billfish.backends.cpu import _cpu
from billfish.errors import ModelError, complaint
from billfish.llm.cache import Cache, Floats, shared_length
from billfish.llm.decoder import Decoder
from billfish.llm.sampling import Sampling
from billfish.tokenizer import Tokenizer

# Rows of x that run together: enough to decode weights once for many, few enough that what lies between two products
# stays in cache.
CHUNK = 256


def hold(decoder: Decoder, cache: Cache, text: list[int], activations: str) -> tuple[Floats, int]:
    """Bring the cache to hold `text`: the hidden state of its last token, [1, hidden], and how many tokens were there.

    What the cache holds of the text is not fed again, except its last token; the rest goes in in chunks.
    """
    with cache.lock:
        there = shared_length(cache.tokens, text[:-1])
        del cache.tokens[there:]
        for start in range(there, len(text), CHUNK):
            hidden = decoder.run([(cache, text[start : start + CHUNK])], activations)
    return hidden[-1:], there


def check_prompt(decoder: Decoder, tokens: list[int], call: str = "llm.generate") -> None:
    """Raises unless the model can take this prompt and answer with at least one token."""
    context = decoder.config.context
    if not tokens:
        raise ModelError(complaint(call, "prompt", "no tokens", "at least one"))
    if len(tokens) > context:
        raise ModelError(complaint(call, "prompt", f"{len(tokens)} tokens", f"at most {context}, the model's context"))
    decoder.check_tokens(call, "prompt", tokens)


class Generation(Iterator[str]):
    """The pieces of an answer as they come, and afterwards what it took.

    tokens: the ids so far. finished: "" while it runs, then "end" (the model's own), "length" (max_tokens) or
    "context" (no room for more). Seconds are those of the prompt, up to the first token, and of all later ones.
    An answer may be left half-way, and its cache used for the next one. If the cache meanwhile holds another text, the
    next step feeds this one anew: slower, and the same answer.
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
        decoder.check_cache("llm.generate", self._cache)
        self._most = min(max_tokens, decoder.config.context - len(prompt) + 1)
        self._cut = "length" if self._most == max_tokens else "context"
        self._texts = tokenizer.stream(self._ids(prompt))

    def _ids(self, prompt: list[int]) -> Iterator[int]:
        started, text = time.perf_counter(), list(prompt)
        self._cache.reserve(min(len(prompt) + self._most, self._decoder.config.context))
        hidden, self.reused_tokens = hold(self._decoder, self._cache, text, self._activations)
        while len(self.tokens) < self._most:
            token = self._sampler.choose(self._decoder.logits(hidden, self._activations)[0])
            now = time.perf_counter()
            if self.tokens:
                self.generation_seconds += now - started
            else:
                self.prompt_seconds = now - started
            started = now
            self.tokens.append(token)
            text.append(token)
            if token in self._ends:
                self.finished = "end"
                return
            yield token
            if len(self.tokens) < self._most:
                started += time.perf_counter() - now  # the time of whoever reads the text is not ours
                hidden, _ = hold(self._decoder, self._cache, text, self._activations)
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
    states = [hold(decoder, c, prompt, activations)[0] for c, prompt in zip(caches, prompts, strict=True)]
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
