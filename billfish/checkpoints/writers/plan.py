"""What becomes of each tensor: written as it is, in another format that holds it, or quantized; or why it cannot be."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from billfish.arrays import FLOATS
from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.container import TYPES
from billfish.checkpoints.mixes import Mix
from billfish.checkpoints.recast import Misfit, holds, recast
from billfish.checkpoints.writers.base import Item, Target, stored_types
from billfish.elements import Element, Integer, Signed
from billfish.errors import CheckpointError, complaint
from billfish.format import Format, get_format
from billfish.ops import dequantize, quantize_matrix
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

# What is usually left as it is: embeddings, the last layer, norms, and the small matrices that choose experts.
SENSITIVE = re.compile(
    r"(^|\.)(lm_head|output|\w*embe?d\w*|wte|wpe|token_types|\w*norm\w*|router|gate|ffn_gate_inp)(\.weight)?$"
)


@dataclass(frozen=True)
class Quantization:
    """How to quantize: the format for ordinary weights, and rules (pattern, format or None) that come first."""

    format: Format
    group_size: int | None
    method: str
    rules: tuple[tuple[re.Pattern[str], Format | None, int | None], ...] = ()
    mix: Mix | None = None  # whose rules come after these

    def choice(self, name: str, origin: str, shape: tuple[int, ...]) -> tuple[Format, int | None] | None:
        """The format of a tensor; None to leave it as it is. Rules are for its name, or the one it had."""
        for pattern, format, group_size in self.rules:
            if pattern.search(name) or pattern.search(origin):
                return None if format is None else (format, group_size)
        ordinary = len(shape) == 2 and name.endswith("weight") and not SENSITIVE.search(name)
        return (self.format, self.group_size) if ordinary else None


@dataclass(frozen=True)
class Settings:
    target: Target
    quantization: Quantization | None = None
    requantize: bool = False
    dtype: np.dtype[Any] | None = None  # of matrices that are written as numbers; None: as they are, decoded to float32


@dataclass(frozen=True)
class Remark:
    """A tensor or a file, and why it is refused, left as it is or left out: what the user is told."""

    name: str
    reason: str


def plan(checkpoint: Checkpoint, settings: Settings) -> tuple[list[Item], list[Remark], list[Remark]]:
    """Items in the order of the checkpoint; tensors that cannot be written; tensors left as they are, and why."""
    items, problems, left = [], list[Remark](), list[Remark]()
    quantization = settings.quantization
    if quantization is not None and quantization.mix is not None:
        shapes = {name: checkpoint.describe(name).shape for name in checkpoint}
        rules = (*quantization.rules, *quantization.mix.rules("quantize", shapes))
        settings = replace(settings, quantization=replace(quantization, rules=rules))
    for name in checkpoint:
        try:
            item = _item(checkpoint, name, settings, left)
        except Misfit as reason:
            problems.append(Remark(name, str(reason)))
        else:
            items.append(item)
        checkpoint.release()
    for name, odd in settings.target.odd_ones(items).items():
        at = next(i for i, item in enumerate(items) if item.name == name)
        try:
            if not settings.requantize:
                raise Misfit(odd.reason)
            items[at] = _quantized(checkpoint, name, items[at].shape, odd.format, odd.group_size, settings)
            left = [remark for remark in left if remark.name != name]
            left.append(Remark(name, f"quantized again, to {odd.format.name}: {odd.reason}"))
        except Misfit as reason:
            problems.append(Remark(name, str(reason)))
    return items, problems, left


def _item(checkpoint: Checkpoint, name: str, settings: Settings, left: list[Remark]) -> Item:
    about, quantization = checkpoint.describe(name), settings.quantization
    if about.unsupported:
        raise Misfit(about.unsupported)
    origin = checkpoint.origins.get(name, name)
    choice = quantization.choice(name, origin, about.shape) if quantization else None
    if about.format is None:
        dtype = np.dtype(TYPES[about.dtype][1])
        if choice is not None and dtype.name in FLOATS and len(about.shape) >= 2:
            try:
                return _quantized(checkpoint, name, about.shape, *choice, settings)
            except Misfit as reason:
                left.append(Remark(name, str(reason)))
        return _numbers(checkpoint, name, _type_asked_for(checkpoint, name, dtype, settings), settings)
    if settings.target.is_plain(name, settings.dtype):
        if settings.dtype is None:
            left.append(Remark(name, "decoded to float32, which loses nothing; --dtype chooses another type"))
        return _numbers(checkpoint, name, settings.dtype or np.dtype(np.float32), settings)
    order = checkpoint.permutation(name) if about.act_order else None
    if choice is not None and settings.requantize:
        return _quantized(checkpoint, name, about.shape, *choice, settings)
    try:
        item = _as_it_is(checkpoint, name, order is not None, settings)
        if item.format is not None and item.bits > about.format.element.bits:
            left.append(
                Remark(name, f"{about.format.name}, held as {item.format.name} with {item.bits} bits for each code")
            )
        return item
    except Misfit as reason:
        fallback = settings.target.fallback(about.format, about.shape[-1])
        if not settings.requantize or fallback is None:
            raise
        left.append(Remark(name, f"quantized again, to {fallback[0]}: {reason}"))
        format, group_size = get_format(fallback[0]), fallback[1]
        return _quantized(checkpoint, name, about.shape, format, group_size, replace(settings, quantization=None))


def _type_asked_for(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], settings: Settings) -> np.dtype[Any]:
    """The type of a plain array in the output: of matrices the one that was asked for, of vectors if it holds them."""
    wanted = settings.dtype
    if wanted is None or dtype.name not in FLOATS:
        return dtype
    if len(checkpoint.describe(name).shape) >= 2:
        return wanted
    casts = settings.target.casts_vectors and holds(_weights(checkpoint, name).astype(np.float32), wanted)
    return wanted if casts else dtype


def _numbers(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], settings: Settings) -> Item:
    """A plain array of some type, from one of any type or from quantized weights."""
    settings.target.check_plain(dtype)
    shape = checkpoint.describe(name).shape

    def load() -> Array:
        weights = _weights(checkpoint, name)
        if weights.dtype == dtype:
            return weights
        with np.errstate(over="ignore"):
            cast = weights.astype(dtype)
        if (np.isinf(cast) & ~np.isinf(weights)).any():
            got = f"numbers up to {np.abs(weights).max():g} for {dtype.name}"
            raise CheckpointError(complaint("convert", name, got, "a type that holds them, such as bfloat16"))
        return cast

    return Item(name, None, shape, 0, {"": dtype}, False, load, lambda: None)


def _as_it_is(checkpoint: Checkpoint, name: str, act_order: bool, settings: Settings) -> Item:
    """In the first format of the target that holds it."""
    shape, target = checkpoint.describe(name).shape, settings.target
    tensor = _matrix(checkpoint, name)
    reasons: list[tuple[int, str]] = []
    for format in _candidates(tensor.format, target):
        try:
            plan = recast(tensor, format)
            planes = plan.planes or tensor.scale_planes
            target.check(format, plan.group_size, planes, shape, act_order)
        except Misfit as reason:
            reasons.append((_distance(tensor.format, format), str(reason)))
            continue
        types = stored_types(format, shape[-1], planes) | target.preferred(format, planes, checkpoint.config)
        return Item(
            name,
            format,
            shape,
            plan.group_size,
            types,
            act_order,
            functools.partial(_load_recast, checkpoint, name, format),
            functools.partial(checkpoint.permutation, name),
        )
    raise Misfit(min(reasons)[1])


def _load_recast(checkpoint: Checkpoint, name: str, format: Format) -> QuantizedTensor:
    tensor = _matrix(checkpoint, name)
    return recast(tensor, format).apply(tensor)


def _candidates(source: Format, target: Target) -> Iterator[Format]:
    """The formats of a target, the source's own first."""
    if source.name in target.formats:
        yield source
    yield from (get_format(name) for name in target.formats if name != source.name)


