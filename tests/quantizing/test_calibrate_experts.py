"""A text through mixtures of experts: sums of each expert, files of them, and weights that are quantized by them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from cases import first
from llm_architectures import MODELS, write_model
from transformers import AutoModelForCausalLM

import billfish as bf
from billfish.checkpoints.names.gguf_names import column_orders
from billfish.checkpoints.write.selection import Quantization
from billfish.cli.main import main
from billfish.llm.cpu import CpuDecoder
from billfish.quantizing.calibrate_checkpoint import Calibration
from billfish.statistics import Statistics
from billfish.statistics.inputs import InputStatistics

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6
# Statistics are by GGUF's names and order of columns, which are other than those of a module in transformers where GGUF
# has value heads in another order (Qwen 3.5) or two matrices for one (Qwen3-Next, Granite 4).
UNLIKE = ("qwen35moe", "qwen3next", "granitehybrid-moe")
MIXTURES = [name for name, (_, _, settings) in MODELS.items() if "num_experts" in settings and name not in UNLIKE]
OTHERS = [
    "gemma2",
    "gemma3",
    "gemma4",
    "glm4moe",
    "olmo2",
    "phi3-longrope",
    "smollm3",
    "qwen3-yarn",
]  # norms, windows, caps, joined matrices


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a model and a text, once."""
    folder = tmp_path_factory.mktemp("models")

    def write(name: str):
        if not (folder / name).exists():
            write_model(folder / name, name)
        (folder / "text.txt").write_text(TEXT)
        return folder / name

    return write


def calibrated(model, out, **options) -> Statistics:
    settings = {"text": model.parent / "text.txt", "tokens": 150, "window": 40, "progress": False} | options
    return bf.calibrate_checkpoint(model, out, **settings)


def by_hooks(model, folder) -> Statistics:
    """The same windows through the model in transformers."""
    windows = Calibration.of(model, folder / "text.txt", True, 150, 40).windows
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return bf.calibrate(made, [torch.tensor([window]) for window in windows], hessian=True, progress=False)


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
def test_sums_are_those_of_hooks_in_transformers(folder_of, tmp_path, name):
    folder = folder_of(name)
    ours = calibrated(folder, tmp_path / "s.safetensors", hessian=True)
    theirs = by_hooks(folder, folder.parent)
    # Routers are parameters in transformers 5, and no Linear; the head may be the embedding.
    known = [own for own in ours if "ffn_gate_inp." not in own and own.startswith("blk")]
    for own in known:
        mine, other = ours[own], theirs[own]
        np.testing.assert_array_equal(mine.counts, other.counts)
        np.testing.assert_allclose(mine.squares, other.squares, rtol=2e-3, atol=1e-4 * other.squares.max())
        np.testing.assert_allclose(mine.outer, other.outer, rtol=2e-3, atol=1e-3 * np.abs(other.outer).max())
    assert not [
        own for own in theirs if own not in ours and not own.endswith(("shared_expert_gate.weight", "lm_head.weight"))
    ]


def test_statistics_follow_the_order_of_columns(folder_of, tmp_path):
    """GGUF has value heads of Qwen 3.5 in another order. Statistics by GGUF's names fit a folder, and those of a module
    fit a GGUF file."""
    folder, gguf_file = folder_of("qwen35"), tmp_path / "m.gguf"
    bf.convert(folder, gguf_file, "gguf")
    statistics = calibrated(folder, tmp_path / "s.safetensors", hessian=True), by_hooks(folder, folder.parent)
    for path, ending in ((folder, "out_proj.weight"), (gguf_file, "ssm_out.weight")):
        checkpoint = bf.open_checkpoint(path)
        orders = column_orders(checkpoint)
        assert sorted(orders) == sorted(name for name in checkpoint if name.endswith(ending))
        for name in orders:
            shape = checkpoint.describe(name).shape
            ours, theirs = (
                Quantization(bf.get_format("q4_0"), None, "gptq", statistics=each, columns=orders).settings(
                    name, shape
                )[1]
                for each in statistics
            )
            for what in ("importance", "hessian"):
                np.testing.assert_allclose(ours[what], theirs[what], rtol=2e-3, atol=1e-3 * np.abs(theirs[what]).max())
    bf.quantize_checkpoint(folder, tmp_path / "quantized", "q4_0", statistics=statistics[0])


