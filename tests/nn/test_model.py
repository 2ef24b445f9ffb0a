"""quantize_model: what it replaces, what it leaves and says why, and that ties hold."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
import pytest
import torch
from common import gaussian

import billfish as bf


class TorchBlock(torch.nn.Module):
    def __init__(self, k: int = 64) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(k, 2 * k, bias=False), torch.nn.Linear(2 * k, k)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class TorchModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 64)
        self.blocks = torch.nn.ModuleList([TorchBlock(), TorchBlock()])
        self.head = torch.nn.Linear(64, 40, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class MlxBlock(mlx.nn.Module):
    def __init__(self, k: int = 64) -> None:
        super().__init__()
        self.up, self.down = mlx.nn.Linear(k, 2 * k, bias=False), mlx.nn.Linear(2 * k, k)

    def __call__(self, x):
        return self.down(mx.maximum(self.up(x), 0))


class MlxModel(mlx.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = mlx.nn.Embedding(40, 64)
        self.blocks = [MlxBlock(), MlxBlock()]
        self.head = mlx.nn.Linear(64, 40, bias=False)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


BOTH = pytest.mark.parametrize("make", [TorchModel, MlxModel])
PATHS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
EMBEDDING = {"embedding": "an Embedding has no quantized form"}
WEIGHTS = [128 * 64, 64 * 128, 128 * 64, 64 * 128, 40 * 64]


def tokens_for(make):
    return torch.tensor([[1, 2, 3]]) if make is TorchModel else mx.array([[1, 2, 3]])


@BOTH
def test_every_linear_is_replaced_and_reported(make):
    model = make()
    plain = model(tokens_for(make))
    report = bf.quantize_model(model, "fp4", group_size=32, method="mse")
    assert sorted(layer.path for layer in report.replaced) == sorted(PATHS)
    assert report.left == EMBEDDING
    assert report.bytes_before == 4 * sum(WEIGHTS)
    assert report.bytes_after == sum(WEIGHTS) * (4 + 16 / 32) / 8
    assert report.bytes_saved == report.bytes_before - report.bytes_after
    assert "fp4, group_size=32: 5 layers, 0.1 MB -> 0.0 MB" in str(report)
    assert f"saved {report.bytes_saved / 1e6:.1f} MB" in str(report)
    for layer in (model.blocks[0].up, model.blocks[1].down, model.head):
        assert isinstance(layer, bf.MarlinLinear)
    y = model(tokens_for(make))
    assert abs(y - plain).mean().item() < 0.15 * abs(plain).mean().item()


@BOTH
def test_the_predicate_chooses_layers_and_settings(make):
    model = make()
    report = bf.quantize_model(
        model,
        "q4_0",
        predicate=lambda path, _: {"format": "q8_0", "activations": "q8"} if "down" in path else path != "head",
        progress=False,
    )
    assert {layer.path: layer.format for layer in report.replaced} == {
        "blocks.0.up": "q4_0",
        "blocks.0.down": "q8_0",
        "blocks.1.up": "q4_0",
        "blocks.1.down": "q8_0",
    }
    assert report.left == {"head": "the predicate says so", **EMBEDDING}
    assert model.blocks[0].down.activations == "q8"
    assert "left head: the predicate says so" in str(report)
    assert "q8_0, group_size=32: 2 layers" in str(report)


@BOTH
def test_what_a_format_cannot_store_is_left(make):
    model = make()
    report = bf.quantize_model(model, "q4_k")
    assert report.replaced == []
    assert report.left["head"] == "quantize_model: K is 64; expected a positive multiple of 256 for q4_k."
    assert type(model.head).__name__ == "Linear"


@BOTH
def test_nothing_changes_where_the_settings_are_wrong(make):
    model = make()
    for settings in ({"format": "fp5"}, {"group_size": 7}, {"predicate": lambda path, layer: None}):
        with pytest.raises(bf.BillfishError):
            bf.quantize_model(model, **settings)
    assert bf.quantize_model(model, predicate=lambda path, layer: False).left.keys() == {*PATHS, "embedding"}


@BOTH
def test_settings_belong_to_the_format_that_they_are_given_with(make):
    """The docstring's own predicate, beside a group size and an option that q8_0 does not have."""
    model = make()
    report = bf.quantize_model(
        model,
        "u4",
        group_size=64,
        zero_point="fractional",
        method="mse",
        predicate=lambda path, _: (
            {"format": "q8_0"} if "down" in path else {"group_size": 32} if "up" in path else True
        ),
    )
    assert {(layer.path.rpartition(".")[2], layer.format, layer.group_size) for layer in report.replaced} == {
        ("down", "q8_0", 32),
        ("up", "u4", 32),
        ("head", "u4", 64),
    }
    assert bf.dequantize(model.head.quantized()).shape == (40, 64)
    fractional = bf.quantize(gaussian((8, 64)), "u4", zero_point="fractional").storage["zeros"].dtype
    assert model.head.quantized().storage["zeros"].dtype == fractional
    report = bf.quantize_model(
        make(), "q8_0", predicate=lambda *_: {"format": "u4", "group_size": 128, "zero_point": "fractional"}
    )
    assert {(layer.format, layer.group_size) for layer in report.replaced} == {("u4", 128)}


