"""Mixes choose the formats that llama.cpp's `quantize` chooses, written out here for a model of 32 layers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_folders import CONFIG, write_gguf
from common import assert_same_bits
from safetensors.numpy import save_file

import billfish as bf
from billfish.checkpoints.mixes import FILE_TYPES, MIXES, mix_named
from billfish.cli.main import main
from billfish.llm.quantize_on_load import Quantizer

HALF = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
ALL = list(range(32))
# Of each mix: most matrices; attn_v and ffn_down with the layers that have another format; attn_output.
TABLE = {
    "Q2_K": ("q2_k", {"q4_k": ALL}, {"q3_k": ALL}, "q3_k"),
    "Q3_K_S": ("q3_k", {}, {}, "q3_k"),
    "Q3_K_M": ("q3_k", {"q5_k": [0, 1], "q4_k": ALL[2:]}, {"q5_k": [0, 1], "q4_k": ALL[2:]}, "q4_k"),
    "Q3_K_L": ("q3_k", {"q5_k": ALL}, {"q5_k": ALL}, "q5_k"),
    "Q4_K_S": ("q4_k", {"q5_k": [0, 1, 2, 3]}, {"q5_k": [0, 1, 2, 3]}, "q4_k"),
    "Q4_K_M": ("q4_k", {"q6_k": HALF}, {"q6_k": HALF}, "q4_k"),
    "Q5_K_S": ("q5_k", {}, {}, "q5_k"),
    "Q5_K_M": ("q5_k", {"q6_k": HALF}, {"q6_k": HALF}, "q5_k"),
    "Q6_K": ("q6_k", {}, {}, "q6_k"),
    "IQ4_XS": ("iq4_xs", {"q5_k": ALL}, {"q5_k": [0, 1, 2, 3]}, "iq4_xs"),
}


def shapes(layers: int = 32, k: int = 256, shared: int = 4, tied: bool = False, experts: int = 0) -> dict:
    """The tensors of a decoder, as llama.cpp names them."""
    found = {"token_embd.weight": (1000, k), "output_norm.weight": (k,)}
    if not tied:
        found["output.weight"] = (1000, k)
    stack = (experts,) if experts else ()
    end = "_exps" if experts else ""
    for i in range(layers):
        found |= {
            f"blk.{i}.attn_norm.weight": (k,),
            f"blk.{i}.attn_q.weight": (k, k),
            f"blk.{i}.attn_k.weight": (k // shared, k),
            f"blk.{i}.attn_v.weight": (k // shared, k),
            f"blk.{i}.attn_v.bias": (k // shared,),
            f"blk.{i}.attn_output.weight": (k, k),
            f"blk.{i}.ffn_gate{end}.weight": (*stack, 2 * k, k),
            f"blk.{i}.ffn_up{end}.weight": (*stack, 2 * k, k),
            f"blk.{i}.ffn_down{end}.weight": (*stack, k, 2 * k),
        }
        if experts:
            found[f"blk.{i}.ffn_gate_inp.weight"] = (experts, k)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_a_model_of_32_layers(name):
    most, values, down, joined = TABLE[name]
    chosen = MIXES[name.lower()].assign(shapes())
    assert chosen["output.weight"] == "q6_k"
    assert chosen["token_embd.weight"] == most
    for i in ALL:
        expected = dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), most)
        expected["attn_v"] = next((format for format, layers in values.items() if i in layers), most)
        expected["ffn_down"] = next((format for format, layers in down.items() if i in layers), most)
        expected["attn_output"] = joined
        assert {part: chosen[f"blk.{i}.{part}.weight"] for part in expected} == expected
    assert not [tensor for tensor in chosen if "norm" in tensor or "bias" in tensor]
    assert set(TABLE) == {mix.name for mix in MIXES.values()}


def test_values_of_few_heads_and_of_the_largest_model():
    assert MIXES["q2_k"].assign(shapes(shared=1))["blk.5.attn_v.weight"] == "q3_k"
    large = MIXES["q4_k_m"].assign(shapes(layers=80))
    assert large["blk.9.attn_v.weight"] == "q6_k"  # with more bits anyway
    assert large["blk.10.attn_v.weight"] == "q5_k"
    assert large["blk.10.ffn_down.weight"] == "q4_k"


def test_experts():
    chosen = MIXES["q4_k_m"].assign(shapes(experts=8))
    assert chosen["blk.5.attn_v.weight"] == chosen["blk.5.attn_k.weight"] == "q8_0"
    assert chosen["blk.5.attn_output.weight"] == "q5_k"
    assert [chosen[f"blk.{i}.ffn_down_exps.weight"] for i in (5, 6)] == ["q4_k", "q6_k"]
    assert chosen["blk.5.ffn_up_exps.weight"] == "q4_k"
    assert "blk.5.ffn_gate_inp.weight" not in chosen
    assert MIXES["q4_k_m"].assign(shapes(experts=16))["blk.5.attn_k.weight"] == "q4_k"


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("q2_k", "q4_0", "q5_0"),
        ("q3_k_l", "q4_0", "q5_1"),
        ("q4_k_m", "q5_0", "q8_0"),
        ("q5_k_m", "q5_1", "q8_0"),
        ("iq4_xs", "iq4_nl", "q5_1"),
    ],
)
def test_rows_that_are_no_multiple_of_256(name, most, more):
    chosen = MIXES[name].assign(shapes(k=288, tied=True))
    assert chosen["blk.0.attn_q.weight"] == most
    assert chosen["blk.0.attn_v.weight"] == more
    assert chosen["token_embd.weight"] == "q8_0"  # which is the output


def test_a_tied_embedding_is_the_output():
    assert MIXES["q4_k_m"].assign(shapes(tied=True))["token_embd.weight"] == "q6_k"


def test_numbers_are_those_of_llama_cpp():
    for mix in MIXES.values():
        name = "MOSTLY_" + mix.name
        assert mix.file_type == gguf.LlamaFileType[name]
    special = {
        "float32": "ALL_F32",
        "float16": "MOSTLY_F16",
        "bfloat16": "MOSTLY_BF16",
        "mxfp4_gguf": "MOSTLY_MXFP4_MOE",
    }
    special |= {"nvfp4_gguf": "MOSTLY_NVFP4"} | {f"q{bits}_k": f"MOSTLY_Q{bits}_K_S" for bits in (3, 4, 5)}
    for format, number in FILE_TYPES.items():
        assert number == gguf.LlamaFileType[special.get(format, f"MOSTLY_{format.upper()}")]
        assert format in bf.FORMATS or format in ("float32", "float16", "bfloat16")


def test_names():
    assert mix_named("Q4_k_M", "billfish") is MIXES["q4_k_m"]
    assert mix_named("Q6_K", "gguf") is MIXES["q6_k"]
    assert mix_named("q6_k", "billfish") is None  # the format
    assert mix_named("q4_0", "gguf") is None


# ---- a real run -----------------------------------------------------------------------------------------------------

LAYERS, HIDDEN = 4, 256


def write_model(folder: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "head_dim": 32}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    parts = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (64, HIDDEN),
        "self_attn.v_proj": (64, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    named = {"model.embed_tokens": (96, HIDDEN), "lm_head": (96, HIDDEN), "model.norm": (HIDDEN,)}
    named |= {f"model.layers.{i}.{part}": shape for i in range(LAYERS) for part, shape in parts.items()}
    arrays = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 16 for name, shape in named.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes, **heads}))
    save_file(arrays, folder / "model.safetensors")
    return arrays


@pytest.mark.parametrize("name", ["Q4_K_M", "q2_k", "Q3_k_l"])
def test_a_folder_to_gguf(tmp_path, name):
    arrays = write_model(tmp_path / "in")
    words = ["quantize", str(tmp_path / "in"), str(tmp_path / "out.gguf"), "--format", name, "--method", "rtn"]
    assert main(words) == 0
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    chosen = MIXES[name.lower()].assign(
        {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    )
    assert kinds == {tensor: chosen.get(tensor, "f32") for tensor in kinds}
    assert kinds["output.weight"] == "q6_k"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
    down = arrays["model.layers.3.mlp.down_proj.weight"]
    expected = bf.quantize(down, chosen["blk.3.ffn_down.weight"], method="rtn")
    assert_same_bits(bf.dequantize(bf.load(tmp_path / "out.gguf")["blk.3.ffn_down.weight"]), bf.dequantize(expected))


def test_a_folder_to_a_folder_and_rules_that_come_first(tmp_path):
    write_model(tmp_path / "in")
    words = ["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "Q4_K_M", "--method", "rtn"]
    assert main([*words, "--keep", "lm_head=q8_0", "--keep", r"layers\.0\.=keep"]) == 0
    ck = bf.load(tmp_path / "out")
    kinds = {name: ck.describe(name).format.name for name in ck if ck.describe(name).format}
    assert kinds["lm_head.weight"] == "q8_0"
    assert kinds["model.embed_tokens.weight"] == "q4_k"
    assert not [name for name in kinds if "layers.0." in name]
    assert [kinds[f"model.layers.{i}.mlp.down_proj.weight"] for i in (1, 2, 3)] == ["q4_k", "q6_k", "q6_k"]


def test_a_gguf_file_again(tmp_path):
    write_gguf(tmp_path / "in.gguf", "q8_0")
    words = ["quantize", str(tmp_path / "in.gguf"), "", "--format", "Q4_K_M", "--requantize", "--method", "rtn"]
    for out in ("out.gguf", "out"):
        words[2] = str(tmp_path / out)
        assert main(words) == 0
        ck = bf.load(words[2])
        name = "blk.0.attn_q.weight" if out == "out.gguf" else "model.layers.0.self_attn.q_proj.weight"
        assert ck.describe(name).format.name == "q5_0"  # its rows have 128


@pytest.mark.parametrize(("dtype", "number"), [("float16", 1), ("bfloat16", 32), ("float32", 0), (None, 7)])
def test_the_file_type_of_a_conversion(tmp_path, dtype, number):
    write_gguf(tmp_path / "in.gguf", "q8_0")
    words = ["convert", str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "--to", "gguf"]
    assert main(words + (["--dtype", dtype] if dtype else [])) == 0
    assert bf.load(tmp_path / "out.gguf").metadata["general.file_type"] == number


def test_the_file_type_stays_where_no_tensor_changes(tmp_path):
    write_model(tmp_path / "in")
    first, second = str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")
    assert main(["quantize", str(tmp_path / "in"), first, "--format", "Q5_K_M", "--method", "rtn"]) == 0
    assert main(["convert", first, second, "--to", "gguf"]) == 0
    assert Path(first).read_bytes() == Path(second).read_bytes()


def test_a_model_that_is_quantized_while_it_loads(tmp_path):
    arrays = write_model(tmp_path / "in")
    quantizer = Quantizer("q4_k_m", tmp_path / "in")
    down = arrays["model.layers.3.mlp.down_proj.weight"]
    assert [quantizer(f"blk.{i}.ffn_down.weight", down).format.name for i in (1, 2, 3)] == ["q4_k", "q6_k", "q6_k"]
    assert quantizer("output.weight", arrays["lm_head.weight"]).format.name == "q6_k"
    norm = arrays["model.norm.weight"]
    assert quantizer("output_norm.weight", norm) is norm


def test_only_limits_a_mix(tmp_path):
    write_model(tmp_path / "in")
    bf.quantize_checkpoint(
        tmp_path / "in", tmp_path / "out", "Q4_K_M", only=["down_proj"], method="rtn", progress=False
    )
    ck = bf.load(tmp_path / "out")
    assert all(("down_proj" in name) == (ck.describe(name).format is not None) for name in ck)


def test_a_model_without_such_names_is_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    save_file({"encoder.weight": np.ones((8, 256), np.float32)}, tmp_path / "in" / "model.safetensors")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "Q4_K_M"]) == 2
    assert re.search(r"Q4_K_M.*'encoder\.weight'.*llama\.cpp", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_mix_is_for_layouts_that_hold_it(tmp_path, capsys):
    write_model(tmp_path / "in")
    assert main(["quantize", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "Q4_K_M", "--to", "mlx"]) == 2
    assert "Its formats are affine4" in capsys.readouterr().err
