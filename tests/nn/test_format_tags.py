"""A state dict says its format: what is in another one does not load, in torch and in MLX, whatever carries it."""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import accelerate
import mlx.core as mx
import mlx.nn
import mlx.optimizers
import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_folders import write_folder
from common import assert_same_bits, gaussian
from mlx.utils import tree_flatten, tree_map
from nn_frameworks import MLX, TORCH, Framework
from transformers import AutoModelForCausalLM

import billfish as bf
from billfish.core.format_tag import ABOUT, About
from billfish.nn.transformers import BillfishConfig

BOTH = pytest.mark.parametrize("framework", [TORCH, MLX], ids=lambda f: f.name)


REFUSED = r"about.*u4b8, group_size=32.*fp4, group_size=32"


def make(framework: Framework, format: str, seed: int = 0, **settings: Any) -> Any:
    tensor = bf.quantize(gaussian((16, 64), seed), format, **settings)
    return framework.ours.MarlinLinear.from_quantized(tensor, framework.array(gaussian((16,), seed + 1)))


def save(framework: Framework, module: Any, path: str) -> None:
    if framework is TORCH:
        safetensors.torch.save_file(module.state_dict(), path)
    else:
        mx.save_safetensors(path, dict(tree_flatten(module.parameters())))


def load(framework: Framework, module: Any, path: str, strict: bool = True) -> None:
    if framework is TORCH:
        module.load_state_dict(safetensors.torch.load_file(path), strict)
    else:
        module.load_weights(path, strict)


def bits(framework: Framework, layer: Any) -> dict[str, bytes]:
    return {
        name: framework.arrays.to_numpy(array.detach() if framework is TORCH else array).tobytes()
        for name, array in framework.parameters(layer).items()
    }


@BOTH
@pytest.mark.parametrize("writer", [TORCH, MLX], ids=lambda f: f"from {f.name}")
@pytest.mark.parametrize(("ours", "theirs"), [("fp4", "u4b8"), ("q4_0", "iq4_nl")])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("in_a_model", [False, True])
def test_another_format_is_refused_and_changes_nothing(framework, writer, ours, theirs, strict, in_a_model, tmp_path):
    path = str(tmp_path / "layer.safetensors")
    layer, wrong, right = make(framework, ours), make(writer, theirs, 2), make(writer, ours, 4)
    module: Any = layer
    if in_a_model:
        (module, wrong, right) = (f.linear(1, 1) for f in (framework, writer, writer))
        module.inner, wrong.inner, right.inner = layer, make(writer, theirs, 2), make(writer, ours, 4)
    x = framework.array(gaussian((3, 64), 9))
    y, before = framework.numpy(layer(x)), bits(framework, layer)
    save(writer, wrong, path)
    with pytest.raises(Exception, match=rf"{theirs}, .*{ours}, ") as caught:
        load(framework, module, path, strict)
    assert isinstance(caught.value, RuntimeError if framework is TORCH else bf.FormatError)
    assert bits(framework, layer) == before
    assert_same_bits(framework.numpy(layer(x)), y)
    save(writer, right, path)
    load(framework, module, path, strict)
    fresh = right.inner if in_a_model else right
    for name, array in fresh.quantized().storage.items():
        assert_same_bits(layer.quantized().storage[name], array)


@BOTH
def test_another_group_size_is_refused(framework, tmp_path):
    """nvfp4 and others have one group size; here it shows in no shape, as both have one group."""
    path = str(tmp_path / "layer.safetensors")
    layer, wrong = (
        framework.ours.MarlinLinear.from_quantized(bf.quantize(gaussian((8, 32)), "u4b8", group_size=g))
        for g in (64, 128)
    )
    save(framework, wrong, path)
    with pytest.raises(Exception, match=r"u4b8, group_size=128.*u4b8, group_size=64"):
        load(framework, layer, path)


@BOTH
def test_a_dict_that_says_nothing_loads_as_before(framework, tmp_path):
    layer, other = make(framework, "fp4"), make(framework, "fp4", 2)
    state = {name: array for name, array in framework.parameters(other).items() if name != ABOUT}
    if framework is TORCH:
        layer.load_state_dict(state)
    else:
        layer.load_weights(list(state.items()))
    assert bits(framework, layer) == bits(framework, other)


@BOTH
@pytest.mark.parametrize(
    "damaged", [b"", b"[]", b"{}", b'{"format": 4, "group_size": 32}', b'{"format": "fp4"}', b"\xff" * 64]
)
def test_bytes_that_say_no_format_are_refused(framework, damaged):
    layer = make(framework, "fp4")
    about = framework.arrays.from_numpy(np.frombuffer(damaged, np.uint8).copy())
    state = {**framework.parameters(layer), ABOUT: about}
    message = r'about.*uint8 .*JSON in uint8, such as {"format'
    with pytest.raises((RuntimeError, bf.FormatError), match=message):
        layer.load_state_dict(state) if framework is TORCH else layer.load_weights(list(state.items()), strict=False)


