"""The backend of the CPU engine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import Backend, Direct, ExpertBlock, ExpertProduct, Problem, Product, delivered
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import Layout, layout_of, layout_of_blocks, why_never, why_not
from billfish.backends.cpu.experts import PackedExperts, pack_experts
from billfish.backends.cpu.native_search import NativeSearch
from billfish.backends.cpu.packed import (
    FLOAT_CODES,
    Axes,
    PackedWeights,
    PlainWeights,
    pack_plain,
    room_for_stream,
    rooms_for_streams,
)
from billfish.backends.cpu.source import byte_numbers, codes_of, prepack_fields, source_of
from billfish.backends.cpu.tensors import from_tensors, to_tensors
from billfish.backends.cpu.torch_threads import share_torch_threads
from billfish.backends.cpu.unpack import decode_planes, planes_of, rest_of, rest_of_blocks
from billfish.core import machine
from billfish.core.activations import DIGITS, IntegerActivations
from billfish.core.arrays import FLOATS, Input, float_input
from billfish.core.errors import BackendUnavailable, FormatError, bad_argument, failure
from billfish.core.format import Format
from billfish.core.formats.ggml import BlockFormat
from billfish.core.formats.structure import structure_of
from billfish.core.mixture import GATES, checked_ids, checked_routing
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.search import provide_kernels
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

MAX_THREADS = 1024

machine.provide(_cpu.KnownFloats, _cpu.default_threads)


def choose_level() -> str:
    """The best ISA level of this machine, or the one that BILLFISH_ISA names."""
    available = _cpu.levels()
    wanted = os.environ.get("BILLFISH_ISA")
    if wanted is None:
        return str(available[0])
    if wanted not in available:
        expected = f"a level that this machine supports: {', '.join(available)}"
        raise BackendUnavailable(bad_argument("cpu", "BILLFISH_ISA", repr(wanted), expected))
    return wanted


provide_kernels(NativeSearch(choose_level))


def set_threads(count: int) -> None:
    """Set the number of CPU threads.

    count: 0 is the default: OMP_NUM_THREADS, or the cores that this process may use by affinity and CPU quota, without
    hyperthreads on Linux. These are looked at when billfish is imported, in the child after a fork, and by
    ``set_threads(0)``.

    Raises DataError for a negative count or one above 1024.

        >>> bf.set_threads(2)
        >>> bf.set_threads(0)
    """
    _cpu.set_threads(check_threads("set_threads", "count", count, least=0))


def check_threads(call: str, argument: str, count: int, least: int = 1) -> int:
    """Raise FormatError unless `count` is a number of threads."""
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= MAX_THREADS:
        raise FormatError(bad_argument(call, argument, repr(count), f"a number from {least} to {MAX_THREADS}"))
    return count


OUTPUTS = ("float32", "float16", "bfloat16")  # types that dequantize writes, numbered as in layout/problem.h


def _rounded(y: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """y in x's type. A value too large for the type becomes infinite."""
    if dtype == np.float32:
        return y
    with np.errstate(over="ignore", invalid="ignore"):
        return y.astype(dtype)


@overload
def _floats(numbers: None) -> None: ...
@overload
def _floats(numbers: Input) -> NDArray[np.float32]: ...
@overload
def _floats(numbers: Input | None) -> NDArray[np.float32] | None: ...


def _floats(numbers: Input | None) -> NDArray[np.float32] | None:
    """An argument as the native core takes it."""
    return None if numbers is None else np.ascontiguousarray(numbers.numpy(), np.float32)


