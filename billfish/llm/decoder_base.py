"""The transformer, on some device: what generations, evaluations and servers ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from billfish.core.errors import BackendUnavailable, DataError, ModelError, ShapeError, bad_argument, failure
from billfish.core.typing import Activations, CacheType
from billfish.llm.adapters import AdaptedMatrix
from billfish.llm.kv_cache import Cache, Floats, PagedMemory, shared_length
from billfish.llm.model_weights import ModelTensors
from billfish.llm.sampler import NextToken, Sampler

Passage = tuple[Cache, list[int]]  # tokens that are fed behind what the cache holds
PENDING = -1  # a token that a pending step is choosing


class PendingStep(ABC):
    """A step that was submitted. drafts: what was fed behind the token of each sampler's sequence, which is nothing
    where there was no memory for a draft."""

    drafts: Sequence[Sequence[int]]

    @abstractmethod
    def choices(self) -> list[list[NextToken]]:
        """Wait for the step: the tokens that it chose for each sampler, several where a draft was right. Raises what
        the step raised; the caches then hold what they held before it."""

    def tokens(self) -> list[int]:
        """The last one of each."""
        return [choices[-1].token for choices in self.choices()]

    def sample_late(self) -> None:  # noqa: B027  # most choose all tokens at once
        """Choose the tokens that depend on those of the step before, which have been asked for by now. `tokens`, or the
        next step, does it otherwise."""


class FinishedStep(PendingStep):
    def __init__(self, choices: list[list[NextToken]], drafts: Sequence[Sequence[int]] = ()) -> None:
        self._choices, self.drafts = choices, drafts or [()] * len(choices)

    def choices(self) -> list[list[NextToken]]:
        return self._choices


class MtpDecoder(ABC):
    """An MTP block, with the embedding and the head of its model. Its row i has the token behind token i."""

    @abstractmethod
    def cache(self) -> Cache:
        """An empty one of the block."""

    @abstractmethod
    def run(self, cache: Cache, tokens: list[int], hidden: Floats) -> Floats:
        """Feed tokens, and the hidden states [tokens, hidden] behind those before them: the block's own."""

    @abstractmethod
    def logits(self, hidden: Floats) -> Floats:
        """Of the block's hidden states [m, hidden]."""

    @abstractmethod
    def normalize(self, hidden: Floats) -> Floats:
        """The block's hidden states, as it takes them to go on behind its own token."""

    @abstractmethod
    def normalize_model(self, hidden: Floats) -> Floats:
        """The model's hidden states, as the block takes them."""