@BOTH
@pytest.mark.parametrize("writer", [TORCH, MLX], ids=lambda f: f"from {f.name}")
def test_a_state_dict_is_a_checkpoint(framework, writer, tmp_path):
    """bf.load reads the file of a model, and of one layer, without a config.json."""
    path = str(tmp_path / "state.safetensors")
    model = writer.linear(1, 1)
    model.a, model.b = make(writer, "fp4", group_size=16), make(writer, "nvfp4", 2)
    save(writer, model, path)
    checkpoint = bf.load(path)
    assert set(checkpoint) == {"weight", "bias", "a.weight", "a.bias", "b.weight", "b.bias"}
    for name, layer in (("a", model.a), ("b", model.b)):
        tensor, about = checkpoint[f"{name}.weight"], checkpoint.describe(f"{name}.weight")
        assert (about.format.name, about.group_size) == (layer.format, layer.group_size)
        assert about.nbytes == tensor.nbytes
        assert_same_bits(bf.dequantize(tensor), bf.dequantize(layer.quantized()))
    save(writer, model.a, path)
    assert set(bf.load(path)) == {"weight", "bias"}
    assert_same_bits(bf.dequantize(bf.load(path)["weight"]), bf.dequantize(model.a.quantized()))
    again = framework.linear(64, 16)
    holder = framework.linear(1, 1)
    holder.a = again
    save(writer, model, path)
    bf.load_into(holder, path, strict=False)
    assert_same_bits(bf.dequantize(holder.a.quantized()), bf.dequantize(model.a.quantized()))


def test_a_damaged_about_in_a_file_is_an_error(tmp_path):
    state = {**make(TORCH, "fp4").state_dict(), ABOUT: torch.zeros(64, dtype=torch.uint8)}
    safetensors.torch.save_file(state, tmp_path / "state.safetensors")
    with pytest.raises(bf.CheckpointError, match=r"about.*JSON"):
        bf.load(tmp_path / "state.safetensors")


def test_long_names_of_formats_fit():
    said = About("a_format_of_somebody_else_with_a_very_long_name_indeed", 128)
    assert len(said.array()) == 128
    assert About.read("load", said.array()) == said
    assert {len(About(name, 128).array()) for name in bf.FORMATS} == {64}


# ---- torch: everything that carries or copies state ------------------------------------------------------------------


def says(layer: Any) -> str:
    return json.loads(layer.state_dict()[ABOUT].numpy().tobytes())["format"]


def test_assign_and_meta():
    wrong, right = make(TORCH, "u4b8").state_dict(), make(TORCH, "fp4", 2).state_dict()
    silent = {name: tensor for name, tensor in right.items() if name != ABOUT}
    for state in (right, silent):
        layer = bf.nn.torch.MarlinLinear(64, 16, format="fp4", device="meta")
        assert layer.about.is_meta
        with pytest.raises(RuntimeError, match=REFUSED):
            layer.load_state_dict(wrong, assign=True)
        assert layer.packed.is_meta
        layer.load_state_dict(state, assign=True)
        assert says(layer) == "fp4"
        assert torch.equal(layer.packed, right["packed"])


def test_to_empty_and_other_devices():
    layer = bf.nn.torch.MarlinLinear(64, 16, format="fp4", device="meta").to_empty(device="cpu")
    assert says(layer) == "fp4"
    assert layer.to("meta").about.is_meta
    assert says(make(TORCH, "fp4").half()) == "fp4"


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "with_bias"])
def test_copies(way):
    layer = make(TORCH, "u4b8")
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save(layer.state_dict(), buffer)
        buffer.seek(0)
        with pytest.raises(RuntimeError, match=REFUSED):
            make(TORCH, "fp4").load_state_dict(torch.load(buffer))
        return
    ways = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
        "with_bias": lambda layer: layer.with_bias(None),
    }
    twin = ways[way](layer)
    assert says(twin) == "u4b8"
    assert twin.about.data_ptr() != layer.about.data_ptr()


def test_inference_mode():
    with torch.inference_mode():
        layer = make(TORCH, "fp4")
        with pytest.raises(RuntimeError, match=REFUSED):
            layer.load_state_dict(make(TORCH, "u4b8").state_dict())
        layer.load_state_dict(make(TORCH, "fp4", 2).state_dict())
    assert says(layer) == "fp4"