@BOTH
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "best"},
        {"activations": "int8"},
        {"format": "q4_0", "zero_point": "fractional"},
        {"format": "u4", "zero_point": "odd"},
        {"predicate": lambda path, _: {"method": "best"} if path == "head" else True},
        {"predicate": lambda path, _: {"activations": "int8"} if path == "head" else True},
        {"predicate": lambda path, _: {"group_size": 7} if path == "head" else True},
        {"predicate": lambda path, _: {"format": "q8_0", "zero_point": "integer"} if path == "head" else True},
        {"predicate": lambda path, _: {"colour": "red"} if path == "head" else True},
    ],
)
def test_everything_is_checked_before_the_first_layer_is_replaced(make, settings):
    model = make()
    with pytest.raises(bf.FormatError, match="quantize_model"):
        bf.quantize_model(model, **settings)
    assert type(model.blocks[0].up).__name__ == type(model.head).__name__ == "Linear"


@BOTH
def test_weights_that_cannot_be_quantized_leave_the_model_as_it_was(make):
    model = make()
    model.head.weight = (
        model.head.weight * float("nan") if make is MlxModel else torch.nn.Parameter(model.head.weight * float("nan"))
    )
    with pytest.raises(bf.DataError, match=r"w.*nan at row 0, k 0"):
        bf.quantize_model(model, "q4_0")
    assert type(model.blocks[0].up).__name__ == "Linear"


@BOTH
def test_tied_linears_share_one_quantized_weight(make):
    model = make()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    report = bf.quantize_model(model, "u4b8")
    first, second = model.blocks[0].up, model.blocks[1].up
    assert first is not second
    assert first.weights_identity == second.weights_identity
    assert report.bytes_before == 4 * (sum(WEIGHTS) - 128 * 64)
    assert model(tokens_for(make)).shape == (1, 3, 40)


@BOTH
def test_an_output_layer_tied_to_the_embedding_stays(make):
    model = make()
    model.head.weight = model.embedding.weight
    report = bf.quantize_model(model, "u4b8")
    assert report.left == {"head": "its weight is also that of embedding.weight, which stays", **EMBEDDING}
    assert model.head.weight is model.embedding.weight


@BOTH
def test_a_tie_to_a_linear_that_stays_holds(make):
    model = make()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    report = bf.quantize_model(model, "u4b8", predicate=lambda path, _: path != "blocks.1.up")
    assert report.left["blocks.0.up"] == "its weight is also that of blocks.1.up, which stays"
    assert model.blocks[1].up.weight is model.blocks[0].up.weight


@BOTH
def test_one_module_in_two_places_stays_one(make):
    model = make()
    model.blocks[1].down = model.blocks[0].down
    report = bf.quantize_model(model, "u4b8")
    assert model.blocks[1].down is model.blocks[0].down
    assert isinstance(model.blocks[0].down, bf.MarlinLinear)
    assert len([layer for layer in report.replaced if layer.path.endswith("down")]) == 1


def test_subclasses_of_linear_are_left():
    """MultiheadAttention reads the weight of its out_proj itself, so that must stay a Linear."""
    model = torch.nn.MultiheadAttention(64, 4)
    report = bf.quantize_model(model, "q4_0")
    assert report.left == {
        "out_proj": "it is a NonDynamicallyQuantizableLinear, which may do more than a Linear",
        "": "a MultiheadAttention has no quantized form",
    }
    x = torch.from_numpy(gaussian((3, 1, 64)))
    assert model(x, x, x)[0].shape == (3, 1, 64)


def test_training_mode_and_device_are_kept():
    model = TorchModel().eval()
    bf.quantize_model(model, "q4_0")
    assert not model.head.training


def test_other_objects_are_refused():
    with pytest.raises(bf.DTypeError, match=r"module.*dict"):
        bf.quantize_model({})
    for layer in (torch.nn.Linear(64, 8), mlx.nn.Linear(64, 8)):
        with pytest.raises(bf.DTypeError, match=r"model.*Linear.*model with Linear layers"):
            bf.quantize_model(layer)
