"""GPTQ, AWQ and plain folders: what is in them as their definitions read it, and one setting for all modules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import checkpoint_samples as samples
import gguf
import numpy as np
import pytest
import torch
from checkpoint_folders import write_folder, write_gguf
from checkpoint_samples import MODULE, K, N
from common import assert_same_bits, gaussian
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

import billfish as bf
from billfish.checkpoints.layouts.gptq import raise_zeros
from billfish.cli.main import main
from billfish.core.arrays import FLOATS

WEIGHT = f"{MODULE}.weight"


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def refused(capsys, *words: object) -> str:
    """What a command says that fails, and leaves nothing behind."""
    out = Path(str(words[2]))
    before = sorted(out.parent.iterdir())
    assert main([str(word) for word in words]) == 2
    assert sorted(out.parent.iterdir()) == before
    return capsys.readouterr().err


def settings_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def matrix_folder(folder: Path, tensors: dict[str, bf.QuantizedTensor | np.ndarray]) -> None:
    """A folder in our own layout with these tensors, by name of their modules."""
    modules, arrays = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            arrays[f"{name}.weight"] = tensor
            continue
        modules[name] = {"format": tensor.format.name, "group_size": tensor.group_size}
        arrays |= {f"{name}.{part}": np.ascontiguousarray(array) for part, array in tensor.storage.items()}
    samples.write_config(folder, quantization_config={"quant_method": "billfish", "modules": modules})
    save_file(arrays, folder / "model.safetensors")


# ---- GPTQ, by its definition ----------------------------------------------------------------------------------------


def field(word: int, bits: int, i: int) -> int:
    return int(word) >> (bits * i) & (2**bits - 1)


def gptq_weights(folder: Path, less: int) -> np.ndarray:
    """w[n, k] = scales[g_idx[k], n] * (q - zero), one number at a time."""
    arrays, bits = load_file(folder / "model.safetensors"), settings_of(folder)["bits"]
    qweight, qzeros, scales, g_idx = (arrays[f"{MODULE}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
    qweight, qzeros, per_word = qweight.view(np.uint32), qzeros.view(np.uint32), 32 // bits
    k, n = len(g_idx), scales.shape[1]
    w = np.zeros((n, k), np.float32)
    for row in range(n):
        for column in range(k):
            group = g_idx[column]
            code = field(qweight[column // per_word, row], bits, column % per_word)
            zero = field(qzeros[group, row // per_word], bits, row % per_word) + less
            w[row, column] = np.float32(code - zero) * np.float32(scales[group, row])
    return w


@pytest.mark.parametrize(
    ("source", "to", "settings"),
    [
        ({"symmetric": True}, "gptq", {"bits": 4, "group_size": 64, "sym": True, "desc_act": False}),
        ({"symmetric": True, "act_order": True}, "gptq", {"bits": 4, "group_size": 64, "sym": True, "desc_act": True}),
        ({"act_order": True}, "gptq", {"bits": 4, "group_size": 64, "sym": False, "desc_act": True}),
        ({"bits": 8, "version": 1}, "gptq", {"bits": 8, "group_size": 64, "sym": False}),
        ({"bits": 8, "symmetric": True, "group": K}, "gptq", {"bits": 8, "group_size": -1, "sym": True}),
        ({"group": 128, "k": 192}, "gptq", {"group_size": 128}),  # whose last group is partial
        ({"version": 2}, "gptq_v2", {"bits": 4, "group_size": 64, "sym": False}),
        ({"symmetric": True}, "gptq_v2", {"bits": 4, "sym": True}),
    ],
)
def test_gptq_by_its_definition(tmp_path, source, to, settings):
    expected = samples.gptq(tmp_path / "in", **source)
    run("convert", tmp_path / "in", tmp_path / "out", "--to", to)
    assert_same_bits(gptq_weights(tmp_path / "out", 1 if to == "gptq" else 0) + 0, expected + 0)
    written = settings_of(tmp_path / "out")
    assert written == {**written, **settings, "quant_method": "gptq", "checkpoint_format": to, "lm_head": False}
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == written
    # and our own reader finds the bits that it found before
    before, after = bf.load(tmp_path / "in"), bf.load(tmp_path / "out")
    assert after.describe(WEIGHT).layout == "gptq"
    assert before[WEIGHT].format is after[WEIGHT].format
    for part, array in before[WEIGHT].storage.items():
        assert array.tobytes() == after[WEIGHT].storage[part].tobytes()
    order = before.permutation(WEIGHT)
    assert (order is None) == (after.permutation(WEIGHT) is None)
    assert order is None or np.array_equal(order, after.permutation(WEIGHT))


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_the_bytes_of_a_file_survive(tmp_path, layout):
    if layout == "gptq":
        samples.gptq(tmp_path / "in", act_order=True)
    else:
        samples.awq(tmp_path / "in")
    run("convert", tmp_path / "in", tmp_path / "out", "--to", layout)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        assert np.array_equal(array, after[name])


def test_gptq_has_no_zero_point_of_0(tmp_path, capsys):
    samples.awq(tmp_path / "in")
    words = "convert", tmp_path / "in", tmp_path / "out", "--to", "gptq"
    assert "zero point 0 is not an integer from 1 to 16" in refused(capsys, *words)
    run(*words[:-1], "gptq_v2")  # which has one
    assert_same_bits(gptq_weights(tmp_path / "out", 0), bf.dequantize(bf.load(tmp_path / "in")[WEIGHT]))


@pytest.mark.parametrize("format", ["u4", "u8"])
def test_zero_points_of_0_are_raised_where_weights_are_quantized(format):
    w = np.abs(gaussian((16, 256)))  # all of them positive, so that zero is the lowest number
    w[3:5] = 0
    w[5] *= -1
    w[6, :64] = np.linspace(0, 0.5, 64, dtype=np.float32)
    q = bf.quantize(w, format, group_size=64, method="rtn")
    raised = raise_zeros(q)
    assert (q.planes["zero"] == 0).any()
    assert (raised.planes["zero"] >= 1).all()
    # rounded once to the old steps, and once to the new ones
    step = np.repeat(raised.planes["scale"].astype(np.float32), 64, axis=1)
    assert (np.abs(bf.dequantize(raised) - w) <= 1.01 * step).all()
    assert_same_bits(bf.dequantize(raised)[3:6], bf.dequantize(q)[3:6])  # nothing to raise, or nothing but zeros


def test_quantize_writes_gptq(tmp_path):
    truth = write_folder(tmp_path / "in", "plain")
    for format in ("u4b8", "u4", "u8b128"):
        out = tmp_path / format
        run("quantize", tmp_path / "in", out, "--to", "gptq", "--format", format, "--group-size", 32)
        ck = bf.load(out)
        assert ck.layouts == {"gptq", "plain"}
        for name, w in truth.items():
            if ck.describe(name).format is None:
                assert_same_bits(ck[name], w)
            else:
                assert ck.describe(name).format.name == format
                q = bf.quantize(w, format, method="mse")
                assert_same_bits(bf.dequantize(ck[name]), bf.dequantize(raise_zeros(q) if format == "u4" else q))
        assert settings_of(out)["sym"] == (format != "u4")


# ---- AWQ, by compressed-tensors' own converter ----------------------------------------------------------------------


def awq_weights(folder: Path, group: int) -> np.ndarray:
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    converter = AutoAWQConverter.from_autoawq_config(settings_of(folder))
    assert converter.group_size == group
    state = converter.process(load_torch(folder / "model.safetensors"))
    parts = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in state.items()}
    parts["weight_scale"] = parts["weight_scale"].float()  # it computes in the type of the scales
    scheme = samples.packed_scheme(4, False, group)
    return samples.compressor("pack-quantized").decompress(parts, scheme)["weight"].numpy()


@pytest.mark.parametrize("source", ["awq", "gptq", "q4_0"])
def test_awq_by_the_converter_of_another_project(tmp_path, source):
    if source == "awq":
        expected, group = samples.awq(tmp_path / "in", group=32), 32
    elif source == "gptq":
        expected, group = samples.gptq(tmp_path / "in", symmetric=True), 64
    else:
        q = bf.quantize(gaussian((N, K)), "q4_0")
        matrix_folder(tmp_path / "in", {MODULE: q})
        expected, group = bf.dequantize(q), 32
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "awq")
    assert_same_bits(awq_weights(tmp_path / "out", group) + 0, expected + 0)
    assert settings_of(tmp_path / "out") == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    ck = bf.load(tmp_path / "out")
    assert ck.describe(WEIGHT).layout == "awq"
    assert_same_bits(bf.dequantize(ck[WEIGHT]) + 0, expected + 0)


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_transformers_reads_the_settings(tmp_path, layout):
    from transformers.utils.quantization_config import AwqConfig, GPTQConfig

    (samples.gptq if layout == "gptq" else samples.awq)(tmp_path / "in")
    run("convert", tmp_path / "in", tmp_path / "out", "--to", layout)
    config = (GPTQConfig if layout == "gptq" else AwqConfig).from_dict(settings_of(tmp_path / "out"))
    assert (config.bits, config.group_size, config.quant_method) == (4, 64, layout)


# ---- one setting for all modules ------------------------------------------------------------------------------------


def test_a_mixture_is_refused_or_quantized_again(tmp_path, capsys):
    w = {name: gaussian((N, K), seed) for seed, name in enumerate(("a", "b", "c", "d"))}
    tensors = {
        "a": bf.quantize(w["a"], "u4b8", group_size=32),
        "b": bf.quantize(w["b"], "u4", group_size=32),
        "c": bf.quantize(w["c"], "u4b8", group_size=64),
        "d": bf.quantize(w["d"], "u8b128", group_size=32),
    }
    matrix_folder(tmp_path / "in", tensors)
    words = "convert", tmp_path / "in", tmp_path / "out", "--to", "gptq"
    error = refused(capsys, *words)
    assert "2 tensors" in error
    assert "c.weight: 4 bits in groups of 64, and 4 bits in groups of 32 elsewhere" in error
    assert "d.weight: 8 bits in groups of 32, and 4 bits in groups of 32 elsewhere" in error
    run(*words, "--requantize")
    assert "quantized again, to u4b8: 4 bits in groups of 64" in " ".join(capsys.readouterr().out.split())
    ck = bf.load(tmp_path / "out")
    assert settings_of(tmp_path / "out")["sym"] is False
    for name in ("a", "b"):  # as they were
        assert_same_bits(bf.dequantize(ck[f"{name}.weight"]), bf.dequantize(tensors[name]))
    for name in ("c", "d"):
        assert ck.describe(f"{name}.weight").group_size == 32
        assert np.linalg.norm(bf.dequantize(ck[f"{name}.weight"]) - w[name]) < 0.15 * np.linalg.norm(w[name])


def test_short_rows_are_a_group_of_their_own(tmp_path):
    tensors = {
        "a": bf.quantize(gaussian((N, 64)), "u4b8", group_size=-1),
        "b": bf.quantize(gaussian((N, 256)), "u4b8", group_size=128),
    }
    matrix_folder(tmp_path / "in", tensors)
    for to in ("gptq", "awq"):
        run("convert", tmp_path / "in", tmp_path / to, "--to", to)
        assert settings_of(tmp_path / to)["group_size"] == 128
        ck = bf.load(tmp_path / to)
        for name, tensor in tensors.items():
            assert_same_bits(bf.dequantize(ck[f"{name}.weight"]), bf.dequantize(tensor))


@pytest.mark.parametrize(
    ("to", "tensor", "reason"),
    [
        ("gptq", lambda: bf.quantize(gaussian((18, 64)), "u4b8"), "N = 18"),
        ("gptq", lambda: bf.quantize(gaussian((N, 64)), "u4", zero_point="fractional"), "zero point 9."),
        ("gptq", lambda: bf.quantize(gaussian((N, 64)), "fp4"), "e2m1"),
        ("gptq", lambda: bf.quantize(gaussian((N, 64)), "q4_1"), "u4 has a zero point, and q4_1 a minimum"),
        ("awq", lambda: bf.quantize(gaussian((N, 192)), "u4", group_size=128), "group size 128"),
        ("awq", lambda: bf.quantize(gaussian((N, 64)), "u8b128"), "u4 has codes of 4 bits, and u8b128 of 8"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, capsys, to, tensor, reason):
    matrix_folder(tmp_path / "in", {"a": tensor()})
    error = refused(capsys, "convert", tmp_path / "in", tmp_path / "out", "--to", to)
    assert "a.weight" in error
    assert reason in error


def test_act_order_is_refused_by_awq(tmp_path, capsys):
    samples.gptq(tmp_path / "in", act_order=True)
    assert "act-order" in refused(capsys, "convert", tmp_path / "in", tmp_path / "out", "--to", "awq")


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_modules_that_stay_plain_are_named(tmp_path, capsys, to):
    write_folder(tmp_path / "in", "plain")
    rules = "--keep", r"layers\.1\.mlp\.down_proj=keep", "--keep", "lm_head=u4"
    run("quantize", tmp_path / "in", tmp_path / "out", "--to", to, "--format", "u4", *rules)
    assert f"{to} stores it unquantized" in capsys.readouterr().out
    assert bf.load(tmp_path / "out").describe("lm_head.weight").format is None
    settings = settings_of(tmp_path / "out")
    if to == "gptq":
        assert settings["dynamic"] == {r"-:^model\.layers\.1\.mlp\.down_proj$": {}}
    else:
        assert settings["modules_to_not_convert"] == ["model.layers.1.mlp.down_proj"]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_embeddings_become_numbers(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", "q4_0")
    before = bf.load(tmp_path / "m.gguf")
    embedding = bf.dequantize(before["token_embd.weight"])
    run("convert", tmp_path / "m.gguf", tmp_path / "out", "--to", "gptq")
    assert "decoded to float32, without loss; --dtype" in " ".join(capsys.readouterr().out.split())
    ck = bf.load(tmp_path / "out")
    assert_same_bits(ck["model.embed_tokens.weight"], embedding)
    assert ck.describe("model.layers.0.mlp.up_proj.weight").format.name == "u4b8"
    assert main(["verify", str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    run("convert", tmp_path / "m.gguf", tmp_path / "half", "--to", "awq", "--dtype", "float16")
    assert "--dtype" not in capsys.readouterr().out
    assert_same_bits(bf.load(tmp_path / "half")["model.embed_tokens.weight"], embedding.astype(np.float16))


@pytest.mark.parametrize("source", ["gptq", "gguf"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
def test_a_plain_folder(tmp_path, source, dtype):
    if source == "gguf":
        write_gguf(path := tmp_path / "m.gguf", "q4_1")
    else:
        write_folder(path := tmp_path / "in", "gptq", act_order=True)
    run("convert", path, tmp_path / "out", "--to", "plain", *(["--dtype", dtype] if dtype else []))
    ck, config = bf.load(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    assert ck.layouts == {"plain"}
    assert "quantization_config" not in config
    if dtype:
        assert config.get("dtype", config.get("torch_dtype")) == dtype
    run("convert", path, tmp_path / "billfish", "--to", "billfish")  # under the same names
    for name, tensor in bf.load(tmp_path / "billfish").items():
        if isinstance(tensor, bf.QuantizedTensor):
            assert_same_bits(ck[name], bf.dequantize(tensor, dtype or "float32"))
        elif tensor.ndim == 2:
            assert_same_bits(ck[name], tensor.astype(FLOATS[dtype or "float32"]))
        else:  # not a bit of it lost
            assert_same_bits(ck[name].astype(np.float32), tensor)


def test_vectors_follow_where_nothing_is_lost(tmp_path):
    half = np.arange(8, dtype=np.float32)
    samples.write_config(tmp_path / "in")
    vectors = {"whole.bias": half, "finer.bias": half + np.float32(2**-20), "ids": np.arange(8, dtype=np.int64)}
    save_file({**vectors, "a.weight": gaussian((8, 32))}, tmp_path / "in" / "model.safetensors")
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "plain", "--dtype", "bfloat16")
    ck = bf.load(tmp_path / "out")
    kinds = {name: ck.describe(name).dtype for name in ck}
    assert kinds == {"whole.bias": "BF16", "finer.bias": "F32", "ids": "I64", "a.weight": "BF16"}


@pytest.mark.torch
def test_transformers_loads_a_plain_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "m.gguf", "q8_0")
    run("convert", tmp_path / "m.gguf", tmp_path / "out", "--to", "plain", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    ck = bf.load(tmp_path / "out")
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, torch.from_numpy(ck[name].astype(np.float32)).bfloat16())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("source", ["gguf", "gptq"])
def test_a_gguf_file_of_numbers(tmp_path, source, dtype):
    if source == "gguf":
        write_gguf(path := tmp_path / "m.gguf", "q4_0")
    else:
        write_folder(path := tmp_path / "in", "gptq", act_order=True)  # which GGUF cannot hold otherwise
    run("convert", path, tmp_path / "out.gguf", "--to", "gguf", "--dtype", dtype)
    run("convert", path, tmp_path / "plain", "--to", "plain", "--dtype", dtype)
    run("verify", tmp_path / "out.gguf", tmp_path / "plain")
    kinds = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        assert tensor.tensor_type.name == (kinds[dtype] if len(tensor.shape) == 2 else "F32")


def test_numbers_that_a_type_does_not_hold(tmp_path, capsys):
    samples.write_config(tmp_path / "in")
    save_file({"a.weight": np.full((8, 32), 1e5, np.float32)}, tmp_path / "in" / "model.safetensors")
    words = "convert", tmp_path / "in", tmp_path / "out", "--to", "plain", "--dtype"
    error = refused(capsys, *words, "float16")
    assert re.search(r"a\.weight.*float16.*100000.*bfloat16", error)
    run(*words, "bfloat16")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("convert", "--to", "mlx", "--dtype", "float16"), "layout mlx has no dtype="),
        (("convert", "--to", "plain", "--dtype", "int8"), "dtype is 'int8'"),
        (("quantize", "--to", "plain", "--format", "u4b8"), "layout plain cannot store quantized weights"),
        (("quantize", "--to", "awq", "--format", "u4b8"), "layout awq cannot store u4b8. Its formats are u4"),
    ],
)
def test_wrong_arguments(tmp_path, capsys, words, reason):
    write_folder(tmp_path / "in", "plain")
    assert reason in refused(capsys, words[0], tmp_path / "in", tmp_path / "out", *words[1:])
