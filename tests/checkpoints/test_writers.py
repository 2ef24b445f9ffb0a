"""The writers: lossless where the target holds the format, read back by the target's own library; else the reason."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_samples as samples
import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoint_samples import MODULE
from common import assert_same_bits
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

import billfish as bf
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.checkpoints.verification import compare

WEIGHT = f"{MODULE}.weight"

SOURCES = {
    "gptq": lambda folder: samples.gptq(folder, version=2),
    "gptq, stored 15": lambda folder: samples.gptq(folder, version=1),
    "gptq, symmetric": lambda folder: samples.gptq(folder, symmetric=True),
    "gptq, act-order": lambda folder: samples.gptq(folder, symmetric=True, act_order=True),
    "gptq, 8 bits": lambda folder: samples.gptq(folder, bits=8, version=2),
    "awq": lambda folder: samples.awq(folder),
    "packed": lambda folder: samples.compressed(folder),
    "packed, asymmetric": lambda folder: samples.compressed(folder, symmetric=False),
    "packed, act-order": lambda folder: samples.compressed(folder, symmetric=False, act_order=True),
    "packed, whole rows": lambda folder: samples.compressed(folder, bits=8, group=None),
    "packed, float32": lambda folder: samples.compressed(folder, dtype=torch.float32),
    "nvfp4": lambda folder: samples.compressed_fp4(folder, "nvfp4"),
    "mxfp4": lambda folder: samples.compressed_fp4(folder, "mxfp4"),
    "modelopt": lambda folder: samples.modelopt(folder),
    "gpt-oss": lambda folder: samples.gpt_oss(folder),
    "mlx": lambda folder: samples.mlx(folder),
    "mlx, 8 bits": lambda folder: samples.mlx(folder, bits=8, dtype=mx.bfloat16),
    "mlx, nvfp4": lambda folder: samples.mlx(folder, mode="nvfp4", group=16),
    "mlx, experts": lambda folder: samples.mlx(folder, experts=3),
    "q4_0": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q4_0", "F32")),
    "q4_1": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q4_1",)),
    "q4_k": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q4_K",)),
    "q5_0": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q5_0",)),
    "q6_k": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q6_K",)),
    "q8_0": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q8_0", "BF16")),
    "gguf mxfp4": lambda folder: samples.gguf_file(folder / "m.gguf", ("MXFP4",)),
    "gguf nvfp4": lambda folder: samples.gguf_file(folder / "m.gguf", ("NVFP4",)),
}
# What each target holds, bit for bit; of the others, a word of the reason.
ALL = set(SOURCES)
INTEGERS = {  # of 4 and 8 bits in groups
    *("gptq", "gptq, symmetric", "gptq, act-order", "gptq, 8 bits", "awq", "packed", "packed, asymmetric"),
    "gptq, stored 15",  # a zero point of 16, which takes 8 bits
    *("packed, act-order", "packed, whole rows", "packed, float32", "q4_0", "q5_0", "q8_0"),
}
LOSSLESS = {
    "billfish": ALL,
    "compressed-tensors": INTEGERS | {"gpt-oss", "nvfp4", "mxfp4", "mlx, nvfp4", "gguf mxfp4", "gguf nvfp4"},
    "mlx": ALL - {"gptq, act-order", "packed, act-order", "packed, float32", "nvfp4", "modelopt", "q6_k"},
    "gptq": INTEGERS - {"gptq", "awq", "packed, asymmetric", "packed, act-order"},
    "gptq_v2": INTEGERS,
    "awq": {"gptq", "gptq, symmetric", "awq", "packed", "packed, asymmetric", "packed, float32", "q4_0"},
    "plain": ALL,
    "gguf": {
        "gptq, symmetric",
        "packed",
        "packed, whole rows",
        "nvfp4",
        "mxfp4",
        "modelopt",
        "gpt-oss",
        "mlx",
        "mlx, nvfp4",
        "mlx, experts",
        *(name for name in ALL if name.startswith(("q", "gguf"))),
    },
}
REASONS = {
    ("compressed-tensors", "modelopt"): "reciprocal in float32",
    ("compressed-tensors", "mlx"): "u4 has a zero point, and affine4 a minimum",
    ("compressed-tensors", "q4_k"): "u4 has a zero point, and q4_k a minimum",
    ("compressed-tensors", "q6_k"): "group size is 16",
    ("gptq", "awq"): "zero point 0 is not an integer from 1 to 16",
    ("gptq", "packed, asymmetric"): "zero point 0",
    ("gptq", "q4_1"): "u4 has a zero point, and q4_1 a minimum",
    ("gptq", "mlx, experts"): "groups of 64|a minimum",
    ("awq", "gptq, act-order"): "act-order",
    ("awq", "gptq, 8 bits"): "u4 has codes of 4 bits, and u8 of 8",
    ("awq", "mxfp4"): "stores e2m1|stores u4",
    ("mlx", "gptq, act-order"): "act-order",
    ("mlx", "packed, float32"): "exact in float32",
    ("mlx", "nvfp4"): "global scale",
    ("gguf", "gptq, act-order"): "act-order",
    ("gguf", "gptq"): "float16",
    ("gguf", "mlx, 8 bits"): "q8_0 has no minimum",
    ("gguf", "packed, float32"): "float16",
}


def out_of(folder: Path, target: str) -> Path:
    return folder / ("out.gguf" if target == "gguf" else "out")


@pytest.mark.parametrize("target", LOSSLESS)
@pytest.mark.parametrize("source", SOURCES)
def test_lossless_or_refused_with_the_reason(tmp_path, source, target):
    SOURCES[source](tmp_path / "in")
    out = out_of(tmp_path, target)
    if source not in LOSSLESS[target]:
        with pytest.raises(bf.CheckpointError, match=REASONS.get((target, source), "--requantize")) as caught:
            bf.convert(tmp_path / "in", out, target, raw_names=True)
        name = next(n for n in bf.load(tmp_path / "in") if bf.load(tmp_path / "in").describe(n).format)
        assert name.rpartition(".")[0] in str(caught.value)  # of experts, the name of each
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
        return
    bf.convert(tmp_path / "in", out, target, raw_names=True)
    before, after = bf.load(tmp_path / "in"), bf.load(out)
    if source == "gpt-oss" and target != "gguf":  # whose experts are stacks, a matrix each, or turned around
        before, after = by_stacks(before), by_stacks(after)
    assert set(after) == set(before)
    for name in before:
        assert compare(before, after, name).same
        assert before.describe(name).shape == after.describe(name).shape
    # and back to where it came from, bit for bit
    if target in ("mlx", "billfish") and source in ("gptq, symmetric", "packed", "packed, whole rows", "awq"):
        bf.convert(out, tmp_path / "again", "compressed-tensors")
        again = bf.load(tmp_path / "again")
        assert compare(before, again, WEIGHT).same


LOSSY = [
    (source, target)
    for target in ("compressed-tensors", "mlx", "gguf")
    for source in ("gptq, act-order", "mlx, 8 bits", "q6_k", "modelopt")
    if source not in LOSSLESS[target]
]


@pytest.mark.parametrize(("source", "target"), LOSSY)
def test_requantizing_is_close_and_says_what_it_did(tmp_path, source, target):
    expected = SOURCES[source](tmp_path / "in")
    out = out_of(tmp_path, target)
    report = bf.convert(tmp_path / "in", out, target, requantize=True, raw_names=True)
    assert report.quantized
    assert "quantized again, to" in str(report)
    ck = bf.load(out)
    name = next(n for n in ck if ck.describe(n).format)
    w = next(iter(expected.values())) if isinstance(expected, dict) else expected
    error = np.linalg.norm(bf.dequantize(ck[name]) - w) / np.linalg.norm(w)
    assert error < (0.02 if source in ("mlx, 8 bits", "q6_k") else 0.2)
    assert ck.permutation(name) is None


# ---- read back by the owner of the layout -----------------------------------------------------------------------


def package_decodes(folder: Path) -> torch.Tensor:
    """What the compressed-tensors package makes of a module, by the configuration in the folder."""
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    group = next(iter(parsed.config_groups.values()))
    state = load_file(folder / "model.safetensors")
    parts = {name.removeprefix(f"{MODULE}."): t for name, t in state.items() if name.startswith(f"{MODULE}.weight")}
    return samples.compressor(config["format"]).decompress(parts, group)["weight"]


@pytest.mark.parametrize(
    "source",
    [
        "gptq",
        "gptq, symmetric",
        "gptq, 8 bits",
        "awq",
        "packed",
        "packed, asymmetric",
        "packed, whole rows",
        "mxfp4",
        "nvfp4",
    ],
)
def test_compressed_tensors_reads_what_we_write(tmp_path, source):
    expected = SOURCES[source](tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    decoded = package_decodes(tmp_path / "out")
    # It computes in the type of the scales.
    dtype = str(decoded.dtype).removeprefix("torch.")
    ours = bf.dequantize(bf.load(tmp_path / "out")[WEIGHT], dtype).astype(np.float32)
    if source == "nvfp4":
        np.testing.assert_allclose(decoded.float().numpy(), expected, rtol=2**-7)
    else:
        assert_same_bits(decoded.float().numpy(), ours)
    np.testing.assert_allclose(ours, expected, rtol=2**-7)


def test_compressed_tensors_bytes_survive_both_ways(tmp_path):
    samples.compressed(tmp_path / "in", symmetric=False)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    bf.convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    before, after = load_file(tmp_path / "in" / "a.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name])


@pytest.mark.parametrize("source", ["q4_0", "q4_1", "q4_k", "awq", "packed", "mlx", "mlx, 8 bits", "mxfp4", "gpt-oss"])
def test_mlx_reads_what_we_write(tmp_path, source):
    SOURCES[source](tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out", "mlx")
    ck = bf.load(tmp_path / "out")
    name = next(n for n in ck if ck.describe(n).format)
    module = name.removesuffix(".weight")
    arrays, metadata = mx.load(str(tmp_path / "out" / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    settings = {key: config["quantization"][key] for key in ("group_size", "bits", "mode")}
    parts = [arrays[f"{module}.{part}"] for part in ("weight", "scales", "biases") if f"{module}.{part}" in arrays]
    parts[1:] = [p.astype(mx.float32) if p.dtype != mx.uint8 else p for p in parts[1:]]
    theirs = np.array(mx.dequantize(*parts, **settings, dtype=mx.float32))
    ours = bf.dequantize(ck[name])
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=2**-22 * np.abs(ours).max())


@pytest.mark.parametrize(
    "source", ["gptq, symmetric", "packed, whole rows", "mxfp4", "modelopt", "q4_k", "mlx", "gpt-oss"]
)
def test_gguf_reads_what_we_write(tmp_path, source):
    SOURCES[source](tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf", raw_names=True)
    before = bf.load(tmp_path / "in")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    name = next(n for n in before if before.describe(n).format)
    assert tuple(reversed(tensors[name].shape.tolist())) == before.describe(name).shape
    theirs = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).reshape(before.describe(name).shape)
    scale = tensors[f"{name.removesuffix('.weight')}.scale"].data[0] if source == "modelopt" else 1
    expected = bf.dequantize(before[name])
    np.testing.assert_allclose(theirs * scale, expected, rtol=1e-6)


def test_gguf_keeps_its_metadata(tmp_path):
    samples.gguf_file(tmp_path / "m.gguf", ("Q4_0", "F16", "BF16", "F32"))
    bf.convert(tmp_path / "m.gguf", tmp_path / "out.gguf", "gguf")
    before, after = bf.load(tmp_path / "m.gguf"), bf.load(tmp_path / "out.gguf")
    described = {"general.file_type": gguf.LlamaFileType.MOSTLY_Q4_0, "general.quantization_version": 2}
    assert {**before.metadata, **described} == dict(after.metadata)
    assert [compare(before, after, name).verdict for name in before] == ["equal bits"] * 4


# ---- quantize ---------------------------------------------------------------------------------------------------


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16, k: int = 256) -> dict[str, torch.Tensor]:
    """A folder such as people download: weights in two shards, a configuration, a tokenizer."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {
        "model.embed_tokens.weight": random(64, k),
        "model.layers.0.mlp.up_proj.weight": random(128, k),
        "model.layers.0.mlp.up_proj.bias": random(128),
        "model.layers.0.mlp.down_proj.weight": random(k, 128),
        "model.layers.0.input_layernorm.weight": random(k),
        "model.layers.1.mlp.up_proj.weight": random(128, k),
        "lm_head.weight": random(64, k),
    }
    samples.write_config(folder, torch_dtype=str(dtype).removeprefix("torch."), hidden_size=k)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    (folder / "LICENSE").write_text("as you like")
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[:3], names[3:])):
        shard = f"model-{i + 1:05}-of-00002.safetensors"
        save_torch({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


QUANTIZED = [f"model.layers.{m}.weight" for m in ("0.mlp.up_proj", "0.mlp.down_proj", "1.mlp.up_proj")]


@pytest.mark.parametrize(
    ("format", "to"),
    [
        *((name, "billfish") for name in bf.FORMATS),
        *((name, "compressed-tensors") for name in ("u4b8", "u8b128", "u4", "u8", "mxfp4", "nvfp4")),
        *((name, "mlx") for name in ("affine4", "affine8", "mxfp4")),
        *((name, "gguf") for name in ("q4_0", "q4_1", "q5_1", "q8_0", "mxfp4_gguf", "nvfp4_gguf", "iq4_nl")),
    ],
)
def test_quantize_is_quantize(tmp_path, format, to):
    tensors = write_model(tmp_path / "in")
    out = out_of(tmp_path, to)
    bf.quantize_checkpoint(tmp_path / "in", out, format, method="rtn", to=to, raw_names=True)
    ck = bf.load(out)
    assert set(ck) == set(tensors)
    for name, tensor in tensors.items():
        about = ck.describe(name)
        if name in QUANTIZED and tensor.shape[1] % bf.FORMATS[format].block_size == 0:
            assert about.format.name == format
            expected = bf.dequantize(bf.quantize(tensor, format, method="rtn"))
            if format == "nvfp4" and to == "compressed-tensors":  # whose global scale was moved by an ulp
                np.testing.assert_allclose(bf.dequantize(ck[name]), expected, rtol=1e-6)
            else:
                assert_same_bits(bf.dequantize(ck[name]), expected)
        else:
            assert about.format is None
            assert ck[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["MXFP4", "nvfp4"])
def test_a_name_means_what_the_target_means_by_it(tmp_path, name):
    """ggml has an MXFP4 and an NVFP4 of its own."""
    write_model(tmp_path / "in")
    out = out_of(tmp_path, "gguf")
    bf.quantize_checkpoint(tmp_path / "in", out, name, method="rtn", keep={"down": "mxfp4"}, raw_names=True)
    formats = {about.format.name for about in map(bf.load(out).describe, bf.load(out)) if about.format}
    assert formats == {f"{name.lower()}_gguf", "mxfp4_gguf"}


def test_rules_and_companions(tmp_path):
    write_model(tmp_path / "in")
    keep = {"lm_head": "q8_0", r"layers\.1\.": "keep", "down": "u4b8:128"}
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "fp4", group_size=128, keep=keep)
    ck = bf.load(tmp_path / "out")
    formats = {name: ck.describe(name).format for name in ck}
    assert {name: f.name for name, f in formats.items() if f} == {
        "model.layers.0.mlp.up_proj.weight": "fp4",
        "model.layers.0.mlp.down_proj.weight": "u4b8",
        "lm_head.weight": "q8_0",
    }
    assert ck["model.layers.0.mlp.up_proj.weight"].group_size == 128
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer.model", "LICENSE", "model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == bytes(range(256))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert config["quantization_config"]["quant_method"] == "billfish"
    # The file alone says enough, too.
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "out" / "model.safetensors").rename(alone / "x.safetensors")
    assert set(bf.load(alone / "x.safetensors")) == set(ck)


