"""Recurrent mixers of a description made ready for a GPU."""

from __future__ import annotations

from billfish.backends.cuda.driver import Buffer
from billfish.backends.cuda.recurrent import MOST_VALUES, DeviceConvolution, DeviceRecurrence, DeviceShortConvolution
from billfish.core.errors import ModelError, failure
from billfish.llm.cuda_weights import GpuWeights
from billfish.llm.model_weights import CALL
from billfish.models.description import Convolution, GatedDeltaNet, Mamba2, ShortConvolution, Vector

RecurrentMixer = GatedDeltaNet | Mamba2 | ShortConvolution


def recurrent_mixer(
    weights: GpuWeights, mixer: RecurrentMixer, state_offset: int
) -> DeviceRecurrence | DeviceShortConvolution:
    """state_offset: bytes from the beginning of a sequence's states to those of the layer."""
    state_at = state_offset // 4
    if isinstance(mixer, ShortConvolution):
        convolution, output = _convolution(weights, mixer.convolution), weights.matrix(mixer.output)
        return DeviceShortConvolution(weights.matrix(mixer.projection), convolution, output, state_at)
    if isinstance(mixer, GatedDeltaNet):
        return _delta_net(weights, mixer, state_at)
    return DeviceRecurrence(
        delta=False,
        key_heads=mixer.groups,
        heads=mixer.heads,
        keys=mixer.state_size,
        values=mixer.head_size,
        tiled=False,
        inputs=(weights.matrix(mixer.projection),),
        output=weights.matrix(mixer.output),
        convolution=_convolution(weights, mixer.convolution),
        decay=_vector(weights, mixer.decay),
        step=_vector(weights, mixer.step),
        skip=_vector(weights, mixer.skip),
        norm=_vector(weights, mixer.norm),
        group=mixer.heads * mixer.head_size // mixer.groups,
        state_at=state_at,
    )


def _delta_net(weights: GpuWeights, mixer: GatedDeltaNet, state_at: int) -> DeviceRecurrence:
    if mixer.value_size > MOST_VALUES:
        problem = f"{mixer.output.name} has value heads of {mixer.value_size} numbers; a GPU takes {MOST_VALUES}"
        raise ModelError(failure(CALL, problem, "Use device='cpu'."))
    return DeviceRecurrence(
        delta=True,
        key_heads=mixer.key_heads,
        heads=mixer.value_heads,
        keys=mixer.key_size,
        values=mixer.value_size,
        tiled=mixer.tiled,
        inputs=weights.matrices([mixer.qkv, mixer.z, mixer.beta, mixer.alpha]),
        output=weights.matrix(mixer.output),
        convolution=_convolution(weights, mixer.convolution),
        decay=_vector(weights, mixer.decay),
        step=_vector(weights, mixer.step),
        skip=None,
        norm=_vector(weights, mixer.norm),
        group=mixer.value_size,
        state_at=state_at,
    )


def _convolution(weights: GpuWeights, part: Convolution) -> DeviceConvolution:
    taps, bias = weights.tensors.convolution(part)
    return DeviceConvolution(weights.send(taps), None if bias is None else weights.send(bias), part.channels, part.taps)


def _vector(weights: GpuWeights, vector: Vector) -> Buffer:
    return weights.send(weights.tensors.vector(vector))
