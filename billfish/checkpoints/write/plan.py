"""What becomes of each tensor: written as it is, in another format that holds it, or quantized; or why it cannot be."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.derived import stack_of
from billfish.checkpoints.entry import Tensor
from billfish.checkpoints.names.expert_stacks import is_turned, upright
from billfish.checkpoints.names.gguf_names import column_orders
from billfish.checkpoints.reports import Remark, by_reason
from billfish.checkpoints.safetensors_files import TYPES
from billfish.checkpoints.write.recast import Misfit, holds, recast
from billfish.checkpoints.write.selection import Quantization, Rule
from billfish.checkpoints.write.target import Item, Target, stored_types
from billfish.core.arrays import FLOAT_NAMES, FLOATS
from billfish.core.elements import Element, Integer, Signed
from billfish.core.errors import CheckpointError, failure
from billfish.core.format import Format, Planes, get_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize_matrix

AGAIN = "--requantize (requantize=True)"
ALREADY = re.compile(r"already quantized \((\w+)\)")


@dataclass(frozen=True)
class OutputSettings:
    target: Target
    quantization: Quantization | None = None
    requantize: bool = False
    raw_names: bool = False  # whether GGUF may get names that no program knows
    dtype: np.dtype[Any] | None = None  # of matrices that are written as numbers; None: as they are, decoded to float32
    overwrite: bool = False  # whether an output that exists is replaced
    rotation: int | None = None  # the seed, of a checkpoint whose tensors are rotated as they are read


@dataclass
class Plan:
    """What becomes of the tensors of a checkpoint."""

    items: list[Item] = field(default_factory=list)  # in the order of the checkpoint
    quantized: set[str] = field(default_factory=set)  # those of them whose values are rounded anew
    left: dict[str, str] = field(default_factory=dict)  # tensors that `quantize` leaves as they are, and why
    notes: list[Remark] = field(default_factory=list)  # what else the user is told
    problems: list[Remark] = field(default_factory=list)  # tensors that cannot be written


def plan(checkpoint: Checkpoint, settings: OutputSettings) -> Plan:
    """From headers, scales and offsets."""
    if settings.quantization:
        settings.quantization.check_patterns(checkpoint)
        settings.quantization.check_statistics(checkpoint)
        quantization = replace(with_mix(checkpoint, settings.quantization), columns=column_orders(checkpoint))
        settings = replace(settings, quantization=quantization)
    made, quantizable = Plan(), upright(checkpoint)
    for name in checkpoint:
        try:
            made.items.append(_item(checkpoint, quantizable, name, settings, made))
        except Misfit as reason:
            made.problems.append(Remark(name, str(reason)))
        checkpoint.release()
    _settle(checkpoint, settings, made)
    return made


def with_mix(checkpoint: Checkpoint, quantization: Quantization) -> Quantization:
    """The rules of its mix are rules like any others, after those of the user."""
    if quantization.mix is None:
        return quantization
    shapes = {name: checkpoint.describe(name).shape for name in checkpoint}
    wanted = [name for name in checkpoint if quantization.is_wanted(name, checkpoint.origins.get(name, name))]
    rules = [Rule(*rule) for rule in quantization.mix.rules("quantize", shapes, wanted)]
    return replace(quantization, rules=(*quantization.rules, *rules))


def _settle(checkpoint: Checkpoint, settings: OutputSettings, made: Plan) -> None:
    """Items that cannot be in one checkpoint with the others are quantized again to be like them, or are problems."""
    for name, odd in settings.target.odd_ones(made.items).items():
        at = next(i for i, item in enumerate(made.items) if item.name == name)
        try:
            if not settings.requantize:
                raise Misfit(odd.reason)
            made.items[at] = _quantized(checkpoint, name, made.items[at].shape, odd.format, odd.group_size, settings)
        except Misfit as reason:
            made.problems.append(Remark(name, str(reason)))
        else:
            made.notes = [remark for remark in made.notes if remark.name != name]
            made.notes.append(Remark(name, f"quantized again, to {odd.format.name}: {odd.reason}"))
            made.quantized.add(name)
            made.left.pop(name, None)


def _item(checkpoint: Checkpoint, quantizable: Checkpoint, name: str, settings: OutputSettings, made: Plan) -> Item:
    about, quantization = checkpoint.describe(name), settings.quantization
    if about.unsupported:
        raise Misfit(about.unsupported)
    if quantization is not None:
        try:
            item = _chosen(quantizable, name, settings, quantization)
            made.quantized.add(name)
            return item
        except Misfit as reason:
            made.left[name] = str(reason)
    if about.format is None:
        dtype = np.dtype(TYPES[about.dtype][1])
        return _numbers(checkpoint, name, _type_asked_for(checkpoint, name, dtype, settings), settings)
    if settings.target.is_plain(name, settings.dtype):
        if settings.dtype is None:
            made.notes.append(Remark(name, "decoded to float32, without loss; --dtype chooses another type"))
        return _numbers(checkpoint, name, settings.dtype or np.dtype(np.float32), settings)
    order = checkpoint.permutation(name) if about.act_order else None
    try:
        item = _as_it_is(checkpoint, name, order is not None, settings)
        if item.format is not None and item.bits > about.format.element.bits:
            made.notes.append(
                Remark(name, f"{about.format.name}, held as {item.format.name} with {item.bits} bits for each code")
            )
        return item
    except Misfit as reason:
        fallback = settings.target.fallback(about.format, about.shape[-1])
        if not settings.requantize or fallback is None:
            raise
        made.notes.append(Remark(name, f"quantized again, to {fallback[0]}: {reason}"))
        made.quantized.add(name)
        made.left.pop(name, None)
        format, group_size = get_format(fallback[0]), fallback[1]
        return _quantized(checkpoint, name, about.shape, format, group_size, replace(settings, quantization=None))


def _chosen(checkpoint: Checkpoint, name: str, settings: OutputSettings, quantization: Quantization) -> Item:
    """A tensor that is to be quantized; raises Misfit with the reason for one that is not."""
    about, origin = checkpoint.describe(name), checkpoint.origins.get(name, name)
    choice = quantization.choice(name, origin, about.shape)
    if choice is None:
        raise Misfit(quantization.reason_to_leave(name, origin, about.shape))
    if about.format is not None and not settings.requantize:
        raise Misfit(f"already quantized ({about.format.name}); {AGAIN} quantizes it again")
    if about.format is None and (len(about.shape) < 2 or np.dtype(TYPES[about.dtype][1]).name not in FLOATS):
        raise Misfit(f"not a matrix of {FLOAT_NAMES}")
    return _quantized(checkpoint, name, about.shape, *choice, settings)


def _type_asked_for(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], settings: OutputSettings) -> np.dtype[Any]:
    """The type of a plain array in the output: of matrices the one that was asked for, of vectors if it holds them."""
    wanted = settings.dtype
    if wanted is None or dtype.name not in FLOATS:
        return dtype
    if len(checkpoint.describe(name).shape) >= 2:
        return wanted
    casts = settings.target.casts_vectors and holds(_weights(checkpoint, name).astype(np.float32), wanted)
    return wanted if casts else dtype


def _numbers(checkpoint: Checkpoint, name: str, dtype: np.dtype[Any], settings: OutputSettings) -> Item:
    """A plain array of some type, from one of any type or from quantized weights."""
    settings.target.check_plain(dtype)
    about = checkpoint.describe(name)
    turned = about.format is not None and len(about.shape) == 3 and is_turned(name, checkpoint.config)
    shape = (about.shape[0], *about.shape[:0:-1]) if turned else about.shape

    def load() -> Array:
        weights = _weights(checkpoint, name)
        if turned:
            weights = weights.swapaxes(1, 2)
        if weights.dtype == dtype:
            return weights
        with np.errstate(over="ignore"):
            cast = weights.astype(dtype)
        if (np.isinf(cast) & ~np.isinf(weights)).any():
            problem = f"{name} overflows {dtype.name}: it has values up to {np.abs(weights).max():g}"
            raise CheckpointError(failure("convert", problem, "Use --dtype bfloat16 or float32."))
        return cast

    return Item(name, None, shape, 0, {"": dtype}, False, load, lambda: None)


def _as_it_is(checkpoint: Checkpoint, name: str, act_order: bool, settings: OutputSettings) -> Item:
    """In the first format of the target that holds it."""
    shape, target = checkpoint.describe(name).shape, settings.target
    matrices = _matrices(checkpoint, name)
    source = matrices[0].format
    reasons: list[tuple[int, str]] = []
    for format in _candidates(source, target):
        try:
            plans = [recast(matrix, format) for matrix in matrices]
            planes = [plan.planes or matrix.scale_planes for plan, matrix in zip(plans, matrices, strict=True)]
            for some in planes:
                target.check(format, plans[0].group_size, some, shape, act_order)
        except Misfit as reason:
            reasons.append((_distance(source, format), str(reason)))
            continue
        return Item(
            name,
            format,
            shape,
            plans[0].group_size,
            _types(target, format, planes, shape[-1], checkpoint.config),
            act_order,
            functools.partial(_load_recast, checkpoint, name, format),
            functools.partial(checkpoint.permutation, name),
        )
    raise Misfit(min(reasons)[1])


def _types(
    target: Target, format: Format, planes: Sequence[Planes], k: int, config: Mapping[str, Any]
) -> dict[str, np.dtype[Any]]:
    """The types of the storage arrays: those that hold all matrices of a stack."""
    types = [stored_types(format, k, some) | target.preferred(format, some, config) for some in planes]
    return {part: np.result_type(*(one[part] for one in types)) for part in types[0]}


def _load_recast(checkpoint: Checkpoint, name: str, format: Format) -> Tensor:
    tensor = checkpoint[name]
    if isinstance(tensor, QuantizedTensor):
        return recast(tensor, format).apply(tensor)
    assert isinstance(tensor, QuantizedExperts)
    if tensor.format is format:
        return tensor
    return stack_of(len(tensor), ((name, recast(matrix, format).apply(matrix)) for matrix in tensor))


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
    settings: OutputSettings,
) -> Item:
    """Quantized, from a plain array or from weights in another format."""
    call, target = "quantize", settings.target
    format = target.own(format)
    quantization = settings.quantization
    k = shape[-1]
    if target.is_plain(name, settings.dtype):
        raise Misfit(f"{target.name} stores it unquantized only")
    if k == 0 or k % format.block_size:
        raise Misfit(f"K = {k} is not a positive multiple of {format.block_size}, as {format.name} needs")
    group = format.check_group_size(call, group_size, k)
    options = format.check_options(call, {})
    specs = format.storage_spec(1, k, group, options)
    row = target.adapt(quantize_matrix(call, name, np.ones((1, k), np.float32), format, group, "rtn", options))
    target.check(format, group, row.scale_planes, shape, False)  # scales and offsets such as the weights will have

    finished = quantization.finished if quantization is not None else None
    if finished is not None and not _is_finished(finished, name, format, shape, group):
        finished = None
    if finished is None and quantization is not None and quantization.statistics is not None:
        quantization.statistics.check_matrix(call, name, shape, quantization.method)

    def matrix(expert: int | None = None) -> QuantizedTensor:
        if finished is not None:
            return target.adapt(_finished_matrix(finished, name, expert))
        method, known = quantization.settings(name, shape, expert) if quantization else ("mse", {})
        weights = _weights(checkpoint, name, expert)
        return target.adapt(quantize_matrix(call, name, weights, format, group, method, options, **known))

    def load() -> Tensor:
        if finished is not None:
            finished.release()  # what the items before have read
        return matrix() if len(shape) == 2 else stack_of(shape[0], ((name, matrix(e)) for e in range(shape[0])))

    types = {part: spec.dtype for part, spec in specs.items()}
    return Item(name, format, shape, group, types, False, load, lambda: None, quantizes=finished is None)


def _is_finished(finished: Checkpoint, name: str, format: Format, shape: tuple[int, ...], group_size: int) -> bool:
    """Whether a tensor is there, quantized just so."""
    about = finished.describe(name) if name in finished else None
    return about is not None and (about.format, about.shape, about.group_size) == (format, shape, group_size)


def _finished_matrix(finished: Checkpoint, name: str, expert: int | None) -> QuantizedTensor:
    """A matrix that is quantized already, or one of a stack."""
    tensor = finished.read(name, experts=None if expert is None else (expert, expert + 1))
    assert not isinstance(tensor, np.ndarray)
    return tensor if isinstance(tensor, QuantizedTensor) else tensor[0]


def _matrices(checkpoint: Checkpoint, name: str) -> list[QuantizedTensor]:
    """A matrix, or all of a stack."""
    tensor = checkpoint[name]
    assert not isinstance(tensor, np.ndarray)
    return [tensor] if isinstance(tensor, QuantizedTensor) else list(tensor)


def _weights(checkpoint: Checkpoint, name: str, expert: int | None = None) -> Array:
    """A tensor as numbers, columns where the model has them; of a stack perhaps one matrix."""
    if expert is not None:
        stack = checkpoint.read(name, experts=(expert, expert + 1))
        assert not isinstance(stack, QuantizedTensor)
        one = stack[0]
        return one if isinstance(one, np.ndarray) else dequantize(one)
    tensor = checkpoint[name]
    return tensor if isinstance(tensor, np.ndarray) else dequantize(tensor)


def refuse(call: str, made: Plan, settings: OutputSettings) -> None:
    """Raises an error, with the tensors and the reasons, if some cannot be written or none would be quantized."""
    if made.problems:
        count = "1 tensor" if len(made.problems) == 1 else f"{len(made.problems)} tensors"
        problem = f"{settings.target.name} cannot store {count} without loss"
        problem += f". {'. '.join(by_reason(made.problems))}"
        raise CheckpointError(failure(call, problem, f"{AGAIN} quantizes again, with loss."))
    if settings.quantization and not made.quantized:
        held = sorted({found[1] for reason in made.left.values() if (found := ALREADY.match(reason))})
        if held:
            problem = f"the matrices are already quantized ({', '.join(held)})"
            fix = f"{AGAIN} quantizes them again, with loss. Better: start from the float model."
            raise CheckpointError(failure(call, problem, fix))
        reasons = by_reason((Remark(*item) for item in made.left.items()), limit=2)
        raise CheckpointError(failure(call, f"nothing to quantize. {'. '.join(reasons) or 'There are no tensors'}"))
