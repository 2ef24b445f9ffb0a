"""Every architecture against transformers: from a folder, from a GGUF file, quantized, and token by token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from cases import first
from common import assert_same_bits, facts
from llm_architectures import ENCODERS, LLAMA_CPP, MODELS, POSITIONS, TOKENS, write_model
from llm_folders import edit, in_transformers, write_tokenizer
from llm_models import Small
from llm_models import write_model as write_gguf
from safetensors.numpy import load_file, save_file
from stack_models import gpt_oss_folder

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.checkpoints.names.gguf_names import by_gguf_names
from billfish.checkpoints.write.target import is_sensitive
from billfish.llm import load
from billfish.models import ARCHITECTURES
from billfish.statistics import InputStatistics, Statistics

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
VECTORS = load_file(Path(__file__).parents[1] / "support" / "vectors" / "architectures.safetensors")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a model, once."""
    folder = tmp_path_factory.mktemp("models")

    def write(name: str):
        if not (folder / name).exists():
            write_model(folder / name, name)
        return folder / name

    return write


def close(actual: np.ndarray, expected: np.ndarray, relative: float = 2e-5) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


def test_every_architecture_is_here():
    tested = {architecture for architecture, _, _ in (MODELS | ENCODERS).values()}
    tested |= {"qwen2", "gemma"}  # test_folders.py
    assert tested == set(ARCHITECTURES)


@EVERY_MODEL
def test_a_folder_gives_the_logits_of_transformers(folder_of, name):
    model = load(folder_of(name), device="cpu")
    assert model.config.architecture == MODELS[name][0]
    assert close(model.logits(TOKENS), in_transformers(folder_of(name), TOKENS))


@EVERY_MODEL
def test_a_gguf_file_gives_the_logits_of_transformers(folder_of, name, tmp_path):
    bf.convert(folder_of(name), tmp_path / "m.gguf", "gguf")
    assert close(load(tmp_path / "m.gguf", device="cpu").logits(TOKENS), in_transformers(folder_of(name), TOKENS))


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_logits_are_those_of_llama_cpp(folder_of, name, tmp_path):
    """It got a GGUF file of ours; see make_architecture_vectors.py."""
    folder = tmp_path if LLAMA_CPP[name] else folder_of(name)
    if LLAMA_CPP[name]:
        write_model(folder, name, **LLAMA_CPP[name])
    logits = load(folder, device="cpu").logits(TOKENS)[POSITIONS]
    assert close(logits, VECTORS[name])


