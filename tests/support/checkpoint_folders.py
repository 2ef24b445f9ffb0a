"""Folders with a small random Llama in the layouts that people have, and the weights that are in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

import billfish as bf
from billfish.models.architecture import LAYER, TOP

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
}
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Arrays = dict[str, NDArray]


def matrices(head: int = 16) -> dict[str, tuple[int, int]]:
    """Every linear layer of the decoder blocks: name and [N, K]."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (8 * head, hidden),
        "self_attn.k_proj": (4 * head, hidden),
        "self_attn.v_proj": (4 * head, hidden),
        "self_attn.o_proj": (hidden, 8 * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}


def plain_arrays(rng: np.random.Generator) -> Arrays:
    """What no layout quantizes: embeddings, norms and the output layer."""
    hidden = CONFIG["hidden_size"]
    arrays = {
        "model.embed_tokens.weight": rng.standard_normal((96, hidden)),
        "lm_head.weight": rng.standard_normal((96, hidden)) * 0.1,
        "model.norm.weight": 1 + 0.1 * rng.standard_normal(hidden),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"model.layers.{i}.{norm}.weight"] = 1 + 0.1 * rng.standard_normal(hidden)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def words(codes: NDArray, axis: int) -> NDArray[np.int32]:
    """Nibbles, eight to a word along an axis, least significant first."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    grouped = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = np.bitwise_or.reduce(grouped << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def random_matrix(
    rng: np.random.Generator, n: int, k: int, act_order: bool, scale_type: type
) -> tuple[Arrays, NDArray[np.float32]]:
    """Codes [K, N], zeros and scales [G, N], group of each k; and the weights [N, K] that they mean."""
    groups = k // GROUP
    codes = rng.integers(0, 16, (k, n))
    zeros = rng.integers(1, 16, (groups, n))
    scales = rng.uniform(0.005, 0.02, (groups, n)).astype(scale_type)
    index = np.arange(k) // GROUP
    if act_order:
        index = rng.permutation(index)
    w = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    return {"codes": codes, "zeros": zeros, "scales": scales, "index": index}, w.T.copy()


def write_folder(
    folder: Path, layout: str, act_order: bool = False, scale_type: type = np.float16, tied: bool = False, seed: int = 0
) -> Arrays:
    """A folder in a layout: "plain", "gptq", "awq" or "compressed-tensors". Returns all its weights as numbers.

    scale_type: float32 makes scales that float16 cannot hold.
    """
    rng = np.random.default_rng(seed)
    truth = plain_arrays(rng)
    if tied:
        del truth["lm_head.weight"]
    stored = dict(truth)
    for name, (n, k) in matrices().items():
        parts, w = random_matrix(rng, n, k, act_order, scale_type)
        truth[f"{name}.weight"] = w
        codes, zeros, scales, index = (parts[key] for key in ("codes", "zeros", "scales", "index"))
        if layout == "plain":
            stored[f"{name}.weight"] = w
        elif layout == "gptq":
            stored[f"{name}.qweight"] = words(codes, 0)
            stored[f"{name}.qzeros"] = words(zeros - 1, 1)  # version 1 stores one less
            stored[f"{name}.scales"] = scales
            stored[f"{name}.g_idx"] = index.astype(np.int32)
        elif layout == "awq":
            shuffled = [
                array.reshape(len(array), -1, 8)[:, :, AWQ_ORDER].reshape(array.shape) for array in (codes, zeros)
            ]
            stored[f"{name}.qweight"] = words(shuffled[0], 1)
            stored[f"{name}.qzeros"] = words(shuffled[1], 1)
            stored[f"{name}.scales"] = scales
        elif layout == "compressed-tensors":
            stored[f"{name}.weight_packed"] = words(codes.T, 1)
            stored[f"{name}.weight_scale"] = np.ascontiguousarray(scales.T)
            stored[f"{name}.weight_zero_point"] = words(zeros.T, 0)
            stored[f"{name}.weight_shape"] = np.array([n, k], np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **CONFIG,
        "tie_word_embeddings": tied,
        **({} if layout == "plain" else {"quantization_config": settings(layout, act_order)}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return truth


def write_gguf(
    path: Path,
    format: str = "q4_0",
    architecture: str = "llama",
    rope: NDArray | None = None,
    seed: int = 0,
    value_length: int | None = None,
) -> None:
    """The same Llama as llama.cpp writes it, its matrices quantized, its embedding too; or a Qwen of that size."""
    rng = np.random.default_rng(seed)
    head = 128 if architecture == "qwen3" else 16  # as every Qwen3 has it, whatever its size
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_key_length(head)
    writer.add_value_length(value_length or head)
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", rope)
    kind = gguf.GGMLQuantizationType[format.upper()]
    names = {hf: ggml for ggml, hf in {**TOP, **LAYER}.items()}
    shapes = {name: array.shape for name, array in plain_arrays(rng).items()}
    for name, (n, k) in matrices(head).items():
        shapes[f"{name}.weight"] = (n, k)
        part = name.rpartition(".")[2]
        if architecture == "qwen2" and part in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{name}.bias"] = (n,)
        if architecture == "qwen3" and part in ("q_proj", "k_proj"):
            shapes[f"{name.removesuffix('proj')}norm.weight"] = (head,)
    for name, shape in shapes.items():
        module, _, kind_of_parameter = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        stored = f"blk.{match[1]}.{names[match[2]]}" if match else names[module]
        stored += f".{kind_of_parameter}"
        w = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(stored, 1 + w / 10)
        else:
            blocks = bf.quantize(w / np.float32(np.sqrt(shape[1])), format).storage["blocks"]
            writer.add_tensor(stored, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def settings(layout: str, act_order: bool) -> dict:
    """The quantization_config of a layout."""
    if layout == "gptq":
        return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": act_order, "sym": False}
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    group = {"weights": weights, "targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
