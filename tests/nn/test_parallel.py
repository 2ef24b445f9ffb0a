"""Tensor parallelism: how layers are cut, and 2 and 4 gloo processes beside one."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import parallel_worker
import pytest
import torch
import torch.multiprocessing
from cases import first
from checkpoint_folders import matrices, write_folder
from common import gaussian

import billfish as bf
from billfish.nn.parallel import RowParallelLinear, Share, bias_share, cut, llama_plan, place, read_share


@pytest.mark.parametrize("ranks", first(1, [2, 4]))
def test_processes_compute_what_one_does(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Processes are forked from one that has imported everything; it looks for this folder in the environment.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"), prepend=os.pathsep)
    multiprocessing.set_forkserver_preload(["parallel_worker"])
    start = torch.multiprocessing.start_processes
    start(parallel_worker.run, (ranks, tmp_path), ranks, start_method="forkserver")


def test_cut():
    assert cut(10, 1, 4, "x") == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert cut(11008, 128, 4, "x") == [(0, 2688), (2688, 5504), (5504, 8192), (8192, 11008)]
    assert cut(192, 64, 2, "x") == [(0, 64), (64, 192)]
    assert cut(100, 32, 2, "x") == [(0, 64), (64, 100)]  # a partial last group
    with pytest.raises(bf.ShapeError, match=r"processes.*4.*at most 3.*x.*3 parts of 64"):
        cut(192, 64, 4, "x")


def test_shares_of_a_bias():
    bias = gaussian((8,))
    assert np.array_equal(bias_share(bias, Share("column", (2, 5), (2, 3, 3)), 1), bias[2:5])
    assert bias_share(bias, Share("row", (0, 4), (4, 4)), 0) is bias
    assert bias_share(bias, Share("row", (4, 8), (4, 4)), 1) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_shares_of_a_plan_are_the_whole(ranks, act_order, tmp_path):
    """Every matrix exactly once over all processes, heads kept together, x in the order that columns want."""
    truth = write_folder(tmp_path, "gptq", act_order)
    weights = bf.load(tmp_path)
    plans = [llama_plan(weights, 4, ranks, rank) for rank in range(ranks)]
    assert all(set(plan) == set(matrices()) for plan in plans)
    for path, (n, k) in matrices().items():
        shares = [plan[path] for plan in plans]
        style = "row" if path.endswith(("o_proj", "down_proj")) else "column"
        assert {share.style for share in shares} == {style}
        restored = np.full((n, k), np.nan, np.float32)
        for share in shares:
            tensor, order = read_share(weights, path, share)
            values = bf.dequantize(tensor)
            if style == "column":
                assert order is None
                restored[slice(*share.span)] = values
            else:
                restored[:, np.arange(*share.span) if order is None else order] = values
        assert np.array_equal(restored, truth[f"{path}.weight"])
        assert sum(shares[0].sizes) == (k if style == "row" else n)
    for plan in plans:
        attention = plan["model.layers.0.self_attn.q_proj"], plan["model.layers.0.self_attn.k_proj"]
        heads = [tuple(bound // 16 for bound in share.span) for share in attention]
        assert heads[0] == tuple(2 * bound for bound in heads[1])  # two queries for each key


def test_an_order_that_x_has_no_features_for_is_refused():
    """Some columns of W take any features of x, but each once, and none that x does not have."""
    tensor = bf.quantize(gaussian((8, 32)), "q4_0")
    order = np.arange(64)[::2]
    layer = RowParallelLinear.from_quantized(tensor, permutation=order)
    place(layer, Share("row", (0, 32), (40, 24)), None)
    x = torch.from_numpy(gaussian((3, 64), 1))
    expected = bf.quantized_linear(x[:, torch.from_numpy(order.copy())], tensor)
    assert torch.equal(layer._product(x), expected)
    assert layer.quantized().permutation is None
    with pytest.raises(bf.ShapeError, match=r"permutation.*, up to 62.*32 different indices of 0 to 53"):
        place(layer, Share("row", (0, 32), (30, 24)), None)
    with pytest.raises(bf.ShapeError, match=r"permutation.*32 different indices of"):
        RowParallelLinear.from_quantized(tensor, permutation=np.zeros(32, np.int64))


def test_more_processes_than_heads(tmp_path):
    write_folder(tmp_path, "gptq")
    with pytest.raises(bf.ShapeError, match=r"at most 4.*the key/value heads of model\.layers\.0"):
        llama_plan(bf.load(tmp_path), 4, 8, 0)


def test_blocks_that_are_not_quantized_stay_whole(tmp_path):
    write_folder(tmp_path, "plain")
    assert llama_plan(bf.load(tmp_path), 4, 2, 0) == {}
