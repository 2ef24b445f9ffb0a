"""What the processes of test_parallel.py do. Each check compares with what one process computes alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import expert_models
import numpy as np
import safetensors.numpy
import torch
import torch.distributed
from checkpoint_folders import write_folder, write_gguf
from common import gaussian
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import billfish as bf
from billfish.nn.parallel import ParallelExperts, Share, cut, parallel_layer
from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.torch.linear import MarlinLinear
from billfish.nn.torch.weights import to_torch
from billfish.nn.transformers import load_model

# format, group size, act-order. Some cut unevenly: five groups of 64, or five blocks of a k-quant.
CASES = [
    ("u4b8", 32, False),
    ("u4", 64, False),
    ("u4", 64, True),
    ("fp4", -1, False),
    ("nvfp4", 16, False),
    ("q4_0", 32, False),
    ("q4_k", 32, False),
]


def run(rank: int, ranks: int, folder: Path) -> None:
    """One process: joins the others, then makes all checks."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        layers(mesh, folder)
        llama(mesh, folder)
        if ranks == 2:  # small models: heads, and groups of 32, for no more
            experts(mesh, folder)
            data_parallel(mesh)
    finally:
        torch.distributed.destroy_process_group()


def write_pair(path: Path, format: str, group_size: int, act_order: bool) -> None:
    """Two layers with biases, in our own layout: up [K, 256] and down [64, K]."""
    k = 1280 if format == "q4_k" else 320
    arrays, modules = {}, {}
    for name, shape in (("up", (k, 256)), ("down", (64, k))):
        tensor = bf.quantize(gaussian(shape) / np.float32(16), format, group_size=group_size)
        arrays |= {f"{name}.{part}": array for part, array in tensor.storage.items()}
        arrays[f"{name}.bias"] = gaussian(shape[:1], 1)
        modules[name] = {"format": format, "group_size": group_size}
        if act_order:
            arrays[f"{name}.permutation"] = np.random.default_rng(5).permutation(shape[1]).astype(np.int32)
    safetensors.numpy.save_file(arrays, path, {"billfish": json.dumps({"modules": modules})})


def whole_layer(weights: bf.Checkpoint, path: str) -> MarlinLinear:
    tensor = weights[f"{path}.weight"]
    assert isinstance(tensor, bf.QuantizedTensor)
    return MarlinLinear.from_quantized(tensor, to_torch(np.array(weights[f"{path}.bias"])))


def layers(mesh: DeviceMesh, folder: Path) -> None:
    """Column-parallel into row-parallel equals the two whole layers: values within the contract, and gradients."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for format, group_size, act_order in CASES:
        path = folder / f"{format}-{group_size}-{act_order}.safetensors"
        if rank == 0:
            write_pair(path, format, group_size, act_order)
        torch.distributed.barrier()
        weights = bf.load(path)
        k = weights.describe("down.weight").shape[1]
        if act_order:  # features anywhere, stored columns where groups end
            features = cut(k, 1, ranks, "features")
            columns = cut(k, weights.describe("down.weight").column_step, ranks, "columns")
        else:
            features = columns = cut(k, weights.describe("down.weight").column_step, ranks, "columns")
        sizes = tuple(b - a for a, b in features)
        up = parallel_layer(weights, "up", Share("column", features[rank], sizes), mesh)
        down = parallel_layer(weights, "down", Share("row", columns[rank], sizes), mesh)
        assert up.out_features == sizes[rank]
        assert down.in_features == columns[rank][1] - columns[rank][0]
        whole_up, whole_down = whole_layer(weights, "up"), whole_layer(weights, "down")
        for dtype in (torch.float32, torch.float16):
            x = torch.from_numpy(gaussian((3, 5, 256), 2)).to(dtype)
            inner = whole_up(x)
            mine = up(x)
            assert torch.equal(mine, inner[..., slice(*features[rank])]), "rows do not depend on each other"
            within_contract(down(mine), inner, whole_down)
        both_gradients(x.float(), (up, down), (whole_up, whole_down))
        gathering = parallel_layer(weights, "up", Share("column", features[rank], sizes, gather_output=True), mesh)
        assert torch.equal(gathering(x), whole_up(x))


def within_contract(y: torch.Tensor, x: torch.Tensor, whole: MarlinLinear) -> None:
    """No further from the exact product than twice what a dense product of the same types is."""
    plain = whole.to_linear()
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    dense = torch.nn.functional.linear(x, plain.weight.to(x.dtype), plain.bias.to(x.dtype))
    # The dense product may be lucky: float32 sums of another order are off by about eps times the sum of magnitudes.
    lucky = torch.finfo(torch.float32).eps * (x.double().abs() @ plain.weight.double().abs().T).max() / 3
    allowed = 2 * max((dense.double() - exact).abs().max(), lucky)
    assert (y.double() - exact).abs().max() <= allowed, (float((y - exact).abs().max()), float(allowed))
    assert y.dtype == x.dtype


def both_gradients(x: torch.Tensor, *pairs: tuple[MarlinLinear, MarlinLinear]) -> None:
    gradients = []
    for up, down in pairs:
        leaf = x.clone().requires_grad_()
        down(torch.relu(up(leaf))).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def experts(mesh: DeviceMesh, folder: Path) -> None:
    """Models with experts: logits and gradients of one process, from some rows of gate and up, some columns of down."""
    for name in ("mixtral", "gpt_oss"):
        path = folder / name
        if mesh.get_local_rank() == 0:
            expert_models.random_model(name).save_pretrained(folder / f"{name}-plain")
            bf.quantize_checkpoint(folder / f"{name}-plain", path, format="q8_0", progress=False)
        torch.distributed.barrier()
        model, whole = load_model(path, mesh=mesh).eval(), load_model(path).eval()
        blocks = [module for module in model.modules() if isinstance(module, ParallelExperts)]
        assert len(blocks) == 2
        assert sum(b.storage_bytes for b in blocks) * 3 <= 2 * storage_of_experts(whole)
        expert_models.assert_near(expert_models.logits(model), expert_models.logits(whole))
        gradients = []
        for each in (model, whole):
            x = torch.from_numpy(gaussian((1, 5, 64), 4)).requires_grad_()
            each(inputs_embeds=x).logits.square().sum().backward()
            gradients.append(x.grad)
        expert_models.assert_near(*gradients, tolerance=1e-4)


class Wrapped(torch.nn.Module):
    """Quantized layers with biases: a linear layer between norms, then experts that all see a token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = MarlinLinear.from_linear(torch.nn.Linear(64, 96), "q4_0")
        self.norm = torch.nn.LayerNorm(96)
        stacks = [
            bf.quantize(gaussian((2, n, k), n) / np.float32(8), "q8_0") for n, k in ((64, 96), (64, 96), (96, 64))
        ]
        biases = {name: torch.randn(2, n) for name, n in (("gate_proj", 64), ("up_proj", 64), ("down_proj", 96))}
        self.experts = MarlinExperts.from_quantized(*stacks, biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x))
        ids = torch.tensor([[0, 1]]).expand(len(x), 2)
        y: torch.Tensor = hidden + self.experts(hidden, ids, torch.full(ids.shape, 0.5))
        return y


