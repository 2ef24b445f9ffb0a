"""Rotation folded into weights: a model whose residual stream is x R computes what it did, without outliers.

RMSNorm without weights gives norm(x R) = norm(x) R for an orthogonal R. So the weights w of a norm go into the matrices
W that read what it gives, and R into all that touch the stream (R1 of QuaRot and SpinQuant):

    embedding E                    E R
    W, of q, k, v, gate, up, ...   W diag(w) R       and w becomes 1
    W, of attention's output, down R^T W             and biases b R

Attention adds up values, so the values of a head may be rotated by a V of their own (R2), all heads by the same one:
rows of v become V^T W, columns of attention's output W V. What a layer computes in between, such as RoPE, softmax or
SwiGLU, sees the same numbers as before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.conversion import target_named
from billfish.checkpoints.derived import Turned
from billfish.checkpoints.entry import Entry, Span, check_experts, cut_array
from billfish.checkpoints.in_memory import HeldArray
from billfish.checkpoints.names.expert_stacks import is_turned, stacks_in
from billfish.checkpoints.names.gguf_names import (
    INVERSE_FREQUENCIES,
    in_folder,
    is_gguf,
    is_of_images,
    text_config,
)
from billfish.checkpoints.reports import ConversionReport
from billfish.checkpoints.safetensors_files import KINDS, TYPES
from billfish.checkpoints.write.export import export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.core.arrays import float_dtype
from billfish.core.errors import CheckpointError, DataError, ModelError, bad_argument, failure
from billfish.core.files import path_of
from billfish.core.progress import OnProgress
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_files import Source, open_source
from billfish.llm.model_weights import ModelTensors
from billfish.models import describe, of_config
from billfish.models.description import (
    Attention,
    Block,
    Dense,
    DenseAndMixture,
    FeedForward,
    GatedDeltaNet,
    LayerNorm,
    Matrix,
    Mixer,
    Mixture,
    Model,
    Stack,
    Vector,
)
from billfish.ops.matmul import dequantize
from billfish.quantizing.rotation import Rotation

CALL = "rotate"
WITHOUT = "Quantize it without `billfish rotate`."
CHUNK = 1 << 22  # numbers that are computed with at a time, where rows are independent
Floats = NDArray[np.float64]


def rotate_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """Fold a random rotation into the weights of a model: what `billfish rotate` does.

    The result is an ordinary unquantized file with the same logits, up to rounding. Its weights and activations have
    fewer outliers, which helps formats with one scale per row; those in groups of 16 or 32 lose more afterwards.
    Calibrate and quantize the result, not `src`.

    src: a GGUF file or a model's folder, unquantized. Quantized weights are dequantized.
    dst: a file that ends in .gguf, or a folder, to create.
    seed: of the rotation.
    dtype: "bfloat16", "float16" or "float32" of all matrices. None: as in `src`; float32 for what is dequantized.
    overwrite: whether a `dst` that exists is replaced. progress: as in :func:`billfish.convert`.

    Returns a ConversionReport. Raises ModelError for a model that cannot be rotated: one whose embedding is its LM
    head, one with post-norms or LayerNorm, or with a draft block. If the process is killed, the same call continues.

        >>> report = bf.rotate_checkpoint("model.gguf", "rotated.gguf", progress=False)
        >>> bf.open_checkpoint("rotated.gguf")["blk.0.attn_q.weight"].dtype
        dtype('float32')
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(bad_argument(CALL, "seed", repr(seed), "an integer of at least 0"))
    path, out = path_of(CALL, src), Path(dst)
    numbers = None if dtype is None else float_dtype(CALL, dtype)
    target = target_named(CALL, "gguf" if out.suffix == ".gguf" else "plain")
    checkpoint, source = Checkpoint(path), open_source(path)
    tensors = _checked(checkpoint, source)
    changes = Changes(tensors, seed)
    view = rotated(checkpoint, tensors, changes, numbers)
    settings = OutputSettings(target, dtype=numbers, overwrite=overwrite, rotation=seed)
    report = export(CALL, view, out, settings, progress)
    same = {name for name in source.tensors if name not in changes.found}
    same |= {source.tensors.origins.get(name, name) for name in same}
    written = (tensor if tensor.name in same else tensor._replace(done="rotated") for tensor in report.tensors)
    return replace(report, tensors=tuple(written))


