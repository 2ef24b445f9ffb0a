"""Generation: prefill a prompt, then decode one token at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError
from billfish.core.typing import Activations
from billfish.llm.decoder_base import PENDING, Decoder, PendingStep
from billfish.llm.detokenizer import Detokenizer, Token, check_text_settings
from billfish.llm.drafting.drafter import Controller, DraftCounts, Drafter
from billfish.llm.kv_cache import Cache, shared_length
from billfish.llm.sampler import NextToken, RequestSampler, Sampling

if TYPE_CHECKING:
    from billfish.llm.grammar import CompiledGrammar
    from billfish.llm.thought_limit import ThoughtLimit

FinishReason = Literal["stop", "length"]


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that takes long, beside the event loop."""
    import asyncio  # here, as few programs need it, and it takes long

    return await asyncio.to_thread(function, *arguments)


class Generation(Iterator[str]):
    """The answer to a prompt: complete from :meth:`Model.generate`, growing while it is read from :meth:`Model.stream`.

    Iterating gives the pieces of the text, in order and once; `async for` does so beside an event loop. An answer may
    be left half-way, and its cache used for the next one. If the cache holds another sequence by then, the next step
    feeds this one again: slower, and the same answer.

    text: the answer so far. tokens: the ids so far, with the token that ended the answer.
    finish_reason: "stop" (the model ended the answer, a stop string came, or the grammar is complete) or "length"
    (max_tokens or the context is reached), as in OpenAI's API; None while the answer runs.
    context_full: whether the model's context ended the answer.
    logprobs: a :class:`Token` for each token of the text with its log probability, or None if it was not asked for.
    prompt_tokens, reused_tokens: of the prompt, all of them, and those that the cache already held.
    prompt_seconds, generation_seconds: time to the first token, and of all later ones.
    drafts: how many tokens were drafted, and how many of these were right.
    decoder, tokenizer, prompt, max_tokens, sampling, activations, cache, stop, grammar, drafter: what
    :meth:`Model.generate` makes of its arguments.
    shown: ids of control tokens whose names belong to the text.
    thought: how many tokens the thought that the answer begins with may have.

        >>> answer = bf.llm.load("model.gguf").generate([5, 6], max_tokens=3)
        >>> len(answer.tokens), answer.finish_reason
        (3, 'length')
        >>> "".join(answer) == answer.text == str(answer)
        True
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        activations: Activations | None,
        cache: Cache | None = None,
        *,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        grammar: CompiledGrammar | None = None,
        drafter: Drafter | None = None,
        shown: Collection[int] = (),
        thought: ThoughtLimit | None = None,
    ) -> None:
        """Arguments are those of :meth:`Model.generate`, checked and encoded. shown: control tokens whose names are
        part of the text. thought: the limit of thoughts."""
        call = "llm.generate"
        decoder.check_prompt(prompt, call)
        decoder.check_tokens(call, "logit_bias", list(sampling.logit_bias))
        check_text_settings(call, stop, logprobs)
        self._cache = decoder.cache() if cache is None else cache
        decoder.check_cache(call, self._cache)
        self.prompt_tokens, self.reused_tokens = len(prompt), 0
        self.prompt_seconds = self.generation_seconds = 0.0
        self.tokens: list[int] = []
        self.logprobs: list[Token] | None = None if logprobs is None else []
        room = decoder.config.context - len(prompt) + 1
        self._most = min(max_tokens, room)
        self.finish_reason: FinishReason | None = None if self._most else "length"
        self._decoder, self._activations, self._sequence = decoder, activations, list(prompt)
        matcher = None if grammar is None else grammar.matcher()
        if thought is not None:
            matcher = thought.matcher(tokenizer, decoder.config.vocabulary, matcher)
        self._sampler = RequestSampler(sampling, prompt, matcher, logprobs)
        self._detokenizer = Detokenizer(tokenizer, stop, shown)
        self._is_cut_by_context = room < max_tokens
        self._drafter, self.drafts = drafter, DraftCounts()
        if drafter is not None:
            drafter.follow(self._cache)
        most, kinds = (0, (0.0,)) if drafter is None else (drafter.most, drafter.acceptance)
        watching = drafter is not None and drafter.watched and not decoder.drafting
        self._controller = Controller(min(most, decoder.rows_alike(activations) - 1), kinds, watching=watching)
        self._pieces: list[str] = []
        self._read = 0  # pieces that were iterated over
        self._turn = threading.RLock()  # of threads, which may wait for the same answer

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._pieces)

    @property
    def context_full(self) -> bool:
        """Whether the answer ended because the model's context is full."""
        return self.finish_reason == "length" and self._is_cut_by_context

    @property
    def finished(self) -> str:
        """The older word for `finish_reason`: "", "end", "length" or "context"."""
        words = {None: "", "stop": "end", "length": "context" if self.context_full else "length"}
        return words[self.finish_reason]

    def limit_context(self, most: int) -> None:
        """Let the prompt and the answer have `most` tokens together, no fewer than the prompt has. Call it before the
        first token."""
        room = most - self.prompt_tokens + 1  # the last token is in no cache
        if room < self._most:
            self._most, self._is_cut_by_context = room, True

    @property
    def prompt_rate(self) -> float:
        """Prefill speed, in tokens per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_rate(self) -> float:
        """Decoding speed, in tokens per second after the first."""
        return (len(self.tokens) - 1) / self.generation_seconds if self.generation_seconds else 0.0

    def finish(self) -> Generation:
        """Decode up to the end of the answer, and return the same object. Iterating still gives all unread pieces."""
        with self._turn:
            while self.finish_reason is None:
                self._step()
        return self

    def __next__(self) -> str:
        with self._turn:
            while self._read == len(self._pieces):
                if self.finish_reason is not None:
                    raise StopIteration
                self._step()
            self._read += 1
            return self._pieces[self._read - 1]

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        piece: str | None = await in_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def finish_async(self) -> Generation:
        """As :meth:`finish`, beside an event loop. A task that is cancelled decodes at most the token under way."""
        while self.finish_reason is None:
            await in_thread(self._step_if_unfinished)
        return self

    def _step_if_unfinished(self) -> None:
        with self._turn:
            if self.finish_reason is None:
                self._step()

    def _step(self) -> None:
        """Decode one token, or several where a draft is right."""
        is_first, started = not self.tokens, time.perf_counter()
        if is_first:
            self._cache.reserve(min(self.prompt_tokens + self._most, self._decoder.config.context))
        kind, drafted = (None, []) if is_first else self._draft()
        asked = len(drafted)  # drafts that there is no memory to try are as useless as wrong ones
        if not drafted:
            token, there = self._decoder.go_on(self._cache, self._sequence, self._sampler, self._activations)
            chosen = [self._sampler.choice(token)]
        else:
            chosen, drafted = self._verify(drafted)
        seconds = time.perf_counter() - started
        if is_first:
            self.prompt_seconds, self.reused_tokens = seconds, there
        else:
            self.generation_seconds += seconds
            self._controller.seconds.note(1 + len(drafted), seconds)
            self._controller.note(asked, len(chosen) - 1, kind)
        taken = 0
        for choice in chosen:
            self._take(choice)
            taken += 1
            if self.finish_reason is not None:
                break
        if not is_first:
            self.drafts.note(len(drafted), taken - (taken == len(chosen)))

    def _draft(self) -> tuple[int | None, list[int]]:
        """Tokens that may come next, and of which kind they are: as many as are worth a try, and as there is room for
        behind the next one. No kind: there is nothing to go by."""
        if self._drafter is None:
            return None, []
        kind = self._drafter.kind(self._sequence)
        most = min(self._most - len(self.tokens) - 1, self._controller.length(kind))
        return kind, self._drafter.draft(self._sequence, most) if most > 0 else []

    def _verify(self, drafted: list[int]) -> tuple[list[NextToken], list[int]]:
        """Compute drafted tokens in one pass: those that the sampler chooses, and one more. Also which were tried."""
        cache = self._cache
        with cache.lock:
            there = cache.rollback(shared_length(cache.tokens, self._sequence[:-1]))
            if there < len(self._sequence) - 1:  # another answer took the cache
                token, _ = self._decoder.go_on(cache, self._sequence, self._sampler, self._activations)
                return [self._sampler.choice(token)], []
            self._decoder.begin_drafting()
            passage = cache, self._sequence[-1:]
            step = self._decoder.submit([passage], [self._sampler], self._activations, [drafted])
            [chosen], [tried] = step.choices(), step.drafts
            return chosen, list(tried)

    def _take(self, choice: NextToken) -> None:
        """The next token of the answer."""
        if self._sampler.error:
            raise DataError(self._sampler.error)
        token = choice.token
        if self._drafter is not None:
            self._controller.watch(self._drafter, self._sequence, token)
        self.tokens.append(token)
        self._sequence.append(token)
        finished = "stop" if choice.complete else "length" if len(self.tokens) == self._most else ""
        piece = self._detokenizer.take(token, choice.scored, finished)
        if piece.text:
            self._pieces.append(piece.text)
        if self.logprobs is not None:
            self.logprobs += piece.tokens
        if piece.finished:
            self.finish_reason = "stop" if piece.finished == "stop" else "length"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({self.text!r}, {len(self.tokens)} tokens, finish_reason={self.finish_reason!r})"


def generate_batch(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    activations: Activations | None,
) -> list[str]:
    """Answers to several prompts, one token of each per decode step, so that a step reads the weights once for all."""
    for prompt in prompts:
        decoder.check_prompt(prompt, "llm.generate_batch")
    decoder.check_tokens("llm.generate_batch", "logit_bias", list(sampling.logit_bias))
    caches = [decoder.cache(len(prompt)) for prompt in prompts]
    samplers = [sampling.sampler(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    most = [min(max_tokens, decoder.config.context - len(prompt) + 1) for prompt in prompts]
    ended = set[int]()

    def take(step: PendingStep, numbers: list[int]) -> None:
        for i, token in zip(numbers, step.tokens(), strict=True):
            if i not in ended:
                answers[i].append(token)
            if token in tokenizer.ends:
                ended.add(i)

    going, before, steps = list(range(len(prompts))), None, 0
    while going := [i for i in going if i not in ended and steps < most[i]]:
        # A GPU is fed the token that the step before is still choosing: this step runs while that one's is read.
        fed = [prompts[i] if not steps else [PENDING] if before else answers[i][-1:] for i in going]
        passages = [(caches[i], tokens) for i, tokens in zip(going, fed, strict=True)]
        step = decoder.submit(passages, [samplers[i] for i in going], activations)
        steps += 1
        if before is not None:
            take(*before)
        step.sample_late()
        before = step, going
        if not decoder.overlaps:
            take(*before)
            before = None
    if before is not None:
        take(*before)
    return [tokenizer.decode(answer) for answer in answers]
