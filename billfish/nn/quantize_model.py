"""quantize_model: every linear layer of a model, in place, with a report of what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from billfish.core.activations import check_activations
from billfish.core.errors import DataError, DTypeError, FormatError, ShapeError, bad_argument, failure, type_of
from billfish.core.format import get_format
from billfish.core.progress import Progress
from billfish.core.typing import Activations, FormatLike, Method
from billfish.nn.layer_base import Kit, Walk, kit_of
from billfish.ops.quantization import check_method
from billfish.statistics import Statistics

OUTPUT_LAYERS = ("lm_head", "output")

Predicate = Callable[[str, Any], "bool | dict[str, Any]"]


class Replaced(NamedTuple):
    """One layer that was quantized. Of layers that share a weight, the first counts its bytes."""

    path: str
    format: str
    group_size: int
    bytes_before: int
    bytes_after: int


@dataclass
class ModelReport:
    """What :func:`quantize_model` and :func:`load_into` did. Printed, it is a short table.

    replaced: the layers that were quantized, each with its path, format and bytes.

        >>> import torch
        >>> report = bf.quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 8)), "q8_0", progress=False)
        >>> [layer.path for layer in report.replaced], report.bytes_before, report.bytes_after
        (['0'], 2048, 544)
    """

    replaced: list[Replaced] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # path of a module with a matrix -> why it stayed as it was

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.replaced)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.replaced)

    @property
    def bytes_saved(self) -> int:
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        kinds: dict[tuple[str, int], ModelReport] = {}
        for layer in self.replaced:
            kinds.setdefault((layer.format, layer.group_size), ModelReport()).replaced.append(layer)
        lines = [
            f"{format}, group_size={group_size}: {len(part.replaced)} layers,"
            f" {part.bytes_before / 1e6:.1f} MB -> {part.bytes_after / 1e6:.1f} MB"
            for (format, group_size), part in kinds.items()
        ]
        lines += [f"left {path}: {reason}" for path, reason in self.left.items()]
        if not self.replaced:
            lines.append("nothing was quantized")
        return "\n".join([*lines, f"saved {self.bytes_saved / 1e6:.1f} MB"])


def is_output(path: str) -> bool:
    """Whether a path is that of a model's output layer, which counts more than its size."""
    return path.rpartition(".")[2] in OUTPUT_LAYERS


