"""Every optional argument of a public function has an effect: of two calls that differ in it, what is seen differs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from common import gaussian
from llm_models import Small, write_model
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from small_adapters import write_small_adapter

import billfish as bf
from billfish.core.errors import BackendUnavailable
from billfish.llm.drafting.drafter import StepSeconds
from billfish.nn.mlx.linear import MarlinLinear as MlxLayer

torch = pytest.importorskip("torch")
from billfish.nn.torch import MarlinExperts  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{{ reasoning_effort }}{{ more }}{% endif %}"
)
TEXT = "abc " * 60
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMES_CALLER = {"call", "framework"}  # whom an error names; and the layer's, which test_layer_base.py has


class World:
    """What calls are made with. Paths are those of a folder of the call's own."""

    w, x = gaussian((8, 256)), gaussian((3, 256), seed=1)
    q = bf.quantize(w, "fp4")
    stack = bf.quantize(gaussian((4, 8, 256)), "q8_0")
    gate_up, down = bf.quantize(gaussian((4, 64, 32)), "q8_0"), bf.quantize(gaussian((4, 32, 32)), "q8_0")
    ids, routing = np.array([[0, 3], [1, 2], [3, 1]]), np.full((3, 2), 0.5, np.float32)
    tokens = list(range(5, 45))
    tensors, ggml_tensors = {"some.weight": q}, {"some.weight": bf.quantize(w, "q8_0")}
    hessian = (x.T @ x + np.eye(256)).astype(np.float32)
    crossed = (x.T @ (2 * x) + np.eye(256)).astype(np.float32)

    def __init__(self, folder: Path, place: Path) -> None:
        self.model, self.other, self.thinks, self.floats, self.experts = (
            str(folder / f"{name}.gguf") for name in ("model", "other", "thinks", "floats", "experts")
        )
        self.unknown, self.statistics, self.one, self.several = (
            str(folder / f"{name}.safetensors") for name in ("unknown", "statistics", "one", "several")
        )
        self.lora, self.text, self.other_text = (str(folder / name) for name in ("lora", "text", "other_text"))
        self.out, self.folder = str(place / "out.gguf"), str(place / "out")
        self.saved = str(place / "saved.safetensors")

    def exists(self) -> str:
        """A path where there is a file."""
        Path(self.out).write_bytes(b"before")
        return self.out

    def loaded(self, **more: Any) -> bf.llm.Model:
        return bf.llm.load(more.pop("path", self.model), device="cpu", **{"progress": False} | more)

    def module(self) -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))

    def collected(self) -> bf.Statistics:
        return bf.calibrate(self.module(), self.batches(), progress=False)

    def batches(self) -> list[Any]:
        return [torch.from_numpy(gaussian((300, 256), seed=seed)) for seed in range(2)]


class Row(NamedTuple):
    """call(world, **arguments) is seen with `base`, and with each of `changed` beside it. Values that are functions are
    called with the world."""

    of: Callable[..., Any]
    call: Callable[..., Any]
    base: Mapping[str, Any]
    changed: Mapping[str, Any]


def fresh(name: str) -> Callable[[World], Any]:
    """A value that each call has a new one of."""
    return lambda world: getattr(world, name)()


def get(name: str) -> Callable[[World], Any]:
    return lambda world: getattr(world, name)


def on(name: str, value: Any = None) -> Callable[..., Any]:
    """A method of a loaded model; `adapter` and `draft` are loaded beside it."""

    def call(world: World, **arguments: Any) -> Any:
        model = world.loaded(path=arguments.pop("path", world.model))
        if "adapter" in arguments:
            model.load_adapter(arguments["adapter"], world.lora)
        if arguments.get("cache") == "used":
            arguments["cache"] = model.cache()
            model.generate("abba", cache=arguments["cache"], max_tokens=1)
        if isinstance(arguments.get("tools"), list) and "temperature" not in arguments:
            arguments["temperature"] = 0
        return getattr(model, name)(**arguments)

    return call


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda world, **arguments: function(**arguments)


