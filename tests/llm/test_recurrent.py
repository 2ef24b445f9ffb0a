"""Models whose layers keep a state instead of keys and values: bits, checkpoints, memory, other parts of folders."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from common import assert_same_bits
from llm_architectures import RECURRENT, TOKENS, write_model
from llm_folders import edit, in_transformers
from safetensors.numpy import load_file, save_file

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.llm import load
from billfish.llm.cpu import state_numbers
from billfish.llm.sampler import Sampler, Sampling
from billfish.models import describe
from billfish.models.description import Attention

EVERY_MODEL = pytest.mark.parametrize("name", RECURRENT)
ONE_OF_EACH = pytest.mark.parametrize("name", ["qwen35", "lfm2", "granitehybrid"])
LONG = [3 + (11 * i * i + 5 * i) % 64 for i in range(2100)]
EVERY = 64  # positions between checkpoints


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Writes a model with room for long texts, once, and loads it."""
    folder, models = tmp_path_factory.mktemp("models"), {}

    def get(name: str):
        if name not in models:
            write_model(folder / name, name, max_position_embeddings=4096)
            models[name] = load(folder / name, device="cpu")
        return models[name]

    return get


def fed(model, tokens: list[int], cuts: list[int], activations: str = "q16", cache=None) -> np.ndarray:
    """Hidden states of tokens that come in pieces."""
    cache = cache or model.cache()
    ends = [*cuts, len(tokens)]
    pieces = [tokens[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
    return np.concatenate([model.decoder.run([(cache, piece)], activations) for piece in pieces if piece])


# ---- the same bits ---------------------------------------------------------------------------------------------------


@EVERY_MODEL
def test_pieces_of_any_size_give_the_same_bits(model_of, name):
    """Behind a checkpoint, across one, and token by token."""
    model, tokens = model_of(name), LONG[:150]
    whole = fed(model, tokens, [])
    for cuts in ([1, 2, 63, 64, 65, 130], [7, 128], list(range(1, 150))):
        assert_same_bits(fed(model, tokens, cuts), whole)


@ONE_OF_EACH
@pytest.mark.parametrize("activations", ["exact", "q16"])
def test_any_number_of_threads_gives_the_same_bits(model_of, name, activations):
    model, before = model_of(name), _cpu.threads()
    try:
        results = []
        for count in (1, 2, 5):
            _cpu.set_threads(count)
            results.append(fed(model, LONG[:100], [70], activations))
    finally:
        _cpu.set_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@EVERY_MODEL
@pytest.mark.parametrize("activations", ["exact", "q16"])
def test_sequences_of_a_batch_get_the_bits_they_get_alone(model_of, name, activations):
    model = model_of(name)
    texts = [LONG[n : n + n] for n in (3, 17, 1, 80)]
    caches = [model.cache() for _ in texts]
    for cache, text in zip(caches, texts, strict=True):
        fed(model, text, [], activations, cache)
    together = model.decoder.run([(cache, [7]) for cache in caches], activations)
    for text, row in zip(texts, together, strict=True):
        assert_same_bits(fed(model, [*text, 7], [len(text)], activations)[-1], row)


@EVERY_MODEL
def test_odd_pieces_are_exact(model_of, name):
    model, tokens = model_of(name), LONG[:150]
    expected = in_transformers(model.decoder.tensors.source.tensors.folder, tokens)
    rows = fed(model, tokens, [5, 9, 64, 107], "exact")
    error = np.abs(model.decoder.logits(rows, "exact") - expected).max()
    assert error <= 2e-5 * np.abs(expected).max()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@EVERY_MODEL
def test_a_rollback_goes_to_a_checkpoint_and_on_from_there(model_of, name):
    model, cache, tokens = model_of(name), model_of(name).cache(), LONG[:200]
    whole = fed(model, tokens, [77], cache=cache)
    assert cache.rollback(300) == 200  # where it is
    assert cache.rollback(150) == 2 * EVERY
    assert cache.tokens == tokens[: 2 * EVERY]
    assert_same_bits(fed(model, tokens[2 * EVERY :], [9], cache=cache), whole[2 * EVERY :])
    assert cache.rollback(EVERY - 1) == 0
    assert_same_bits(fed(model, tokens, [], cache=cache), whole)


@ONE_OF_EACH
def test_ends_of_messages_are_checkpoints(model_of, name):
    """The token </s> ends a message, as the tokenizer says."""
    model, cache, tokens = model_of(name), model_of(name).cache(), [*LONG[:100], 1, *LONG[100:140]]
    assert 1 in model.tokenizer.ends
    whole = fed(model, tokens, [30], cache=cache)
    assert cache.rollback(120) == 101
    assert_same_bits(fed(model, tokens[101:], [], cache=cache), whole[101:])


@ONE_OF_EACH
def test_a_prompt_with_a_known_beginning_reads_little_again(model_of, name, monkeypatch):
    """Of 2,000 tokens that two prompts share, at most 64, counted where they are fed."""
    model, cache, counts = model_of(name), model_of(name).cache(), []
    run = type(model.decoder).run

    def counting(decoder, passages, activations):
        counts.append(sum(len(tokens) for _, tokens in passages))
        return run(decoder, passages, activations)

    monkeypatch.setattr(type(model.decoder), "run", counting)
    sampler = Sampler(Sampling(temperature=0))
    model.decoder.go_on(cache, [*LONG[:2000], *LONG[:90]], sampler, "q16")
    assert sum(counts) == 2090
    counts.clear()
    text = [*LONG[:2000], *LONG[5:45]]
    token, there = model.decoder.go_on(cache, text, sampler, "q16")
    assert sum(counts) == len(text) - there <= 40 + EVERY
    assert token == model.decoder.go_on(model.cache(), text, sampler, "q16")[0]


@ONE_OF_EACH
def test_a_copy_goes_on_as_the_original(model_of, name):
    model, cache = model_of(name), model_of(name).cache()
    whole = fed(model, LONG[:150], [], cache=cache)
    copied, begun = cache.copy(), model.cache()
    begun.begin_as(cache, cache.restorable(140))
    assert begun.tokens == LONG[: 2 * EVERY]
    assert_same_bits(fed(model, LONG[2 * EVERY : 150], [], cache=begun), whole[2 * EVERY :])
    assert_same_bits(fed(model, [9], [], cache=copied), fed(model, [9], [], cache=cache))


def test_checkpoints_stay_within_their_budget():
    """Four of them fit in 256 MiB beside each other: those of the latest message ends, and the last position's."""
    state = _cpu.SequenceState([(0, 16, 0, 1 << 24)], 0, 64)
    assert state.nbytes == 4 << 24
    for start in range(0, 1280, EVERY):
        state.reserve(start, EVERY, 2048, [start + 10] if start in (128, 640) else [])
    assert state.checkpoints == 4
    assert [state.restorable(n) for n in (100, 200, 649, 700, 1280)] == [0, 138, 138, 650, 1280]


@ONE_OF_EACH
def test_eight_sequences_hold_eight_states(model_of, name):
    model, capacity = model_of(name), 64
    caches = [model.decoder.cache(capacity) for _ in range(8)]
    held = 0
    for block in model.config.blocks:
        mixer = block.mixer
        keys = 2 * mixer.kv_heads * mixer.head_size * capacity if isinstance(mixer, Attention) else 0
        held += 4 * (keys or state_numbers(mixer))
    assert [cache.nbytes for cache in caches] == [held] * 8
    for _ in range(3):
        model.decoder.run([(cache, [5]) for cache in caches], "q16")
    assert [cache.nbytes for cache in caches] == [held] * 8


# ---- what cannot run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen35", "ssm.group_count", 0),
        ("qwen35", "ssm.time_step_rank", 3),
        ("qwen35", "ssm.state_size", 24),
        ("qwen35", "ssm.inner_size", 100),
        ("qwen35", "ssm.conv_kernel", 0),
        ("qwen35", "full_attention_interval", 0),
        ("lfm2", "shortconv.l_cache", 65),
        ("granitehybrid", "ssm.group_count", 3),
        ("granitehybrid", "ssm.time_step_rank", 0),
        ("granitehybrid", "ssm.state_size", 8),
        ("granitehybrid", "ssm.inner_size", 120),
        ("granitehybrid", "ssm.conv_kernel", -1),
    ],
)
def test_bad_fields_are_named(model_of, name, field, value):
    source = model_of(name).decoder.tensors.source
    fields = {**source.fields, f"{name}.{field}": value}
    with pytest.raises(bf.ModelError, match=rf"{field} is {value}"):
        describe(fields, source.vocabulary, source.tensors)