def quantize_model(
    model: Any,
    format: FormatLike = "fp4",
    *,
    group_size: int | None = None,
    method: Method = "mse",
    activations: Activations = "exact",
    predicate: Predicate | None = None,
    statistics: Statistics | str | os.PathLike[str] | None = None,
    calibrate: Iterable[Any] | None = None,
    progress: bool = True,
    **options: str,
) -> ModelReport:
    """Quantize the linear layers of a torch or MLX model, in place.

    Each Linear becomes a MarlinLinear. Stacks of experts become layers of ours too: transformers' modules with stacked
    parameters MarlinExperts, mlx-lm's SwitchLinear MarlinSwitchLinear.

    model: a torch.nn.Module or an mlx.nn.Module.
    format, group_size, method, options: as in :func:`billfish.quantize`. activations: as in
    :func:`billfish.quantized_linear`, for the layers.
    predicate: (path, layer) -> False to leave a layer, True to take it with the settings given here, or a dict of
    settings of its own, such as {"format": "q8_0"}. Without one, all are taken but output layers (`lm_head`,
    `output`), as `billfish quantize` does. Group size and options belong to the format that they are given with: a
    dict that names another one has its own, or the defaults.
    statistics: of the inputs of the layers, from :func:`billfish.calibrate` or a file, by the names of their weights.
    They weight the quantization error.
    calibrate: batches to compute them from, as in :func:`billfish.calibrate`, for torch. method="gptq" needs one of
    the two, with X^T X.
    progress: whether to draw a bar on terminals.

    A layer stays as it is where the format cannot store its K, where it is a subclass of Linear with a forward of its
    own, or where it shares its weight with something that stays, as output layers do with embeddings. Linear layers
    that share a weight share the quantized one. Embeddings, convolutions and layers that are quantized already stay,
    too.

    Returns a ModelReport, which has all of that. Raises DTypeError for anything else than a model, and FormatError for
    settings that do not fit; the model is then as it was.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> report = bf.quantize_model(model, "fp4", group_size=32, progress=False)
        >>> len(report.replaced), model(torch.ones(2, 64)).shape
        (2, torch.Size([2, 8]))
    """
    _check_arguments(predicate, options)
    kit = kit_of("quantize_model", model)
    walk = kit.walk(model)
    if isinstance(model, walk.linear_type):
        expected = "a model with Linear layers. For one layer, use bf.MarlinLinear.from_linear"
        raise DTypeError(bad_argument("quantize_model", "model", type_of(model), expected))
    settings = {"format": format, "group_size": group_size, "method": method, "activations": activations, **options}
    get_format(format, "quantize_model").check_options("quantize_model", options)
    chosen, left = _choose(walk, settings, predicate)
    _choose_experts(kit, walk, settings, predicate, chosen, left)
    left |= {path: f"{article(kind)} {kind} has no quantized form" for path, kind in walk.matrices.items()}
    left |= dict.fromkeys(walk.quantized, "it is quantized already")
    inputs = _Inputs(kit, model, statistics, calibrate, method == "gptq", progress)
    for path, linear, _ in walk.linears:
        if path in chosen:
            inputs.check(path, linear.weight.shape, chosen[path])
    stacks = {path: kit.stack_shapes(path, module) for path, module, _ in walk.experts if path in chosen}
    for path, shapes in stacks.items():
        for stack, shape in shapes.items():
            inputs.check(stack, shape, chosen[path])
    report = ModelReport(left=left)
    layers: dict[int, Any] = {}  # what becomes of a Linear, which may be in several places
    twins: dict[int, Any] = {}  # the first layer that was made of a weight
    with Progress(len(chosen), "layers", enabled=progress) as bar:
        for path, module, _ in walk.experts:
            if id(module) not in layers and path in chosen:
                bar.advance(1, path)
                before = kit.stack_bytes(module)
                known = [inputs.known(stack, shape, chosen[path]) for stack, shape in stacks[path].items()]
                layer = layers[id(module)] = kit.quantize_experts(module, **chosen[path], known=known)
                report.replaced.append(Replaced(path, layer.format, layer.group_size, before, layer.storage_bytes))
        for path, linear, _ in walk.linears:
            if id(linear) not in layers and path in chosen:
                bar.advance(1, path)
                twin = twins.get(id(linear.weight))
                before = after = 0
                if twin is None:
                    own = inputs.settings(path, linear.weight.shape, chosen[path])
                    layer = kit.layer_type.from_linear(linear, **own)
                    before, after = linear.weight.nbytes, layer.storage_bytes
                else:
                    layer = twin.with_bias(getattr(linear, "bias", None))
                layers[id(linear)] = twins[id(linear.weight)] = layer
                report.replaced.append(Replaced(path, layer.format, layer.group_size, before, after))
    for _, module, put in (*walk.linears, *walk.experts):
        if id(module) in layers:
            put(layers[id(module)])
    kit.note_layers(model)
    return report


def article(noun: str) -> str:
    """A or an."""
    return "an" if noun[:1] in "AEIOU" else "a"


def _check_arguments(predicate: Any, options: dict[str, Any]) -> None:
    """Raise for arguments that other libraries have, and name ours."""
    call = "quantize_model"
    if predicate is not None and not callable(predicate):
        expected = "a function (path, layer) -> bool or dict, such as lambda path, layer: not path.endswith('lm_head')"
        raise DTypeError(bad_argument(call, "predicate", repr(predicate), expected))
    hints = {
        "skip": "To leave layers out, pass predicate=lambda path, layer: path not in {...}.",
        "bits": "Pass a format of that width, such as 'q4_k' or 'u8'. bf.quantize_checkpoint has bits=.",
    }
    for name, hint in hints.items():
        if name in options:
            raise FormatError(failure(call, f"unknown argument {name}={options[name]!r}", hint))