class Decoder(ABC):
    """All layers of a model. Making one checks that the tensors are there; `pack` reads them, some at a time, and puts
    them into the order of the kernels."""

    device: str  # "cpu", or "cuda:0"
    overlaps = False  # whether a step may be submitted before the tokens of the one before are asked for
    chunk: int  # tokens of a text that are fed at once
    usual: Activations | None  # of generations
    exact: Activations | None  # the most exact ones: what other models are compared with
    cache_types: tuple[CacheType, ...]  # that keys and values can have
    cache_type: CacheType  # that those of the next cache have

    def __init__(self, tensors: ModelTensors) -> None:
        self.tensors, self.config = tensors, tensors.config
        self.last_norm = tensors.vector(self.config.final_norm)
        self.nbytes = 0  # of weights, as they are held in memory
        self.message_ends: frozenset[int] = frozenset()  # tokens that end a message of a conversation
        self.separator = -1  # the token between the texts of a pair
        self.drafting = False  # whether `begin_drafting` was called

    @property
    def captures(self) -> int:
        """How many CUDA graphs were captured."""
        return 0

    @property
    def pages(self) -> PagedMemory | None:
        """What caches take pages from, where they do not have their memory to themselves."""
        return None

    @abstractmethod
    def pack(self, under_way: Callable[[], object]) -> None:
        """Make it ready to run. When other threads begin to pack, beside which Python can go on, calls `under_way`."""

    @property
    @abstractmethod
    def kernels(self) -> str:
        """Whose kernels run, for people."""

    @property
    def about(self) -> str:
        """The same, and what else a run depends on."""
        return self.kernels

    def add_adapter(self, parts: Sequence[AdaptedMatrix]) -> int:
        """A LoRA adapter for caches that are given its number; see :meth:`billfish.llm.kv_cache.Cache.adapt`."""
        raise BackendUnavailable(
            failure("llm.load_adapter", f"{self.device} has no kernels for LoRA adapters", "Pass device='cpu'.")
        )

    @property
    def mtp(self) -> MtpDecoder | None:
        """The model's MTP block, where the file has one and the device runs it."""
        return None

    @abstractmethod
    def cache(self, capacity: int = 256) -> Cache:
        """An empty cache with room for so many positions."""

    @abstractmethod
    def run(self, passages: Sequence[Passage], activations: Activations | None) -> Floats:
        """Feed tokens, each list behind what its cache holds: hidden states [all tokens in order, hidden].

        A cache takes its tokens when all their keys are in it, so that whatever is raised leaves it as it was.
        """

    def passes(self, passages: Sequence[Passage], activations: Activations | None) -> list[list[int]]:
        """Passages that `run` takes together, by their numbers, so that each gets what it gets alone. Each has at most
        `chunk` tokens."""
        return [[number] for number in range(len(passages))]

    @abstractmethod
    def logits(self, hidden: Floats, activations: Activations | None) -> Floats:
        """Hidden states [m, hidden] to the scores of all tokens [m, vocabulary]."""

    @abstractmethod
    def choose(
        self, passages: Sequence[Passage], samplers: Sequence[Sampler], activations: Activations | None
    ) -> list[int]:
        """Feed tokens, as `run` does, but any number: the token that comes next in each text that has a sampler. There
        may be fewer samplers than passages; the last texts then are only fed."""

    def check_device(self) -> None:  # noqa: B027  # a CPU cannot be lost
        """Raises DeviceLost if this process cannot compute on the device any more."""

    def prefill_budget(self, decoding: int) -> int:
        """How many tokens of prompts a server feeds in a step beside those of `decoding` answers, which wait for it."""
        return self.chunk // 4 if decoding else self.chunk

    def verify(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]],
        activations: Activations | None,
    ) -> list[list[NextToken]]:
        """Feed tokens as `choose` does, and behind a single one what was drafted for its text, up to `rows_alike` - 1
        tokens; there is a draft, maybe an empty one, for each sampler. Returns the next tokens of each text: those of
        the draft as long as the sampler chooses them, and one more. The caches hold the texts up to the last choice."""
        fed = with_drafts(passages, drafts)
        wanted = [*(len(draft) + 1 for draft in drafts), *[0] * (len(passages) - len(drafts))]
        rows = self.scores(fed, wanted, activations)
        return self.accepted(fed, rows, samplers, drafts)

    def accepted(
        self,
        passages: Sequence[Passage],
        logits: Sequence[Floats],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]],
    ) -> list[list[NextToken]]:
        """What the samplers choose. Drafted tokens that they do not leave the caches."""
        chosen = [s.accept(rows, draft) for s, rows, draft in zip(samplers, logits, drafts, strict=False)]
        for (cache, _), choices, draft in zip(passages, chosen, drafts, strict=False):
            cache.rollback(len(cache.tokens) - (1 + len(draft) - len(choices)))
        return chosen

    def submit(
        self,
        passages: Sequence[Passage],
        samplers: Sequence[Sampler],
        activations: Activations | None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> PendingStep:
        """As `choose`, or with drafts as `verify`, but a decoder that `overlaps` does not wait for the device.

        Its passages may be [PENDING]: the token that the pending step before chooses for that cache. The cache holds
        PENDING in its place until that step's tokens are asked for.
        """
        if any(drafts):
            return FinishedStep(self.verify(passages, samplers, drafts, activations), drafts)
        chosen = self.choose(passages, samplers, activations)
        return FinishedStep([[s.choice(token)] for token, s in zip(chosen, samplers, strict=True)])

    def warm(  # noqa: B027  # most need nothing
        self, sequences: int, activations: Activations | None, drafting: int = 0
    ) -> None:
        """Make ready whatever steps of up to so many sequences take, before somebody waits for them. drafting: the most
        rows of a step after `begin_drafting`, if that may be called."""

    def rows_alike(self, activations: Activations | None) -> int:
        """How many rows of a sequence a pass may have so that each gets the bits that it gets alone."""
        return 1

    def begin_drafting(self) -> None:
        """From now on, each of up to `rows_alike` rows gets the bits that it gets alone. Called before the first draft,
        at the latest. Steps without drafts may be slower from then on: on an NVIDIA GPU they are batch-invariant, some
        8 %; on a CPU, greedy batches multiply the LM head with int16 activations; on an Apple GPU, tokens are sampled
        on the host, in float64, except greedy ones."""
        self.drafting = True

    def scores(
        self, passages: Sequence[Passage], wanted: Sequence[int], activations: Activations | None
    ) -> list[Floats]:
        """Feed tokens, as `run` does: the logits [wanted, vocabulary] behind the last `wanted` tokens of each list."""
        hidden = self.run(passages, activations)
        ends = np.cumsum([len(tokens) for _, tokens in passages])
        rows = [hidden[end - count : end] for end, count in zip(ends, wanted, strict=True)]
        logits = self.logits_alike(np.concatenate(rows), activations)
        return np.split(logits, np.cumsum(wanted)[:-1])

    def logits_alike(self, hidden: Floats, activations: Activations | None) -> Floats:
        """As `logits`, where each row gets the bits that it gets alone."""
        return self.logits(hidden, activations)

    @abstractmethod
    def check_activations(self, call: str, activations: str | None, usual: Activations | None) -> Activations | None:
        """Raises unless the device multiplies with such activations. None: `usual`."""

    def ends_in(self, start: int, tokens: list[int]) -> list[int]:
        """Positions behind the messages that end in these tokens, which come at positions from `start` on."""
        if not self.message_ends:
            return []
        return [start + i + 1 for i, token in enumerate(tokens) if token in self.message_ends]

    def set_cache_type(self, cache_type: CacheType) -> None:
        """Caches that are made from now on have such numbers; raises if the device has none."""
        if cache_type not in self.cache_types:
            expected = " or ".join(map(repr, self.cache_types))
            raise DataError(bad_argument("llm.load", "cache_type", repr(cache_type), f"{expected} on {self.device}"))
        self.cache_type = cache_type

    def go_on(
        self, cache: Cache, text: list[int], sampler: Sampler, activations: Activations | None
    ) -> tuple[int, int]:
        """Bring the cache to hold `text`: the token that comes next, and how many tokens were there.

        Tokens of the text that the cache holds are not fed again, except the last one.
        """
        with cache.lock:
            there = cache.rollback(shared_length(cache.tokens, text[:-1]))
            [token] = self.choose([(cache, text[there:])], [sampler], activations)
        return token, there

    def check_tokens(self, call: str, argument: str, tokens: list[int]) -> None:
        """Raises unless the vocabulary has them all."""
        last = self.config.vocabulary - 1
        odd = next((token for token in tokens if not 0 <= token <= last), None)
        if odd is not None:
            raise ModelError(failure(call, f"{argument} has the token {odd}", f"Expected tokens from 0 to {last}."))

    def check_cache(self, call: str, cache: Cache) -> None:
        """Raises unless the cache is this model's: another one's has other sizes, or keys that mean something else."""
        if cache.config is not self.config:
            problem = f"the cache belongs to another model ({cache.config.name})"
            raise ModelError(failure(call, problem, "Pass one of this model's cache()."))

    def check_answers(self, call: str) -> None:
        """Raises unless the model continues texts."""
        if self.config.encoder is not None:
            model = f"{self.config.name} ({self.config.architecture})"
            problem = f"{model} is an encoder, which makes vectors of texts, not answers"
            raise ModelError(failure(call, problem, "Call Model.embed_text, or POST to /v1/embeddings."))

    def check_hidden(self, hidden: Floats) -> None:
        """Raises unless they are hidden states of this model."""
        if (
            not isinstance(hidden, np.ndarray)
            or hidden.dtype != np.float32
            or hidden.shape[1:] != (self.config.hidden,)
        ):
            value = f"{getattr(hidden, 'dtype', type(hidden).__name__)} of shape {getattr(hidden, 'shape', '?')}"
            raise ShapeError(bad_argument("llm.logits", "hidden", value, f"float32 [m, {self.config.hidden}]"))

    def check_prompt(self, tokens: list[int], call: str = "llm.generate") -> None:
        """Raises unless the model can take this prompt and answer with at least one token."""
        context = self.config.context
        if not tokens:
            raise ModelError(bad_argument(call, "prompt", "empty", "at least one token"))
        if len(tokens) > context:
            problem = f"prompt has {len(tokens)} tokens; the model's context is {context}"
            raise ModelError(failure(call, problem, "Shorten the prompt."))
        self.check_tokens(call, "prompt", tokens)

    @contextmanager
    def _locked(self, passages: Sequence[Passage]) -> Iterator[None]:
        """With the locks of all caches, each of which is there once."""
        caches = {id(cache): cache for cache, _ in passages}
        if len(caches) < len(passages):
            raise ModelError(failure("llm.run", "two passages share a cache", "Pass one cache for each sequence."))
        for cache in caches.values():
            self.check_cache("llm.run", cache)
        with ExitStack() as locks:
            for key in sorted(caches):  # in one order in all threads, so that no two wait for each other
                locks.enter_context(caches[key].lock)
            yield


def with_drafts(passages: Sequence[Passage], drafts: Sequence[Sequence[int]]) -> list[Passage]:
    """The passages, each with its draft; the last ones may have none."""
    drafted = [(cache, [*tokens, *draft]) for (cache, tokens), draft in zip(passages, drafts, strict=False)]
    return [*drafted, *passages[len(drafts) :]]