def written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without what it returns: the files and the words count."""

    def call(world: World, **arguments: Any) -> None:
        function(**{"progress": False} | arguments)

    return call


def on_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a torch model; its answer counts, and the report."""

    def call(world: World, **arguments: Any) -> Any:
        module = world.module()
        report = function(module, **{"progress": False} | arguments)
        return report, module(torch.from_numpy(world.x)), str(module)

    return call


def layer_of(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, **arguments: Any) -> Any:
        layer = make(**arguments)
        state = dict(tree_flatten(layer.parameters())) if isinstance(layer, MlxLayer) else layer.state_dict()
        return str(layer), layer.activations, state

    return call


OVERWRITE = {"overwrite": True}
FILE = {"src": get("floats"), "dst": get("out")}
TEXTS = FILE | {"text": get("text"), "tokens": 40, "window": 20, "device": "cpu"}
CODES = bf.pack_fp4_weights(gaussian((64, 8)))
U4 = bf.pack_u4_weights(gaussian((64, 8)))
X64 = gaussian((3, 64), seed=1)
LINEAR, MLX_LINEAR = torch.nn.Linear(256, 8), mlx.nn.Linear(256, 8)
BIG = gaussian((8, 512))
TURNED = np.roll(np.arange(256), 3)
VALUES = {"weights": [World.q, World.q], "x": get("x")}
ROUNDS = {"activations": "q8"}
# What needs a GPU (tests/backends/cuda/test_experts.py), and the zeros that tests/nn/test_warming.py counts.
ELSEWHERE = {"expert_linear": {"check"}, "experts": {"check"}, "warm_up": {"dtype", "chosen"}}
ANOTHER = {"backend": "cuda"}  # which is not there
# Options of chat answers: the tool's name is in the prompt, and a forced call is all of the answer.
CALLS = {"messages": [{"role": "user", "content": "abba"}], "tools": [TOOL], "max_tokens": 60, "temperature": 0}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}

ANSWER = {
    "max_tokens": 3,
    "temperature": 2.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 9.0,
    "logit_bias": {70: 99.0},
    "raw": True,
}
MORE = {
    "stop": "F",
    "logprobs": 2,
    "response_format": SCHEMA,
    "chat_template_kwargs": {"more": "abab"},
    "draft": "ngram",
    "cache": "used",
    "adapter": "mine",
}
SAMPLED = {"temperature": 2.0, "max_tokens": 40}
LIMITS = {"top_k": 2, "top_p": 0.1, "min_p": 0.9, "seed": 2, **ROUNDS}
CHAT = {
    "tools": [],
    "tool_choice": "required",
    "response_format": SCHEMA,
    "reasoning_effort": "high",
    "chat_template_kwargs": {"more": "abab"},
}


