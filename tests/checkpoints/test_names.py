"""Between folders and GGUF, with transformers as the judge: it reads both sides by its own code."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import checkpoint_folders as folders
import checkpoint_samples as samples
import gguf
import llm_architectures
import numpy as np
import pytest
import torch
from cases import first
from common import facts
from gguf import TokenType
from llm_models import Small
from llm_models import write_model as write_small
from llm_oracle import Oracle
from llm_text import varied_lines
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import billfish as bf
from billfish.checkpoints.names.gguf_names import by_gguf_names, gguf_parts, of_gguf_parts
from billfish.checkpoints.tokenizer.gguf_tokenizer import read_metadata
from billfish.checkpoints.write.export import ARRANGED
from billfish.checkpoints.write.tokenizer_files import tokenizer_files
from billfish.cli.main import main
from billfish.llm import default_model
from billfish.llm import load as load_llm
from billfish.models.rope import llama3_factors, llama3_rule

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
    model = AutoModelForCausalLM.from_config(config)
    for vector in model.parameters():
        if vector.ndim == 1:  # norms and biases begin as ones or zeros; multiples of 2^-10 stay whole beside Gemma's 1
            vector.data += torch.randint(-300, 300, vector.shape) / 1024
    model.save_pretrained(folder)


def edit_config(folder: Path, **settings) -> None:
    """Other settings in config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | settings
    kept = {name: value for name, value in config.items() if name not in settings or value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def logits(folder: Path, **arguments) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    with torch.no_grad():
        return model(TOKENS).logits.numpy()


KINDS = [(model_type, tied) for model_type in ("llama", "mistral", "qwen2", "qwen3") for tied in (False, True)]


@pytest.mark.parametrize(("model_type", "tied"), [*KINDS, ("gemma", True)])  # there is no other Gemma
def test_a_folder_as_gguf(tmp_path, model_type, tied):
    write_model(tmp_path / "in", model_type, tie_word_embeddings=tied)
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    expected = logits(tmp_path / "in")
    by_numpy = Oracle(tmp_path / "m.gguf").logits(TOKENS[0].tolist())
    np.testing.assert_allclose(by_numpy, expected[0], rtol=1e-4, atol=1e-5)
    if model_type != "gemma":  # which transformers does not read from GGUF
        np.testing.assert_allclose(logits(tmp_path, gguf_file="m.gguf"), expected, rtol=1e-5, atol=1e-5)
    # and back again
    bf.convert(tmp_path / "m.gguf", tmp_path / "out", "billfish")
    assert bf.verify(tmp_path / "in", tmp_path / "out")
    assert bf.verify(tmp_path / "in", tmp_path / "m.gguf")
    edit_config(tmp_path / "out", quantization_config=None)
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
    vocabulary = {piece: i for i, piece in enumerate([*(chr(33 + i) for i in range(88)), "ab", "cd"])}
    plainly = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b", "c d"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "added_tokens": [
            {"id": 5, "content": "&", "special": True, **plainly},
            {"id": 6, "content": "'", "special": False, **plainly},
            {"id": 90, "content": "<|end|>", "special": True, **plainly},
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
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 90,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.chat_template": "{{x}}",
    }
    assert {name: fields[name] for name in expected} == expected
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == 96
    assert fields["tokenizer.ggml.tokens"][89:92] == ["cd", "<|end|>", "[PAD91]"]
    kinds = fields["tokenizer.ggml.token_type"]
    assert (kinds[4:7], kinds[90]) == ([TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED], TokenType.CONTROL)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["output_norm.weight"] == "F32"


@pytest.mark.full  # `make docs-commands`, which is in `make test`, types both commands
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
    ours, theirs = read_metadata(bf.load(path).metadata), AutoTokenizer.from_pretrained(folder)
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
    with pytest.raises(bf.CheckpointError, match=r"llm\.load.*--raw-names"):
        bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    (note,) = bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf", raw_names=True).notes
    assert note.name == "tokenizer.json"
    assert note.reason.startswith("left out: llm.load: ")
    write_small(tmp_path / "small.gguf", Small(fields={"tokenizer.ggml.pre": "unheard of"}))
    (note,) = bf.convert(tmp_path / "small.gguf", tmp_path / "out", "billfish").notes
    assert re.match(r"left out: .*tokenizer\.ggml\.model.*'gpt2'.*'unh", note.reason)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