class CpuBackend(Backend):
    """The kernels of one ISA level."""

    name = "cpu"
    unpacks = unpacks_experts = True

    def __init__(self) -> None:
        self.level = choose_level()

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"runs on arrays in CPU memory; x is on {problem.device}"
        if problem.operation == "dequantize":
            reads = structure_of(problem.format) is not None or byte_numbers(problem.format) is not None
            return reads, f"it does not read the storage of {problem.format.name}"
        if problem.activations == "fp8":
            return False, "supports activations 'exact', 'q8' and 'q16', not 'fp8', which needs an NVIDIA GPU"
        reason = why_never(problem.format) or why_not(problem.group_size, problem.k)
        return not reason, reason

    def usable(self) -> tuple[bool, str]:
        named = "as BILLFISH_ISA says" if "BILLFISH_ISA" in os.environ else "the best of this machine"
        return True, f"{self.level} kernels, {named}"

    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> PackedWeights:
        """With all that `unpack` needs, which `pack_all` leaves out."""
        structure = structure_of(tensor.format)
        if structure is None or not structure.scales_inside:
            return self._pack_with_fields(tensor, unpacks=True)
        weights = self.pack_all([tensor])[0]
        assert isinstance(weights, PackedWeights)
        rest = rest_of_blocks(tensor.format, tensor.storage, weights.axes.scales)
        return self._pack_with_fields(tensor, unpacks=True) if rest is None else replace(weights, rest=rest)

    def pack_all(self, tensors: Iterable[QuantizedTensor | Array]) -> list[PackedWeights | PlainWeights]:
        """Packs many matrices, quantized ones or arrays [N, K] of PLAIN_TYPES.

        All ggml blocks go in one native call, which leaves Python to other threads.
        """
        packed: dict[int, PackedWeights | PlainWeights] = {}
        in_blocks: list[tuple[int, QuantizedTensor, Axes]] = []
        for place, tensor in enumerate(list(tensors)):
            if not isinstance(tensor, QuantizedTensor):
                packed[place] = pack_plain(self.level, tensor)
                continue
            structure = structure_of(tensor.format)
            if structure is None or not structure.scales_inside:
                packed[place] = self._pack_with_fields(tensor)
                continue
            assert isinstance(tensor.format, BlockFormat)
            in_blocks.append((place, tensor, axes_of(layout_of_blocks(tensor.format))))
        jobs = []
        rooms = rooms_for_streams([self._stream_bytes(tensor, axes) for _, tensor, axes in in_blocks])
        for (place, tensor, axes), room in zip(in_blocks, rooms, strict=True):
            weights = packed[place] = self._weights_in(room, tensor, axes)
            source = codes_of(tensor)
            jobs.append((weights.description, source.data, source.about, room))
        for (place, tensor, _), finite in zip(in_blocks, _cpu.prepack_blocks(self.level, jobs), strict=True):
            if not finite:  # scales that are not finite go as float32: see axes.py
                packed[place] = self._pack_with_fields(tensor)
        return [packed[place] for place in range(len(packed))]

    def _stream_bytes(self, tensor: QuantizedTensor, axes: Axes) -> int:
        return int(_cpu.packed_bytes(self.level, axes.describe(tensor.shape)))

    def _weights_in(self, room: NDArray[np.uint8], tensor: QuantizedTensor, axes: Axes) -> PackedWeights:
        """PackedWeights whose stream is not written yet."""
        about = tensor.format, tensor.shape, tensor.group_size, self.level, axes
        return PackedWeights(*about, room, tensor.permutation)

    def _pack_with_fields(self, tensor: QuantizedTensor, unpacks: bool = False) -> PackedWeights:
        """Packs codes from the storage or from their plane, and scales from the planes of a Layout."""
        layout = layout_of(tensor)
        axes = axes_of(layout)
        weights = self._weights_in(room_for_stream(self._stream_bytes(tensor, axes)), tensor, axes)
        prepack_fields(self.level, weights.description, tensor, layout, weights.data)
        if not unpacks:
            return weights
        rest = rest_of(tensor.format, tensor.scale_planes, layout, tensor.group_size, tensor.shape[1])
        return replace(weights, rest=rest)

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        """All products in one native call. Products in a row with the same x are made together."""
        if activations == "given":
            return [self._multiply_given(product) for product in products]
        _share_threads(products[0].x)
        digits, last = DIGITS[activations], None
        if len(products) == 1 and products[0].out is None:
            return [_alone(products[0], digits)]
        todo, ys = [], []
        for product in products:
            x, weights, n, bias, out = product
            assert isinstance(x, Input)
            if x is not last:
                last, lead, k = x, x.shape[:-1], x.shape[-1]
                rows = np.ascontiguousarray(x.numpy().reshape(math.prod(lead), k), np.float32)
            added = None if bias is None else np.ascontiguousarray(bias.numpy(), np.float32)
            room = None if out is None else _room_in(out, added)
            y = np.empty((*lead, n), np.float32) if room is None else room
            ys.append((y, room is not None))
            if rows.size:
                todo.append((weights.level, weights.description, weights.data, rows, digits, added, y))
            else:  # no rows, or no columns
                y[...] = 0 if added is None else added
        if len(todo) == 1:
            _cpu.multiply(*todo[0])
        elif todo:
            _cpu.multiply_all(todo)
        return [_finished(product, y, there) for product, (y, there) in zip(products, ys, strict=True)]

    def _multiply_given(self, product: Product) -> NDArray[np.float32]:
        x, weights = product.x, product.weights
        assert isinstance(x, IntegerActivations)
        y = np.empty((len(x.codes), product.n), np.float32)
        if len(y) and weights.axes.codes in FLOAT_CODES:
            rows = np.ascontiguousarray(x.values(weights.shape[1]), np.float32)
            _cpu.multiply(weights.level, weights.description, weights.data, rows, 0, None, y)
        elif len(y):
            codes, scale = np.ascontiguousarray(x.codes, np.int8), np.ascontiguousarray(x.scale, np.float32)
            _cpu.multiply_codes(weights.level, weights.description, weights.data, codes, scale, y)
        return y

    def pack_experts(self, stack: QuantizedExperts | Array, place: str = "cpu") -> PackedExperts:
        """stack: quantized, or an array [E, N, K] of PLAIN_TYPES."""
        return pack_experts(self.level, stack)

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        """All chosen experts in one native call, which shares out their tiles together."""
        x, weights = product.x, product.weights
        _share_threads(x)
        ids, rows = checked_ids(product.ids, product.experts), _floats(x)
        y = np.empty((*ids.shape, product.n), np.float32)
        if len(ids):
            stack = weights.arrays(_floats(product.biases))
            _cpu.multiply_experts(weights.level, stack, rows, ids, DIGITS[activations], y)
        return x.like(_rounded(y, FLOATS[x.dtype_name]))

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        """The whole block in one native call."""
        x, down = block.x, block.down
        _share_threads(x)
        for stack in block.gate_up:
            if stack.level != down.level:
                problem = f"gate_up is packed for {stack.level}, and down for {down.level}"
                raise BackendUnavailable(failure(x.call, problem, "Pack both on one machine: bf.prepack."))
        ids, routing, rows = checked_ids(block.ids, block.experts), checked_routing(block.routing), _floats(x)
        y = np.empty(x.shape, np.float32)
        if len(ids):
            biases = map(_floats, block.gate_up_biases)
            stacks = [stack.arrays(added) for stack, added in zip(block.gate_up, biases, strict=True)]
            up = stacks[1] if len(stacks) == 2 else None
            last, activation = down.arrays(_floats(block.down_biases)), GATES.index(block.activation)
            _cpu.run_experts(down.level, rows, ids, routing, stacks[0], up, last, activation, DIGITS[activations], y)
        return x.like(_rounded(y, FLOATS[x.dtype_name]))

    def unpack(
        self, weights: PackedWeights | PackedExperts, format: Format, shape: tuple[int, ...], group_size: int
    ) -> Storage:
        if isinstance(weights, PackedWeights):
            return weights.format.pack(planes_of(weights))
        parts = [format.pack(planes_of(weights.matrix(e))) for e in range(len(weights))]
        return {name: np.stack([part[name] for part in parts]) for name in format.storage_names}

    def to_tensors(self, weights: PackedWeights | PackedExperts) -> tuple[list[Any], str] | None:
        return None if weights.rest is None else to_tensors(weights)

    def from_tensors(self, tensors: Sequence[Any], about: str) -> PackedWeights | PackedExperts:
        return from_tensors(tensors, about)

    def direct(self, weights: PackedWeights) -> Direct:
        n, k = weights.shape

        def multiply(x: Any, bias: Any) -> Any:
            if not x.is_cpu or x.shape[-1:] != (k,) or (bias is not None and not bias.is_cpu):
                return None
            share_torch_threads()
            taken = float_input("MarlinLinear", "x", x)
            added = None if bias is None else float_input("MarlinLinear", "bias", bias)
            return _alone(Product(taken, weights, n, added), DIGITS["exact"])

        return multiply

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        wanted = out.numpy()
        target = wanted if wanted.flags.c_contiguous else np.empty(wanted.shape, wanted.dtype)
        kind = OUTPUTS.index(target.dtype.name)
        if not tensor.storage:
            weights = tensor.made((self.name, "cpu"), lambda: self.pack(tensor))
            decode_planes(tensor.format, planes_of(weights), tensor.group_size, self.level, target, kind)
            if target is not wanted:
                wanted[...] = target
            return
        s = source_of(tensor)
        raw = target.view(np.uint32 if target.dtype.itemsize == 4 else np.uint16)
        fields = s.scale, s.minimum, s.zero
        tables = s.byte_values, s.scaled_tables, s.numbers
        _cpu.dequantize(self.level, s.data, s.words, s.about, *fields, *tables, raw, kind)
        if target is not wanted:
            wanted[...] = target


