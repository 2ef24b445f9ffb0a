"""convert and save: a checkpoint, or what is in memory, to files of any layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from billfish.checkpoints.checkpoint import Source, opened
from billfish.checkpoints.in_memory import checkpoint_of
from billfish.checkpoints.reports import ConversionReport
from billfish.checkpoints.write.export import TARGETS, export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.checkpoints.write.target import Target
from billfish.core.arrays import float_dtype
from billfish.core.errors import FormatError, bad_argument, did_you_mean, failure
from billfish.core.progress import OnProgress
from billfish.core.typing import Layout


def convert(
    src: Source,
    dst: str | os.PathLike[str],
    to: Layout,
    *,
    dtype: DTypeLike | None = None,
    requantize: bool = False,
    raw_names: bool = False,
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """Write a checkpoint in another layout, without loss: what `billfish convert` does.

    src: a path that :func:`billfish.open_checkpoint` takes, or a checkpoint that it returned.
    dst: a folder to create; a file that ends in .gguf for GGUF, or in .safetensors for one file in our own layout.
    to: "billfish", "compressed-tensors", "mlx", "gptq", "gptq_v2", "awq", "gguf", or "plain": unquantized.
    dtype: "bfloat16", "float16" or "float32" for matrices that are written unquantized: all of them in "plain" and
    "gguf", embeddings and the LM head in "gptq" and "awq". None is float32, which loses nothing, where a matrix must
    be decoded.
    requantize: whether weights that the layout cannot hold as they are may be quantized again. Without it they are an
    error, which names them, and nothing is written.
    raw_names: whether GGUF may get the tensors of a model that llama.cpp has no names for, under their own names. No
    program runs such a file; billfish opens it.
    overwrite: whether a file or a model's folder at `dst` is replaced, when the new one is whole.
    progress: True draws a bar on terminals, False nothing; or a callable (bytes done, bytes in all, name).

    Returns a ConversionReport. Raises CheckpointError for what cannot be read or written. If the process is killed,
    the same call continues where it was.

        >>> report = bf.convert("model.gguf", "folder", "billfish", progress=False)
        >>> bool(bf.verify("model.gguf", "folder", progress=False))
        True
    """
    call, target = "convert", target_named("convert", to)
    if dtype is not None and not target.takes_dtype:
        others = ", ".join(name for name, known in TARGETS.items() if known.takes_dtype)
        raise FormatError(failure(call, f"the layout {target.name} has no dtype=", f"It is for {others}."))
    numbers = None if dtype is None else float_dtype(call, dtype)
    settings = OutputSettings(target, None, requantize, raw_names, numbers, overwrite)
    return export(call, opened(src), Path(dst), settings, progress)


def save(
    model_or_tensors: Any,
    path: str | os.PathLike[str],
    *,
    to: Layout | None = None,
    requantize: bool = False,
    raw_names: bool = False,
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """Write a model or tensors from memory to a folder or file, without changing a bit of them.

    model_or_tensors: a torch.nn.Module or an mlx.nn.Module; a mapping from names to QuantizedTensors, QuantizedExperts
    and arrays (NumPy, torch, MLX); or one QuantizedTensor or QuantizedExperts, which gets the name "weight". The
    matrix of a QuantizedLinear is `LAYER.weight`; everything else of the model's state dict has its own name, and what
    is tied is written once, under its first name. The configuration of a model of transformers becomes config.json.
    path: a folder to create, or a file: .safetensors for our own layout, .gguf for GGUF. GGUF takes models that have
    llama.cpp's names or a configuration that tells them, and others with `raw_names`.
    to, requantize, raw_names, overwrite, progress: as in :func:`billfish.convert`. The default is our own layout, or
    GGUF for a .gguf file.

    Returns a ConversionReport. Raises CheckpointError for what cannot be written. The file appears under its name when
    it is whole.

        >>> q = bf.quantize(np.eye(32, dtype=np.float32), "q8_0")
        >>> report = bf.save({"layer.weight": q}, "weights.safetensors", progress=False)
        >>> bf.open_checkpoint("weights.safetensors")["layer.weight"].shape
        (32, 32)
    """
    call, out = "save", Path(path)
    settings = OutputSettings(
        target_named(call, to or layout_of(path)), None, requantize, raw_names, overwrite=overwrite
    )
    return export(call, checkpoint_of(model_or_tensors, out.stem), out, settings, progress)


def layout_of(path: str | os.PathLike[str]) -> Layout:
    """The layout that an output has unless `to` says another."""
    return "gguf" if Path(path).suffix == ".gguf" else "billfish"


def target_named(call: str, name: str) -> Target:
    """What writes the layout that `to` names."""
    if name not in TARGETS:
        expected = f"one of {', '.join(TARGETS)}.{did_you_mean(str(name), TARGETS)}"
        raise FormatError(bad_argument(call, "to", repr(name), expected))
    return TARGETS[name]()