RULES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rule", RULES)
def test_scaled_positions_go_both_ways(tmp_path, rule, key):
    """The rule becomes fields or divisors in GGUF, and the same rule again; both sides compute the same."""
    write_model(tmp_path / "in", "llama")
    edit_config(tmp_path / "in", **{"rope_parameters": None, "rope_theta": 10000.0, key: RULES[rule]})
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    expected, by_numpy = logits(tmp_path / "in"), Oracle(tmp_path / "m.gguf").logits(TOKENS[0].tolist())
    np.testing.assert_allclose(by_numpy, expected[0], rtol=1e-4, atol=1e-5)
    edit_config(tmp_path / "in", rope_scaling=None, rope_parameters=None)
    assert np.abs(logits(tmp_path / "in") - expected).max() > 5e-5  # scaled positions are others
    bf.convert(tmp_path / "m.gguf", tmp_path / "out", "billfish")
    edit_config(tmp_path / "out", quantization_config=None)
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rope_type": "dynamic", "factor": 8.0}, "rope_scaling|'dynamic'|default, linear, llama3"),
        ({"rope_type": "yarn", "factor": 8.0}, "rope_scaling.original_max_position_embeddings|None|pos"),
        ({"type": "linear"}, "rope_scaling.factor|None|positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor|None|positive number"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling|{'full_attention'"),
    ],
)
def test_scaled_positions_of_other_rules_are_refused(tmp_path, rule, message):
    write_model(tmp_path / "in", "llama")
    edit_config(tmp_path / "in", rope_scaling=rule)
    with pytest.raises(bf.CheckpointError, match=facts(message)):
        bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(("head_size", "theta"), [(64, 500000.0), (128, 10000.0), (32, 100.0)])
def test_divisors_of_llama3_are_those_of_transformers(head_size, theta):
    rule = RULES["llama3"] | {"rope_theta": theta}
    config = AutoConfig.for_model("llama", **(SIZES | {"head_dim": head_size, "rope_parameters": rule}))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_size, 2) / head_size)
    factors = llama3_factors(head_size, theta, rule)
    np.testing.assert_allclose(plain / factors, scaled.numpy(), rtol=1e-5)
    if factors.max() > 7.99:  # a head that turns that slowly tells the whole rule
        assert llama3_rule(factors, theta)["factor"] == 8


def test_divisors_of_another_rule_are_refused(tmp_path):
    folders.write_gguf(tmp_path / "m.gguf", rope=np.linspace(1, 9, 8, dtype=np.float32))
    with pytest.raises(bf.CheckpointError, match=r"rope_freqs\.weight.*Llama 3"):
        bf.convert(tmp_path / "m.gguf", tmp_path / "out", "billfish")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act|'relu'|'silu' for llama"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor|0.5|1 for llama"),
    ],
)
def test_settings_that_gguf_has_no_field_for_are_refused(tmp_path, settings, message):
    write_model(tmp_path / "in", "llama")
    edit_config(tmp_path / "in", **settings)
    with pytest.raises(bf.CheckpointError, match=facts(message)):
        bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")


def test_a_sliding_window_is_where_the_context_ends(tmp_path):
    """GGUF knows no window for these architectures: behind it, attention would see what it must not."""
    write_model(tmp_path / "in", "mistral", sliding_window=24)
    assert by_gguf_names(bf.load(tmp_path / "in")).metadata["llama.context_length"] == 24
    edit_config(tmp_path / "in", model_type="qwen2", use_sliding_window=False)
    assert by_gguf_names(bf.load(tmp_path / "in")).metadata["qwen2.context_length"] == 64


def test_old_folders_have_frequencies_that_nobody_needs(tmp_path):
    write_model(tmp_path / "in", "llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: np.ones(16, np.float32)}, tmp_path / "in" / "more.safetensors")
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    np.testing.assert_allclose(logits(tmp_path, gguf_file="m.gguf"), logits(tmp_path / "in"), rtol=1e-5, atol=1e-5)


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


FUSED = ("llama3", "gpt-oss", "granitehybrid-moe", "qwen3next", "qwen35moe", "mixtral")


@pytest.mark.parametrize("name", first(6, [*FUSED, *(each for each in llm_architectures.MODELS if each not in FUSED)]))
def test_tensors_of_folders_are_made_of_those_of_gguf(tmp_path, name):
    """Quantized ones, to the bit, under the names of every layout, whatever it has as one and in whichever order."""
    llm_architectures.write_model(tmp_path / "in", name)
    for out in ("out", "out.gguf"):
        bf.quantize_checkpoint(tmp_path / "in", tmp_path / out, "q8_0", method="rtn", progress=False)
    parts = bf.load(tmp_path / "out.gguf")
    for arranged in ARRANGED.values():
        folder = arranged(bf.load(tmp_path / "out"))
        names = [own for own in folder if folder.describe(own).format]
        assert names
        for own in names:
            shape = folder.describe(own).shape
            known = {part: parts.entry(part) for part in gguf_parts(own, shape, parts.metadata)}
            made = of_gguf_parts(own, shape, known, parts.metadata)
            assert made.description.shape == shape
            assert made.read().storage["blocks"].tobytes() == folder[own].storage["blocks"].tobytes(), own