def _distance(a: Format, b: Format) -> int:
    """Which refusal to report: that of the format most like the source."""
    kinds: dict[type[Element], type[Element]] = {Signed: Integer}  # two ways to write the same
    alike = kinds.get(type(a.element), type(a.element)) is kinds.get(type(b.element), type(b.element))
    return 8 * (not alike) + 2 * abs(a.element.bits - b.element.bits) + ((a.offset == "none") != (b.offset == "none"))


def _quantized(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    format: Format,
    group_size: int | None,
    settings: Settings,
) -> Item:
    """Quantized, from a plain array or from weights in another format."""
    call, target = "quantize", settings.target
    method = settings.quantization.method if settings.quantization else "mse"
    k = shape[-1]
    if target.is_plain(name, settings.dtype):
        raise Misfit(f"{target.name} holds it as numbers only")
    if k == 0 or k % format.block_size:
        raise Misfit(f"K = {k} is no positive multiple of {format.block_size}, as {format.name} needs")
    group = format.check_group_size(call, group_size, k)
    options = format.check_options(call, {})
    specs = format.storage_spec(1, k, group, options)
    row = target.adapt(quantize_matrix(call, name, np.ones((1, k), np.float32), format, group, "rtn", options))
    target.check(format, group, row.scale_planes, shape, False)  # scales and offsets such as the weights will have

    def load() -> QuantizedTensor:
        weights = _weights(checkpoint, name).reshape(-1, k)
        return target.adapt(quantize_matrix(call, name, weights, format, group, method, options))

    types = {part: spec.dtype for part, spec in specs.items()}
    return Item(name, format, shape, group, types, False, load, lambda: None)


def _matrix(checkpoint: Checkpoint, name: str) -> QuantizedTensor:
    tensor = checkpoint[name]
    assert isinstance(tensor, QuantizedTensor)
    return tensor


def _weights(checkpoint: Checkpoint, name: str) -> Array:
    """A tensor as numbers, columns where the model has them."""
    tensor = checkpoint[name]
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    return dequantize(tensor)


def by_reason(remarks: Sequence[Remark], limit: int = 5) -> list[str]:
    """One line for each reason, with the names of the first tensors and the number of the others."""
    names: dict[str, list[str]] = {}
    for remark in remarks:
        names.setdefault(remark.reason, []).append(remark.name)
    return [
        ", ".join(same[:limit]) + (f" and {len(same) - limit} more" if len(same) > limit else "") + f": {reason}"
        for reason, same in names.items()
    ]


def refuse(call: str, problems: Sequence[Remark], takes: str) -> None:
    """Raises an error that names the tensors and the reasons."""
    if problems:
        raise CheckpointError(complaint(call, f"{len(problems)} tensors", "; ".join(by_reason(problems)), takes))