def test_weights_that_do_not_fit_are_left_and_named(tmp_path):
    write_model(tmp_path / "in", k=200)
    report = bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "q4_0", method="rtn")
    assert report.left[QUANTIZED[0]] == "K = 200 is not a positive multiple of 32, as q4_0 needs"
    assert bf.load(tmp_path / "out").describe(QUANTIZED[0]).format is None
    assert bf.load(tmp_path / "out").describe(QUANTIZED[1]).format is not None


def test_shards(tmp_path, monkeypatch):
    write_model(tmp_path / "in")
    monkeypatch.setattr("billfish.checkpoints.write.target.SHARD_BYTES", 60_000)
    for target in ("billfish", "compressed-tensors", "mlx"):
        bf.convert(tmp_path / "in", tmp_path / target, target)
        index = json.loads((tmp_path / target / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        before, after = bf.load(tmp_path / "in"), bf.load(tmp_path / target)
        assert {compare(before, after, name).verdict for name in before} == {"equal bits"}


def test_headers_are_those_of_safetensors_itself(tmp_path):
    """Read by the library, which checks every offset; and data begin at a multiple of 8."""
    write_model(tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "out", "billfish")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == set(bf.load(tmp_path / "in"))
    assert int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little") % 8 == 0


def test_a_tensor_that_cannot_be_read_cannot_be_converted(tmp_path):
    samples.mlx(tmp_path / "in", bits=3, group=32)
    with pytest.raises(bf.CheckpointError, match="affine with 3 bits"):
        bf.convert(tmp_path / "in", tmp_path / "out", "billfish", requantize=True)


def test_types_that_a_target_lacks(tmp_path):
    (tmp_path / "in").mkdir()
    save_torch({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "in" / "model.safetensors")
    for target, out in (("gguf", "out.gguf"), ("mlx", "out")):
        with pytest.raises(bf.CheckpointError, match=r"a: .* has no type float8_e4m3fn"):
            bf.convert(tmp_path / "in", tmp_path / out, target, raw_names=True)


def test_scalars_and_empty_arrays(tmp_path):
    (tmp_path / "in").mkdir()
    save_file(
        {"s": np.array(2.5, np.float32), "e": np.zeros((0, 3), np.float32)}, tmp_path / "in" / "model.safetensors"
    )
    bf.convert(tmp_path / "in", tmp_path / "out", "billfish")
    before, after = bf.load(tmp_path / "in"), bf.load(tmp_path / "out")
    assert {compare(before, after, name).verdict for name in before} == {"equal bits"}


@pytest.mark.torch
def test_transformers_loads_what_we_write(tmp_path):
    """A small random Llama, quantized and saved for it, gives the logits of the decoded weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "out", "u4b8", group_size=32, to="compressed-tensors")
    decoded = LlamaForCausalLM(config)
    ck = bf.load(tmp_path / "out")
    state = {
        n: torch.from_numpy(np.array(bf.dequantize(t) if isinstance(t, bf.QuantizedTensor) else t))
        for n, t in ck.items()
    }
    missing = decoded.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected, got = decoded(tokens).logits, theirs(tokens).logits
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)
