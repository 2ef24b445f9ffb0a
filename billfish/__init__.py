"""billfish: run, quantize, convert and serve language models in 2 to 8 bits, on CPUs and NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

from billfish.core.version import __version__ as __version__

if TYPE_CHECKING:
    from billfish import llm
    from billfish.backends import BACKENDS
    from billfish.backends.cpu.backend import set_threads
    from billfish.backends.cpu.experts import PackedExperts
    from billfish.backends.cpu.packed import PackedWeights
    from billfish.checkpoints import Checkpoint, open_checkpoint
    from billfish.checkpoints import load as load
    from billfish.checkpoints.conversion import convert, save
    from billfish.checkpoints.reports import ConversionReport, VerificationReport
    from billfish.checkpoints.verification import verify
    from billfish.core.errors import (
        BackendUnavailable,
        BillfishError,
        CheckpointError,
        DataError,
        DTypeError,
        FormatError,
        ModelError,
        ShapeError,
    )
    from billfish.core.format import Format
    from billfish.core.formats import FORMATS, get_format, register
    from billfish.core.quantized_experts import QuantizedExperts
    from billfish.core.tensor import QuantizedTensor
    from billfish.nn import MarlinLinear, QuantizedLinear, WarmUp, load_into, warm_up
    from billfish.nn.quantize_model import ModelReport, quantize_model
    from billfish.nn.torch.calibration import calibrate
    from billfish.ops.expert_linear import expert_linear, experts
    from billfish.ops.ggml_blocks import (
        dequantize_q4_0,
        dequantize_q4_1,
        dequantize_q5_0,
        dequantize_q5_1,
        dequantize_q8_0,
        dequantize_q8_1,
        quantize_q4_0,
        quantize_q4_1,
        quantize_q5_0,
        quantize_q5_1,
        quantize_q8_0,
        quantize_q8_1,
    )
    from billfish.ops.matmul import dequantize, gemm_w4a8, prepack, quantized_linear, quantized_linears
    from billfish.ops.quantization import quantize
    from billfish.ops.weight_packing import (
        pack_fp4_weights,
        pack_s4_weights,
        pack_u4_weights,
        unpack_fp4_weights,
        unpack_s4_weights,
        unpack_u4_weights,
    )
    from billfish.quantizing.calibrate_checkpoint import calibrate_checkpoint
    from billfish.quantizing.quantize_checkpoint import quantize_checkpoint
    from billfish.quantizing.rotate_checkpoint import rotate_checkpoint
    from billfish.quantizing.tune_checkpoint import tune_checkpoint
    from billfish.statistics import Statistics

__all__ = [
    "BACKENDS",
    "FORMATS",
    "BackendUnavailable",
    "BillfishError",
    "Checkpoint",
    "CheckpointError",
    "ConversionReport",
    "DTypeError",
    "DataError",
    "Format",
    "FormatError",
    "MarlinLinear",
    "ModelError",
    "ModelReport",
    "PackedExperts",
    "PackedWeights",
    "QuantizedExperts",
    "QuantizedLinear",
    "QuantizedTensor",
    "ShapeError",
    "Statistics",
    "VerificationReport",
    "WarmUp",
    "calibrate",
    "calibrate_checkpoint",
    "convert",
    "dequantize",
    "dequantize_q4_0",
    "dequantize_q4_1",
    "dequantize_q5_0",
    "dequantize_q5_1",
    "dequantize_q8_0",
    "dequantize_q8_1",
    "expert_linear",
    "experts",
    "gemm_w4a8",
    "get_format",
    "llm",
    "load_into",
    "open_checkpoint",
    "pack_fp4_weights",
    "pack_s4_weights",
    "pack_u4_weights",
    "prepack",
    "quantize",
    "quantize_checkpoint",
    "quantize_model",
    "quantize_q4_0",
    "quantize_q4_1",
    "quantize_q5_0",
    "quantize_q5_1",
    "quantize_q8_0",
    "quantize_q8_1",
    "quantized_linear",
    "quantized_linears",
    "register",
    "rotate_checkpoint",
    "save",
    "set_threads",
    "tune_checkpoint",
    "unpack_fp4_weights",
    "unpack_s4_weights",
    "unpack_u4_weights",
    "verify",
    "warm_up",
]

# Where the names are. A name is imported when it is first used: `billfish --version` needs no NumPy.
_ELSEWHERE = {
    "BACKENDS": "billfish.backends",
    "BackendUnavailable": "billfish.core.errors",
    "BillfishError": "billfish.core.errors",
    "Checkpoint": "billfish.checkpoints",
    "CheckpointError": "billfish.core.errors",
    "ConversionReport": "billfish.checkpoints.reports",
    "DTypeError": "billfish.core.errors",
    "DataError": "billfish.core.errors",
    "FORMATS": "billfish.core.formats",
    "Format": "billfish.core.format",
    "FormatError": "billfish.core.errors",
    "MarlinLinear": "billfish.nn",
    "ModelError": "billfish.core.errors",
    "ModelReport": "billfish.nn",
    "PackedExperts": "billfish.backends.cpu.experts",
    "PackedWeights": "billfish.backends.cpu.packed",
    "QuantizedExperts": "billfish.core.quantized_experts",
    "QuantizedLinear": "billfish.nn",
    "QuantizedTensor": "billfish.core.tensor",
    "ShapeError": "billfish.core.errors",
    "Statistics": "billfish.statistics",
    "VerificationReport": "billfish.checkpoints.reports",
    "WarmUp": "billfish.nn",
    "calibrate": "billfish.nn.torch.calibration",
    "calibrate_checkpoint": "billfish.quantizing.calibrate_checkpoint",
    "convert": "billfish.checkpoints.conversion",
    "dequantize": "billfish.ops.matmul",
    "dequantize_q4_0": "billfish.ops.ggml_blocks",
    "dequantize_q4_1": "billfish.ops.ggml_blocks",
    "dequantize_q5_0": "billfish.ops.ggml_blocks",
    "dequantize_q5_1": "billfish.ops.ggml_blocks",
    "dequantize_q8_0": "billfish.ops.ggml_blocks",
    "dequantize_q8_1": "billfish.ops.ggml_blocks",
    "expert_linear": "billfish.ops.expert_linear",
    "experts": "billfish.ops.expert_linear",
    "gemm_w4a8": "billfish.ops.matmul",
    "get_format": "billfish.core.formats",
    "load": "billfish.checkpoints",  # the older name of open_checkpoint
    "load_into": "billfish.nn",
    "open_checkpoint": "billfish.checkpoints",
    "pack_fp4_weights": "billfish.ops.weight_packing",
    "pack_s4_weights": "billfish.ops.weight_packing",
    "pack_u4_weights": "billfish.ops.weight_packing",
    "prepack": "billfish.ops.matmul",
    "quantize": "billfish.ops.quantization",
    "quantize_checkpoint": "billfish.quantizing.quantize_checkpoint",
    "quantize_model": "billfish.nn",
    "quantize_q4_0": "billfish.ops.ggml_blocks",
    "quantize_q4_1": "billfish.ops.ggml_blocks",
    "quantize_q5_0": "billfish.ops.ggml_blocks",
    "quantize_q5_1": "billfish.ops.ggml_blocks",
    "quantize_q8_0": "billfish.ops.ggml_blocks",
    "quantize_q8_1": "billfish.ops.ggml_blocks",
    "quantized_linear": "billfish.ops.matmul",
    "quantized_linears": "billfish.ops.matmul",
    "register": "billfish.core.formats",
    "rotate_checkpoint": "billfish.quantizing.rotate_checkpoint",
    "save": "billfish.checkpoints.conversion",
    "set_threads": "billfish.backends.cpu.backend",
    "tune_checkpoint": "billfish.quantizing.tune_checkpoint",
    "unpack_fp4_weights": "billfish.ops.weight_packing",
    "unpack_s4_weights": "billfish.ops.weight_packing",
    "unpack_u4_weights": "billfish.ops.weight_packing",
    "verify": "billfish.checkpoints.verification",
    "warm_up": "billfish.nn",
}


if not TYPE_CHECKING:  # a checker would believe that there is everything

    def __getattr__(name: str) -> Any:
        if name == "llm":
            return importlib.import_module("billfish.llm")
        if name not in _ELSEWHERE:
            raise AttributeError(f"module 'billfish' has no attribute {name!r}")
        importlib.import_module("billfish.backends.cpu.backend")  # which tells core.machine what only native code knows
        globals()[name] = value = getattr(importlib.import_module(_ELSEWHERE[name]), name)
        return value


def __dir__() -> list[str]:
    """The public names, and not what they are made of."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
