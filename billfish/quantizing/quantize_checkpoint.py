"""Quantize whole checkpoints: to one format or a mix, or `--bits`: a format for each matrix."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from billfish.checkpoints.checkpoint import Checkpoint, Source, opened
from billfish.checkpoints.conversion import layout_of, target_named
from billfish.checkpoints.mixes import mix_named
from billfish.checkpoints.names.expert_stacks import stacks_in
from billfish.checkpoints.reports import ConversionReport
from billfish.checkpoints.write.export import check_export, export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.checkpoints.write.selection import Quantization, Rule
from billfish.checkpoints.write.target import Item
from billfish.core.errors import DataError, FormatError, bad_argument, failure
from billfish.core.files import path_of
from billfish.core.format import Format, parse_format
from billfish.core.progress import OnProgress
from billfish.core.typing import FormatLike, Layout, Method
from billfish.llm.devices import check_device
from billfish.ops.quantization import check_method, gptq_device
from billfish.quantizing.bit_plan import CALL, BitPlan
from billfish.quantizing.calibrate_checkpoint import calibrated
from billfish.quantizing.sensitivity import FORMATS, LONG_ROW, Candidate, candidates_of, plan_bits
from billfish.statistics.statistics import Statistics

LOG = logging.getLogger(__name__)


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
    sequential: bool | None = None,
    device: str = "auto",
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """Quantize the weights of a checkpoint, file to file: what `billfish quantize` does.

    Embeddings, the LM head, norms, routers and whatever is quantized already stay as they are; `report.left` says
    which and why. Experts are quantized, in stacks or one by one.

    src, dst, raw_names, overwrite, progress: as in :func:`billfish.convert`. to: likewise; by default GGUF for a file
    that ends in .gguf, else our own layout.
    format: of the weights, such as "fp4" or "fp4:64". Or a mix such as "Q4_K_M", which chooses a format for each
    tensor, embeddings and the LM head too, as llama.cpp does.
    group_size: weights that share a scale; -1 is a whole row, None the format's default.
    method: "mse", "rtn" or "gptq", as in :func:`billfish.quantize`.
    keep: {regular expression: format} for other tensors or another format: "q8_0", "u4b8:128" with a group size, or
    "keep", which leaves them as they are. The first that finds a tensor's name counts.
    only: regular expressions; tensors that none of them finds, nor `keep`, stay as they are.
    requantize: whether weights that are quantized already are quantized again, too.
    statistics: of the inputs of the weights, or a file of them. They weight the quantization error. Those of another
    model are an error.
    calibrate: a text to run through the model for such statistics, or True for one that the package carries; see
    :func:`billfish.calibrate_checkpoint`. "gptq" needs X^T X: of statistics that have it, or it is calibrated with
    that text.
    sequential: whether "gptq" quantizes matrix after matrix, each with the inputs that the quantized ones before it
    give, to compensate their errors. None is True unless there are `statistics`. True needs disk space beside `dst` for
    the quantized layers and hidden states, False for X^T X and those; too little is an error. Models whose layers share
    a KV cache, and encoders, are calibrated as with False.
    device: where the model runs for `calibrate`: "cpu", "cuda", "cuda:N", "metal", or "auto", the first GPU or the CPU.
    "gptq" runs on a "cuda" that is named, if torch is there, else on the CPU.

    Returns a ConversionReport. Raises CheckpointError for what cannot be read or written, and DataError if nothing
    would be quantized.

        >>> arrays = {"layers.0.up_proj.weight": np.ones((32, 64), np.float32)}
        >>> report = bf.save(arrays, "unquantized.safetensors", progress=False)
        >>> report = bf.quantize_checkpoint("unquantized.safetensors", "quantized.safetensors", "q4_0", progress=False)
        >>> bf.open_checkpoint("quantized.safetensors")["layers.0.up_proj.weight"]
        QuantizedTensor(q4_0, [32, 64], group_size=32, 1152 bytes)
    """
    if statistics is not None and calibrate:
        raise DataError(failure(CALL, "calibrate= and statistics= exclude each other", "Pass one of them."))
    settings = _settings(
        dst, format, group_size, method, keep or {}, {}, only, to, requantize, raw_names, overwrite, device
    )
    checkpoint, out = opened(src), Path(dst)
    in_order = _in_order(sequential, method, statistics)
    items = list[Item]()
    if statistics is None and (calibrate or method == "gptq"):
        items = [item for _, item in check_export(CALL, checkpoint, out, settings)]
    assert settings.quantization is not None
    how = (settings.quantization, requantize, items) if in_order else None
    with _statistics(checkpoint, out, statistics, calibrate, method, progress is True, device, how) as known:
        return export(CALL, checkpoint, out, _with_statistics(settings, *known), progress)


def quantize_to_bits(
    source: str,
    out: str,
    bits: float,
    formats: str | None,
    plan_file: str | None,
    keep: Mapping[str, str | Format],
    *,
    method: Method,
    statistics: str | None,
    calibrate: bool | str,
    group_size: int | None,
    only: Sequence[str] = (),
    to: Layout | None = None,
    requantize: bool = False,
    raw_names: bool = False,
    sequential: bool | None = None,
    device: str = "auto",
    overwrite: bool = False,
    progress: bool | OnProgress = True,
) -> ConversionReport:
    """As :func:`quantize_checkpoint`, with a format for each matrix so that `bits` is the average.

    plan_file: read if it is there. Otherwise the plan is written to it, or logged without one.
    keep: rules of the user, which come first. The average is that of the plan, without them.
    """
    if group_size is not None:
        problem = "--group-size and --bits exclude each other"
        raise DataError(failure(CALL, problem, "Write group sizes in --formats, as in fp4:64."))
    path, destination = path_of(CALL, source), Path(out)
    checkpoint, written = opened(path), None if plan_file is None else Path(plan_file)
    plan = BitPlan.load(written) if written is not None and written.exists() else None
    candidates = [] if plan else candidates_of(FORMATS if formats is None else formats.split(","), bits)
    largest = max(candidates, key=lambda candidate: candidate.bits(LONG_ROW), default=None)
    if largest is not None and bits > largest.bits(LONG_ROW):  # which no measurement would change
        most = f"the most that --formats has are {largest.bits(LONG_ROW):g}, of {largest.name}"
        raise DataError(f"{CALL}: --bits is {bits:g}; {most}. Use --format {largest.name}, or fewer bits.")

    def settings_for(plan: BitPlan) -> OutputSettings:
        further = only, to, requantize, raw_names, overwrite, device
        return _settings(out, plan.format, None, method, keep, plan.keep, *further)

    # Whatever the writer refuses is refused before hours of measurements.
    tried = _trials(checkpoint, candidates) if plan is None else [plan]
    checked = (check_export(CALL, checkpoint, destination, settings_for(trial)) for trial in tried)
    wanted = {name for found in checked for name, _ in found}
    if plan is not None:
        average = _average_bits(checkpoint, wanted, settings_for(plan), len(keep))
        if average > bits:
            LOG.warning(
                "%s has %.3f bits per weight on average, more than --bits %g. The plan counts.", written, average, bits
            )
    in_order, kept = _in_order(sequential, method, statistics), None
    with contextlib.ExitStack() as stack:
        known, finished = None, None
        if not in_order:
            known, _ = stack.enter_context(
                _statistics(checkpoint, destination, statistics, calibrate, method, True, device)
            )
        elif plan is None:  # which needs mean squares only
            known, _ = stack.enter_context(
                calibrated(checkpoint, destination, calibrate, False, True, device, suffix="squares")
            )
        if plan is None:
            text = Path(calibrate) if isinstance(calibrate, str) else None
            kept = Path(f"{os.path.abspath(destination)}.partial-damage.json")
            names = [candidate.name for candidate in candidates]
            plan = plan_bits(
                path, bits, formats=names, statistics=known, text=text, requantize=requantize, device=device, kept=kept,
                wanted=wanted,
            )  # fmt: skip
            if written is None:
                LOG.info("the chosen formats:\n%s", plan.text().rstrip())
            else:
                plan.save(written)
        settings = settings_for(plan)
        if in_order:
            assert settings.quantization is not None
            items = [item for _, item in check_export(CALL, checkpoint, destination, settings)]
            how = (settings.quantization, requantize, items)
            known, finished = stack.enter_context(
                _statistics(checkpoint, destination, None, calibrate, method, True, device, how)
            )
        report = export(CALL, checkpoint, destination, _with_statistics(settings, known, finished), progress)
    if kept is not None:
        kept.unlink(missing_ok=True)
    return report


def _average_bits(checkpoint: Checkpoint, wanted: set[str], settings: OutputSettings, rules: int) -> float:
    """Bits for each weight that a plan chooses the format of: of all that is quantized, what none of so many rules of
    the user is for."""
    assert settings.quantization is not None
    planned = replace(settings.quantization, rules=settings.quantization.rules[rules:])
    total, weights = 0.0, 0
    for name in wanted:
        shape = checkpoint.describe(name).shape
        choice = planned.choice(name, name, shape)
        if choice is not None:
            format, group_size = choice
            group = format.check_group_size(CALL, group_size, shape[-1])
            weights += math.prod(shape)
            total += math.prod(shape) * format.bits_per_weight(group)
    return total / weights if weights else 0.0


def _in_order(sequential: bool | None, method: str, statistics: object) -> bool:
    """Whether matrices are quantized one after the other; raises where that is asked for and cannot be."""
    can = method == "gptq" and statistics is None
    if sequential and not can:
        problem = f"sequential=True needs method='gptq' without statistics=; method is {method!r}"
        raise DataError(failure(CALL, problem, "Pass a text with calibrate=."))
    return can and sequential is not False


def _trials(checkpoint: Checkpoint, candidates: Sequence[Candidate]) -> list[BitPlan]:
    """Plans that give each matrix each of the formats once, and have all formats beside each other."""
    some = Quantization(candidates[0].format, None, "mse")
    names = [name for name in checkpoint if some.choice(name, name, checkpoint.describe(name).shape)]
    first = [name for name in names if not stacks_in(name)[1]]  # the others of a stack go with its first expert
    plans = []
    for turn in range(len(candidates)):
        shares = [first[(i + turn) % len(candidates) :: len(candidates)] for i in range(1, len(candidates))]
        keep = {
            f"^(?:{'|'.join(map(re.escape, share))})$": candidate.name
            for share, candidate in zip(shares, candidates[1:], strict=True)
            if share
        }
        plans.append(BitPlan(candidates[0].name, keep))
    return plans


def _settings(
    dst: str | os.PathLike[str],
    format: FormatLike,
    group_size: int | None,
    method: str,
    keep: Mapping[str, str | Format],
    planned: Mapping[str, str],
    only: Sequence[str],
    to: Layout | None,
    requantize: bool,
    raw_names: bool,
    overwrite: bool,
    device: str,
) -> OutputSettings:
    """All that the writer is told. planned: rules that come after `keep` and `only`."""
    target = target_named(CALL, to or layout_of(dst))
    check_method(CALL, method)
    mix = mix_named(format, target.name) if isinstance(format, str) else None
    chosen, group_size = parse_format(mix.format if mix else format, CALL, group_size)
    rules, later = (tuple(_rule(*item) for item in given.items()) for given in (keep, planned))
    patterns = tuple(_pattern("only", pattern) for pattern in only)
    allowed = target.quantizes or target.formats
    if not allowed:
        raise FormatError(failure(CALL, f"the layout {target.name} cannot store quantized weights", "Choose another."))
    for used in (chosen, *(rule.format for rule in (*rules, *later))):
        if used is not None and target.own(used).name not in allowed:
            raise FormatError(
                failure(
                    CALL, f"the layout {target.name} cannot store {used.name}", f"Its formats are {', '.join(allowed)}."
                )
            )
    place = _gptq_place(check_device(device)) if method == "gptq" else "cpu"
    quantization = Quantization(chosen, group_size, method, rules, patterns, mix, planned=later, gptq_device=place)
    return OutputSettings(target, quantization, requantize, raw_names, overwrite=overwrite)


@functools.cache
def _gptq_place(device: str) -> str:
    """Where GPTQ runs: on a GPU that is named, if torch can use it. Says once if not."""
    place = gptq_device(device) if device.startswith("cuda") else "cpu"
    if place != device and device.startswith("cuda"):
        LOG.warning("GPTQ runs on the CPU: on %s it needs torch with CUDA, which is not installed.", device)
    return place


def _rule(pattern: str, choice: str | Format) -> Rule:
    """A pattern with FORMAT, FORMAT:GROUP, or "keep"."""
    compiled = _pattern("keep", pattern)
    return Rule(compiled, None, None) if choice == "keep" else Rule(compiled, *parse_format(choice, CALL))


def _pattern(argument: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FormatError(bad_argument(CALL, argument, f"{pattern!r} ({error})", "a regular expression")) from None


@contextlib.contextmanager
def _statistics(
    checkpoint: Checkpoint,
    out: Path,
    statistics: Statistics | str | os.PathLike[str] | None,
    calibrate: bool | str | os.PathLike[str],
    method: str,
    progress: bool,
    device: str,
    sequential: tuple[Quantization, bool, Sequence[Item]] | None = None,
) -> Iterator[tuple[Statistics | None, Checkpoint | None]]:
    """Those of a file, those of a text with what is quantized with them, or none."""
    if statistics is not None:
        yield statistics if isinstance(statistics, Statistics) else Statistics.load(statistics), None
    elif calibrate or method == "gptq":
        with calibrated(checkpoint, out, calibrate, method == "gptq", progress, device, sequential) as computed:
            yield computed
    else:
        yield None, None


def _with_statistics(
    settings: OutputSettings, statistics: Statistics | None, finished: Checkpoint | None
) -> OutputSettings:
    assert settings.quantization is not None
    return replace(settings, quantization=replace(settings.quantization, statistics=statistics, finished=finished))
