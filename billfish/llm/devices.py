"""Where a model runs: the words of `device=` and `--device`."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import sys

from billfish.backends import BACKENDS
from billfish.core.errors import BackendUnavailable, DataError, bad_argument, failure
from billfish.core.extras import how_to_install
from billfish.llm.decoder_base import Decoder
from billfish.llm.model_weights import CALL, ModelTensors
from billfish.models.description import Attention, Block, Dense, GatedDeltaNet, Mamba2, Model, ShortConvolution

MIXERS = {GatedDeltaNet: "gated delta nets", ShortConvolution: "short convolutions", Mamba2: "Mamba-2 layers"}
DEVICES = "cpu, cuda, cuda:N, metal, metal-emulator, or auto (the first GPU, else the CPU)"
METAL = ("metal", "metal-emulator")


def check_device(device: str) -> str:
    """ "cpu", "cuda:N" or "auto"; raises if it is none of the words, or if there is no such device.

    The variable BILLFISH_DEVICE of the environment says what "auto" means, if it is there.
    """
    if device == "auto":
        device = os.environ.get("BILLFISH_DEVICE") or device
    if device in ("cpu", "auto"):
        return device
    if device == "mps":
        device = "metal"
    if device in METAL:
        return _checked_metal(device)
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        raise DataError(bad_argument(CALL, "device", repr(device), DEVICES))
    from billfish.backends.cuda.driver import device as gpu  # here: of those who have no GPU, nobody waits for it

    ordinal = int(found[1] or 0)
    gpu(ordinal)
    return f"cuda:{ordinal}"


def make_decoder(device: str, tensors: ModelTensors) -> Decoder:
    """The decoder for a device that was checked."""
    if device == "auto":
        device = _best_device()
    if device == "cpu":
        from billfish.llm.cpu import CpuDecoder

        return CpuDecoder(tensors)
    if device in METAL:
        from billfish.llm.metal import MetalDecoder

        return MetalDecoder(tensors, device)
    unknown = missing(tensors.config)
    if unknown:
        problem = f"models with {', '.join(unknown)} do not run on a GPU yet"
        raise BackendUnavailable(failure(CALL, problem, "Use device cpu."))
    from billfish.llm.cuda import CudaDecoder

    return CudaDecoder(tensors, int(device.removeprefix("cuda:")))


def _best_device() -> str:
    if sys.platform == "darwin":
        return "metal" if BACKENDS["metal"].usable()[0] else "cpu"
    return "cuda:0" if _has_driver() and BACKENDS["cuda"].usable()[0] else "cpu"


def _checked_metal(device: str) -> str:
    """Raises where MLX is not installed, or there is no Metal for it, or no compiler for the emulator."""
    usable, reason = BACKENDS[device].usable()
    if usable and importlib.util.find_spec("mlx") is None:
        usable, reason = False, f"mlx is not installed. Run: {how_to_install('metal')}"
    if not usable:
        raise BackendUnavailable(failure(CALL, f"device {device!r}: {reason}"))
    return device


def missing(model: Model) -> list[str]:
    """What a model has that the decoder on a GPU does not run: it knows a Llama's parts, norms of heads and GELU."""
    found = dict[str, bool]()

    def note(name: str, there: bool) -> None:
        found[name] = found.get(name, False) or there

    first = model.blocks[0]
    for block in model.blocks:
        mixer = block.mixer
        note("experts", not isinstance(block.feed_forward, Dense))
        if not isinstance(mixer, Attention):
            note(MIXERS[type(mixer)], True)
            continue
        note("sliding windows", mixer.window > 0)
        note("attention sinks", mixer.sinks is not None)
        note("soft caps", mixer.cap > 0 or model.logit_cap > 0)
        note("post-norms", block.mixer_post_norm is not None or block.feed_forward_post_norm is not None)
        note("blocks without pre-norms", block.mixer_norm is None or block.feed_forward_norm is None)
        note("norms over all heads", mixer.q_norm is not None and mixer.q_norm.size != mixer.head_size)
        note("norms of values", mixer.v_norm)
        note("layers that rotate differently", mixer.rope != 0)
        note("rotations with a magnitude", any(rope.scaling.magnitude != 1 for rope in model.ropes))
        own_scale = not math.isclose(mixer.scale, mixer.head_size**-0.5, rel_tol=1e-6)
        note("queries with a scale of their own", own_scale)
        note("scaled residuals or logits", block.residual_scale != 1 or model.logit_scale != 1)
        note("scores that grow with the position", mixer.temperature is not None)
        note("an output gate", mixer.gated)
        note("layers that share keys and values", mixer.k is None or mixer.v is None)
        note("layers of several sizes", _sizes(block) != _sizes(first))
        note("per-layer embeddings", block.per_layer_input is not None or block.output_scale is not None)
    return [name for name, there in found.items() if there]


def _sizes(block: Block) -> tuple[int, ...]:
    mixer, part = block.mixer, block.feed_forward
    heads = (mixer.heads, mixer.kv_heads, mixer.head_size) if isinstance(mixer, Attention) else ()
    return (*heads, part.size) if isinstance(part, Dense) else heads


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there, which most machines without a GPU tell at once."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
    except OSError:
        return False
    return True