@EVERY_MODEL
def test_names_are_those_of_gguf(folder_of, name):
    """Its own tables are the judge."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == MODELS[name][0])
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    for tensor in by_gguf_names(bf.load(folder_of(name))):
        module = re.sub(r"^blk\.\d+", "blk.{bid}", re.sub(r"\.(weight|bias|scale)$", "", tensor))
        if not (MODELS[name][0] == "gemma4" and module.endswith(("ffn_gate_exps", "ffn_up_exps"))):  # or both as one
            assert module in known, tensor


@pytest.mark.parametrize("name", ["qwen3moe", "gemma4-moe", "qwen35moe"])
def test_gate_and_up_may_be_one_stack(folder_of, name, tmp_path):
    bf.convert(folder_of(name), tmp_path / "apart.gguf", "gguf")
    rewritten(tmp_path / "apart.gguf", tmp_path / "joined.gguf", {}, joined=True)
    assert "blk.1.ffn_gate_up_exps.weight" in bf.load(tmp_path / "joined.gguf")
    apart, joined = (load(tmp_path / f"{file}.gguf", device="cpu").logits(TOKENS) for file in ("apart", "joined"))
    assert_same_bits(apart, joined)
    bf.convert(tmp_path / "joined.gguf", tmp_path / "back", "plain")
    # A delta net's A is -exp(A_log) in GGUF, and its logarithm is rounded as the machine's library does.
    assert close(load(tmp_path / "back", device="cpu").logits(TOKENS), apart)


@EVERY_MODEL
@pytest.mark.parametrize("format", first(1, ["q4_0", "q8_0"]))
def test_quantized_weights_give_the_logits_of_their_numbers(folder_of, name, format, tmp_path):
    bf.quantize_checkpoint(folder_of(name), tmp_path / "quantized", format, method="rtn")
    bf.convert(tmp_path / "quantized", tmp_path / "m.gguf", "gguf")
    bf.convert(tmp_path / "quantized", tmp_path / "plain", "plain")
    model, expected = load(tmp_path / "m.gguf", device="cpu"), in_transformers(tmp_path / "plain", TOKENS)
    assert format in model.decoder.kernels
    assert close(model.logits(TOKENS), expected)
    error = np.abs(model.logits(TOKENS, activations="q16") - expected).max(axis=1)
    assert np.median(error) <= 1e-3 * np.abs(expected).max()  # a token with two equal scores may take another expert
    assert close(load(tmp_path / "quantized", device="cpu").logits(TOKENS), expected)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phi3"])
def test_quantize_does_what_the_command_does(folder_of, name, tmp_path):
    bf.quantize_checkpoint(folder_of(name), tmp_path / "out", "q4_0")
    model = load(folder_of(name), device="cpu", quantize="q4_0")
    assert "q4_0" in model.decoder.kernels
    assert_same_bits(model.logits(TOKENS), load(tmp_path / "out", device="cpu").logits(TOKENS))


def test_gpt_oss_as_it_is_published(tmp_path):
    """Its experts are MXFP4, and not a bit of them changes."""
    made, _ = gpt_oss_folder(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    made.set_attn_implementation("eager")
    with torch.no_grad():
        expected = made(torch.tensor([TOKENS])).logits[0].numpy()
    for path in (tmp_path / "in", tmp_path / "m.gguf"):
        model = load(path, device="cpu")
        assert "mxfp4" in model.decoder.kernels
        assert close(model.logits(TOKENS), expected)


@EVERY_MODEL
def test_tokens_one_by_one_give_what_all_at_once_give(folder_of, name):
    """Nothing depends on how rows come, in blocks of four or in heads together."""
    model = load(folder_of(name), device="cpu")
    cache = model.decoder.cache(16)
    rows = [model.decoder.run([(cache, TOKENS[:21])], "exact")]
    rows += [model.decoder.run([(cache, [token])], "exact") for token in TOKENS[21:]]
    assert close(model.decoder.logits(np.concatenate(rows), "exact"), model.logits(TOKENS))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2moe", "gemma2"])
@pytest.mark.parametrize("activations", ["exact", "q16"])
def test_any_number_of_threads_gives_the_same_bits(folder_of, name, activations):
    model, before = load(folder_of(name), device="cpu"), _cpu.threads()
    try:
        results = []
        for count in (1, 2, 5):
            _cpu.set_threads(count)
            results.append(model.logits(TOKENS, activations=activations))
    finally:
        _cpu.set_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@EVERY_MODEL
def test_batches_odd_pieces_and_rollbacks_give_the_same_bits(folder_of, name):
    """A sequence gets the same bits alone and beside others, prefilled in any pieces, and after a rollback."""
    model = load(folder_of(name), device="cpu")
    run, texts = model.decoder.run, [TOKENS[:n] for n in (3, 17, 1, 33)]
    alone = []
    for text in texts:
        cache = model.cache()
        alone.append(np.concatenate([run([(cache, text)], "exact"), run([(cache, [7])], "exact")]))
    # Prefill: a batch of pieces of several sequences, of 1 to 13 tokens each.
    caches, rows = [model.cache() for _ in texts], [[] for _ in texts]
    for start, end in ((0, 1), (1, 6), (6, 13), (13, 26), (26, 33)):
        going = [i for i, text in enumerate(texts) if text[start:end]]
        parts = [texts[i][start:end] for i in going]
        together = run([(caches[i], part) for i, part in zip(going, parts, strict=True)], "exact")
        for i, part in zip(going, np.split(together, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
            rows[i].append(part)
    # Decode: one token of each sequence.
    for i, row in enumerate(run([(cache, [7]) for cache in caches], "exact")):
        assert_same_bits(np.concatenate([*rows[i], row[None]]), alone[i])
    # Rollback: a sequence goes on from where its cache can go back to.
    cache, text = caches[3], [*texts[3], 7]
    kept = cache.rollback(20)
    assert 0 <= kept <= 20
    assert cache.tokens == text[:kept]
    assert_same_bits(run([(cache, text[kept:])], "exact"), alone[3][kept:])


@EVERY_MODEL
def test_statistics_are_found_under_every_name(folder_of, name):
    """Of a folder's matrices for GGUF's, which may be parts of them, and the other way round."""
    folder = bf.open_checkpoint(folder_of(name))
    sides = [{each: view.describe(each).shape for each in view} for view in (by_stacks(folder), by_gguf_names(folder))]
    one = np.ones((), np.int64)
    matrices = [{each: shape for each, shape in side.items() if is_matrix(each, shape)} for side in sides]
    for known, wanted in (matrices, matrices[::-1]):
        inputs = {each: InputStatistics(np.ones(shape[-1]), one) for each, shape in known.items()}
        statistics = Statistics(inputs, architecture=MODELS[name][0], shapes=known)
        for each, shape in wanted.items():
            statistics.check_matrix("quantize", each, shape, "mse")
            assert each in statistics


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and not is_sensitive(name) and "conv" not in name


# ---- settings that must matter ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt-oss", {"sliding_window": 64}),
        ("gpt-oss", {"num_experts_per_tok": 2}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
        ("phi3", {"sliding_window": None}),
        ("qwen3-yarn", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("granitemoe", {"residual_multiplier": 1.0}),
        ("qwen3moe", {"norm_topk_prob": False}),
    ],
)
def test_a_setting_changes_what_transformers_changes(folder_of, tmp_path, name, settings):
    write_model(tmp_path, name)
    edit(tmp_path / "config.json", **{key: value for key, value in settings.items() if value is not None})
    whole = json.loads((tmp_path / "config.json").read_text())
    whole |= settings  # None too, which `edit` would leave out
    (tmp_path / "config.json").write_text(json.dumps(whole))
    logits = load(tmp_path, device="cpu").logits(TOKENS)
    assert close(logits, in_transformers(tmp_path, TOKENS))
    assert not close(logits, load(folder_of(name), device="cpu").logits(TOKENS), 2e-3)


def test_equal_scores_choose_the_lower_experts(folder_of, tmp_path):
    """A router that cannot tell experts apart takes the first ones: the others' weights do not matter."""
    write_model(tmp_path, "qwen3moe")
    arrays = load_file(tmp_path / "model.safetensors")
    routers = [name for name in arrays if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    arrays |= {name: np.zeros_like(arrays[name]) for name in routers}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    logits = load(tmp_path, device="cpu").logits(TOKENS)
    others = re.compile(r".*\.experts\.[3-7]\..*")
    spoilt = {name: np.full_like(array, np.nan) if others.match(name) else array for name, array in arrays.items()}
    save_file(spoilt, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_bits(load(tmp_path, device="cpu").logits(TOKENS), logits)


@pytest.mark.parametrize("activations", ["exact", "q16"])
def test_a_text_that_is_not_finite_spoils_no_other(folder_of, activations, monkeypatch):
    model = load(folder_of("gpt-oss"), device="cpu")
    embed = model.decoder.embed

    def with_infinities(tokens: list[int]) -> np.ndarray:
        return np.where(np.array(tokens)[:, None] == 9, np.float32(np.inf), embed(tokens))

    monkeypatch.setattr(model.decoder, "embed", with_infinities)
    spoilt, other = model.decoder.run([(model.cache(), [token]) for token in (9, 7)], activations)
    assert np.isnan(spoilt).all()
    assert_same_bits(other, model.decoder.run([(model.cache(), [7])], activations)[0])


# ---- what cannot run -------------------------------------------------------------------------------------------------


def rewritten(source, path, fields: dict, without: str = "", joined: bool = False):
    """A GGUF file with other fields, without a tensor, or with experts' gate and up as one stack."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", *fields):
            continue
        items = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], items)
    for name, value in fields.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name != without}
    for name, tensor in tensors.items():
        data = tensor.data
        if name.endswith("ffn_gate_inp_shexp.weight"):  # as old files have it
            data = data.ravel()
        if joined and "ffn_up_exps" in name:
            continue
        if joined and "ffn_gate_exps" in name:
            data = np.concatenate([data, tensors[name.replace("gate", "up")].data], axis=1)
            name = name.replace("gate", "gate_up")
        writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_used_count": 9}, "expert_used_count|9|1 to 8"),
        ({"expert_used_count": 0}, "expert_used_count|0|1 to 8"),
        ({"expert_count": 0}, "expert_count|0|at least one expert"),
        ({"expert_count": 7}, "blk.0.ffn_gate_inp.weight|(8, 64)|(7, 64)"),
        ({"expert_gating_func": 2}, "expert_gating_func|2|1 or 3 (softmax)"),
        ({"expert_group_count": 2}, "expert_group_count|2|1"),
        ({"attention.causal": False}, "attention.causal|False|true"),
        ({"expert_weights_scale": NAN}, "expert_weights_scale|nan|number"),
        ({"attention.sliding_window": 0}, "attention.sliding_window|0|length of a window"),
        ({"attention.sliding_window": None}, "no field gpt-oss.attention.sliding_window"),
        (
            {"attention.sliding_window_pattern": -1},
            "attention.sliding_window_pattern|-1|number of layers",
        ),
        ({"attention.sliding_window_pattern": [True]}, "attention.sliding_window_pattern|1 layers|3"),
        ({"rope.scaling.type": "odd"}, "rope.scaling.type|'odd'|none, linear, yarn, longrope"),
        ({"rope.scaling.factor": NAN}, "rope.scaling.factor|nan|number"),
        ({"rope.scaling.factor": -2.0}, "rope.scaling.factor|-2.0|positive number"),
        ({"rope.scaling.original_context_length": 0}, "rope.scaling.original_context_length|0|positive"),
        ({"rope.scaling.yarn_beta_fast": 0.0}, "rope.scaling.yarn_beta_fast|0.0|positive number"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor|0.5|1"),
        ({"rope.freq_base": 1.0}, "rope.freq_base|1.0|number above 1 for YaRN"),
        ({"rope.freq_base": 0.0}, "rope.freq_base|0.0|positive number"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping|-1.0|positive number, or 0 for none"),
        ({"attention.scale": 0.0}, "attention.scale|0.0|positive number"),
    ],
)
def test_bad_fields_are_refused_by_name(folder_of, tmp_path, fields, message):
    bf.convert(folder_of("gpt-oss"), tmp_path / "good.gguf", "gguf")
    own = {f"gpt-oss.{name}": value for name, value in fields.items()}
    rewritten(tmp_path / "good.gguf", tmp_path / "m.gguf", own)
    with pytest.raises(bf.ModelError, match=facts(message)):
        load(tmp_path / "m.gguf", device="cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        "blk.0.attn_sinks.weight",
        "blk.1.post_attention_norm.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.1.ffn_gate_inp.bias",
        "blk.2.ffn_up_exps.weight",
        "blk.2.ffn_down_exps.bias",
        "blk.0.attn_output.bias",
    ],
)
def test_a_missing_tensor_is_named(folder_of, tmp_path, tensor):
    bf.convert(folder_of("gpt-oss"), tmp_path / "good.gguf", "gguf")
    rewritten(tmp_path / "good.gguf", tmp_path / "m.gguf", {}, without=tensor)
    message = f"no tensor {tensor}|gpt-oss"
    with pytest.raises(bf.ModelError, match=facts(message)):
        load(tmp_path / "m.gguf", device="cpu")


@pytest.mark.parametrize("factor", [NAN, 0.0, -1.0])
def test_divisors_that_are_none_are_refused(tmp_path, factor):
    write_gguf(tmp_path / "good.gguf", Small(), {"rope_freqs.weight": np.full(16, factor, np.float32)})
    with pytest.raises(bf.ModelError, match=r"rope_freqs.weight.*not positive"):
        load(tmp_path / "good.gguf", device="cpu")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit|5.0|7.0 for gpt_oss"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types|['chunked_attention'"),
        ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers|[0]|[] for qwen3_moe"),
        ("olmoe", {"clip_qkv": 3.0}, "clip_qkv|3.0|None for olmoe"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1]}, "no_rope_layers|[0, 1, 1, 1, 1]|every 4th layer"),
        ("qwen3-yarn", {"rope_parameters": {"rope_type": "yarn", "factor": NAN}}, "rope_scaling.factor|nan"),
        ("gemma2", {"sliding_window": "7"}, "sliding_window|'7'|number"),
        ("phi3-longrope", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0],
                                               "original_max_position_embeddings": 16}}, "long_factor|a list of 1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_run_are_named(folder_of, tmp_path, name, settings, message):
    write_model(tmp_path, name)
    edit(tmp_path / "config.json", **settings)
    with pytest.raises(bf.BillfishError, match=facts(message)):
        load(tmp_path, device="cpu")


def test_blocks_that_draft_are_kept_and_not_run(folder_of, tmp_path):
    """GLM's files have a layer behind the last, which predicts a second token."""
    shutil.copytree(folder_of("glm4moe"), tmp_path / "in")
    arrays = load_file(tmp_path / "in" / "model.safetensors")
    last = {name.replace("layers.2.", "layers.3."): array for name, array in arrays.items() if "layers.2." in name}
    more = {f"model.layers.3.{name}.weight": np.ones(64, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= {"model.layers.3.eh_proj.weight": np.ones((64, 128), np.float32)}
    save_file(arrays | last | more, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "in" / "config.json", num_nextn_predict_layers=1)
    bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert "blk.3.nextn.eh_proj.weight" in bf.load(tmp_path / "m.gguf")
    expected = load(folder_of("glm4moe"), device="cpu").logits(TOKENS)
    for path in (tmp_path / "in", tmp_path / "m.gguf"):
        model = load(path, device="cpu")
        assert (model.config.layers, model.config.draft_blocks) == (3, 1)
        assert_same_bits(model.logits(TOKENS), expected)
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == (arrays | last | more).keys()