def test_a_module_has_no_statistics_in_another_order(folder_of, tmp_path):
    folder = folder_of("qwen35")
    known = calibrated(folder, tmp_path / "s.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(bf.DataError, match=r"out_proj.*order of columns.*bf.calibrate"):
        bf.quantize_model(model, "q4_0", statistics=known)


def test_experts_without_tokens_are_known_by_the_others(folder_of, tmp_path):
    known = calibrated(folder_of("mixtral"), tmp_path / "s.safetensors", tokens=2, hessian=True)[
        "blk.0.ffn_down_exps.weight"
    ]
    unseen = np.flatnonzero(known.counts == 0)
    assert 2 <= len(unseen) <= 5
    seen = np.flatnonzero(known.counts)
    for mean in (known.importance, lambda e: known.hessian("w", expert=e)):
        np.testing.assert_allclose(mean(int(unseen[0])), np.mean([mean(int(e)) for e in seen], axis=0), rtol=1e-5)


def test_any_number_of_threads_gives_the_same_bytes(folder_of, tmp_path):
    try:
        for threads in (1, 2, 3):
            bf.set_threads(threads)
            calibrated(folder_of("qwen2moe"), tmp_path / f"{threads}.safetensors", hessian=True)
    finally:
        bf.set_threads(0)
    first, *others = [(tmp_path / f"{threads}.safetensors").read_bytes() for threads in (1, 2, 3)]
    assert others == [first, first]


def test_an_interrupted_run_goes_on_to_the_same_bytes(folder_of, tmp_path, monkeypatch):
    model, cut = folder_of("gpt-oss"), tmp_path / "cut.safetensors"
    calibrated(model, tmp_path / "whole.safetensors", hessian=True)
    run_layer, calls = CpuDecoder.run_layer, []

    def stopping(self, layer, *arguments):
        calls.append(layer)
        if calls.count(1) == 3:
            raise KeyboardInterrupt
        run_layer(self, layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CpuDecoder, "run_layer", stopping)
        with pytest.raises(KeyboardInterrupt):
            calibrated(model, cut, hessian=True)
    assert not cut.exists()
    calibrated(model, cut, hessian=True)
    assert cut.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


# ---- imatrix files ---------------------------------------------------------------------------------------------------


def test_imatrix_files_have_the_shapes_of_llama_cpp(folder_of, tmp_path):
    """[E, K] and [E, 1] for stacks, [1, K] and [1, 1] for all else, the router and the shared expert among it."""
    ours = calibrated(folder_of("qwen2moe"), tmp_path / "s.safetensors")
    calibrated(folder_of("qwen2moe"), tmp_path / "i.gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    assert {name.removesuffix(".counts") for name in tensors if name.endswith(".counts")} == set(ours)
    for matrix, experts, k in (
        ("ffn_gate_exps", 8, 64), ("ffn_up_exps", 8, 64), ("ffn_down_exps", 8, 64), ("ffn_gate_inp", 1, 64),
        ("ffn_gate_shexp", 1, 64), ("ffn_down_shexp", 1, 96), ("attn_q", 1, 64),
    ):  # fmt: skip
        name = f"blk.1.{matrix}.weight"
        sums, counts = tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]
        assert (sums.shape, counts.shape) == ((experts, k), (experts, 1))
        np.testing.assert_array_equal(sums, ours[name].squares.reshape(experts, k).astype(np.float32))
        np.testing.assert_array_equal(counts.ravel(), ours[name].counts.ravel())
    assert tensors["blk.1.ffn_up_exps.weight.counts"].sum() == 3 * 150  # experts of each token
    read = Statistics.load(tmp_path / "i.gguf")
    np.testing.assert_allclose(
        read["blk.0.ffn_down_exps.weight"].importance(), ours["blk.0.ffn_down_exps.weight"].importance(), rtol=1e-6
    )


@pytest.mark.parametrize("suffix", ["gguf", "dat"])
def test_gate_and_up_in_one_stack_are_two_in_imatrix_files(folder_of, tmp_path, suffix):
    folder = folder_of("olmoe")
    theirs = by_hooks(folder, folder.parent)
    stacks = {name: InputStatistics(k.squares, k.counts) for name, k in theirs.items() if "experts" in name}
    Statistics(stacks, window=40).save(tmp_path / f"i.{suffix}")
    read = Statistics.load(tmp_path / f"i.{suffix}")
    assert set(read) == {f"blk.{i}.ffn_{part}_exps.weight" for i in range(2) for part in ("gate", "up", "down")}
    for own in read:
        k = 96 if "down" in own else 64  # .dat has the numbers of all experts in one row
        _, known = read.settings("quantize", own, (8, 1, k), "mse")
        np.testing.assert_allclose(known["importance"], theirs[own].importance(), rtol=1e-5)
        one = f"model.layers.{own[4]}.mlp.experts.5.{own[10:].split('_')[0]}_proj.weight"
        _, known = read.settings("quantize", one, (1, k), "mse")
        np.testing.assert_allclose(known["importance"], theirs[own].importance(5), rtol=1e-5)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rtn", "mse", "gptq"])
def test_a_gguf_file_is_quantized_by_a_text(folder_of, tmp_path, method):
    folder, source = folder_of("qwen3moe"), tmp_path / "in.gguf"
    bf.convert(folder, source, "gguf", progress=False)
    out, text = tmp_path / "out.gguf", str(folder.parent / "text.txt")
    assert (
        main(
            [
                "quantize",
                str(source),
                str(out),
                "--format",
                "q4_0",
                "--method",
                method,
                "--no-sequential",
                "--calibrate",
                text,
            ]
        )
        == 0
    )
    known = bf.calibrate_checkpoint(source, tmp_path / "s.safetensors", text=text, hessian=True, progress=False)
    plain, found = bf.load(source), bf.load(out)
    for name in ("blk.0.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"):
        for e in range(8):
            more = {"hessian": known[name].hessian(name, expert=e)} if method == "gptq" else {}
            truth = bf.quantize(plain[name][e], "q4_0", method=method, importance=known[name].importance(e), **more)
            np.testing.assert_array_equal(bf.dequantize(found[name][e]), bf.dequantize(truth))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "out.gguf", "s.safetensors"]
    bf.llm.load(out, device="cpu").logits([3, 4, 5])


