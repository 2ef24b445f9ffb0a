"""Folders of a language model: config.json, tokenizer.json and the small files beside them, each in its own grammar."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np

from attack.cases import Case, as_json, odd_json, odd_text, run_model
from attack.safetensors_files import joined
from billfish.checkpoints.tokenizer.tokenizer import byte_characters
from billfish.checkpoints.tokenizer.tokenizer_json import chat_template, read_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "vocab_size": 259,
    "bos_token_id": 0,
    "eos_token_id": [1],
    "sliding_window": None,
    "quantization_config": {},
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": "{{ messages[0]['content'] }}",
}
# Parts of a tokenizer.json by the names that the library has, each with settings that it takes.
PRE = [
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Digits", "individual_digits": True},
    {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "CharDelimiterSplit", "delimiter": "\0"},
    {"type": "BertPreTokenizer"},
    {"type": "UnicodeScripts"},
    {"type": "Sequence", "pretokenizers": []},
    None,
]
NORMALIZERS = [
    {"type": "NFC"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    {"type": "Replace", "pattern": {"Regex": "[["}, "content": ""},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "tAMAAAAAAAA="},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]},
    None,
]
DECODERS = [
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "Sequence", "decoders": []},
    None,
]
MODELS = [
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["", float("1e308")]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0]], "byte_fallback": False},
    {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    {
        "type": "WordPiece",
        "vocab": {"a": 0},
        "unk_token": "x",
        "continuing_subword_prefix": "#",
        "max_input_chars_per_word": 0,
    },
    {"type": "BPE", "vocab": {}, "merges": []},
]
PROCESSORS = [
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "?", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "BertProcessing", "sep": ["", 10**9], "cls": ["", 0]},
    None,
]


@functools.cache
def weights() -> bytes:
    """The matrices of CONFIG, small numbers in float32."""
    rng, header, data = np.random.default_rng(0), {}, b""
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (259, 32), "model.norm.weight": (32,)}
    shapes |= {f"{layer}{n}.weight": (32,) for n in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {
        f"{layer}self_attn.{n}_proj.weight": s
        for n, s in zip("qkvo", [(32, 32), (16, 32), (16, 32), (32, 32)], strict=True)
    }
    shapes |= {
        f"{layer}mlp.{n}_proj.weight": s for n, s in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items()
    }
    for name, shape in shapes.items():
        content = rng.standard_normal(shape).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return joined(as_json(header), data)


@functools.cache
def pieces() -> tuple[str, ...]:
    return ("<s>", "</s>", *byte_characters(), "ab")


def tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer.json."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": piece, **added} for i, piece in enumerate(pieces()[:2])],
        "normalizer": None,
        "pre_tokenizer": PRE[0],
        "post_processor": None,
        "decoder": DECODERS[0],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {piece: i for i, piece in enumerate(pieces())}, "merges": [["a", "b"]]},
    }  # fmt: skip


def odd_tokenizer(rng: random.Random) -> tuple[str, bytes]:
    """One part replaced by another that the library has, or by anything."""
    known: dict[str, Any] = tokenizer()
    pools = {
        "pre_tokenizer": PRE,
        "normalizer": NORMALIZERS,
        "decoder": DECODERS,
        "model": MODELS,
        "post_processor": PROCESSORS,
    }
    rule = rng.choice([*pools, *pools, "added_tokens", "vocab", "any", "text", "settings"])
    if rule in pools:
        known[rule] = rng.choice(pools[rule])
        if rng.random() < 0.3:
            known[rule] = odd_json(known[rule], rng)
    elif rule == "added_tokens":
        token = dict(known["added_tokens"][0])
        token["id"] = rng.choice([0, 5, 258, 259, 300, 10**6, 2**31, 2**32 - 1, 2**32, -1])
        token["content"] = rng.choice(["", "a", "ab", "\0", "<new>", "x" * 20_000, " "])
        token[rng.choice(["lstrip", "single_word", "normalized", "special"])] = rng.choice([True, False])
        known["added_tokens"] = rng.choice([[token], [*known["added_tokens"], token], [token] * 3, []])
    elif rule == "vocab":
        model = known["model"]
        model["vocab"][rng.choice(["new", "", "ab", "a" * 20_000])] = rng.choice(
            [0, 259, 500, 10**6, 2**32 - 1, 2**32, -1]
        )
        model["merges"] = rng.choice([[["a", "b"]], ["a b"], [["a"]], [["x", "y"]], ["a"], [["a", "b", "c"]], 3])
        model[rng.choice(["unk_token", "continuing_subword_prefix", "end_of_word_suffix"])] = rng.choice(
            ["", "ab", "##", None]
        )
        model[rng.choice(["byte_fallback", "ignore_merges", "fuse_unk"])] = True
        model["dropout"] = rng.choice([None, None, 0.0, 1.0, 2.0, -1.0])
    elif rule == "any":
        for _ in range(rng.choice([1, 3])):
            changed = odd_json(known, rng)
            known = changed if isinstance(changed, dict) else known
    elif rule == "settings":
        known["truncation"] = rng.choice(
            [None, {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}]
        )
        known["padding"] = rng.choice([{"strategy": {"Fixed": 10**9}, "direction": "Left", "pad_to_multiple_of": 0,
                                        "pad_id": 0, "pad_type_id": 0, "pad_token": ""}, None])  # fmt: skip
    text = as_json(known)
    return rule, odd_text(text, rng) if rule != "text" else odd_text(odd_text(text, rng), rng)


def use_tokenizer(folder: Path) -> None:
    """Read it, encode and decode."""
    tokenizer = read_folder(folder, len(pieces()))
    for text in ("ab <s> ü", "", "\0\n 12345", "x" * 300):
        for special in (True, False):
            tokenizer.decode(
                token for token in tokenizer.encode(text, special=special) if token < len(tokenizer.pieces)
            )
    chat_template(folder)


def small_files(rng: random.Random) -> dict[str, bytes]:
    """Files beside the weights, now and then broken."""
    files = {"tokenizer_config.json": as_json(TOKENIZER_CONFIG)}
    if rng.random() < 0.3:
        files["tokenizer_config.json"] = odd_text(as_json(odd_json(TOKENIZER_CONFIG, rng)), rng)
    if rng.random() < 0.2:
        files["special_tokens_map.json"] = odd_text(as_json(odd_json(TOKENIZER_CONFIG, rng)), rng)
    if rng.random() < 0.2:
        files["generation_config.json"] = odd_text(as_json(odd_json({"eos_token_id": [1, 2]}, rng)), rng)
    if rng.random() < 0.1:
        files["chat_template.jinja"] = rng.choice([b"", b"\xff", b"{{", b"{{ 1 }}"])
    return files


def tokenizers(rng: random.Random) -> Case:
    """A tokenizer alone."""
    rule, text = odd_tokenizer(rng)
    return Case(rule, {"tokenizer.json": text, **small_files(rng)}, use_tokenizer)


def models(rng: random.Random) -> Case:
    """All of a model: it is loaded and run."""
    config: Any = dict(CONFIG)
    config["model_type"] = rng.choice(["llama", "llama", "llama", "mistral", "qwen2", "qwen3", "gemma"])
    if rng.random() < 0.3:
        config["rope_scaling"] = dict(SCALING)
    for _ in range(rng.choice([1, 1, 2, 3])):
        changed = odd_json(config, rng)
        config = changed if isinstance(changed, dict) else config
    files = {"model.safetensors": weights(), "config.json": odd_text(as_json(config), rng), **small_files(rng)}
    files["tokenizer.json"] = odd_tokenizer(rng)[1] if rng.random() < 0.1 else as_json(tokenizer())
    return Case("config.json", files, run_model)
