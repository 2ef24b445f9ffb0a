"""Between folders and GGUF, with transformers as the judge: it reads both sides by its own code."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import checkpoint_samples as samples
import gguf
import numpy as np
import pytest
import torch
from gguf import TokenType
from llm_models import Small
from llm_models import write_model as write_small
from llm_text import varied_lines
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import billfish as bf
from billfish.checkpoints.writers.tokenizer import tokenizer_files
from billfish.cli import main
from billfish.llm import default_model
from billfish.llm import load as load_llm
from billfish.tokenizer import Tokenizer

TOKENS = torch.arange(3, 19)[None]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "head_dim": 32,
}


def write_model(folder: Path, model_type: str, **more) -> None:
    torch.manual_seed(0)
    # transformers does not read the size of a head from GGUF; 128 is what it takes for granted of qwen3.
    sizes = SIZES | ({"head_dim": 128} if model_type == "qwen3" else {})
    config = AutoConfig.for_model(model_type, **(sizes | more))
    config._attn_implementation = "eager"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def logits(folder: Path, **arguments) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    with torch.no_grad():
        return model(TOKENS).logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_folder_as_gguf(tmp_path, model_type, tied):
    write_model(tmp_path / "in", model_type, tie_word_embeddings=tied)
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    expected = logits(tmp_path / "in")
    np.testing.assert_allclose(logits(tmp_path, gguf_file="m.gguf"), expected, rtol=1e-5, atol=1e-5)
    # and back again
    bf.convert(tmp_path / "m.gguf", tmp_path / "out", "billfish")
    assert bf.verify(tmp_path / "in", tmp_path / "out")
    assert bf.verify(tmp_path / "in", tmp_path / "m.gguf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["q4_0", "q8_0"])
def test_quantized_gguf_and_compressed_tensors_are_the_same_model(tmp_path, format):
    """A folder to GGUF, that to compressed-tensors: rows back in their places, weights bit for bit."""
    write_model(tmp_path / "in", "llama")
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "m.gguf", format)
    ck = bf.load(tmp_path / "m.gguf")
    assert ck.describe("blk.0.attn_q.weight").format.name == format
    bf.convert(tmp_path / "m.gguf", tmp_path / "out", "compressed-tensors")
    by_gguf = logits(tmp_path, gguf_file="m.gguf")
    np.testing.assert_allclose(logits(tmp_path / "out"), by_gguf, rtol=1e-4, atol=1e-4)
    assert np.abs(by_gguf - logits(tmp_path / "in")).max() > 1e-3  # it was quantized


def test_what_llama_cpp_looks_for(tmp_path):
    write_model(tmp_path / "in", "llama", rope_theta=5000.0)
    vocabulary = {chr(33 + i): i for i in range(90)}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "c d"]},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [
            {"id": 5, "content": "&", "special": True},
            {"id": 6, "content": "'", "special": False},
            {"id": 90, "content": "<|end|>", "special": True},
        ],
    }
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "in" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": "{{x}}"})
    )
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    fields = {n: f.contents() for n, f in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 128,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 32,
        "llama.vocab_size": 96,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.eos_token_id": 90,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.chat_template": "{{x}}",
    }
    assert {name: fields[name] for name in expected} == expected
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == 96
    assert fields["tokenizer.ggml.tokens"][89:92] == ["z", "<|end|>", "[PAD91]"]
    kinds = fields["tokenizer.ggml.token_type"]
    assert (kinds[4:7], kinds[90]) == ([TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED], TokenType.CONTROL)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["output_norm.weight"] == "F32"


def test_a_real_file_by_the_names_of_models(tmp_path, capsys):
    """SmolLM2: bit for bit to MLX, where q4_1 is affine4 and q8_0 affine8; and its configuration."""
    path = default_model()
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "mlx"]) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    ck = bf.load(tmp_path / "out")
    assert ck["model.layers.3.self_attn.q_proj.weight"].format.name == "affine4"
    assert ck["model.embed_tokens.weight"].format.name == "affine8"
    config = ck.config
    assert (config["hidden_size"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (576, 3, True)
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert main(["verify", str(path), str(tmp_path / "out")]) == 0
    assert "the same values" in capsys.readouterr().out


def test_a_real_tokenizer_comes_along(tmp_path):
    """SmolLM2's, into files that transformers reads, and from those back into GGUF."""
    path = default_model()
    folder, again = tmp_path / "out", tmp_path / "again.gguf"
    samples.write_config(folder)
    for name, content in tokenizer_files(bf.load(path).metadata).items():
        (folder / name).write_bytes(content)
    ours, theirs = Tokenizer(bf.load(path).metadata), AutoTokenizer.from_pretrained(folder)
    for line in [*varied_lines()[:300], "<|im_start|>user\nHi<|im_end|>"]:
        tokens = ours.encode(line)
        assert theirs(line).input_ids == tokens
        assert theirs.decode(tokens, skip_special_tokens=True) == ours.decode(tokens)
    messages = [{"role": "user", "content": "Hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.encode(rendered) == load_llm(path).encode(messages)
    write_model(tmp_path / "model", "llama", vocab_size=len(ours.pieces))
    for file in folder.glob("tokenizer*"):
        file.rename(tmp_path / "model" / file.name)
    bf.convert(tmp_path / "model", again, "gguf")
    before, after = bf.load(path).metadata, bf.load(again).metadata
    names = {name for name in before if name.startswith("tokenizer.")} - {"tokenizer.ggml.add_space_prefix"}
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


def test_tokenizers_that_are_left_out_are_named(tmp_path):
    write_model(tmp_path / "in", "llama")
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    (note,) = bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf").notes
    assert note.name == "tokenizer.json"
    assert note.reason.startswith("left out: byte-level BPE")
    write_small(tmp_path / "small.gguf", Small(fields={"tokenizer.ggml.pre": "unheard of"}))
    (note,) = bf.convert(tmp_path / "small.gguf", tmp_path / "out", "billfish").notes
    assert note.reason.startswith("left out: [llm.load] tokenizer.ggml.model: got 'gpt2' cut as 'unh")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_are_not_dropped(tmp_path, key):
    write_model(tmp_path / "in", "llama")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config[key] = {"rope_type": "llama3", "factor": 8.0}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(bf.CheckpointError, match="rotary positions scaled by"):
        bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")


def test_rules_may_use_either_name(tmp_path):
    write_model(tmp_path / "in", "llama")
    for i, pattern in enumerate(("mlp.up_proj", "ffn_up")):
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / f"{i}.gguf", "q4_0", method="rtn", keep={pattern: "q8_0"})
        assert bf.load(tmp_path / f"{i}.gguf").describe("blk.1.ffn_up.weight").format.name == "q8_0"


@pytest.mark.parametrize("source", ["folder", "gguf", "gptq"])
def test_mlx_lm_loads_what_we_write(tmp_path, source):
    """From a plain folder, from GGUF with its own names and order, and from GPTQ, which mlx-lm itself cannot load."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    write_model(tmp_path / "in", "llama", tie_word_embeddings=False)
    start = tmp_path / "in"
    if source == "gguf":
        start = tmp_path / "m.gguf"
        bf.quantize_checkpoint(tmp_path / "in", start, "q4_1", method="mse", to="gguf")
    elif source == "gptq":
        start = tmp_path / "gptq"
        write_gptq(tmp_path / "in", start)
    if source == "folder":
        keep = {"lm_head": "affine8:32"}
        bf.quantize_checkpoint(start, tmp_path / "out", "affine4", group_size=64, keep=keep, to="mlx")
    else:
        bf.convert(start, tmp_path / "out", "mlx")
    model, _ = load_model(tmp_path / "out")
    model.set_dtype(mx.float32, lambda dtype: mx.issubdtype(dtype, mx.floating))
    theirs = np.array(model(mx.array(TOKENS.numpy())))
    decoded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "in"))
    ck = bf.load(tmp_path / "out")
    state = {n: bf.dequantize(t) if isinstance(t, bf.QuantizedTensor) else t.astype(np.float32) for n, t in ck.items()}
    assert not decoded.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in state.items()}).missing_keys
    with torch.no_grad():
        expected = decoded(TOKENS).logits.numpy()
    np.testing.assert_allclose(theirs, expected, rtol=1e-3, atol=1e-3)


def write_gptq(source: Path, folder: Path) -> None:
    """The linear layers of a model in GPTQ, symmetric, by plain rounding."""
    import checkpoint_samples as samples
    from safetensors.numpy import save_file

    config = json.loads((source / "config.json").read_text())
    about = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    samples.write_config(folder, **config, quantization_config=about)
    arrays = {}
    for name, w in bf.load(source).items():
        if "proj" not in name:
            arrays[name] = np.array(w)
            continue
        planes = bf.quantize(np.array(w), "u4b8", group_size=32).planes
        module, groups = name.removesuffix(".weight"), w.shape[1] // 32
        arrays[f"{module}.qweight"] = samples.pack_along(planes["codes"].T, 4, 0).view(np.int32)
        arrays[f"{module}.qzeros"] = np.full((groups, w.shape[0] // 8), 0x77777777, np.int32)
        arrays[f"{module}.scales"] = np.ascontiguousarray(planes["scale"].T)
    save_file(arrays, folder / "model.safetensors")
