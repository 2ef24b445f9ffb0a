"""Small random models of every architecture, written as GGUF, and the same weights in transformers' own classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import billfish as bf
from billfish.checkpoints.layouts.gguf import ggml_names
from billfish.checkpoints.tokenizer.tokenizer import BYTE, CONTROL, NORMAL, byte_characters
from billfish.models.architecture import LAYER, TOP

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Small:
    """The sizes of a model; `architecture` decides which tensors it has."""

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    feed_forward: int = 96
    context: int = 128
    quantization: str = "Q8_0"
    embedding: str = ""  # its type, if another than the other matrices'
    finer: str = ""  # the type of attn_v and ffn_down, to which Q4_K_M gives more bits
    tied: bool = False
    rope_base: float = 10000.0
    template: str = TEMPLATE  # of a chat; empty for none
    fields: dict[str, Any] = field(default_factory=dict)  # more metadata
    without: tuple[str, ...] = ()  # tensors to leave out
    seed: int = 0

    def matrices(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_q": (q, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, q),
            "ffn_gate": (self.feed_forward, self.hidden),
            "ffn_up": (self.feed_forward, self.hidden),
            "ffn_down": (self.hidden, self.feed_forward),
        }


def vocabulary(architecture: str) -> tuple[list[str], list[int]]:
    """Pieces and their kinds: some control tokens, then one piece for each byte and a few words."""
    control = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    if architecture == "gemma":
        pieces = [f"<0x{b:02X}>" for b in range(256)]
        words = ["▁", "a", "b", "▁a", "ab", "▁ab"]
        return [*control, *pieces, *words], [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * len(words)
    pieces = list(byte_characters())
    return [*control, *pieces, "ab"], [CONTROL] * 4 + [NORMAL] * 257


def write_model(path: Path, small: Small, more: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Write the file, with `more` tensors; returns its weights as numbers, by their names in it."""
    rng = np.random.default_rng(small.seed)
    writer = gguf.GGUFWriter(path, small.architecture)
    writer.add_name(f"small {small.architecture}")
    writer.add_block_count(small.layers)
    writer.add_context_length(small.context)
    writer.add_embedding_length(small.hidden)
    writer.add_feed_forward_length(small.feed_forward)
    writer.add_head_count(small.heads)
    writer.add_head_count_kv(small.kv_heads)
    writer.add_key_length(small.head_size)
    writer.add_value_length(small.head_size)
    writer.add_rope_dimension_count(small.head_size)
    writer.add_rope_freq_base(small.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    pieces, kinds = vocabulary(small.architecture)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if small.template:
        writer.add_chat_template(small.template)
    if small.architecture == "gemma":
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges(["a b"])
    for name, value in small.fields.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    weights: dict[str, np.ndarray] = {}

    def add(name: str, values: np.ndarray, kind: str) -> None:
        if name in small.without:
            return
        type_ = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K") or kind in (
            "IQ4_NL",
            "IQ4_XS",
            "NVFP4",
        ):  # the library does not quantize to these, or worse
            tensor = bf.quantize(values.astype(np.float32), ggml_names()[kind])
            data = tensor.storage["blocks"]
            if kind == "NVFP4":
                writer.add_tensor(name.replace(".weight", ".scale"), tensor.storage["global_scale"].reshape(1))
        else:
            data = gguf.quants.quantize(values.astype(np.float32), type_)
        weights[name] = gguf.quants.dequantize(data, type_)
        writer.add_tensor(name, data, raw_dtype=type_)

    def matrix(name: str, n: int, k: int, kind: str = small.quantization) -> None:
        add(name, rng.standard_normal((n, k)) * 0.7 / np.sqrt(k) * 4, kind)

    def vector(name: str, size: int, around: float) -> None:
        add(name, around + 0.3 * rng.standard_normal(size), "F32")

    matrix("token_embd.weight", len(pieces), small.hidden, small.embedding or small.quantization)
    for i in range(small.layers):
        vector(f"blk.{i}.attn_norm.weight", small.hidden, 1)
        vector(f"blk.{i}.ffn_norm.weight", small.hidden, 1)
        for name, (n, k) in small.matrices().items():
            kind = small.finer if name in ("attn_v", "ffn_down") else ""
            matrix(f"blk.{i}.{name}.weight", n, k, kind or small.quantization)
            if small.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                vector(f"blk.{i}.{name}.bias", n, 0)
        if small.architecture == "qwen3":
            vector(f"blk.{i}.attn_q_norm.weight", small.head_size, 1)
            vector(f"blk.{i}.attn_k_norm.weight", small.head_size, 1)
    vector("output_norm.weight", small.hidden, 1)
    for name, numbers in (more or {}).items():
        writer.add_tensor(name, numbers)
    if not small.tied:
        matrix("output.weight", len(pieces), small.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def in_transformers(small: Small, weights: dict[str, np.ndarray]) -> Any:
    """The same model as transformers has it: names, the order of rotating pairs, and gemma's norms differ."""
    import torch
    import transformers

    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}[small.architecture]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=small.hidden,
        intermediate_size=small.feed_forward,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        head_dim=small.head_size,
        max_position_embeddings=small.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=small.tied,
        rope_parameters={"rope_type": "default", "rope_theta": small.rope_base},
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    state = {}
    for name, values in weights.items():
        if small.architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            # llama.cpp's files have pairs next to each other, transformers has their halves apart.
            values = values.reshape(-1, small.head_size // 2, 2, small.hidden).swapaxes(1, 2).reshape(values.shape)
        if small.architecture == "gemma" and "norm" in name:
            values = values - 1
        *layer, part, ending = name.split(".")
        target = f"model.layers.{layer[1]}.{LAYER[part]}.{ending}" if layer else f"{TOP[part]}.{ending}"
        state[target] = torch.from_numpy(np.ascontiguousarray(values))
    if small.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model