# ---- quantizing ------------------------------------------------------------------------------------------------------


@EVERY_MODEL
def test_calibrates_and_quantizes(model_of, name, tmp_path):
    """Convolutions stay as they are, from folders and from GGUF files."""
    folder = model_of(name).decoder.tensors.source.tensors.folder
    bf.convert(folder, tmp_path / "m.gguf", "gguf")
    (tmp_path / "text.txt").write_text("ab cd abab " * 60)
    options = {"text": tmp_path / "text.txt", "tokens": 300, "window": 280, "progress": False}
    bf.calibrate_checkpoint(tmp_path / "m.gguf", tmp_path / "s.safetensors", **options)
    for source in (folder, tmp_path / "m.gguf"):
        bf.quantize_checkpoint(
            source, tmp_path / "q.gguf", "q4_0", statistics=tmp_path / "s.safetensors", overwrite=True
        )
        tensors = bf.load(tmp_path / "q.gguf")
        kept = [each for each in tensors if "conv1d.weight" in each or "shortconv.conv.weight" in each]
        assert kept
        assert {tensors.describe(each).dtype for each in kept} == {"F32"}
        assert np.isfinite(load(tmp_path / "q.gguf", device="cpu").logits(TOKENS)).all()


@pytest.mark.parametrize("format", ["q4_0", "q4_k"])
def test_columns_that_blocks_do_not_end_with_keep_their_order(tmp_path, format):
    """Heads of 128 go in another order in GGUF: with blocks of 256 a folder runs, and cannot become a GGUF file."""
    sizes = {"linear_value_head_dim": 128, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.03}
    write_model(tmp_path / "in", "qwen35", **sizes)
    bf.quantize_checkpoint(tmp_path / "in", tmp_path / "quantized", format, method="rtn")
    bf.convert(tmp_path / "quantized", tmp_path / "plain", "plain")
    expected = in_transformers(tmp_path / "plain", TOKENS)
    logits = load(tmp_path / "quantized", device="cpu").logits(TOKENS)
    assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()
    if format == "q4_k":
        with pytest.raises(bf.CheckpointError, match="order"):
            bf.convert(tmp_path / "quantized", tmp_path / "m.gguf", "gguf")