def test_arrays_are_not_put_in_by_hand():
    """They would change nothing: all of them come together, by set_storage or a state dict."""
    layer, other = make(TORCH, "fp4"), make(TORCH, "fp4", 2)
    with pytest.raises(bf.DTypeError, match="set_storage"):
        layer.scales = other.scales
    layer.set_storage(other.storage())
    assert bits(TORCH, layer)["scales"] == bits(TORCH, other)["scales"]


def test_accelerate_loads_into_empty_layers(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self, format: str) -> None:
            super().__init__()
            self.inner = bf.nn.torch.MarlinLinear(64, 16, format=format)

        def forward(self, x):
            return self.inner(x)

    model = Model("fp4")
    model.inner.load_state_dict(make(TORCH, "fp4").state_dict())
    accelerate.Accelerator().save_model(model, tmp_path)
    for format in ("fp4", "u4b8"):
        with accelerate.init_empty_weights(include_buffers=True):
            empty = Model(format)
        if format == "fp4":
            loaded = accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}, strict=True)
            assert torch.equal(loaded(torch.ones(1, 64)), model(torch.ones(1, 64)))
        else:
            with pytest.raises(bf.FormatError, match=r"fp4, group_size=32.*u4b8"):
                accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}, strict=True)


def test_transformers_finds_nothing_missing(tmp_path):
    write_folder(tmp_path / "in", "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=BillfishConfig("fp4"))
    model.save_pretrained(tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    state = safetensors.torch.load_file(file)
    assert "model.layers.0.mlp.up_proj.about" in state
    silent = {name: tensor for name, tensor in state.items() if not name.endswith(ABOUT)}
    for given in (state, silent):
        safetensors.torch.save_file(given, file, {"format": "pt"})
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values())
        assert says(again.model.layers[0].mlp.up_proj) == "fp4"
        assert torch.equal(again(torch.tensor([[1, 5]])).logits, model(torch.tensor([[1, 5]])).logits)
    # config.json may say something else: the arrays know better.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"] |= {"format": "u4b8", "modules": {}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, file, {"format": "pt"})
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].mlp.up_proj.format == "fp4"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_compilers_leave_it_alone():
    torch.compiler.reset()
    model, x = torch.nn.Sequential(make(TORCH, "fp4")), torch.from_numpy(gaussian((3, 64)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled.load_state_dict({f"_orig_mod.0.{n}": t for n, t in make(TORCH, "u4b8").state_dict().items()})


def test_distributed_state_dicts():
    """torch.distributed.checkpoint looks every key up in the model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, other = torch.nn.Sequential(make(TORCH, "fp4")), torch.nn.Sequential(make(TORCH, "u4b8"))
    state = get_model_state_dict(model)
    assert "0.about" in state
    set_model_state_dict(model, state)
    with pytest.raises(RuntimeError, match=REFUSED):
        set_model_state_dict(model, get_model_state_dict(other))


# ---- MLX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("used", [False, True])
def test_mlx_hands_over_array_by_array(place, used):
    """Wherever `about` comes among them, a refused load leaves what the layer had, also right after another load."""
    layer, right, wrong = make(MLX, "fp4"), make(MLX, "fp4", 2), make(MLX, "u4b8", 4)
    model = mlx.nn.Sequential(layer)
    x = mx.array(gaussian((3, 64), 9))

    def ordered(source: Any) -> list[tuple[str, mx.array]]:
        arrays = list(source.parameters().items())
        about = next(pair for pair in arrays if pair[0] == ABOUT)
        arrays.remove(about)
        arrays.insert(place, about)
        return [(f"layers.0.{name}", array) for name, array in arrays]

    model.load_weights(ordered(right))
    if used:
        layer(x)
    with pytest.raises(bf.FormatError, match=REFUSED):
        model.load_weights(ordered(wrong))
    assert bits(MLX, layer) == bits(MLX, right)
    assert_same_bits(np.array(layer(x)), np.array(right(x)))


def test_trees_optimizers_and_compiled_functions():
    model = mlx.nn.Sequential(make(MLX, "fp4"), mlx.nn.Linear(16, 4))
    model.update(tree_map(lambda array: mx.array(np.array(array)), model.parameters()))
    x = mx.array(gaussian((3, 64)))
    optimizer = mlx.optimizers.Adam(learning_rate=0.001)
    step = mlx.nn.value_and_grad(model, lambda model, x: (model(x) ** 2).sum())
    before, (first, gradients) = bits(MLX, model.layers[0]), step(model, x)
    optimizer.update(model, gradients)
    assert step(model, x)[0].item() < first.item()
    assert bits(MLX, model.layers[0]) == before
    compiled = mx.compile(lambda x: model(x), inputs=model.state)
    np.testing.assert_allclose(np.array(compiled(x)), np.array(model(x)), rtol=1e-5, atol=1e-5)
    assert copy.deepcopy(model).layers[0][ABOUT].tolist() == model.layers[0][ABOUT].tolist()