@pytest.mark.parametrize("name", first(2, [*MIXTURES]))
def test_a_folder_is_quantized_as_its_gguf_file(folder_of, tmp_path, name):
    """Whatever the folder calls its experts, one by one or in stacks: statistics find them."""
    folder = folder_of(name)
    settings = {"method": "gptq", "calibrate": folder.parent / "text.txt", "progress": False}
    bf.quantize_checkpoint(folder, tmp_path / "folder", "q4_0", **settings)
    bf.convert(folder, tmp_path / "in.gguf", "gguf", progress=False)
    bf.quantize_checkpoint(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0", **settings)
    bf.convert(tmp_path / "folder", tmp_path / "again.gguf", "gguf", progress=False)
    found, expected = bf.load(tmp_path / "again.gguf"), bf.load(tmp_path / "out.gguf")
    stacks = [own for own in expected if "_exps.weight" in own]
    assert len(stacks) == 3 * {"gpt-oss": 3, "gemma4-moe": 4}.get(name, 2)
    for own in stacks:
        if expected.describe(own).shape[-1] % 32:  # columns of gemma4's ffn_down are no whole blocks, and stay floats
            np.testing.assert_array_equal(found[own], expected[own])
        else:
            assert found[own].storage["blocks"].tobytes() == expected[own].storage["blocks"].tobytes()


@pytest.mark.parametrize("name", first(2, ["qwen35moe", "lfm2", "mixtral", "granitehybrid", "glm4moe"]))
def test_layers_of_every_kind_are_quantized_in_order(folder_of, tmp_path, name):
    """Behind recurrent layers and experts, too, matrices have the inputs of the quantized model."""
    model, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    (tmp_path / "text.txt").write_text(TEXT)
    bf.convert(folder_of(name), model, "gguf", progress=False)
    how = Quantization(bf.get_format("q8_0"), None, "gptq")
    in_order = Calibration.of(model, tmp_path / "text.txt", True, 150, 40).sequential(how, False)
    in_order.write(tmp_path / "s.safetensors", False)
    known = Statistics.load(tmp_path / "s.safetensors")
    bf.quantize_checkpoint(model, out, "q8_0", method="gptq", statistics=known, progress=False)
    theirs, floats = calibrated(out, tmp_path / "out.safetensors"), calibrated(model, tmp_path / "in.safetensors")
    for own in theirs:
        found, truth, before = (s[own].squares for s in (known, theirs, floats))
        assert np.abs(found - truth).max() <= 1e-4 * truth.max(), own
        if not own.startswith("blk.0."):
            assert np.abs(before - truth).max() > 1e-4 * truth.max(), own


def test_an_mlx_folder_is_quantized_by_the_same_statistics(folder_of, tmp_path):
    folder = folder_of("mixtral")
    known = calibrated(folder, tmp_path / "s.safetensors")
    bf.quantize_checkpoint(
        folder, tmp_path / "mlx", "affine4", group_size=32, to="mlx", statistics=known, progress=False
    )
    name = "model.layers.0.block_sparse_moe.switch_mlp.gate_proj.weight"
    found = bf.load(tmp_path / "mlx")
    w = bf.load(folder)["model.layers.0.block_sparse_moe.experts.3.w1.weight"]
    truth = bf.quantize(w, "affine4", group_size=32, importance=known["blk.0.ffn_gate_exps.weight"].importance(3))
    np.testing.assert_allclose(bf.dequantize(found[name][3]), bf.dequantize(truth), rtol=1e-2, atol=1e-3)
