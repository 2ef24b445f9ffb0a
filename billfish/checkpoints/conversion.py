"""convert, quantize_checkpoint and save: a checkpoint, or what is in memory, to files of any layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from billfish.checkpoints.checkpoint import Source, opened
from billfish.checkpoints.in_memory import checkpoint_of
from billfish.checkpoints.mixes import mix_named
from billfish.checkpoints.reports import ConversionReport
from billfish.checkpoints.write.export import TARGETS, check_export, export
from billfish.checkpoints.write.plan import Settings
from billfish.checkpoints.write.selection import Quantization, Rule
from billfish.checkpoints.write.target import Target
from billfish.core.arrays import float_dtype
from billfish.core.errors import DataError, FormatError, complaint
from billfish.core.format import Format, get_format
from billfish.core.progress import OnProgress
from billfish.core.typing import FormatLike, Layout, Method
from billfish.ops.quantization import check_method

if TYPE_CHECKING:
    from billfish.statistics import Statistics


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

    src: a path that bf.load takes, or a checkpoint that it returned.
    dst: a folder to create; a file that ends in .gguf for GGUF, or in .safetensors for one file in our own layout.
    to: "billfish", "compressed-tensors", "mlx", "gptq", "gptq_v2", "awq", "gguf", or "plain": numbers alone.
    dtype: "bfloat16", "float16" or "float32" for matrices that are written as numbers: all of them in "plain" and
    "gguf", embeddings and the last layer in "gptq" and "awq". None: what has to become numbers becomes float32, which
    loses nothing.
    requantize: whether weights that the layout cannot hold as they are may be quantized again. Without it they are an
    error, which names them, and nothing is written.
    raw_names: whether GGUF may get the tensors of a model that llama.cpp's names are not known for, under their own
    names. No program runs such a file; bf.load reads it.
    overwrite: whether a file or a model's folder at `dst` is replaced, when the new one is whole.
    progress: True draws a bar on terminals, False nothing; or a callable (bytes done, bytes in all, name).

    Killed at any moment, the same call continues where it was. str(report) is what the command prints.
    """
    call, target = "convert", _target("convert", to)
    if dtype is not None and not target.takes_dtype:
        takes = f"it for {', '.join(name for name, known in TARGETS.items() if known.takes_dtype)}"
        raise FormatError(complaint(call, "dtype", f"{dtype} for {target.name}", takes))
    numbers = None if dtype is None else float_dtype(call, dtype)
    settings = Settings(target, None, requantize, raw_names, numbers, overwrite)
    return export(call, opened(src), Path(dst), settings, progress)