Layer = bf.nn.torch.MarlinLinear
SAME = {"method": "rtn"}
ROWS = [
    # ---- matmuls ----
    Row(
        bf.quantized_linear,
        plain(bf.quantized_linear),
        {"x": get("x"), "weight": get("q")},
        {"bias": np.ones(8, np.float32), "out": np.ones((3, 7), np.float32), **ROUNDS, **ANOTHER},
    ),
    Row(
        bf.quantized_linear,
        plain(bf.quantized_linear),
        {"x": X64, "weight": U4[0], "scales": U4[1], "zeros": U4[2], "format": "u4"},
        {"scales": 2 * U4[1], "zeros": 2 * U4[2], "format": "fp4", "group_size": 64},
    ),
    Row(
        bf.quantized_linears,
        plain(bf.quantized_linears),
        VALUES,
        {"biases": [None, np.ones(8, np.float32)], **ROUNDS, **ANOTHER},
    ),
    Row(
        bf.expert_linear,
        plain(bf.expert_linear),
        {"x": get("x"), "w": get("stack"), "ids": get("ids")},
        {"biases": np.ones((4, 8), np.float32), **ROUNDS, **ANOTHER},
    ),
    Row(
        bf.experts,
        plain(bf.experts),
        {
            "x": gaussian((3, 32)),
            "gate_up": get("gate_up"),
            "down": get("down"),
            "ids": get("ids"),
            "weights": get("routing"),
        },
        {
            "hidden_act": "gelu",
            "gate_up_biases": np.ones((4, 64), np.float32),
            "down_biases": np.ones((4, 32), np.float32),
            **ROUNDS,
            **ANOTHER,
        },
    ),
    Row(
        bf.gemm_w4a8,
        plain(bf.gemm_w4a8),
        {"x_q8": bf.quantize_q8_0(gaussian((3, 256))), "w_q4": bf.quantize_q4_0(gaussian((8, 256)))},
        {"format": "q8_0", **ANOTHER},
    ),
    Row(
        bf.dequantize,
        plain(bf.dequantize),
        {"q": get("q")},
        {"dtype": "float16", "like": torch.zeros(1), "out": np.ones((3, 7), np.float32), **ANOTHER},
    ),
    # ---- quantization ----
    Row(
        bf.quantize,
        plain(bf.quantize),
        {"w": get("w"), "format": "u4"},
        {
            "group_size": 64,
            **SAME,
            "importance": np.arange(256, dtype=np.float32) ** 2,
            "hessian": get("hessian"),
            "options": {"zero_point": "fractional"},
        },
    ),
    Row(
        bf.quantize,
        plain(bf.quantize),
        {"w": get("w"), "format": "u4", "method": "gptq", "hessian": get("hessian")},
        {"cross": get("crossed")},
    ),
    *(
        Row(function, plain(function), {"x": get("w")}, {"method": "mse"})
        for function in (bf.quantize_q4_0, bf.quantize_q4_1, bf.quantize_q5_0, bf.quantize_q5_1, bf.quantize_q8_0)
    ),
    Row(bf.quantize_q8_1, plain(bf.quantize_q8_1), {"x": get("w")}, {"method": "mse"}),
    Row(bf.pack_fp4_weights, plain(bf.pack_fp4_weights), {"w_kn": BIG.T}, {"group_size": 64, **SAME}),
    Row(bf.pack_s4_weights, plain(bf.pack_s4_weights), {"w_kn": BIG.T}, {"group_size": 64, **SAME}),
    Row(
        bf.pack_u4_weights,
        plain(bf.pack_u4_weights),
        {"w_kn": BIG.T},
        {"group_size": 64, **SAME, "zero_point": "fractional"},
    ),
    *(
        Row(
            function,
            plain(function),
            dict(zip(("packed", "scales", "zeros"), made, strict=False)),
            {"group_size": 64, "dtype": "float16"},
        )
        for function, made in (
            (bf.unpack_fp4_weights, CODES),
            (bf.unpack_s4_weights, bf.pack_s4_weights(gaussian((64, 8)))),
            (bf.unpack_u4_weights, U4),
        )
    ),
    # ---- checkpoints ----
    Row(
        bf.convert,
        written(bf.convert),
        FILE | {"to": "gguf"},
        {"dtype": "float16", "progress": True},
    ),
    Row(
        bf.convert, written(bf.convert), {"src": get("model"), "dst": get("folder"), "to": "awq"}, {"requantize": True}
    ),
    Row(bf.convert, written(bf.convert), {"src": get("unknown"), "dst": get("out"), "to": "gguf"}, {"raw_names": True}),
    Row(bf.convert, written(bf.convert), FILE | {"dst": fresh("exists"), "to": "gguf"}, OVERWRITE),
    Row(
        bf.save,
        written(bf.save),
        {"model_or_tensors": get("tensors"), "path": get("folder")},
        {"to": "mlx", "progress": True},
    ),
    Row(
        bf.save,
        written(bf.save),
        {"model_or_tensors": get("tensors"), "path": get("folder"), "to": "awq"},
        {"requantize": True},
    ),
    Row(bf.save, written(bf.save), {"model_or_tensors": get("ggml_tensors"), "path": get("out")}, {"raw_names": True}),
    Row(
        bf.save,
        written(bf.save),
        {"model_or_tensors": get("ggml_tensors"), "path": fresh("exists"), "raw_names": True},
        OVERWRITE,
    ),
    Row(bf.verify, plain(bf.verify), {"a": get("model"), "b": get("model"), "progress": False}, {"progress": True}),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        FILE | {"format": "q4_0"},
        {
            **SAME,
            "keep": {"attn_q": "q8_0"},
            "only": ["attn_q"],
            "statistics": get("statistics"),
            "calibrate": get("text"),
            "to": "mlx",
            "progress": True,
        },
    ),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        {"src": get("floats"), "dst": get("folder"), "format": "fp4"},
        {"group_size": 64},
    ),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        FILE | {"format": "q4_0", "method": "gptq", "calibrate": get("text")},
        {"sequential": False, "device": "cuda"},
    ),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        FILE | {"src": get("model"), "format": "q4_0"},
        {"requantize": True},
    ),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        FILE | {"src": get("unknown"), "format": "q4_0"},
        {"raw_names": True},
    ),
    Row(
        bf.quantize_checkpoint,
        written(bf.quantize_checkpoint),
        FILE | {"dst": fresh("exists"), "format": "q4_0"},
        OVERWRITE,
    ),
    Row(
        bf.calibrate_checkpoint,
        written(bf.calibrate_checkpoint),
        TEXTS | {"dst": get("saved")},
        {"text": get("other_text"), "hessian": True, "tokens": 30, "window": 10, "device": "cuda", "progress": True},
    ),
    Row(bf.calibrate_checkpoint, written(bf.calibrate_checkpoint), TEXTS | {"dst": fresh("exists")}, OVERWRITE),
    Row(bf.rotate_checkpoint, written(bf.rotate_checkpoint), FILE, {"seed": 1, "dtype": "float16", "progress": True}),
    Row(bf.rotate_checkpoint, written(bf.rotate_checkpoint), FILE | {"dst": fresh("exists")}, OVERWRITE),
    Row(
        bf.tune_checkpoint,
        written(bf.tune_checkpoint),
        TEXTS | {"src": get("model"), "against": get("floats"), "epochs": 1},
        {
            "text": get("other_text"),
            "tokens": 30,
            "window": 10,
            "epochs": 2,
            "rate": 0.1,
            "device": "cuda:99",
            "progress": True,
        },
    ),
    Row(
        bf.tune_checkpoint,
        written(bf.tune_checkpoint),
        TEXTS | {"src": get("model"), "dst": fresh("exists"), "against": get("floats"), "epochs": 1},
        OVERWRITE,
    ),
    Row(
        bf.Checkpoint.read,
        lambda world, **arguments: bf.open_checkpoint(world.model).read("blk.0.attn_q.weight", **arguments),
        {},
        {"rows": (0, 8), "columns": (0, 32)},
    ),
    Row(
        bf.Checkpoint.read,
        lambda world, **arguments: bf.open_checkpoint(world.experts).read("blk.0.ffn_up_exps.weight", **arguments),
        {},
        {"experts": (0, 1)},
    ),
    Row(
        bf.QuantizedTensor.from_storage,
        plain(bf.QuantizedTensor.from_storage),
        {"format": "fp4", "storage": World.q.storage, "group_size": 32},
        {"group_size": 64, "permutation": TURNED},
    ),
    # ---- language models ----
    Row(
        bf.llm.load,
        lambda world, **arguments: said(bf.llm.load(**{"device": "cpu", "progress": False} | arguments)),
        {"path": get("floats")},
        {
            "path": get("other"),
            "device": "cuda",
            "quantize": "q4_0",
            "convert": lambda world: lambda name, tensor: 0.5 * tensor,
            "cache_type": "int8",
        },
    ),
    Row(
        bf.llm.load,
        lambda world, **arguments: said(bf.llm.load(**{"device": "cpu", "quantize": "q4_0"} | arguments)),
        {"path": get("floats"), "progress": False},
        {**SAME, "statistics": get("statistics"), "progress": lambda world: lambda done, of, what: print("progress")},
    ),
    Row(
        bf.llm.evaluate,
        lambda world, **arguments: bf.llm.evaluate(world.loaded(), world.tokens, **arguments),
        {"window": 20},
        {
            "against": lambda world: world.loaded(path=world.other),
            **ROUNDS,
            "window": 10,
            "progress": True,
        },
    ),
    *(
        Row(getattr(bf.llm.Model, name), on(name), {given: prompt, "max_tokens": 40} | base, changed)
        for name, given, prompt, more in (
            ("generate", "prompt", "abba", MORE),
            ("stream", "prompt", "abba", MORE),
            ("generate_batch", "prompts", ["abba", "ab"], {}),
        )
        for base, changed in (
            ({}, ANSWER | more),
            (SAMPLED, LIMITS),
            ({"draft": "ngram"}, {"draft_length": 1} if more else {}),
        )
        if changed
    ),
    *(
        Row(getattr(bf.llm.Model, name), on(name), base, changed)
        for name in ("chat", "chat_stream")
        for base, changed in (
            (CALLS, CHAT),
            (CALLS | {"tool_choice": "required"}, {"parallel_tool_calls": False}),
            ({"messages": CALLS["messages"], "max_tokens": 60, "path": get("thinks")}, {"reasoning_budget": 2}),
        )
    ),
    Row(bf.llm.Model.tokenize, on("tokenize"), {"text": "<|user|>ab"}, {"special": False, "add_bos": False}),
    Row(bf.llm.Model.encode, on("encode"), {"prompt": "ab"}, {"raw": True, "chat_template_kwargs": {"more": "abab"}}),
    Row(bf.llm.Model.logits, on("logits"), {"tokens": get("tokens")}, {**ROUNDS, "adapter": "mine"}),
    Row(bf.llm.Model.hidden, on("hidden"), {"tokens": get("tokens")}, {**ROUNDS, "adapter": "mine"}),
    Row(bf.llm.Model.embed_text, on("embed_text"), {"text": "abba"}, ROUNDS),
    # ---- layers ----
    Row(
        Layer,
        layer_of(Layer),
        {"in_features": 256, "out_features": 8},
        {
            "bias": False,
            "format": "q4_0",
            "group_size": 64,
            **ROUNDS,
            "act_order": True,
            "device": "meta",
            "dtype": torch.float16,
        },
    ),
    Row(
        Layer,
        layer_of(Layer),
        {"in_features": 256, "out_features": 8, "format": "u4"},
        {"options": {"zero_point": "fractional"}},
    ),
    Row(
        Layer.from_linear,
        layer_of(Layer.from_linear),
        {"linear": LINEAR, "format": "u4"},
        {
            "format": "fp4",
            "group_size": 64,
            **SAME,
            "importance": np.arange(256, dtype=np.float32) ** 2,
            "hessian": get("hessian"),
            **ROUNDS,
            "options": {"zero_point": "fractional"},
        },
    ),
    Row(
        Layer.from_linear,
        layer_of(Layer.from_linear),
        {"linear": LINEAR, "format": "u4", "method": "gptq", "hessian": get("hessian")},
        {"cross": get("crossed")},
    ),
    Row(
        Layer.from_quantized,
        layer_of(Layer.from_quantized),
        {"tensor": get("q")},
        {"bias": torch.ones(8), "permutation": TURNED, **ROUNDS, "device": "meta"},
    ),
    Row(
        MarlinExperts.from_quantized,
        lambda world, **arguments: expert_answer(MarlinExperts.from_quantized(**arguments)),
        {"gate": get("down"), "up": get("down"), "down": get("down")},
        {"biases": {"up_proj": torch.ones(4, 32)}, "hidden_act": "gelu", **ROUNDS, "device": "meta"},
    ),
    # ---- MLX's ----
    Row(
        MlxLayer,
        layer_of(MlxLayer),
        {"in_features": 256, "out_features": 8},
        {"bias": False, "format": "q4_0", "group_size": 64, **ROUNDS, "act_order": True, "dtype": mx.float16},
    ),
    Row(
        MlxLayer,
        layer_of(MlxLayer),
        {"in_features": 256, "out_features": 8, "format": "u4"},
        {"options": {"zero_point": "fractional"}},
    ),
    Row(
        MlxLayer.from_linear,
        layer_of(MlxLayer.from_linear),
        {"linear": MLX_LINEAR, "format": "u4"},
        {
            "format": "fp4",
            "group_size": 64,
            **SAME,
            "importance": np.arange(256, dtype=np.float32) ** 2,
            "hessian": get("hessian"),
            **ROUNDS,
            "options": {"zero_point": "fractional"},
        },
    ),
    Row(
        MlxLayer.from_linear,
        layer_of(MlxLayer.from_linear),
        {"linear": MLX_LINEAR, "format": "u4", "method": "gptq", "hessian": get("hessian")},
        {"cross": get("crossed")},
    ),
    Row(
        MlxLayer.from_quantized,
        layer_of(MlxLayer.from_quantized),
        {"tensor": get("q")},
        {"bias": mx.ones((8,)), "permutation": TURNED, **ROUNDS},
    ),
    # ---- models ----
    Row(
        bf.quantize_model,
        on_module(bf.quantize_model),
        {"format": "u4"},
        {
            "format": "fp4",
            "group_size": 64,
            **SAME,
            **ROUNDS,
            "predicate": lambda world: lambda path, layer: path == "0",
            "calibrate": fresh("batches"),
            "statistics": fresh("collected"),
            "progress": True,
            "options": {"zero_point": "fractional"},
        },
    ),
    Row(
        bf.load_into,
        on_module(bf.load_into),
        {"source": get("one")},
        {
            "rename": lambda world: lambda name: name.replace("0.", "1.").replace("1.bias", "9.bias"),
            **ROUNDS,
            "progress": True,
        },
    ),
    Row(bf.load_into, on_module(bf.load_into), {"source": get("several")}, {"strict": False}),
    Row(
        bf.calibrate,
        lambda world, **arguments: saved(world, bf.calibrate(world.module(), world.batches(), **arguments)),
        {"progress": False},
        {"hessian": True, "progress": True},
    ),
    Row(
        bf.warm_up,
        lambda world, **arguments: bf.warm_up(Layer(256, 8), **arguments)._replace(seconds=0),
        {},
        {"rows": (1, 8)},
    ),
]