# ---- other parts of folders ------------------------------------------------------------------------------------------


def test_a_folder_with_images_and_drafts_runs_as_text(model_of, tmp_path, caplog):
    """As Qwen publishes it: the language model is a part, beside one for images and a block that drafts."""
    folder = model_of("qwen35").decoder.tensors.source.tensors.folder
    shutil.copytree(folder, tmp_path / "in")
    arrays = load_file(folder / "model.safetensors")
    expected = model_of("qwen35").logits(TOKENS)
    draft = {name.replace("model.layers.3.", "mtp.layers.0."): array for name, array in arrays.items()}
    draft = {name: array for name, array in draft.items() if name.startswith("mtp.")}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    draft |= {f"mtp.{name}.weight": np.full(64, 0.25, np.float32) for name in norms}
    draft |= {"mtp.fc.weight": np.ones((64, 128), np.float32)}
    whole = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()} | draft
    images = {"model.visual.blocks.0.attn.proj.weight": np.ones((8, 8), np.float32)}
    save_file(whole | images, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "in" / "config.json").unlink()
    edit(tmp_path / "in" / "config.json", model_type="qwen3_5", text_config=text, tie_word_embeddings=False)
    report = bf.convert(tmp_path / "in", tmp_path / "m.gguf", "gguf")
    assert [note.name for note in report.notes if "images" in note.reason] == list(images)
    tensors = bf.load(tmp_path / "m.gguf")
    assert_same_bits(tensors["blk.4.nextn.enorm.weight"], np.full(64, 1.25, np.float32))
    caplog.set_level("INFO")
    for path in (tmp_path / "in", tmp_path / "m.gguf"):
        model = load(path, device="cpu")
        assert (model.config.layers, model.config.draft_blocks) == (4, 1)
        assert_same_bits(model.logits(TOKENS), expected)
    assert "1 tensors for images or sound are left out" in caplog.text
    bf.convert(tmp_path / "m.gguf", tmp_path / "back", "plain")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == (arrays | draft).keys()
    for name, array in draft.items():
        assert np.abs(back[name] - array).max() < 1e-6  # norms had 1 added
