"""What vLLM's layers get from the plug-in, in a vLLM that does nothing but hand them over (vllm_fake.py)."""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import vllm_fake
from checkpoint_folders import write_folder

import billfish as bf
from billfish.core.errors import BackendUnavailable, CheckpointError, FormatError, ShapeError
from billfish.nn import vllm as plugin

BLOCK = "model.layers.0"
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    vllm_fake.install(monkeypatch)
    monkeypatch.delenv("BILLFISH_ACTIVATIONS", raising=False)


def config_of(folder: Any, **settings: Any) -> Any:
    """The configuration that vLLM makes for a folder."""
    config = importlib.import_module("billfish.nn.vllm.quantization_config").BillfishConfig.from_config(settings)
    config.maybe_update_config(str(folder), type("Config", (), {"tie_word_embeddings": settings.get("tied", False)}))
    config.packed_modules_mapping = MERGED
    return config


def served(config: Any, layer: Any, path: str, columns: tuple[int, int], rows: list[int], all_rows: int) -> Any:
    """A layer that vLLM has loaded, with its method."""
    method = config.get_quant_method(layer, path)
    method.create_weights(layer, columns[0], rows, columns[1], all_rows, torch.float32, weight_loader=None)
    method.process_weights_after_loading(layer)
    return method


def test_registering_twice_is_once():
    plugin.register()
    plugin.register()
    assert [config.__name__ for config in vllm_fake.REGISTERED.values()] == ["BillfishConfig"]


def test_an_old_vllm_refuses_billfish_and_nothing_else(monkeypatch):
    vllm_fake.install(monkeypatch, "0.20.1")
    plugin.register()
    refusal = vllm_fake.REGISTERED["billfish"]
    assert refusal.override_quantization_method({}, "gptq") is None
    assert refusal.override_quantization_method({}, "billfish") == "billfish"
    with pytest.raises(BackendUnavailable, match=r"0.20.1.*0.32 or newer"):
        refusal.from_config({})


def test_a_newer_vllm_without_a_class_that_billfish_imports_says_so(monkeypatch):
    vllm_fake.install(monkeypatch, "0.99.0")
    monkeypatch.delattr(sys.modules["vllm.model_executor.models.utils"], "WeightsMapper")
    monkeypatch.delitem(sys.modules, "billfish.nn.vllm.quantization_config", raising=False)
    plugin.register()
    refusal = vllm_fake.REGISTERED["billfish"]
    assert refusal.override_quantization_method({}, "gptq") is None
    with pytest.raises(BackendUnavailable, match=r"0\.99\.0.*WeightsMapper.*vllm 0\.32"):
        refusal.from_config({})


def test_how_x_is_multiplied_is_said_by_config_json_or_the_environment(monkeypatch):
    make = importlib.import_module("billfish.nn.vllm.quantization_config").BillfishConfig.from_config
    assert make({"quant_method": "gptq"}).activations == "exact"
    assert make({"activations": "q16"}).activations == "q16"
    monkeypatch.setenv("BILLFISH_ACTIVATIONS", "q8")
    assert make({"activations": "q16"}).activations == "q8"
    monkeypatch.setenv("BILLFISH_ACTIVATIONS", "q4")
    with pytest.raises(FormatError, match=r"activations.*'q4'.*'exact' or 'q8' or 'q16'"):
        make({})


def test_a_configuration_goes_to_other_processes(tmp_path):
    write_folder(tmp_path, "gptq")
    config = config_of(tmp_path)
    assert pickle.loads(pickle.dumps(config)).matrices == config.matrices


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_merged_layer_of_two_ranks(tmp_path, act_order, rank):
    truth = write_folder(tmp_path, "gptq", act_order=act_order)
    layer = vllm_fake.QKVParallelLinear(rank)
    method = served(config_of(tmp_path), layer, f"{BLOCK}.self_attn.qkv_proj", (128, 128), [64, 32, 32], 256)
    w = np.concatenate([np.split(truth[f"{BLOCK}.self_attn.{p}.weight"], 2)[rank] for p in MERGED["qkv_proj"]])
    x, bias = torch.randn(3, 128), torch.randn(128)
    assert len(layer.billfish) == (3 if act_order else 1)  # columns of each part in an order of its own
    torch.testing.assert_close(method.apply(layer, x), x @ torch.from_numpy(w).T)
    torch.testing.assert_close(method.apply(layer, x, bias), x @ torch.from_numpy(w).T + bias)