def said(model: bf.llm.Model) -> object:
    return model.logits(World.tokens, activations="exact")


def expert_answer(layer: Any) -> object:
    place = layer.gate_proj.storage_device if hasattr(layer.gate_proj, "storage_device") else None
    x = torch.from_numpy(gaussian((3, 32)))
    return place, layer(x, torch.from_numpy(World.ids), torch.from_numpy(World.routing))


def saved(world: World, statistics: bf.Statistics) -> None:
    statistics.save(world.saved)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(value: object) -> object:
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.device), value.dtype, value.shape, None if value.is_meta else seen(value.detach().numpy())
    if isinstance(value, mx.array):
        return seen(np.array(value))
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, (bf.QuantizedTensor, bf.QuantizedExperts)):
        return (
            value.format.name,
            value.shape,
            value.group_size,
            seen(value.storage),
            seen(getattr(value, "permutation", None)),
        )
    if isinstance(value, Mapping):
        return {str(key): seen(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [seen(each) for each in value]
    if isinstance(value, bf.llm.Generation):
        for _ in value:
            pass
        return value.text, value.tokens, seen(value.logprobs), value.drafts.drafted, value.reused_tokens
    if hasattr(value, "generation"):  # an answer in a chat
        for _ in value:
            pass
        return re.sub(r"'id': '\w+'", "", str(value.message)), value.generation.prompt_tokens, value.generation.tokens
    if dataclasses.is_dataclass(value):
        return {name: seen(each) for name, each in vars(value).items() if "seconds" not in name}
    return repr(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    repeats = Small(template=TEMPLATE, seed=4, tied=True, layers=1, heads=1, kv_heads=1, feed_forward=32, context=512)
    repeats.fields["tokenizer.ggml.add_bos_token"] = True
    thinks = TEMPLATE.replace("{{ more }}", "<think>\n")
    models = {
        "model": repeats,
        "other": Small(seed=1),
        "thinks": Small(template=thinks),
        "floats": Small(quantization="F32"),
    }
    for name, small in models.items():
        write_model(folder / f"{name}.gguf", small)
    save_file({"some.weight": np.ones((32, 64), np.float32)}, folder / "unknown.safetensors")
    (folder / "text").write_text(TEXT)
    (folder / "other_text").write_text("xyz 12 " * 60)
    write_small_adapter(folder / "lora", repeats)
    world = World(folder, folder)
    bf.calibrate_checkpoint(
        **{name: value(world) if callable(value) else value for name, value in TEXTS.items()}
        | {"dst": folder / "statistics.safetensors", "progress": False}
    )
    arrays = {"0.weight": bf.quantize(gaussian((256, 256)), "q8_0"), "0.bias": np.zeros(256, np.float32)}
    arrays |= {"1.weight": gaussian((8, 256)), "1.bias": np.zeros(8, np.float32)}
    bf.save(arrays, folder / "one.safetensors", progress=False)
    bf.save(arrays | {"2.weight": np.zeros((8, 256), np.float32)}, folder / "several.safetensors", progress=False)
    stack = bf.quantize(gaussian((4, 32, 64)), "q8_0")
    bf.save({"blk.0.ffn_up_exps.weight": stack}, folder / "experts.gguf", raw_names=True, progress=False)
    return folder


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    """There is no GPU, and how much is drafted does not depend on measured times."""

    def device(ordinal: int = 0) -> Any:
        raise BackendUnavailable("cuda: no NVIDIA driver was found.")

    monkeypatch.setattr("billfish.backends.cuda.driver.device", device)
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)


def observe(row: Row, folder: Path, place: Path, changed: Mapping[str, Any]) -> dict[str, object]:
    """What a call returns or raises, what it says on a terminal, and the files that it leaves."""
    place.mkdir()
    world, found = World(folder, place), {}
    given = {**row.base, **changed}
    given.update(given.pop("options", {}))
    given = {name: value(world) if inspect.isfunction(value) else value for name, value in given.items()}
    words = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", words)
        patch.setattr(sys, "stdout", words)
        try:
            found["value"] = seen(row.call(world, **given))
        except (bf.BillfishError, ValueError) as error:
            found["value"] = type(error).__name__, str(error).replace(str(place), "")
            found["failed"] = True
    found["words"] = bool(words.getvalue())
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    found["files"] = {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).digest() for path in files}
    return found


@pytest.fixture(scope="module")
def without(folder, tmp_path_factory) -> Callable[[int], dict[str, object]]:
    """What is seen of a row's base. It is the same each time, so that a difference comes of an argument."""

    @functools.cache
    def seen_of(index: int) -> dict[str, object]:
        place = tmp_path_factory.mktemp("without")
        first, again = (observe(ROWS[index], folder, place / name, {}) for name in ("first", "again"))
        assert first == again
        return first

    return seen_of


CASES = [(index, name) for index, row in enumerate(ROWS) for name in row.changed]


@pytest.mark.parametrize(
    ("index", "name"), [pytest.param(i, name, id=f"{ROWS[i].of.__qualname__}-{name}-{i}") for i, name in CASES]
)
def test_an_argument_has_an_effect(index, name, folder, without, tmp_path):
    row, before = ROWS[index], without(index)
    given = observe(row, folder, tmp_path / "given", {name: row.changed[name]})
    assert before != given
    assert not (before.get("failed") and given.get("failed")), "both calls fail"


def optional(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty or p.name == "options"} - NAMES_CALLER


PUBLIC = [getattr(module, name) for module in (bf, bf.llm) for name in module.__all__]
FUNCTIONS = {function for function in PUBLIC if inspect.isfunction(function) and optional(function)}


@pytest.mark.parametrize("function", sorted(FUNCTIONS | {row.of for row in ROWS}, key=lambda each: each.__qualname__))
def test_the_table_has_every_optional_argument(function):
    known = {name for row in ROWS if row.of == function for name in row.changed}
    assert optional(function) - known == ELSEWHERE.get(function.__qualname__, set())
