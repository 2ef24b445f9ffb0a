"""The plug-in for Hugging Face transformers. Importing this module registers it.

    from billfish.nn.transformers import BillfishConfig, load_model

    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BillfishConfig("fp4", group_size=128))
    model.save_pretrained(out)                 # from_pretrained(out) and bf.open_checkpoint(out) read it
    model = load_model("model.gguf")           # or a GPTQ, AWQ, compressed-tensors, ModelOpt or MLX folder

Loading goes through transformers' own loader in all cases, so that renamings, ties and missing weights are its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from billfish.checkpoints import Checkpoint, open_checkpoint
from billfish.checkpoints.layouts.native import MARKER
from billfish.checkpoints.names.gguf_names import by_model_names, is_gguf
from billfish.core.activations import check_activations
from billfish.core.errors import CheckpointError, FormatError, ShapeError, failure
from billfish.core.extras import missing
from billfish.core.format import get_format
from billfish.core.format_tag import ABOUT
from billfish.core.typing import Activations, FormatName, Method
from billfish.nn import parallel
from billfish.nn.torch.expert_layers import (
    PROJECTIONS,
    MarlinExperts,
    activation_of,
    halves,
    is_experts,
    plain_biases,
    plain_stacks,
    stack_shapes,
    to_plain,
    why_not,
)
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.torch.module import QuantizedModule
from billfish.ops.quantization import check_method, quantize
from billfish.statistics import Statistics

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.core_model_loading import ConversionOps
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils import GENERATION_CONFIG_NAME
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from billfish.nn.transformers_places import (
        Places,
        find_places,
        gguf_config,
        keep_stacks,
        make_experts,
        make_layer,
        refuse_others,
        state_dict,
        tells_format,
        with_stacks,
    )
except ImportError as error:
    raise missing("transformers", "transformers", error) from error

__all__ = ["BillfishConfig", "load_model"]

METHOD = "billfish"
SETTINGS = ("format", "group_size", "method", "activations")  # of a layer


@register_quantization_config(METHOD)
class BillfishConfig(QuantizationConfigMixin):
    """How to quantize a model while transformers loads it, and, in a saved config.json, how it was quantized.

    format, group_size, method, options: as in :func:`billfish.quantize`. activations: as in
    :func:`billfish.quantized_linear`.
    modules: settings for single layers by path, such as {"lm_head": {"format": "q8_0"}}.
    modules_to_not_convert: layers to leave, by path, the end of a path, or a pattern of its beginning; by default the
    output layer. Layers whose weights are tied always stay. A name that no layer has is an error.
    quant_method: "billfish", which transformers writes and reads.
    statistics: as in :func:`billfish.quantize_model`: from :func:`billfish.calibrate`, or a file. They are not saved
    with the model.

    Pass it to `from_pretrained` as quantization_config.

        >>> from billfish.nn.transformers import BillfishConfig
        >>> BillfishConfig("fp4", group_size=64).to_dict()["group_size"]
        64
    """

    def __init__(
        self,
        format: FormatName | str = "fp4",
        group_size: int | None = None,
        method: Method = "mse",
        activations: Activations = "exact",
        options: dict[str, str] | None = None,
        modules: dict[str, dict[str, Any]] | None = None,
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
        statistics: Statistics | str | os.PathLike[str] | None = None,
    ) -> None:
        call = "BillfishConfig"
        known = get_format(format, call)
        if group_size is not None and group_size != -1:
            known.check_group_size(call, group_size, None)
        check_method(call, method)
        self.quant_method = quant_method  # theirs are an enum, which plug-ins cannot extend
        self.format, self.group_size = known.name, known.default_group_size if group_size is None else group_size
        self.method, self.activations = method, check_activations(call, activations)
        self.options = known.check_options(call, options or {})
        self.modules = {path: {**own} for path, own in (modules or {}).items()}
        for path, own in self.modules.items():
            odd = next((name for name in own if name not in SETTINGS), None)
            if odd is not None:
                raise FormatError(
                    failure(
                        call,
                        f"unknown setting {odd!r} in modules[{path!r}]",
                        f"The settings are {', '.join(SETTINGS)}.",
                    )
                )
            if "format" in own:
                own["format"] = get_format(own["format"], call).name
        self.modules_to_not_convert = modules_to_not_convert
        if isinstance(statistics, (str, os.PathLike)):
            statistics = Statistics.load(statistics)
        self.statistics = statistics

    def to_dict(self) -> dict[str, Any]:
        unsaved = ("statistics", "source")
        return {name: deepcopy(value) for name, value in self.__dict__.items() if name not in unsaved}

    def settings(self, path: str) -> dict[str, Any]:
        """What MarlinLinear.from_linear is told for a layer."""
        chosen = {name: getattr(self, name) for name in SETTINGS}
        own = self.modules.get(path, {})
        if own.get("format", self.format) != self.format:
            return {**chosen, "group_size": None, **own}
        return {**chosen, **own, **self.options}


class LoadConfig(BillfishConfig):
    """For load_model alone: where the matrices of a checkpoint go. Saved, it is a BillfishConfig like any other."""

    def __init__(self, weights: Checkpoint, places: Places, activations: Activations) -> None:
        super().__init__(activations=activations)
        self.source: tuple[Checkpoint, Places] | None = (weights, places)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadConfig:
        return self  # transformers copies configurations; this one holds an open file and a mesh


@register_quantizer(METHOD)
class BillfishQuantizer(HfQuantizer):
    """What transformers calls while it loads a model."""

    requires_calibration = False
    quantization_config: BillfishConfig

    def __init__(self, quantization_config: BillfishConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized |= isinstance(quantization_config, LoadConfig)
        self.chosen: dict[str, dict[str, Any]] = {}  # layers to quantize, with their settings
        self.left: dict[str, str] = {}  # layers that stay, and why
        self.storage: set[str] = set()  # names of storage arrays, whose type must stay as it is
        self.stacks: dict[str, dict[str, Any]] = {}  # experts that are quantized already, by module and projection
        self.parallel = False  # whether this process has only a share of the model

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        if not self.pre_quantized:
            self._choose(model)
            return
        config = self.quantization_config
        if isinstance(config, LoadConfig) and config.source is not None:
            source, places = config.source
        else:
            source = by_model_names(open_checkpoint(Path(checkpoint_files[0]).parent))
            places = find_places(model, source)
            refuse_others(model, source, places)
        marked = {re.escape(f"{path}.{MARKER}") + "$" for path in places.names}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *marked}
        for path in places.experts:
            block = make_experts(model.get_submodule(path), path, source, places, config.activations)
            model.set_submodule(path, block)
            for part, stack in block.named_children():
                assert isinstance(stack, QuantizedModule)
                self._await(f"{path}.{part}", stack, source, places)
        for path, name in places.names.items():
            if path.rpartition(".")[0] in places.experts:
                continue
            layer = make_layer(
                model.get_submodule(path),
                source.describe(name),
                act_order=source.is_reordered(name),
                activations=config.activations,
                share=places.shares.get(path),
                mesh=places.mesh,
            )
            model.set_submodule(path, layer)
            self._await(path, layer, source, places)

    def _await(self, path: str, layer: QuantizedModule, source: Checkpoint, places: Places) -> None:
        """Storage arrays will come for a layer on "meta"."""
        if isinstance(self.quantization_config, LoadConfig) or not tells_format(source, places.names[path]):
            layer.register_buffer(ABOUT, None)  # nobody must look for it in the file
        self.storage |= {f"{path}.{part}" for part in layer.storage_names}

    def _choose(self, model: Any) -> None:
        config = self.quantization_config
        self._check_names(model)
        skipped = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        tied = model.all_tied_weights_keys
        held = {name.removesuffix(".weight") for name in (*tied.keys(), *tied.values())}
        for path, module in model.named_modules():
            experts = is_experts(module)
            if type(module) is not torch.nn.Linear and not experts:
                continue
            if path in held:
                self.left[path] = "its weight is tied"
            elif path not in config.modules and not should_convert_module(path, skipped):
                self.left[path] = "modules_to_not_convert"
            elif experts and why_not(module):
                self.left[path] = why_not(module)
            else:
                settings = config.settings(path)
                columns = [w.shape[-1] for w in plain_stacks(module)] if experts else [module.in_features]
                try:
                    for k in columns:
                        get_format(settings["format"]).check_k("BillfishConfig", k)
                    self._check_statistics(path, module, settings["method"])
                    self.chosen[path] = settings
                except ShapeError as error:
                    self.left[path] = str(error)

    def _check_statistics(self, path: str, module: Any, method: str) -> None:
        """Raises unless what is known of a layer's inputs is of this model, and enough for the method."""
        statistics, call = self.quantization_config.statistics, "BillfishConfig"
        if statistics is not None:
            plain = {path: (module.out_features, module.in_features)} if isinstance(module, torch.nn.Linear) else {}
            for matrix, shape in (plain or stack_shapes(path, module)).items():
                statistics.check_matrix(call, f"{matrix}.weight", shape, method)
                statistics.check_columns(call, f"{matrix}.weight")
        elif method == "gptq":
            raise FormatError(failure(call, "method 'gptq' needs statistics= with X^T X"))

    def _check_names(self, model: Any) -> None:
        """Raises for names that no layer has: whoever wrote them meant one."""
        config = self.quantization_config
        linears = [
            path for path, module in model.named_modules() if type(module) is torch.nn.Linear or is_experts(module)
        ]
        paths = [path for path, _ in model.named_modules()]
        unused = {
            "modules": [path for path in config.modules if path not in linears],
            "modules_to_not_convert": [
                pattern
                for pattern in config.modules_to_not_convert or []
                if all(should_convert_module(path, [pattern]) for path in paths)
            ],
        }
        for argument, patterns in unused.items():
            if patterns:
                problem = f"{argument} has {patterns[0]!r}, which matches no layer"
                names = f"The layers have names such as {', '.join(map(repr, linears[:3]))}."
                raise FormatError(failure("BillfishConfig", problem, names))

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return name in ("weight", "gate_up_proj", "down_proj") and path in self.chosen

    def get_quantize_ops(self) -> ConversionOps:
        return QuantizeWeight(self.chosen, self.stacks, self.quantization_config.statistics)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        if self.storage.intersection(converter.target_patterns):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for path, stacks in self.stacks.items():
            module, settings = model.get_submodule(path), self.chosen[path]
            gate, up, down = (stacks[part] for part in PROJECTIONS)
            block = MarlinExperts.from_quantized(
                gate,
                up,
                down,
                plain_biases(module),
                hidden_act=activation_of(module),
                activations=settings["activations"],
                device=stacks["device"],
            )
            model.set_submodule(path, block.train(module.training))
        self.stacks.clear()
        for path, module in model.named_modules():
            if isinstance(module, QuantizedModule) and module.device.type == "meta":
                raise CheckpointError(failure("from_pretrained", f"the folder lacks arrays of the layer {path}"))
        self.note_layers(model)
        if isinstance(self.quantization_config, LoadConfig):
            self.quantization_config.source = None  # the file may be closed
        return model

    def note_layers(self, model: Any) -> None:
        """What save_pretrained has to know of the layers of ours."""
        keep_stacks(model)
        layers = {path: module for path, module in model.named_modules() if isinstance(module, QuantizedModule)}
        self.quantization_config.modules = {
            path: {"format": layer.format, "group_size": layer.group_size} for path, layer in layers.items()
        }
        self.parallel = any(hasattr(module, "mesh") for module in model.modules())

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        with torch.device("meta"):
            skeleton = type(model)(model.config)
        for path, module in list(model.named_modules()):
            if isinstance(module, MarlinLinear):
                model.set_submodule(path, module.to_linear(dtype or torch.float32))
            elif isinstance(module, MarlinExperts):
                model.set_submodule(path, to_plain(module, skeleton.get_submodule(path), dtype or torch.float32))
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Add the markers of checkpoints/layouts/native.py: transformers without this plug-in refuses the file."""
        layers = [path for path, module in model.named_modules() if isinstance(module, MarlinLinear)]
        markers = {f"{path}.{MARKER}": torch.empty(0, dtype=torch.uint8) for path in layers}
        return {**model.state_dict(), **markers}, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return not self.parallel

    @property
    def is_trainable(self) -> bool:
        return True  # gradients go through; what is trained is beside the quantized weights

    @property
    def is_compileable(self) -> bool:
        return True


class QuantizeWeight(ConversionOps):
    """A Linear that has just been read becomes a MarlinLinear, and its weight is gone before the next one is read.

    Stacks of experts are quantized and kept in `stacks`: a module has several, and their biases come by themselves.
    """

    def __init__(
        self, chosen: dict[str, dict[str, Any]], stacks: dict[str, dict[str, Any]], statistics: Statistics | None
    ) -> None:
        self.chosen, self.stacks, self.statistics = chosen, stacks, statistics

    def convert(  # transformers passes all by name, these among them
        self, input_dict: dict[str, Any], model: Any, full_layer_name: str, missing_keys: Any, **kwargs: Any
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        path, _, name = full_layer_name.rpartition(".")
        linear = model.get_submodule(path)
        if is_experts(linear):
            self._convert_experts(path, name, linear, value[0] if isinstance(value, list) else value)
            missing_keys.discard(full_layer_name)
            return {}
        linear.weight = torch.nn.Parameter(value[0] if isinstance(value, list) else value, requires_grad=False)
        settings = {**self.chosen[path], **self._known(path, path, linear.weight.shape)}
        model.set_submodule(path, MarlinLinear.from_linear(linear, **settings))
        missing_keys.discard(full_layer_name)
        return {}

    def _known(self, path: str, matrix: str, shape: Sequence[int]) -> dict[str, Any]:
        """What is known of the inputs of a matrix or stack of a module, and the method that it is enough for."""
        if self.statistics is None:
            return {}
        name, method = f"{matrix}.weight", self.chosen[path]["method"]
        method, known = self.statistics.settings("BillfishConfig", name, tuple(shape), method)
        return {"method": method, **known}

    def _convert_experts(self, path: str, name: str, module: Any, numbers: torch.Tensor) -> None:
        stacks = self.stacks.setdefault(path, {"device": numbers.device})
        upright = numbers.transpose(1, 2) if module.is_transposed else numbers
        parts = {"down_proj": upright}
        if name == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), halves(upright, module), strict=True))
        settings = {key: value for key, value in self.chosen[path].items() if key != "activations"}
        for part, stack in parts.items():
            stacks[part] = quantize(stack.cpu(), **{**settings, **self._known(path, f"{path}.{part}", stack.shape)})
        setattr(module, name, torch.nn.Parameter(torch.empty_like(numbers, device="meta"), requires_grad=False))


def note_layers(model: Any) -> None:
    """A transformers.PreTrainedModel whose layers were replaced in memory saves them as one that was quantized while it
    was loaded. Without that, from_pretrained would look for the weights of other layers. A model of another project's
    quantizer stays its own."""
    quantizer = getattr(model, "hf_quantizer", None)
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    if quantizer is None and layers:
        ways = {layer.activations for layer in layers}
        config = BillfishConfig(layers[0].format, activations=ways.pop() if len(ways) == 1 else "exact")
        quantizer = model.hf_quantizer = BillfishQuantizer(config, pre_quantized=True)
        model.config.quantization_config = config
    if isinstance(quantizer, BillfishQuantizer):
        quantizer.note_layers(model)


def load_model(
    path: str | os.PathLike[str],
    auto_class: Any = AutoModelForCausalLM,
    *,
    activations: Activations = "exact",
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> Any:
    """Load a transformers model from a checkpoint of any layout, its quantized matrices in MarlinLinear bit by bit.

    path: a folder with its config.json, or a GGUF file (or a folder with one) of a Llama, Qwen2, Qwen3 or Gemma model.
    auto_class: the class of transformers that makes the model; AutoModelForCausalLM by default.
    activations: as in :func:`billfish.quantized_linear`, for the layers.
    mesh: a DeviceMesh of one axis: the layers of Llama-shaped models are cut over it (billfish.nn.parallel), and each
    process reads only its share of them.
    kwargs: for from_pretrained, such as dtype (as config.json says, or float32).

    Returns a transformers.PreTrainedModel. Raises CheckpointError for a checkpoint that cannot be read or does not
    fit.

        >>> from billfish.nn.transformers import load_model
        >>> model = load_model("model.gguf")
        >>> type(model).__name__, type(model.model.layers[0].mlp.up_proj).__name__
        ('LlamaForCausalLM', 'MarlinLinear')
    """
    path = Path(path)
    checkpoint = open_checkpoint(path)
    weights = by_model_names(checkpoint)
    config = gguf_config(checkpoint) if is_gguf(checkpoint) else AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kwargs.setdefault("dtype", config.dtype or torch.float32)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config)
    weights = with_stacks(skeleton, weights)
    places = find_places(skeleton, weights)
    if mesh is not None:
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        plan = parallel.llama_plan(weights, kv_heads, mesh.size(), mesh.get_local_rank())
        shares = {p: plan[m] for p, n in places.names.items() if (m := n.removesuffix(".weight")) in plan}
        places = places._replace(shares=shares, mesh=mesh)
    model = type(skeleton).from_pretrained(
        None,
        config=config,
        state_dict=state_dict(weights, places),
        quantization_config=LoadConfig(weights, places, activations),
        **kwargs,
    )
    model.name_or_path = str(path)
    if (path / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model