def quantize_checkpoint(
    src: Source,
    dst: str | os.PathLike[str],
    format: FormatLike,
    *,
    group_size: int | None = None,
    method: Method = "mse",
    keep: Mapping[str, str | Format] | None = None,
    only: Sequence[str] = (),
    to: Layout | None = None,
    requantize: bool = False,
    raw_names: bool = False,
    statistics: Statistics | str | os.PathLike[str] | None = None,
    calibrate: bool | str | os.PathLike[str] = False,
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """Quantize the weights of a checkpoint, file to file: what `billfish quantize` does.

    Embeddings, the last layer, norms, routers and whatever is quantized already stay as they are; `report.left` says
    which and why. Experts are quantized, in stacks or one by one. If nothing would be quantized, that is an error.

    format: of the weights, with groups of `group_size` (-1: a whole row; None: the format's own). Or a mix such as
    "Q4_K_M", which chooses a format for each tensor, embeddings and the last layer too, as llama.cpp does.
    method: "mse", "rtn" or "gptq", as in bf.quantize.
    keep: {regular expression: format} for other tensors or another format: "q8_0", "u4b8:128" with a group size, or
    "keep", which leaves them as they are. The first that finds a tensor's name counts.
    only: regular expressions; tensors that none of them finds, nor `keep`, stay as they are.
    requantize: whether weights that are quantized already are quantized again, too.
    statistics: of the inputs that weights are multiplied with, or a file of them: errors then count where the inputs
    are large. Those of another model are an error.
    calibrate: a text to run through the model for such statistics, or True for one that the package carries; see
    bf.calibrate_checkpoint. "gptq" needs X^T X: of statistics that have it, or it is calibrated with that text.
    src, dst, raw_names, overwrite, progress: as in bf.convert. to: likewise; by default GGUF for a file that ends in
    .gguf, else our own layout.
    """
    call = "quantize"
    target = _target(call, to or _layout_of(dst))
    check_method(call, method)
    mix = mix_named(format, target.name) if isinstance(format, str) else None
    chosen = get_format(mix.format if mix else format, call)
    _check_group(call, "group_size", chosen, group_size)
    rules = tuple(_rule(call, pattern, choice) for pattern, choice in (keep or {}).items())
    patterns = tuple(_pattern(call, "only", pattern) for pattern in only)
    allowed = target.quantizes or target.formats
    if not allowed:
        raise FormatError(complaint(call, "to", target.name, "a layout that holds quantized weights"))
    for used in (chosen, *(rule.format for rule in rules)):
        if used is not None and target.own(used).name not in allowed:
            raise FormatError(complaint(call, "format", used.name, f"one of {', '.join(allowed)} for {target.name}"))
    if statistics is not None and calibrate:
        raise DataError(complaint(call, "calibrate", "it and statistics", "one of them"))
    quantization = Quantization(chosen, group_size, method, rules, patterns, mix)
    settings = Settings(target, quantization, requantize, raw_names, overwrite=overwrite)
    checkpoint, out = opened(src), Path(dst)
    if statistics is None and (calibrate or method == "gptq"):
        check_export(call, checkpoint, out, settings)
        from billfish.quantizing.temporary_statistics import calibrated  # here: few need a model that runs

        with calibrated(checkpoint, out, calibrate, method == "gptq", progress is True) as computed:
            return export(call, checkpoint, out, _with_statistics(settings, computed), progress)
    if statistics is None:
        return export(call, checkpoint, out, settings, progress)
    from billfish.statistics import Statistics

    known = statistics if isinstance(statistics, Statistics) else Statistics.load(statistics)
    return export(call, checkpoint, out, _with_statistics(settings, known), progress)


def _with_statistics(settings: Settings, statistics: Statistics) -> Settings:
    assert settings.quantization is not None
    return replace(settings, quantization=replace(settings.quantization, statistics=statistics))


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
    """Write a model or tensors from memory to a folder or file that bf.load reads, not a bit of them changed.

    model_or_tensors: a torch.nn.Module or an mlx.nn.Module, or a mapping from names to QuantizedTensors,
    QuantizedExperts and arrays (NumPy, torch, MLX). The matrix of a MarlinLinear is `LAYER.weight`; everything else of
    the model's state dict has its own name, and what is tied is written once, under its first name. The configuration
    of a model of transformers becomes config.json.
    path: a folder to create, or a file: .safetensors for our own layout, .gguf for GGUF. GGUF takes models that have
    llama.cpp's names or a configuration that tells them, and others with `raw_names`.
    to, requantize, raw_names, overwrite, progress: as in bf.convert. The default is our own layout, or GGUF for a .gguf
    file.

    All is written under another name beside `path` and renamed at the end, so that nothing half-written is ever there.
    """
    call, out = "save", Path(path)
    settings = Settings(_target(call, to or _layout_of(path)), None, requantize, raw_names, overwrite=overwrite)
    return export(call, checkpoint_of(model_or_tensors, out.stem), out, settings, progress)


def _layout_of(path: str | os.PathLike[str]) -> Layout:
    return "gguf" if Path(path).suffix == ".gguf" else "billfish"


def _target(call: str, name: str) -> Target:
    if name not in TARGETS:
        raise FormatError(complaint(call, "to", repr(name), f"one of {', '.join(TARGETS)}"))
    return TARGETS[name]()


def _rule(call: str, pattern: str, choice: str | Format) -> Rule:
    """A pattern with FORMAT, FORMAT:GROUP, or "keep"."""
    compiled = _pattern(call, "keep", pattern)
    if isinstance(choice, Format):
        return Rule(compiled, choice, None)
    name, _, group = choice.partition(":")
    if name == "keep":
        return Rule(compiled, None, None)
    format = get_format(name, call)
    try:
        group_size = int(group) if group else None
    except ValueError:
        raise FormatError(complaint(call, "keep", repr(choice), "FORMAT[:GROUP], or keep")) from None
    _check_group(call, "keep", format, group_size)
    return Rule(compiled, format, group_size)


def _pattern(call: str, argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FormatError(complaint(call, argument, f"{pattern!r} ({error})", "a regular expression")) from None


def _check_group(call: str, argument: str, format: Format, group_size: int | None) -> None:
    if group_size is not None and group_size not in format.group_sizes:
        if group_size == -1 and format.whole_row_groups:
            return
        allowed = ", ".join(map(str, format.group_sizes)) + (" or -1" if format.whole_row_groups else "")
        raise FormatError(complaint(call, argument, group_size, f"{allowed} for {format.name}"))
