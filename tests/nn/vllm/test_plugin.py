"""The plug-in for vLLM, as far as it needs no vLLM: names, shares, refusals, and that importing it is free."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoint_folders import write_folder

import billfish as bf
from billfish.core.errors import BackendUnavailable, CheckpointError, FormatError, ShapeError
from billfish.core.tensor import why_not_joined
from billfish.nn.vllm.checkpoint_folder import FolderMatrix, matrices_of, open_folder, patterns, patterns_of_arrays
from billfish.nn.vllm.shares import MatrixRows, names_of_parts, parts_of, read_shares, shares_of
from billfish.nn.vllm.thread_count import cores_of_worker
from billfish.nn.vllm.versions import check_version, is_old

ROOT = Path(__file__).parents[3]
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"
PLAIN = FolderMatrix("m.weight", "q4_0", (64, 96), 32, False)


def test_importing_imports_no_vllm_and_no_torch():
    code = "import sys, billfish, billfish.nn.vllm; print(*sorted({'vllm', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_the_entry_point_leads_to_a_function():
    text = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(r'entry-points\."vllm\.general_plugins"\]\nbillfish = "(.*)"', text)
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("version", "old"), [("0.31.2", True), ("0.32.0+cpu", False), ("1.0", False), ("dev", False)])
def test_a_vllm_that_is_too_old_is_told_so(version, old):
    assert is_old(version) == old
    if old:
        with pytest.raises(BackendUnavailable, match=r"version of vllm.*0.31.2.*0.32 or newer"):
            check_version(version)


# ---- a folder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
def test_the_matrices_of_a_folder_and_their_arrays(tmp_path, layout):
    write_folder(tmp_path, layout)
    checkpoint = open_folder(str(tmp_path))
    found = matrices_of(checkpoint)
    assert len(found) == 14
    assert found[f"{ATTENTION}.q_proj"] == FolderMatrix(f"{ATTENTION}.q_proj.weight", "u4", (128, 128), 32, False)
    pattern = re.compile("|".join(f"(?:{one})" for one in patterns_of_arrays(checkpoint)))
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        parts = set(file.keys())
    plain = {name for name in parts if "norm" in name or name in ("lm_head.weight", "model.embed_tokens.weight")}
    assert {name for name in parts if not pattern.fullmatch(name)} == plain


def test_one_pattern_stands_for_all_layers_unless_another_tensor_has_such_a_name():
    wanted = [f"layers.{i}.down.weight" for i in range(3)]
    assert patterns(wanted, ["norm.weight"]) == [r"layers\.\d+\.down\.weight"]
    assert patterns(wanted, ["layers.3.down.weight"]) == [re.escape(name) for name in wanted]
    assert patterns(["w1.2.b1"], []) == [r"w1\.\d+\.b1"]


def test_a_folder_that_is_not_there_or_not_quantized_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"some/model.*folder on this machine.*hf download"):
        open_folder("some/model")
    write_folder(tmp_path, "plain")
    with pytest.raises(CheckpointError, match=r"no quantized matrices.*billfish quantize"):
        matrices_of(open_folder(str(tmp_path)))


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_merged_layer_have_the_names_of_the_folder():
    three = {f"a.{part}": PLAIN for part in MERGED["qkv_proj"]}
    assert names_of_parts("a.qkv_proj", MERGED, three) == ["a.q_proj", "a.k_proj", "a.v_proj"]
    assert names_of_parts("a.qkv_proj", MERGED, {"a.qkv_proj": PLAIN}) == ["a.qkv_proj"]
    assert names_of_parts("a.o_proj", MERGED, three) == []
    assert names_of_parts("lm_head", MERGED, {"lm_head": PLAIN}) == ["lm_head"]
    with pytest.raises(FormatError, match=r"a.q_proj, a.k_proj, a.v_proj all.* a.v_proj is not quantized"):
        names_of_parts("a.qkv_proj", MERGED, {"a.q_proj": PLAIN, "a.k_proj": PLAIN})


def test_ranks_may_have_the_same_keys_and_values():
    """Eight query heads and two key/value heads of 16 rows, for four ranks."""
    assert parts_of([32, 16, 16], rank=3, ranks=4, replicas=2) == [
        MatrixRows(32, 3, 4),
        MatrixRows(16, 1, 2),
        MatrixRows(16, 1, 2),
    ]
    assert parts_of([96], rank=3, ranks=1) == [MatrixRows(96, 0, 1)]


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_shares_of_a_merged_layer_are_one_matrix(tmp_path, layout, rank):
    truth = write_folder(tmp_path, layout)
    checkpoint = open_folder(str(tmp_path))
    found = matrices_of(checkpoint)
    names = names_of_parts(f"{ATTENTION}.qkv_proj", MERGED, found)
    shares = shares_of("qkv", [found[name] for name in names], parts_of([64, 32, 32], rank, 2), None)
    (joint,) = read_shares(checkpoint, shares)
    halves = [np.split(truth[f"{name}.weight"], 2)[rank] for name in names]
    np.testing.assert_array_equal(bf.dequantize(joint), np.concatenate(halves))


def test_the_shares_of_a_matrix_that_is_fused_in_the_folder(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((128, 64)).astype(np.float32)
    bf.save({"a.qkv_proj.weight": bf.quantize(w, "q4_0")}, tmp_path / "folder", progress=False)
    checkpoint = open_folder(str(tmp_path / "folder"))
    matrix = matrices_of(checkpoint)["a.qkv_proj"]
    (joint,) = read_shares(checkpoint, shares_of("a", [matrix], parts_of([32, 16, 16], 1, 2), None))
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    np.testing.assert_array_equal(bf.dequantize(joint), bf.dequantize(bf.quantize(w, "q4_0"))[rows])


def test_some_columns(tmp_path):
    truth = write_folder(tmp_path, "gptq")
    checkpoint = open_folder(str(tmp_path))
    matrix = matrices_of(checkpoint)["model.layers.0.mlp.down_proj"]
    (half,) = read_shares(checkpoint, shares_of("down", [matrix], parts_of([128], 1, 1), (192, 384)))
    np.testing.assert_array_equal(bf.dequantize(half), truth["model.layers.0.mlp.down_proj.weight"][:, 192:])


def test_what_cannot_be_joined_stays_apart(tmp_path):
    """NVFP4 has a scale for a whole matrix; act-order has an order for each."""
    rng = np.random.default_rng(1)
    tensors = [bf.quantize(rng.standard_normal((32, 64)).astype(np.float32), "nvfp4") for _ in range(2)]
    assert "a scale for all of its weights" in why_not_joined(tensors)
    assert why_not_joined(tensors[:1]) == ""
    assert "different settings" in why_not_joined([tensors[0], bf.quantize(np.ones((32, 64), np.float32), "q4_0")])
    write_folder(tmp_path, "gptq", act_order=True)
    checkpoint = open_folder(str(tmp_path))
    found = matrices_of(checkpoint)
    gate_up = [found[f"model.layers.0.mlp.{part}_proj"] for part in ("gate", "up")]
    assert len(read_shares(checkpoint, shares_of("m", gate_up, parts_of([384, 384], 0, 1), None))) == 2


@pytest.mark.parametrize(
    ("matrix", "parts", "columns", "words"),
    [
        (PLAIN, [MatrixRows(64)], (48, 96), r"columns 48 and 96 of 96.*multiples of 32.* 1, 3 ranks"),
        (PLAIN._replace(reordered=True), [MatrixRows(64)], (0, 48), r"--tensor-parallel-size 1, or .* act-order"),
        (PLAIN, [MatrixRows(32, 0, 4)], None, r"\(64, 96\).*128 rows"),
    ],
)
def test_shares_that_cannot_be_are_refused(matrix, parts, columns, words):
    with pytest.raises(ShapeError, match=words):
        shares_of("a.o_proj", [matrix], parts, columns)


def test_the_cores_that_a_worker_is_given():
    assert cores_of_worker({"GOMP_CPU_AFFINITY": "0 3 12"}) == {0, 3, 12}
    assert cores_of_worker({"OMP_PLACES": "{0,1}", "GOMP_CPU_AFFINITY": ""}) == {0, 1}
    assert cores_of_worker({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5]"}) == {4, 5}
    assert cores_of_worker({"KMP_AFFINITY": "granularity=fine,proclist=[0,2-4,{6,7}],explicit"}) == {0, 2, 3, 4, 6, 7}
    assert cores_of_worker({"KMP_AFFINITY": "compact,1,0"}) == set()
    assert cores_of_worker({"KMP_AFFINITY": "compact,1,0", "OMP_PLACES": "cores(4)"}) == set()
    assert cores_of_worker({"GOMP_CPU_AFFINITY": "0-31"}) == set(range(32))
    assert cores_of_worker({"GOMP_CPU_AFFINITY": "0-6:2 9"}) == {0, 2, 4, 6, 9}
    assert cores_of_worker({"OMP_PLACES": "{0:16}"}) == set(range(16))
    assert cores_of_worker({"OMP_PLACES": "{0:4}:2:8"}) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cores_of_worker({"OMP_PLACES": "{0:2:4},{1}"}) == {0, 4, 1}
    assert cores_of_worker({}) == set()