# ---- what can be rotated --------------------------------------------------------------------------------------------


def _checked(checkpoint: Checkpoint, source: Source) -> ModelTensors:
    """The tensors of a model; raises ModelError if it cannot be rotated."""
    model = describe(source.fields, source.vocabulary, source.tensors)
    reason = why_not(model, source.tensors)
    if not reason and not is_gguf(checkpoint):
        if any(map(is_of_images, checkpoint)):
            reason = "it has parts for images or sound, which write to the residual stream, too"
        elif _config_ties(checkpoint):
            reason = "config.json ties the LM head to the embedding, and only the head can take the last norm's weights"
    if reason:
        raise ModelError(failure(CALL, f"{checkpoint.path} cannot be rotated: {reason}", WITHOUT))
    return ModelTensors(source, model)


def why_not(model: Model, tensors: Checkpoint) -> str:
    """Why a model cannot be rotated; "" if it can."""
    norms = [
        model.final_norm,
        *(norm for block in model.blocks for norm in (block.mixer_norm, block.feed_forward_norm)),
    ]
    if model.encoder is not None or any(isinstance(norm, LayerNorm) for norm in norms):
        return "it has LayerNorm, which subtracts a mean that a rotation changes"
    if any(map(_has_post_norms, model.blocks)) or None in norms:
        return "it has norms behind attention and feed-forward parts (post-norms), whose weights no matrix can take"
    if model.per_layer_embedding is not None:
        return "it has embeddings per layer"
    if model.head.name == model.embedding.name:
        return "its embedding is also its LM head (tied), and only the head can take the last norm's weights"
    drafts = tuple(f"blk.{model.layers + i}." for i in range(model.draft_blocks))
    if drafts and any(name.startswith(drafts) for name in tensors):
        return "it has a block for drafts (MTP), which has a norm behind the last one"
    return ""


def _has_post_norms(block: Block) -> bool:
    parts = (block.mixer_post_norm, block.feed_forward_post_norm, block.per_layer_input)
    return isinstance(block.feed_forward, DenseAndMixture) or any(part is not None for part in parts)


def _config_ties(checkpoint: Checkpoint) -> bool:
    """Whether transformers takes the embedding for the head, even where the folder has a head."""
    text = text_config(checkpoint.config)
    return bool(of_config(text, checkpoint.path).completed(text).get("tie_word_embeddings", False))


