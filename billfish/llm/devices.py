"""Where a model runs: the words of `device=` and `--device`."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import re
import sys

from billfish.backends import BACKENDS
from billfish.core.errors import BackendUnavailable, DataError, bad_argument, failure
from billfish.core.extras import how_to_install
from billfish.core.machine import memory_bytes
from billfish.llm.decoder_base import Decoder
from billfish.llm.model_weights import CALL, ModelTensors
from billfish.models.description import Attention, Dense, Mixture, Model

LOG = logging.getLogger(__name__)
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
    if tensors.config.encoder is not None and device != "cpu":
        missing = "attention to both sides, LayerNorm and positions in a table"
        raise BackendUnavailable(
            failure(CALL, f"{device} has no kernels for encoders: {missing}.", "Pass device='cpu'.")
        )
    if device == "cpu":
        from billfish.llm.cpu import CpuDecoder

        return CpuDecoder(tensors)
    if device in METAL:
        from billfish.llm.metal import MetalDecoder

        return MetalDecoder(tensors, device)
    from billfish.llm.cuda import CudaDecoder

    return CudaDecoder(tensors, int(device.removeprefix("cuda:")))


def device_of_layers(call: str, device: str, model: Model) -> str:
    """Where a text runs through a model layer by layer, as for statistics: "cpu", "cuda:N" or "metal". Of "auto", a GPU
    if it can; another device that cannot is an error."""
    chosen = chosen_device(device)
    strange = why_not_layers(model, chosen)
    reason = f"{chosen} cannot calibrate {strange}" if strange and chosen != "cpu" else ""
    if reason and device != "auto":
        raise BackendUnavailable(failure(call, reason, "Use device cpu."))
    if reason:
        LOG.info("%s: %s; the CPU does", call, reason)
    return "cpu" if reason else chosen


def why_not_layers(model: Model, device: str) -> str:
    """What of a model cannot be observed on a GPU, or ""."""
    if model.encoder is not None:
        return "encoders"
    if model.per_layer_embedding is not None:
        return "models with embeddings per layer"
    if any(isinstance(block.mixer, Attention) and block.mixer.shares is not None for block in model.blocks):
        return "models whose layers share keys and values"
    parts = [block.feed_forward for block in model.blocks if not isinstance(block.feed_forward, Dense)]
    if parts and device in METAL:
        return "mixtures of experts"
    sizes = [part.size if isinstance(part, Mixture) else part.mixture.size for part in parts]
    odd = next((size for size in sizes if size % 8), None)
    return "" if odd is None else f"experts with an intermediate size of {odd}, which is not a multiple of 8"


def chosen_device(device: str) -> str:
    """The device of the words; of "auto", that which is tried first."""
    device = check_device(device)
    return _best_device() if device == "auto" else device


def is_gpu(device: str) -> bool:
    """Whether a device is one; of "auto", that which is tried first."""
    return chosen_device(device) != "cpu"


def device_memory(device: str) -> int:
    """The memory of a device in bytes. Of "auto", that of the device which is tried first."""
    device = chosen_device(device)
    if not device.startswith("cuda"):
        return memory_bytes()  # a Mac's GPU shares it
    from billfish.backends.cuda.driver import total_bytes

    return total_bytes(int(device.removeprefix("cuda:")))


def _best_device() -> str:
    if sys.platform == "darwin":
        return "metal" if BACKENDS["metal"].usable()[0] else "cpu"
    return "cuda:0" if _has_driver() and BACKENDS["cuda"].usable()[0] else "cpu"


def _checked_metal(device: str) -> str:
    """Raises where MLX is not installed, or there is no Metal for it, or no compiler for the emulator."""
    usable, reason = BACKENDS[device].usable()
    if usable and importlib.util.find_spec("mlx") is None:
        usable, reason = False, f"mlx is not installed. Run: {how_to_install('metal')}"
    if usable and not hasattr(importlib.import_module("mlx.core"), "new_thread_unsafe_stream"):
        usable, reason = False, f"mlx is too old. Run: {how_to_install('metal')}"
    if not usable:
        raise BackendUnavailable(failure(CALL, f"device {device!r}: {reason}"))
    return device


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there, which most machines without a GPU tell at once."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
    except OSError:
        return False
    return True
