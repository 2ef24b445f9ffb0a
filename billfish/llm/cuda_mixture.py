"""The experts of a model on a GPU: stacks of matrices, one copy of each, and the router's matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import numpy as np

from billfish.backends.cuda.axes import why_not
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.experts import GATE_ROWS, DeviceExperts, by_turns, pack_gate_up
from billfish.backends.cuda.launcher import sent
from billfish.backends.cuda.mixture_step import TICKETS, DeviceMixture, DeviceRouter
from billfish.core.errors import ModelError, failure
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import CALL, ExpertTensor, ModelTensors
from billfish.models.description import Mixture, Vector
from billfish.ops.matmul import dequantize


def pack_mixture(tensors: ModelTensors, mixture: Mixture, shared: DeviceDense | None, ordinal: int) -> DeviceMixture:
    """Read and pack a mixture, a stack at a time. shared: the expert for all tokens, packed, where there is one."""
    place = f"cpu:{ordinal}"  # memory of ours, not torch's
    router = _router(tensors, mixture, place, ordinal)
    reason = router.why_not()
    if reason:
        raise ModelError(failure(CALL, f"the GPU cannot run {mixture.gate.name}: {reason}", "Use device cpu."))
    parts = [stack for stack in (mixture.gate, mixture.up) if stack is not None]
    gate_up = _gate_up([tensors.stack(part) for part in parts], place)
    tensors.source.tensors.release()
    packed = _stack(tensors.stack(mixture.down), place)
    biases = [tensors.bias(part) for part in parts]
    made = DeviceMixture(
        router=router,
        size=mixture.size,
        gate_up=tuple(gate_up),
        down=packed,
        activation=mixture.activation,
        gate_up_biases=_biases(biases, len(gate_up), mixture, ordinal),
        down_bias=_sent(tensors.bias(mixture.down), ordinal),
        shared=shared,
    )
    tensors.source.tensors.release()
    return made


def _router(tensors: ModelTensors, mixture: Mixture, place: str, ordinal: int) -> DeviceRouter:
    router = mixture.router
    matrix = tensors.matrix(router.matrix)
    weights = dequantize(matrix) if isinstance(matrix, QuantizedTensor) else matrix
    if mixture.shared_gate is not None:
        weights = np.concatenate([weights.astype(np.float32), tensors.vector(mixture.shared_gate)[None]])

    def vector(part: Vector | None) -> Buffer | None:
        return _sent(tensors.vector(part), ordinal)

    return DeviceRouter(
        weights=DeviceWeights.pack_plain(weights, place),
        experts=mixture.experts,
        chosen=router.chosen,
        tickets=sent(np.zeros(TICKETS, np.uint32), ordinal),
        bias=_sent(tensors.bias(router.matrix), ordinal),
        sigmoid=router.scores == "sigmoid",
        renormalized=router.renormalized,
        scale=router.scale,
        selection_bias=vector(router.selection_bias),
        expert_scale=vector(router.expert_scale),
        groups=router.groups,
        groups_used=router.groups_used,
    )


def _gate_up(stacks: Sequence[ExpertTensor], place: str) -> list[DeviceExperts]:
    """One stack whose rows alternate, or gate and up."""
    quantized = [stack for stack in stacks if isinstance(stack, QuantizedExperts) and _multiplied(stack)]
    if len(quantized) == len(stacks):
        return pack_gate_up(quantized, place)
    size = sum(stack.shape[1] for stack in stacks) // 2
    if not quantized and size % GATE_ROWS == 0:
        return [_plain(stacks, by_turns(size), place, gated=True)]
    if len(stacks) == 1:
        return [_plain(stacks, np.arange(first, first + size), place) for first in (0, size)]
    return [_stack(stack, place) for stack in stacks]


def _stack(stack: ExpertTensor, place: str) -> DeviceExperts:
    if isinstance(stack, QuantizedExperts) and _multiplied(stack):
        return DeviceExperts.pack(stack, place)
    return _plain([stack], None, place)


def _plain(stacks: Sequence[ExpertTensor], rows: Array | None, place: str, gated: bool = False) -> DeviceExperts:
    """Unquantized weights, one expert at a time."""

    def matrices() -> Iterator[Array]:
        for e in range(stacks[0].shape[0]):
            parts = [stack[e] for stack in stacks]
            plain = [dequantize(part) if isinstance(part, QuantizedTensor) else part for part in parts]
            whole = plain[0] if len(plain) == 1 else np.concatenate(plain)
            yield whole if rows is None else whole[rows]

    experts, _, k = stacks[0].shape
    n = sum(stack.shape[1] for stack in stacks) if rows is None else len(rows)
    return DeviceExperts.pack_plain(matrices(), (experts, n, k), place, gated)


def _biases(biases: list[Array | None], stacks: int, mixture: Mixture, ordinal: int) -> tuple[Buffer | None, ...]:
    """For each packed stack; of one stack those of all gates come first, as its kernels read them."""
    if all(bias is None for bias in biases):
        return (None,) * stacks
    zeros = np.zeros((mixture.experts, mixture.size), np.float32)
    whole = np.concatenate([zeros if bias is None else bias for bias in biases], axis=1)
    parts = [whole] if stacks == 1 else np.split(whole, 2, axis=1)
    return tuple(sent(np.ascontiguousarray(part), ordinal) for part in parts)


def _multiplied(stack: ExpertTensor) -> TypeGuard[QuantizedExperts]:
    """Whether the kernels multiply with a stack as it is. Others become plain weights."""
    return isinstance(stack, QuantizedExperts) and not why_not(stack.format, stack.group_size, stack.shape[2])


def _sent(array: Array | None, ordinal: int) -> Buffer | None:
    return None if array is None else sent(array, ordinal)
