"""Stacks of experts in checkpoints: whatever the layout, one tensor [E, N, K], and not a bit of it changed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import stack_models as models
import torch
from common import assert_same_bits, gaussian
from safetensors.numpy import load_file, save_file

import billfish as bf
from billfish.checkpoints.names.expert_stacks import by_stacks, one_by_one
from billfish.checkpoints.names.gguf_names import by_gguf_names

BLOCK = "model.layers.0.mlp"
E, INNER, H = 4, 32, 64
PARTS = {"gate": (E, INNER, H), "up": (E, INNER, H), "down": (E, H, INNER)}


def stacks(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights that a small float16 holds, so that layouts may store them as they like."""
    return {part: gaussian(shape, seed + i).astype(np.float16) for i, (part, shape) in enumerate(PARTS.items())}


def write(folder: Path, arrays: dict[str, Any], **config: Any) -> Path:
    samples.write_config(folder, **config)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors")
    return folder


def one_each(weights: dict[str, np.ndarray], name: str = "mlp.experts.{e}.{part}_proj") -> dict[str, np.ndarray]:
    return {
        f"model.layers.0.{name.format(e=e, part=part)}.weight": stack[e]
        for part, stack in weights.items()
        for e in range(len(stack))
    }


def in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of gate and up, one after the other."""
    joint = np.empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]), gate.dtype)
    joint[:, ::2], joint[:, 1::2] = gate, up
    return joint


def layouts(weights: dict[str, np.ndarray]) -> dict[str, tuple[dict[str, np.ndarray], str]]:
    """The arrays of each plain layout, and the type of model that has it."""
    gate, up, down = (weights[part] for part in PARTS)
    joint = np.concatenate((gate, up), 1)
    short = {"gate": "w1", "up": "w3", "down": "w2"}
    return {
        "one each": (one_each(weights), "qwen3_moe"),
        "mixtral": (one_each({short[p]: w for p, w in weights.items()}, "mlp.experts.{e}.{part}"), "mixtral"),
        "stacked": ({f"{BLOCK}.experts.gate_up_proj": joint, f"{BLOCK}.experts.down_proj": down}, ""),
        "granite": ({f"{BLOCK}.input_linear.weight": joint, f"{BLOCK}.output_linear.weight": down}, ""),
        "mlx": ({f"{BLOCK}.switch_mlp.{part}_proj.weight": w for part, w in weights.items()}, ""),
        "gpt-oss": (
            {
                f"{BLOCK}.experts.gate_up_proj": in_turn(gate, up).swapaxes(1, 2),
                f"{BLOCK}.experts.down_proj": down.swapaxes(1, 2),
            },
            "gpt_oss",
        ),
    }  # fmt: skip


# ---- what a stack is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layouts(stacks()))
def test_every_layout_has_the_same_stacks(tmp_path, layout):
    weights = stacks()
    arrays, kind = layouts(weights)[layout]
    view = by_stacks(bf.load(write(tmp_path / "in", arrays, model_type=kind)))
    assert set(view) == {f"{BLOCK}.experts.{part}_proj.weight" for part in PARTS}
    for part, stack in weights.items():
        name = f"{BLOCK}.experts.{part}_proj.weight"
        assert view.describe(name).shape == stack.shape
        assert view.describe(name).nbytes == stack.nbytes
        assert_same_bits(view[name], stack)
        assert_same_bits(view.read(name, experts=(1, 3), rows=(5, 20), columns=(0, 16)), stack[1:3, 5:20, :16])
    apart = one_by_one(bf.load(tmp_path / "in"))
    ends = ("w1", "w3", "w2") if layout == "mixtral" else [f"{part}_proj" for part in PARTS]
    for end, stack in zip(ends, weights.values(), strict=True):
        assert_same_bits(apart[f"{BLOCK}.experts.2.{end}.weight"], stack[2])


@pytest.mark.parametrize(
    "format", ["u4", "u4b8", "u8", "affine4", "mxfp4", "nvfp4", "fp4", "q4_0", "q4_k", "nvfp4_gguf"]
)
def test_a_stack_is_saved_as_one_tensor(tmp_path, format):
    stack = bf.quantize(gaussian((3, 16, 256)), format)
    bf.save(stack, tmp_path / "one.safetensors")
    bf.save({"m.experts.down_proj": stack, "other": np.ones(3, np.float32)}, tmp_path / "folder")
    for loaded in (
        bf.load(tmp_path / "one.safetensors")["weight"],
        bf.load(tmp_path / "folder")["m.experts.down_proj"],
    ):
        assert isinstance(loaded, bf.QuantizedExperts)
        assert (loaded.shape, loaded.format, loaded.group_size) == (stack.shape, stack.format, stack.group_size)
        for part, array in stack.storage.items():
            assert_same_bits(loaded.storage[part], array)
    about = bf.load(tmp_path / "folder").describe("m.experts.down_proj")
    assert (about.shape, about.nbytes) == ((3, 16, 256), stack.nbytes)
    part = bf.load(tmp_path / "folder").read("m.experts.down_proj", experts=(2, 3), rows=(4, 9), columns=(0, 256))
    assert_same_bits(bf.dequantize(part), bf.dequantize(stack)[2:, 4:9])
    if "gguf" in format or format.startswith("q"):
        bf.convert(tmp_path / "folder", tmp_path / "out.gguf", "gguf", raw_names=True)
        again = bf.load(tmp_path / "out.gguf")["m.experts.down_proj"]
        for part, array in stack.storage.items():
            assert_same_bits(again.storage[part], array)


def test_files_of_earlier_versions_have_a_stack_as_one_matrix(tmp_path):
    """Words lie along K there, and the experts beside each other."""
    stack = bf.quantize(gaussian((3, 16, 64)), "u4b8")
    flat = bf.quantize(bf.dequantize(stack).reshape(48, 64), "u4b8", method="rtn")
    about = {"format": "u4b8", "group_size": 32, "shape": [3, 16, 64]}
    write(
        tmp_path / "in",
        {f"m.{part}": array for part, array in flat.storage.items()},
        quantization_config={"quant_method": "billfish", "modules": {"m": about}},
    )
    loaded = bf.load(tmp_path / "in")["m.weight"]
    assert loaded.shape == (3, 16, 64)
    assert_same_bits(bf.dequantize(loaded), bf.dequantize(flat).reshape(3, 16, 64))


# ---- quantized layouts --------------------------------------------------------------------------------------------


def quantized_folder(folder: Path, to: str, format: str) -> Path:
    """Experts one by one, quantized and written in some layout."""
    weights = {part: gaussian((E, 64, 64), i) for i, part in enumerate(PARTS)}
    write(folder / "plain", one_each(weights), model_type="qwen3_moe", num_experts=E)
    bf.quantize_checkpoint(folder / "plain", folder / to, format, to=to)
    return folder / to


@pytest.mark.parametrize(
    ("to", "format"),
    [("compressed-tensors", "u4b8"), ("compressed-tensors", "nvfp4"), ("gptq", "u4b8"), ("gptq", "u4"), ("awq", "u4")],
)
def test_matrices_of_any_layout_become_stacks(tmp_path, to, format):
    ck = bf.load(quantized_folder(tmp_path, to, format))
    view = by_stacks(ck)
    name = f"{BLOCK}.experts.up_proj.weight"
    stack = view[name]
    assert isinstance(stack, bf.QuantizedExperts)
    assert (stack.format.name, stack.shape) == (format, (E, 64, 64))
    assert view.describe(name).nbytes == sum(ck.describe(n).nbytes for n in ck if n.endswith("up_proj.weight"))
    for e in range(E):
        one = ck[f"{BLOCK}.experts.{e}.up_proj.weight"]
        for part, array in one.storage.items():
            assert_same_bits(stack.storage[part][e], array)


def test_scales_that_need_another_type_in_one_expert_widen_those_of_all(tmp_path):
    folder = quantized_folder(tmp_path, "compressed-tensors", "u4b8")
    arrays = load_file(folder / "model.safetensors")
    scales = f"{BLOCK}.experts.1.up_proj.weight_scale"
    arrays |= {name: array.astype(np.float32) for name, array in arrays.items() if name.endswith("_scale")}
    arrays[scales] = arrays[scales] + np.float32(1e-6)
    save_file(arrays, folder / "model.safetensors")
    ck = bf.load(folder)
    stack = by_stacks(ck)[f"{BLOCK}.experts.up_proj.weight"]
    assert stack.storage["scales"].dtype == np.float32
    for e in range(E):
        assert_same_bits(bf.dequantize(stack[e]), bf.dequantize(ck[f"{BLOCK}.experts.{e}.up_proj.weight"]))


def test_one_stack_is_in_memory_at_a_time(tmp_path):
    weights = {part: gaussian((16, 128, 128), i) for i, part in enumerate(PARTS)}
    write(tmp_path / "in", one_each(weights), model_type="qwen3_moe")
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "u4b8", to="gptq", method="rtn")
    ck = bf.load(tmp_path / "out")
    view = by_stacks(ck)
    tracemalloc.start()
    try:
        for name in view:
            stack = view[name]
            largest = stack.nbytes
            del stack
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest < peak < 1.5 * largest


def test_mlx_layers_read_the_stacks_that_we_write(tmp_path):
    folder = quantized_folder(tmp_path, "mlx", "affine4")
    arrays = mx.load(str(folder / "model.safetensors"))
    parts = [arrays[f"{BLOCK}.switch_mlp.down_proj.{part}"] for part in ("weight", "scales", "biases")]
    assert parts[0].shape == (E, 64, 8)
    x, chosen = mx.array(gaussian((5, 1, 64))), mx.array([3, 0, 1, 1, 2])
    theirs = mx.gather_qmm(x, *parts, rhs_indices=chosen, transpose=True, group_size=32, bits=4)
    stack = bf.load(folder)[f"{BLOCK}.switch_mlp.down_proj.weight"]
    ours = bf.expert_linear(np.array(x)[:, 0], stack, np.array(chosen)[:, None].astype(np.int32))
    np.testing.assert_allclose(ours[:, 0], np.array(theirs)[:, 0], atol=2e-3)


@pytest.mark.parametrize("layout", ["stacked", "one each", "gpt-oss"])
@pytest.mark.parametrize("to", ["billfish", "compressed-tensors", "mlx"])
def test_quantizing_a_folder_quantizes_its_experts(tmp_path, layout, to):
    weights = {part: stack.astype(np.float32) for part, stack in stacks().items()}
    arrays, kind = layouts(weights)[layout]
    write(tmp_path / "in", arrays, model_type=kind)
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "mxfp4", to=to)
    assert not report.left
    view = by_stacks(bf.load(tmp_path / "out"))
    for part, stack in weights.items():
        expected = bf.quantize(stack, "mxfp4")
        assert_same_bits(bf.dequantize(view[f"{BLOCK}.experts.{part}_proj.weight"]), bf.dequantize(expected))
    compared = bf.verify(tmp_path / "in", tmp_path / "out").comparisons
    assert {comparison.outcome for comparison in compared} == {"different"}
    assert max(comparison.relative_error for comparison in compared) < 0.2


def test_routers_and_biases_stay_as_they_are(tmp_path):
    models.model("gpt-oss").save_pretrained(tmp_path / "in")
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "mxfp4")
    assert f"{BLOCK}.experts.gate_up_proj" in report.quantized
    assert {name.rpartition("layers.0.")[2] for name in report.left if "layers.0.mlp" in name} == {
        "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", "mlp.router.weight", "mlp.router.bias",
    }  # fmt: skip
    models.model("granitemoe").save_pretrained(tmp_path / "granite")
    left = bf.quantize_checkpoint(tmp_path / "granite", tmp_path / "granite-out", "mxfp4").left
    assert left["model.layers.0.block_sparse_moe.router.layer.weight"].startswith("not quantized by default")


# ---- gpt-oss's own files ------------------------------------------------------------------------------------------


def test_gpt_oss_blocks_are_what_transformers_decodes_them_to(tmp_path):
    made, arrays = models.gpt_oss_folder(tmp_path / "in")
    ck = bf.load(tmp_path / "in")
    name = f"{BLOCK}.experts.gate_up_proj"
    theirs = made.get_parameter(name).detach().numpy().swapaxes(1, 2)
    assert_same_bits(bf.dequantize(ck[name]), np.ascontiguousarray(theirs))
    assert np.shares_memory(ck[name].storage["packed"], ck.entry(name).packed.array())
    view = by_gguf_names(ck)
    for part, expected in models.experts(made, "gpt-oss", 0).items():
        stack = view[f"blk.0.ffn_{part}_exps.weight"]
        assert isinstance(stack, bf.QuantizedExperts)
        assert_same_bits(bf.dequantize(stack), expected.contiguous().numpy())
    bias = arrays[f"{name}_bias"]
    assert_same_bits(view["blk.0.ffn_gate_exps.bias"], np.ascontiguousarray(bias[:, ::2]))
    assert_same_bits(view["blk.0.ffn_up_exps.bias"], np.ascontiguousarray(bias[:, 1::2]))


def test_gpt_oss_becomes_gguf_blocks_that_gguf_decodes_to_the_same(tmp_path):
    made, _ = models.gpt_oss_folder(tmp_path / "in")
    report = bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    assert {tensor.after for tensor in report.tensors if "_exps.weight" in tensor.name} == {"mxfp4_gguf"}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    for part, expected in models.experts(made, "gpt-oss", 1).items():
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(decoded, expected.numpy())
    assert bf.verify(tmp_path / "in", tmp_path / "out.gguf")


def test_gpt_oss_as_numbers_is_the_model_that_transformers_has(tmp_path):
    made, _ = models.gpt_oss_folder(tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out", "plain", dtype="float32")
    again = type(made).from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, made(tokens).logits)
    assert bf.verify(tmp_path / "in", tmp_path / "out")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    bf.convert(tmp_path / "out.gguf", tmp_path / "back", "plain", dtype="float32")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "back"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_gpt_oss_for_mlx_has_the_layers_that_mlx_lm_makes_of_it(tmp_path):
    models.gpt_oss_folder(tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out", "mlx")
    from mlx_lm.models import gpt_oss

    theirs = gpt_oss.Model.sanitize(None, dict(mx.load(str(tmp_path / "in" / "model.safetensors"))))
    ours = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert mx.array_equal(ours[name], array), name


# ---- what is wrong ------------------------------------------------------------------------------------------------


def refused(folder: Path, match: str) -> None:
    with pytest.raises(bf.CheckpointError, match=match):
        by_stacks(bf.load(folder))[f"{BLOCK}.experts.gate_proj.weight"]


def test_gates_and_ups_whose_order_nobody_tells_are_refused(tmp_path):
    """Of gpt-oss they lie in turn, and a file without its config.json does not say that it is gpt-oss."""
    models.gpt_oss_folder(tmp_path / "in")
    (tmp_path / "in" / "config.json").unlink()
    [file] = (tmp_path / "in").glob("*.safetensors")
    facts = r"gate_up_proj_bias.*config\.json"
    with pytest.raises(bf.CheckpointError, match=facts):
        by_stacks(bf.load(file))


def test_missing_experts_are_named(tmp_path):
    arrays = one_each(stacks())
    some = {name: array for name, array in arrays.items() if ".experts.3." not in name}
    refused(write(tmp_path / "a", some, num_experts=8), r"_proj\.weight.*3 experts \(0, 1, 2\).*all 8")
    del arrays[f"{BLOCK}.experts.1.gate_proj.weight"]
    refused(write(tmp_path / "b", arrays), r"gate_proj\.weight.*3 experts \(0, 2, 3\).*all 4, 0 to 3")
    refused(write(tmp_path / "c", one_each(stacks()), num_local_experts=2), r"4 experts .*all 2")
    with pytest.raises(bf.CheckpointError, match="all 4, 0 to 3"):
        bf.convert(tmp_path / "b", tmp_path / "out", "mlx")
    assert not (tmp_path / "out").exists()


def test_doubled_experts_are_named(tmp_path):
    arrays = one_each(stacks())
    spare = next(iter(arrays.values()))
    refused(write(tmp_path / "a", {**arrays, f"{BLOCK}.experts.02.gate_proj.weight": spare}), "same expert 2")
    refused(write(tmp_path / "b", {**arrays, f"{BLOCK}.experts.2.w1.weight": spare}), "same expert 2")
    whole = {f"{BLOCK}.experts.gate_proj.weight": stacks()["gate"]}
    refused(write(tmp_path / "c", {**arrays, **whole}), r"are both .*gate_proj")
    joint = {f"{BLOCK}.experts.gate_up_proj": gaussian((E, 2 * INNER, H))}
    refused(write(tmp_path / "d", {**whole, **joint}), r"are both .*gate_proj")
    refused(write(tmp_path / "e", {**arrays, **joint}), r"are both .*gate_proj")


def test_parts_that_disagree_are_named(tmp_path):
    arrays = one_each(stacks())
    odd = f"{BLOCK}.experts.2.gate_proj.weight"
    refused(write(tmp_path / "a", {**arrays, odd: gaussian((INNER + 1, H))}), r"2\.gate_proj\.weight.*F32 \(33, 64\)")
    refused(write(tmp_path / "b", {**arrays, odd: arrays[odd].astype(ml_dtypes.bfloat16)}), r"BF16 .*F16")
    refused(write(tmp_path / "c", {f"{BLOCK}.experts.gate_up_proj": gaussian((E, 7, H))}), r"rows of .* is 7")
    tensors = {name: bf.quantize(array, "q4_0") for name, array in arrays.items()}
    bf.save({**tensors, odd: bf.quantize(arrays[odd], "q8_0")}, tmp_path / "d")
    refused(tmp_path / "d", r"2\.gate_proj\.weight.*q8_0 .*q4_0 .* as .*0\.gate_proj")


def test_act_order_in_one_expert_is_named(tmp_path):
    arrays = one_each(stacks())
    tensors = {name: bf.quantize(array.astype(np.float32), "u4b8") for name, array in arrays.items()}
    odd = f"{BLOCK}.experts.2.gate_proj.weight"
    kept = tensors[odd]
    order = np.random.default_rng(0).permutation(H)
    tensors[odd] = bf.QuantizedTensor.from_storage("u4b8", kept.storage, kept.group_size, permutation=order)
    bf.save(tensors, tmp_path / "in")
    refused(tmp_path / "in", r"2\.gate_proj\.weight.*act-order")


@pytest.mark.parametrize(
    ("blocks", "scales", "match"),
    [
        ((E, 8, 2, 15), (E, 8, 2), r"U8 \[E, N, K/32, 16\]"),
        ((E, 8, 2, 16), (E, 8, 3), r"shape of .*_scales"),
        ((E, 8, 2, 16), (E - 1, 8, 2), r"shape of .*_scales"),
        ((2, E, 8, 2, 16), (2, E, 8, 2), r"\[E, N, K\]"),
    ],
)
def test_blocks_of_a_wrong_shape_are_named(tmp_path, blocks, scales, match):
    name = f"{BLOCK}.experts.gate_up_proj"
    arrays = {f"{name}_blocks": np.zeros(blocks, np.uint8), f"{name}_scales": np.zeros(scales, np.uint8)}
    write(tmp_path / "in", arrays, model_type="gpt_oss")
    with pytest.raises(bf.CheckpointError, match=match):
        bf.load(tmp_path / "in")


def test_arrays_of_our_own_layout_that_disagree_are_named(tmp_path):
    stack = bf.quantize(gaussian((3, 16, 64)), "u4b8")
    config = {"quant_method": "billfish", "format": "u4b8", "group_size": 32}
    arrays = {f"m.{part}": array for part, array in stack.storage.items()}
    write(tmp_path / "in", {**arrays, "m.scales": arrays["m.scales"][:2]}, quantization_config=config)
    with pytest.raises(bf.CheckpointError, match=r"shapes .*packed.*scales \(2, 2, 16\).*axis E in each"):
        bf.load(tmp_path / "in")


def test_experts_are_only_asked_of_stacks(tmp_path):
    write(tmp_path / "in", one_each(stacks()))
    ck = bf.load(tmp_path / "in")
    with pytest.raises(bf.CheckpointError, match="experts"):
        ck.read(f"{BLOCK}.experts.0.up_proj.weight", experts=(0, 1))
    with pytest.raises(bf.CheckpointError, match=r"experts.*\(0, 9\).*0 <= start < stop <= 4"):
        by_stacks(ck).read(f"{BLOCK}.experts.up_proj.weight", experts=(0, 9))
