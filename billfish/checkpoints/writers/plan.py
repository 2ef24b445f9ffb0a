"""What becomes of each tensor: written as it is, in another format that holds it, or quantized; or why it cannot be."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from billfish.arrays import FLOATS
from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.container import TYPES
from billfish.checkpoints.recast import Misfit, recast
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


@dataclass(frozen=True)
class Remark:
    """A tensor or a file, and why it is refused, left as it is or left out: what the user is told."""

    name: str
    reason: str


def plan(checkpoint: Checkpoint, settings: Settings) -> tuple[list[Item], list[Remark], list[Remark]]:
    """Items in the order of the checkpoint; tensors that cannot be written; tensors left as they are, and why."""
    items, problems, left = [], list[Remark](), list[Remark]()
    for name in checkpoint:
        try:
            item = _item(checkpoint, name, settings, left)
        except Misfit as reason:
            problems.append(Remark(name, str(reason)))
        else:
            items.append(item)
        checkpoint.release()
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
        settings.target.check_plain(dtype)
        return Item(name, None, about.shape, 0, {"": dtype}, False, lambda: checkpoint[name], lambda: None)
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
    format = target.own(format)
    method = settings.quantization.method if settings.quantization else "mse"
    k = shape[-1]
    if k == 0 or k % format.block_size:
        raise Misfit(f"K = {k} is no positive multiple of {format.block_size}, as {format.name} needs")
    group = format.check_group_size(call, group_size, k)
    options = format.check_options(call, {})
    specs = format.storage_spec(1, k, group, options)
    planes = format.unpack_scales({part: spec.zeros() for part, spec in specs.items()})
    target.check(format, group, planes, shape, False)

    def load() -> QuantizedTensor:
        weights = _weights(checkpoint, name).reshape(-1, k)
        tensor = quantize_matrix(call, name, weights, format, group, method, options)
        return _with_reciprocal(tensor) if target.stores_reciprocals and "global_scale" in tensor.storage else tensor

    types = {part: spec.dtype for part, spec in specs.items()}
    return Item(name, format, shape, group, types, False, load, lambda: None)


def _with_reciprocal(tensor: QuantizedTensor) -> QuantizedTensor:
    """The global scale moved by an ulp, so that it is the reciprocal of a float32."""
    one, scale = np.float32(1), tensor.storage["global_scale"]
    moved = np.asarray(one / np.float32(one / scale), np.float32)
    return replace(tensor, storage={**tensor.storage, "global_scale": moved})


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