# ---- what becomes of each tensor ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What becomes of a matrix W [N, K], a vector [K], or a bias as [N, 1]: columns are multiplied with `norm`, then
    each run of columns becomes W R, and each run of rows R^T W. span: the rows that are; None: all."""

    columns: Rotation | None = None
    norm: Floats | None = None
    rows: Rotation | None = None
    span: tuple[int, int] | None = None

    def apply(self, weights: Floats) -> Floats:
        if self.norm is not None:
            weights = weights * self.norm
        if self.columns is not None:
            weights = self.columns.apply(weights)
        if self.rows is not None:
            chosen = slice(*(self.span or (0, weights.shape[-2])))
            below = weights[..., chosen, :].swapaxes(-1, -2)
            weights = weights.copy()
            weights[..., chosen, :] = self.rows.apply(np.ascontiguousarray(below)).swapaxes(-1, -2)
        return weights


@dataclass
class Changes:
    """The changes of all tensors of a model, by GGUF's names. A norm, whose numbers become 1, has None."""

    tensors: ModelTensors
    seed: int
    found: dict[str, Change | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.tensors.config
        self._stream = Rotation(model.hidden, self.seed)
        self._add(f"{model.embedding.name}.weight", Change(self._stream))
        shared = {model.source(i) for i in range(model.layers)}
        for i, block in enumerate(model.blocks):
            assert block.mixer_norm is not None
            assert block.feed_forward_norm is not None
            self._read([*_inputs(block.mixer)], block.mixer_norm)
            self._read([*_inputs(block.feed_forward)], block.feed_forward_norm)
            values = None if i in shared else self._values(block.mixer)
            self._write(block.mixer.output, values)
            for down in _outputs(block.feed_forward):
                self._write(down)
        self._read([model.head], model.final_norm)

    def _read(self, parts: list[Matrix | Stack | Vector], norm: Vector) -> None:
        """Parts that multiply with what a norm gives."""
        change = Change(self._stream, self.tensors.vector(norm).astype(np.float64))
        for part in parts:
            self._add(part.name if isinstance(part, Vector) else f"{part.name}.weight", change)
        self.found[norm.name] = None

    def _write(self, part: Matrix | Stack, values: Rotation | None = None) -> None:
        """A part whose products are added to the stream. values: the rotation of its inputs."""
        self._add(f"{part.name}.weight", Change(columns=values, rows=self._stream))
        self._add(f"{part.name}.bias", Change(rows=self._stream))

    def _values(self, mixer: Mixer) -> Rotation | None:
        """The rotation of each head's values, if they may be rotated: what gates them does so number by number."""
        if not isinstance(mixer, Attention) or mixer.v is None or mixer.shares is not None or mixer.gated:
            return None
        rotation, name = Rotation(mixer.head_size, self.seed), f"{mixer.v.name}.weight"
        span = (mixer.v.first, mixer.v.first + mixer.v.rows)
        found = self.found[name]
        assert found is not None
        self.found[name] = replace(found, rows=rotation, span=span)
        self._add(f"{mixer.v.name}.bias", Change(rows=rotation, span=span))
        return rotation

    def _add(self, name: str, change: Change) -> None:
        if self.tensors.has(name):
            self.found[name] = change


def _inputs(part: Mixer | FeedForward) -> Iterator[Matrix | Stack | Vector]:
    """What multiplies with the output of the norm before a part."""
    if isinstance(part, Attention):
        found: tuple[Matrix | Stack | Vector | None, ...] = (part.q, part.k, part.v)
    elif isinstance(part, GatedDeltaNet):
        found = (part.qkv, part.z, part.beta, part.alpha)
    elif isinstance(part, Dense):
        found = (part.gate, part.up)
    elif isinstance(part, Mixture):
        found = (part.router.matrix, part.gate, part.up, part.shared_gate)
        found += () if part.shared is None else tuple(_inputs(part.shared))
    else:
        assert not isinstance(part, DenseAndMixture)
        found = (part.projection,)
    yield from (each for each in found if each is not None)


def _outputs(part: FeedForward) -> Iterator[Matrix | Stack]:
    """What a feed-forward part adds to the stream."""
    assert not isinstance(part, DenseAndMixture)
    yield part.down
    if isinstance(part, Mixture) and part.shared is not None:
        yield part.shared.down


# ---- the rotated checkpoint -----------------------------------------------------------------------------------------


def rotated(checkpoint: Checkpoint, tensors: ModelTensors, changes: Changes, dtype: np.dtype[Any] | None) -> Checkpoint:
    """The checkpoint with rotated tensors under its own names, computed as they are read. dtype: as in
    `rotate_checkpoint`."""
    view = tensors.source.tensors
    known = {_place(view.origins.get(name, name)): name for name in view}
    entries: dict[str, Entry] = {}
    for own in checkpoint:
        name, entry = known.get(_place(own)), checkpoint.entry(own)
        if name is None and not own.endswith(INVERSE_FREQUENCIES):
            raise ModelError(failure(CALL, f"{checkpoint.path} cannot be rotated: nothing is known of {own}", WITHOUT))
        if name is None or name not in changes.found:
            entries[own] = entry
            continue
        change = changes.found[name]
        if change is None:
            entries[own] = _ones(own, name, checkpoint, entry, tensors)
        else:
            turned = is_turned(own, checkpoint.config) and len(entry.description.shape) == 3
            entries[own] = Rotated(entry, change, dtype, name.endswith(".bias"), turned)
    result = checkpoint.view(entries, [*entries])
    result.origins = {}
    if not is_gguf(checkpoint):
        result.config = {**checkpoint.config, "tie_word_embeddings": False}
    return result


def _place(name: str) -> str:
    """The same for all experts of a stack."""
    stacks, _ = stacks_in(name)
    return stacks[0] if stacks else name


def _ones(own: str, name: str, checkpoint: Checkpoint, entry: Entry, tensors: ModelTensors) -> Entry:
    """A norm that multiplies with 1, in the type that it has."""
    about = entry.description
    ones = np.ones(about.shape, np.float32)
    if not is_gguf(checkpoint):
        ones = in_folder(name, ones, tensors.source.fields)
    return HeldArray(own, ones.astype(TYPES[about.dtype][1]))


class Rotated(Entry):
    """A tensor, changed. It is computed in float64, a part at a time: rows, or columns where rows are rotated.

    dtype: of a matrix; None is that of the entry, and float32 if that is quantized. turned: whether the stack is
    [E, K, N] where it is not quantized.
    """

    def __init__(
        self, entry: Entry, change: Change, dtype: np.dtype[Any] | None, is_bias: bool, turned: bool = False
    ) -> None:
        about = entry.description
        self.change, self.is_bias, self.turned = change, is_bias, turned
        self.entry = Turned(entry) if turned and about.format is None else entry
        shape = self.entry.description.shape
        is_matrix = len(shape) > 1 and not is_bias
        own = np.dtype(np.float32) if about.format is not None else np.dtype(TYPES[about.dtype][1])
        self.dtype = dtype if dtype is not None and (is_matrix or dtype == np.float32) else own
        shape = (shape[0], *shape[:0:-1]) if turned else shape
        nbytes = math.prod(shape) * self.dtype.itemsize
        about = replace(about, format=None, group_size=None, act_order=False, column_step=1)
        super().__init__(replace(about, dtype=KINDS[self.dtype], shape=shape, nbytes=nbytes), entry.parts)

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        shape = self.entry.description.shape
        if self.is_bias:
            whole = self._changed(self._floats()[..., None])[..., 0]
        elif len(shape) < 3:
            whole = self._matrix()
        else:
            first, last = check_experts(self.description, experts)
            whole, experts = np.empty((last - first, *shape[1:]), self.dtype), None
            for e in range(first, last):
                whole[e - first] = self._matrix((e, e + 1))
            whole = whole.swapaxes(1, 2) if self.turned else whole
        return cut_array(whole, rows, columns, experts)

    def _matrix(self, expert: Span | None = None) -> Array:
        """[N, K], or a vector [K]."""
        *rows, k = self.entry.description.shape[int(expert is not None) :]
        change = self.change
        out = np.empty((*rows, k), self.dtype)
        if change.rows is None and rows:
            step = max(1, CHUNK // k)
            for start in range(0, rows[0], step):
                part = start, min(start + step, rows[0])
                out[slice(*part)] = self._changed(self._floats(part, expert))
            return out
        weights = self._floats(None, expert)
        step = k if change.norm is not None else max(1, CHUNK // rows[0])
        run = 1 if change.columns is None else change.columns.size
        for start in range(0, k, -(-step // run) * run):
            part = start, start + -(-step // run) * run
            out[..., slice(*part)] = self._changed(weights[..., slice(*part)])
        return out

    def _floats(self, rows: Span | None = None, expert: Span | None = None) -> Array:
        """Some rows, as plain numbers."""
        tensor = self.entry.read(rows, None, expert)
        if expert is not None:
            assert not isinstance(tensor, QuantizedTensor)
            tensor = tensor[0]
        return tensor if isinstance(tensor, np.ndarray) else dequantize(tensor)

    def _changed(self, weights: Array) -> Array:
        changed = self.change.apply(weights.astype(np.float64))
        with np.errstate(over="ignore"):
            cast = changed.astype(self.dtype)
        if (np.isinf(cast) & ~np.isinf(changed)).any():
            name, most = self.description.name, np.abs(changed).max()
            problem = f"{name} overflows {self.dtype.name}: rotated, it has values up to {most:g}"
            raise CheckpointError(failure(CALL, problem, "Use --dtype bfloat16 or float32."))
        return cast