def test_a_row_parallel_layer_of_two_ranks(tmp_path):
    truth, config = write_folder(tmp_path, "awq"), config_of(tmp_path)
    x, y = torch.randn(3, 384), []
    for rank in range(2):
        layer = vllm_fake.LinearBase(rank)
        method = served(config, layer, f"{BLOCK}.mlp.down_proj", (192, 384), [128], 128)
        y.append(method.apply(layer, x[:, rank * 192 : (rank + 1) * 192]))
    torch.testing.assert_close(y[0] + y[1], x @ torch.from_numpy(truth[f"{BLOCK}.mlp.down_proj.weight"]).T)


def test_what_a_rank_cannot_have_is_refused_before_anything_is_loaded(tmp_path):
    write_folder(tmp_path, "gptq")
    config, layer = config_of(tmp_path), vllm_fake.LinearBase(1)
    method = config.get_quant_method(layer, f"{BLOCK}.self_attn.o_proj")
    with pytest.raises(ShapeError, match=r"multiples of 32.* 1, 2, 4 ranks"):
        method.create_weights(layer, 16, [128], 128, 128, torch.float32)


def test_vllm_loads_all_but_the_arrays_of_quantized_matrices(tmp_path):
    write_folder(tmp_path, "compressed-tensors")
    config = config_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"no layer.*u4 matrix.*down_proj.*13 others"):
        config.get_checkpoint_weight_mapper()
    for i in range(2):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            config.get_quant_method(vllm_fake.LinearBase(), f"model.layers.{i}.{name}")
    mapper = config.get_checkpoint_weight_mapper()
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        loaded = {name for name in file.keys() if mapper.keeps(name)}  # noqa: SIM118
    assert len(loaded) == 7
    assert all("norm" in name or name in ("lm_head.weight", "model.embed_tokens.weight") for name in loaded)


def test_layers_that_predict_further_tokens_may_be_left_out():
    is_beyond = importlib.import_module("billfish.nn.vllm.quantization_config").is_beyond
    assert [is_beyond(f"model.layers.{i}.mlp.down_proj", 2) for i in range(4)] == [False, False, True, True]
    assert is_beyond("mtp.layers.0.mlp.down_proj", 2)
    assert not is_beyond("model.layers.5.mlp.down_proj", 0)  # of a model that does not say how many it has


def test_a_layer_of_plain_numbers_is_left_to_vllm(tmp_path):
    write_folder(tmp_path, "gptq")
    config = config_of(tmp_path)
    assert type(config.get_quant_method(vllm_fake.LinearBase(), "other")).__name__ == "UnquantizedLinearMethod"
    assert config.get_quant_method(vllm_fake.ParallelLMHead(0, 96, 128, 128), "lm_head") is None
    assert config.get_quant_method(torch.nn.LayerNorm(4), "norm") is None


def test_a_tied_head_is_the_embedding(tmp_path):
    rng = np.random.default_rng(0)
    table = bf.quantize(rng.standard_normal((96, 64)).astype(np.float32), "q8_0")
    bf.save({"model.embed_tokens.weight": table}, tmp_path / "folder", progress=False)
    config = config_of(tmp_path / "folder", tied=True, activations="q8")
    embedding, head = vllm_fake.VocabParallelEmbedding(64, 96, 64, 64), vllm_fake.ParallelLMHead(64, 96, 64, 64)
    embedding.quant_method = config.get_quant_method(embedding, "model.embed_tokens")
    head.quant_method = config.get_quant_method(head, "lm_head")
    for layer in (embedding, head):
        layer.quant_method.create_weights(layer, 64, [64], 64, 128, torch.float32)
    assert head.quant_method.tie_weights(head, embedding) is embedding
    embedding.quant_method.process_weights_after_loading(embedding)
    rows = torch.from_numpy(bf.dequantize(table))[64:]
    assert torch.equal(embedding.quant_method.embedding(embedding, torch.tensor([0, 31])), rows[[0, 31]])
    x = torch.randn(2, 64)
    logits = embedding.quant_method.apply(embedding, x)
    assert logits.shape == (2, 64)
    assert embedding.billfish[0].activations == "q16"  # eight bits cost most before the head
    torch.testing.assert_close(logits[:, :32], x @ rows.T, rtol=1e-3, atol=1e-3)
    assert not logits[:, 32:].any()


