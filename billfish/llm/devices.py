"""Where a model runs: the words of `device=` and `--device`."""

from __future__ import annotations

import ctypes
import os
import re
import sys

from billfish.backends import BACKENDS
from billfish.core.errors import DataError, bad_argument
from billfish.llm.decoder_base import Decoder
from billfish.llm.model_weights import CALL, ModelTensors

DEVICES = "cpu, cuda, cuda:N, or auto (the first GPU, else the CPU)"


def check_device(device: str) -> str:
    """ "cpu", "cuda:N" or "auto"; raises if it is none of the words, or if there is no such device.

    The variable BILLFISH_DEVICE of the environment says what "auto" means, if it is there.
    """
    if device == "auto":
        device = os.environ.get("BILLFISH_DEVICE") or device
    if device in ("cpu", "auto"):
        return device
    found = re.fullmatch(r"cuda(?::(\d+))?", device)
    if found is None:
        apple = ". Apple GPUs run layers of torch and MLX, not whole models" if device in ("mps", "metal") else ""
        raise DataError(bad_argument(CALL, "device", repr(device), DEVICES + apple))
    from billfish.backends.cuda.driver import device as gpu  # here: of those who have no GPU, nobody waits for it

    ordinal = int(found[1] or 0)
    gpu(ordinal)
    return f"cuda:{ordinal}"


def make_decoder(device: str, tensors: ModelTensors) -> Decoder:
    """The decoder for a device that was checked."""
    if device == "auto":
        device = "cuda:0" if _has_driver() and BACKENDS["cuda"].usable()[0] else "cpu"
    if device == "cpu":
        from billfish.llm.cpu import CpuDecoder

        return CpuDecoder(tensors)
    from billfish.llm.cuda import CudaDecoder

    return CudaDecoder(tensors, int(device.removeprefix("cuda:")))


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there, which most machines without a GPU tell at once."""
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll")
    except OSError:
        return False
    return True
