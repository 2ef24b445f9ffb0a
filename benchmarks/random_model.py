"""Models of random weights in q4_0 or mxfp4, with the sizes of real ones: GGUF files for billfish and llama.cpp.

How fast a model runs depends on its sizes and not on what its weights say.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import byte_characters

BLOCK = 32
BLOCKS = {
    "q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", BLOCK // 2)]),
    "mxfp4": np.dtype([("scale", "u1"), ("codes", "u1", BLOCK // 2)]),
}
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "mxfp4": gguf.GGMLQuantizationType.MXFP4}
CODE_DEVIATION = {"q4_0": 4.6, "mxfp4": 2.8}  # of codes from -8 to 7, and of E2M1


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; `tied`: the embedding is the head, too."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int = 128256
    context: int = 8192
    tied: bool = False
    rope_base: float = 500000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> dict[str, tuple[int, int]]:
        """GGUF's names and [N, K], in the order of the file."""
        kv = self.kv_heads * self.head_size
        layer = {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.feed_forward, self.hidden),
            "ffn_up": (self.feed_forward, self.hidden),
            "ffn_down": (self.hidden, self.feed_forward),
        }
        ends = ["token_embd"] if self.tied else ["token_embd", "output"]
        sizes = {f"{name}.weight": (self.vocabulary, self.hidden) for name in ends}
        return sizes | {f"blk.{i}.{name}.weight": size for i in range(self.layers) for name, size in layer.items()}

    def transformers(self) -> dict[str, Any]:
        """The arguments of transformers.LlamaConfig."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base},
            "tie_word_embeddings": self.tied,
        }

    def norms(self) -> list[str]:
        """GGUF's names of the vectors [hidden]."""
        layers = [f"blk.{i}.{name}.weight" for i in range(self.layers) for name in ("attn_norm", "ffn_norm")]
        return [*layers, "output_norm.weight"]


SHAPES = {
    "8b": Shape(layers=32, hidden=4096, feed_forward=14336, heads=32, kv_heads=8),  # Llama-3-8B
    "1b": Shape(layers=16, hidden=2048, feed_forward=8192, heads=32, kv_heads=8, tied=True),  # Llama-3.2-1B
}


def pieces(count: int) -> list[str]:
    """A vocabulary of byte-level BPE: one piece for each byte, one merge, and names for the rest."""
    known = [*byte_characters(), "ab"]
    return [*known, *(f"<{i}>" for i in range(len(known), count))]


def random_blocks(rng: np.random.Generator, n: int, k: int, blocks: str = "q4_0") -> NDArray[np.uint8]:
    """W [n, k] as bytes [n, k / 32 * 18], or 17 for mxfp4. A row of x of size 1 gives a row of y of about size 1."""
    block = BLOCKS[blocks]
    size = n * k // BLOCK * block.itemsize
    data = rng.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)[:size]  # faster than rng.bytes
    scale = 1 / (CODE_DEVIATION[blocks] * np.sqrt(k))
    data.view(block)["scale"] = scale if blocks == "q4_0" else 127 + round(np.log2(scale))
    return data.reshape(n, -1)


def write_random_model(path: Path, shape: Shape, seed: int = 0, blocks: str = "q4_0") -> None:
    """Write the file, a tensor at a time: 4.5 GB of Llama-3-8B take seconds. No token ends a text."""
    rng = np.random.default_rng(seed)
    unfinished = path.with_name(path.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    try:
        _describe(writer, shape)
        type_ = TYPES[blocks]
        for name, (n, k) in shape.matrices().items():
            row_bytes = k // BLOCK * BLOCKS[blocks].itemsize
            writer.add_tensor_info(name, (n, row_bytes), np.dtype(np.uint8), n * row_bytes, raw_dtype=type_)
        for name in shape.norms():
            writer.add_tensor_info(name, (shape.hidden,), np.dtype(np.float32), 4 * shape.hidden)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for n, k in shape.matrices().values():
            writer.write_tensor_data(random_blocks(rng, n, k, blocks))
        for _ in shape.norms():
            writer.write_tensor_data(np.ones(shape.hidden, np.float32))
        writer.close()
        os.replace(unfinished, path)
    except BaseException:
        writer.close()
        unfinished.unlink(missing_ok=True)
        raise


def _describe(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The fields: sizes and vocabulary."""
    writer.add_name(f"random weights, {shape.layers} layers of {shape.hidden}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(pieces(shape.vocabulary))
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocabulary)
    writer.add_token_merges(["a b"])