def axes_of(layout: Layout) -> Axes:
    return Axes(layout.codes, layout.scales, layout.group, layout.bias, layout.factor, layout.table)


def _share_threads(x: object) -> None:
    if isinstance(x, Input) and x.kind == "torch":
        share_torch_threads()


def _alone(product: Product, digits: int) -> Any:
    """One product, with as little around it as can be: a small one takes no longer than ten lines of Python."""
    x, weights, n, bias, _ = product
    assert isinstance(x, Input)
    rows, shape = x.numpy(), x.shape
    if len(shape) != 2:
        rows = rows.reshape(math.prod(shape[:-1]), shape[-1])
    y = np.empty((*shape[:-1], n), np.float32)
    added = None if bias is None else np.ascontiguousarray(bias.numpy(), np.float32)
    if rows.size:
        rows = np.ascontiguousarray(rows, np.float32)
        _cpu.multiply(weights.level, weights.description, weights.data, rows, digits, added, y)
    else:  # no rows, or no columns
        y[...] = 0 if added is None else added
    return x.adapter.from_numpy(y if x.dtype_name == "float32" else _rounded(y, FLOATS[x.dtype_name]))


def _room_in(out: Input, bias: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """The memory of `out` if kernels can write y there, else None. x may share this memory, as x is read first."""
    room = out.numpy()
    direct = room.dtype == np.float32 and room.flags.c_contiguous
    return room if direct and (bias is None or not np.may_share_memory(bias, room)) else None


def _finished(product: Product, y: NDArray[np.float32], there: bool) -> Any:
    """The array that the caller gets. there: the kernels have written y to `product.out`."""
    if there and product.out is not None:
        return product.out.source
    assert isinstance(product.x, Input)
    return delivered(product, _rounded(y, FLOATS[product.x.dtype_name]))