def data_parallel(mesh: DeviceMesh) -> None:
    """DDP, FSDP and `fully_shard`: outputs and gradients are those of one process that has seen all batches."""
    rank, batches = mesh.get_local_rank(), [torch.from_numpy(gaussian((4, 64), seed)) for seed in (1, 2)]
    whole = Wrapped()
    (sum(whole(x).square().mean() for x in batches) / 2).backward()
    expected, y = {name: p.grad for name, p in whole.named_parameters()}, whole(batches[rank]).detach()
    mine = Wrapped()
    fully_shard(mine.up, mesh=mesh)
    for model in (
        DistributedDataParallel(Wrapped()),
        FullyShardedDataParallel(Wrapped(), device_id=torch.device("cpu")),
        FullyShardedDataParallel(Wrapped(), device_id=torch.device("cpu"), use_orig_params=True),
        fully_shard(mine, mesh=mesh),
    ):
        torch.testing.assert_close(model(batches[rank]).detach(), y)
        model(batches[rank]).square().mean().backward()
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, with_grads=model._use_orig_params):
                found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
        else:
            own = model.module if isinstance(model, DistributedDataParallel) else model
            found = {name: full(p.grad) for name, p in own.named_parameters()}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
        assert found or not model._use_orig_params


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def storage_of_experts(model: torch.nn.Module) -> int:
    return sum(module.storage_bytes for module in model.modules() if isinstance(module, MarlinExperts))


def llama(mesh: DeviceMesh, folder: Path) -> None:
    """A whole model from files of several layouts: the logits of one process, from a share of the bytes."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    paths = [folder / "gptq", folder / "act_order", folder / "model.gguf"]
    if rank == 0:
        write_folder(paths[0], "gptq")
        write_folder(paths[1], "gptq", act_order=True)
        write_gguf(paths[2])
    torch.distributed.barrier()
    tokens = torch.tensor([[1, 5, 7, 9, 11, 3]])
    for path in paths:
        spans = spy_on_reads()
        model = load_model(path, mesh=mesh)
        read = dict(spans)
        whole = load_model(path)
        with torch.no_grad():
            y, expected = model(tokens).logits, whole(tokens).logits
        assert (y - expected).abs().max() <= 2e-6 * expected.abs().max() * ranks
        check_shares(model, whole, read, ranks)


def spy_on_reads() -> dict[str, tuple]:
    """What is read of each tensor from now on."""
    spans: dict[str, tuple] = {}
    read = bf.Checkpoint.__dict__.get("_read", bf.Checkpoint.read)
    bf.Checkpoint._read = read

    def spying(self, name, *, rows=None, columns=None, **more):
        spans[name] = (rows, columns)
        return read(self, name, rows=rows, columns=columns, **more)

    bf.Checkpoint.read = spying
    return spans


def check_shares(model: torch.nn.Module, whole: torch.nn.Module, read: dict, ranks: int) -> None:
    """Cut layers have their part of the bytes, and no more of the file was asked for."""
    total = mine = 0
    for path, layer in model.named_modules():
        if isinstance(layer, MarlinLinear):
            assert hasattr(layer, "mesh"), path
            rows, columns = read[f"{path}.weight"]
            assert (rows is None) != (columns is None), "only a share was read"
            mine += layer.storage_bytes
            total += whole.get_submodule(path).storage_bytes
    assert total > 0
    assert mine == total // ranks
    try:
        model.save_pretrained("never")
    except ValueError:
        assert not os.path.exists("never")
    else:
        raise AssertionError("a share was saved as if it were the model")