class _Inputs:
    """What is known of the inputs of layers: given, or computed from batches."""

    def __init__(
        self,
        kit: Kit,
        model: Any,
        statistics: Statistics | str | os.PathLike[str] | None,
        batches: Iterable[Any] | None,
        outer: bool,
        progress: bool,
    ) -> None:
        call = "quantize_model"
        if statistics is not None and batches is not None:
            raise DataError(failure(call, "calibrate= and statistics= exclude each other", "Pass one of them."))
        self._statistics: Statistics | None
        if batches is not None:
            self._statistics = kit.calibrate(model, batches, hessian=outer, progress=progress)
        elif statistics is None or isinstance(statistics, Statistics):
            self._statistics = statistics
        else:
            self._statistics = Statistics.load(statistics)

    def check(self, path: str, shape: Sequence[int], settings: dict[str, Any]) -> None:
        """Raises if they are of another model, or not enough for the method, before anything is changed."""
        if self._statistics is not None:
            self._statistics.check_matrix("quantize_model", f"{path}.weight", tuple(shape), settings["method"])
            self._statistics.check_columns("quantize_model", f"{path}.weight")
        elif settings["method"] == "gptq":
            fix = "Pass calibrate= batches, or statistics= with X^T X."
            raise DataError(failure("quantize_model", "method 'gptq' needs statistics of the inputs", fix))

    def settings(self, path: str, shape: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of a layer, with what is known of its inputs."""
        return {**settings, **self.known(path, shape, settings)}

    def known(self, path: str, shape: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        """What is known of the inputs of a matrix or stack, and the method that it is enough for."""
        if self._statistics is None:
            return {}
        name, method = f"{path}.weight", settings["method"]
        method, known = self._statistics.settings("quantize_model", name, tuple(shape), method)
        return {"method": method, **known}


def _settings_of(settings: dict[str, Any], own: dict[str, Any], k: int) -> dict[str, Any]:
    """A layer's settings, where it has some of its own; raises unless from_linear will take them for rows of k."""
    call = "quantize_model"
    format = get_format(own.get("format", settings["format"]), call)
    if format is not get_format(settings["format"]):
        settings = {"group_size": None, **{name: settings[name] for name in ("method", "activations")}}
    chosen = {**settings, **own, "format": format}
    check_method(call, chosen["method"])
    check_activations(call, chosen["activations"])
    format.check_group_size(call, chosen["group_size"], k)
    named = ("format", "group_size", "method", "activations")
    format.check_options(call, {name: value for name, value in chosen.items() if name not in named})
    return chosen


def _verdict(predicate: Predicate | None, path: str, layer: Any) -> bool | dict[str, Any]:
    verdict = predicate(path, layer) if predicate else not is_output(path)
    if not isinstance(verdict, (bool, dict)):
        expected = "a bool, or a dict of settings"
        raise DTypeError(bad_argument("quantize_model", f"predicate({path!r}, ...)", type_of(verdict), expected))
    return verdict


def _choose_experts(
    kit: Kit,
    walk: Walk,
    settings: dict[str, Any],
    predicate: Predicate | None,
    chosen: dict[str, dict[str, Any]],
    left: dict[str, str],
) -> None:
    """As `_choose`, for the modules with experts."""
    for path, module, _ in walk.experts:
        verdict, reason = _verdict(predicate, path, module), kit.why_not(module)
        if reason:
            left[path] = reason
        elif verdict is False:
            left[path] = "the predicate says so" if predicate else "output layers stay unless a predicate takes them"
        else:
            own = verdict if isinstance(verdict, dict) else {}
            try:
                for *_, k in kit.stack_shapes(path, module).values():
                    given = _settings_of(settings, own, k)
                    get_format(given["format"]).check_k("quantize_model", k)
                chosen[path] = given
            except ShapeError as error:
                left[path] = str(error)


def _choose(
    walk: Walk, settings: dict[str, Any], predicate: Predicate | None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Settings for each layer to quantize, and a reason for each one to leave. Nothing is changed yet."""
    call = "quantize_model"
    chosen: dict[str, dict[str, Any]] = {}
    left: dict[str, str] = {}
    stays = dict(walk.others)  # the weights that must not be quantized, and who holds them
    for path, linear, _ in walk.linears:
        verdict = _verdict(predicate, path, linear)
        if type(linear) is not walk.linear_type:
            left[path] = f"it is a {type(linear).__name__}, which may do more than a Linear"
        elif verdict is False:
            left[path] = "the predicate says so" if predicate else "output layers stay unless a predicate takes them"
        else:
            k = linear.weight.shape[1]
            chosen[path] = _settings_of(settings, verdict if isinstance(verdict, dict) else {}, k)
            try:
                get_format(chosen[path]["format"]).check_k(call, k)
            except ShapeError as error:
                left[path] = str(error)
                del chosen[path]
        if path in left:
            stays.setdefault(id(linear.weight), path)
    for path, linear, _ in walk.linears:
        if path in chosen and id(linear.weight) in stays:
            del chosen[path]
            left[path] = f"its weight is also that of {stays[id(linear.weight)]}, which stays"
    return chosen, left