def test_a_head_of_its_own_stays_whatever_the_configuration_says(tmp_path):
    rng = np.random.default_rng(0)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    matrices = {name: bf.quantize(rng.standard_normal((96, 64)).astype(np.float32), "q8_0") for name in names}
    bf.save(matrices, tmp_path / "folder", progress=False)
    config = config_of(tmp_path / "folder", tied=True)
    embedding, head = vllm_fake.VocabParallelEmbedding(0, 96, 128, 64), vllm_fake.ParallelLMHead(0, 96, 128, 64)
    embedding.quant_method = config.get_quant_method(embedding, "model.embed_tokens")
    assert config.get_quant_method(head, "lm_head").tie_weights(head, embedding) is head


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_folder(path: Any, count: int = 4) -> dict[str, bf.QuantizedTensor]:
    """A folder with the experts of one layer, one by one: gate and up [64, 32], down [32, 64]."""
    rng = np.random.default_rng(2)
    shapes = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
    tensors = {
        f"{BLOCK}.mlp.experts.{e}.{name}.weight": bf.quantize(rng.standard_normal(shape).astype(np.float32), "q4_0")
        for e in range(count)
        for name, shape in shapes.items()
    }
    bf.save(tensors, path, progress=False)
    return tensors


def expected(tensors: dict[str, bf.QuantizedTensor], x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor) -> Any:
    """y of experts in numbers."""
    y = torch.zeros_like(x)
    for t, j in np.ndindex(*ids.shape):
        path = f"{BLOCK}.mlp.experts.{int(ids[t, j])}"
        gate, up, down = (
            torch.from_numpy(bf.dequantize(tensors[f"{path}.{part}_proj.weight"])) for part in ("gate", "up", "down")
        )
        y[t] += routing[t, j] * (down @ (torch.nn.functional.silu(gate @ x[t]) * (up @ x[t])))
    return y


def test_the_experts_of_two_ranks(tmp_path):
    tensors = experts_folder(tmp_path / "folder")
    config = config_of(tmp_path / "folder")
    x, ids, routing = torch.randn(5, 32), torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [1, 3]]), torch.rand(5, 2)
    shared = torch.zeros_like(x)
    for rank in range(2):  # half of the rows of gate and up, and of the columns of down
        layer = vllm_fake.RoutedExperts(4, rank)
        method = config.get_quant_method(layer, f"{BLOCK}.mlp.experts.routed_experts")
        method.create_weights(layer, 4, 32, 32)
        method.process_weights_after_loading(layer)
        shared += method.apply(layer, x, routing, ids, None, None)
    torch.testing.assert_close(shared, expected(tensors, x, ids, routing), rtol=1e-4, atol=1e-4)
    own = torch.zeros_like(x)
    for rank in range(2):  # two experts each
        places = torch.tensor([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1])
        layer = vllm_fake.RoutedExperts(4, expert_map=places)
        method = config.get_quant_method(layer, f"{BLOCK}.mlp.experts.routed_experts")
        method.create_weights(layer, 2, 32, 64)
        method.process_weights_after_loading(layer)
        own += method.apply(layer, x, routing, ids, None, None)
    torch.testing.assert_close(own, expected(tensors, x, ids, routing), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_rows_that_nobody_has_written_are_rows_of_nan(tmp_path, wrong):
    """vLLM runs such rows before it serves."""
    tensors = experts_folder(tmp_path / "folder")
    layer = vllm_fake.RoutedExperts(4)
    method = config_of(tmp_path / "folder").get_quant_method(layer, f"{BLOCK}.mlp.experts.routed_experts")
    method.create_weights(layer, 4, 32, 64)
    method.process_weights_after_loading(layer)
    x, ids, routing = torch.randn(3, 32), torch.tensor([[0, 3], [1, 2], [3, 1]]), torch.rand(3, 2)
    right = expected(tensors, x, ids, routing)
    routing[1, 0] = wrong
    y = method.apply(layer, x, routing, ids, None, None)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[::2], right[::2], rtol=1e-4, atol=1e-4)


def test_experts_that_are_refused(tmp_path):
    experts_folder(tmp_path / "folder")
    config, path = config_of(tmp_path / "folder"), f"{BLOCK}.mlp.experts"
    with pytest.raises(FormatError, match=r"the activation 'swigluoai'.*silu or gelu_tanh"):
        config.get_quant_method(vllm_fake.RoutedExperts(4, activation="swigluoai"), path)
    assert config.get_quant_method(vllm_fake.RoutedExperts(4), "another.experts") is None
    layer = vllm_fake.RoutedExperts(4, expert_map=torch.tensor([0, -1, 1, -1]))
    method = config.get_quant_method(layer, path)
    method.create_weights(layer, 2, 32, 64)
    with pytest.raises(FormatError, match=r"experts \[0, 2\].*linear"):
        method.process_weights_after_loading(layer)
    with pytest.raises(ShapeError, match=r"columns 0 and 16 of 64.*multiples of 32"):
        method.create_weights(layer, 4, 32, 16)
    del config.matrices[f"{path}.up_proj"]
    with pytest.raises(FormatError, match=r"up_proj is not quantized"):
        config.get_quant_method(vllm_fake.RoutedExperts(4), path)
