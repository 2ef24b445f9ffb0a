"""Models of random weights in q4_0, q8_0 or mxfp4, with the sizes of real ones: GGUF files for billfish and llama.cpp.

How fast a model runs depends on its sizes and not on what its weights say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.gguf_header import ALIGNMENT, header_bytes, typed
from billfish.checkpoints.tokenizer.tokenizer import byte_characters
from billfish.core.files import replacing
from billfish.models import describe, of_config
from billfish.models.description import Convolution, Vector, tensors_in

BLOCK = 32
BLOCKS = {
    "q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", BLOCK // 2)]),
    "q8_0": np.dtype([("scale", "<f2"), ("codes", "i1", BLOCK)]),
    "mxfp4": np.dtype([("scale", "u1"), ("codes", "u1", BLOCK // 2)]),
}
PERIOD = 4194301  # a prime: no row is another one
NORMAL, CONTROL = 1, 3  # kinds of tokens
CODE_DEVIATION = {"q4_0": 4.6, "q8_0": 73.9, "mxfp4": 2.8}  # of codes from -8 to 7, of bytes, and of E2M1
Tensors = list[tuple[str, str, tuple[int, ...]]]  # names in GGUF, types and shapes


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; `tied`: the embedding is the head, too. finer: the blocks of attn_v and ffn_down, to which
    llama.cpp's Q4_K_M gives more bits in half of the layers; those of all matrices unless given."""

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
    finer: str = ""

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

    def tensors(self, blocks: str) -> Tensors:
        """All tensors, the matrices in these blocks."""
        matrices: Tensors = [
            (name, self.blocks_of(name, blocks).upper(), size) for name, size in self.matrices().items()
        ]
        return [*matrices, *((name, "F32", (self.hidden,)) for name in self.norms())]

    def blocks_of(self, name: str, blocks: str) -> str:
        return self.finer if self.finer and name.endswith(("attn_v.weight", "ffn_down.weight")) else blocks

    def fields(self) -> dict[str, Any]:
        """The metadata apart from the tokenizer."""
        sizes = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": self.rope_base,
            "vocab_size": self.vocabulary,
        }
        return {"general.architecture": "llama"} | {f"llama.{name}": value for name, value in sizes.items()}


@dataclass(frozen=True)
class MixtureShape:
    """The sizes of a model with experts in every layer, gpt-oss or qwen3moe. rest: the blocks of all other matrices."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    chosen: int
    expert_size: int
    vocabulary: int
    rope_base: float
    blocks: str
    rest: str
    window: int = 0  # of every other layer
    context: int = 8192
    norm_epsilon: float = 1e-6

    @property
    def is_gpt_oss(self) -> bool:
        """With biases, sinks and windows; else each head has norms of its q and k."""
        return self.architecture == "gpt-oss"

    def tensors(self, blocks: str | None = None) -> Tensors:
        """All tensors. blocks: of experts, if not the usual ones."""
        experts, rest, wide = (blocks or self.blocks).upper(), self.rest.upper(), self.heads * self.head_size
        kv, up = self.kv_heads * self.head_size, (self.experts, self.expert_size, self.hidden)
        layer: Tensors = [
            ("attn_q.weight", rest, (wide, self.hidden)),
            ("attn_k.weight", rest, (kv, self.hidden)),
            ("attn_v.weight", rest, (kv, self.hidden)),
            ("attn_output.weight", rest, (self.hidden, wide)),
            ("ffn_gate_inp.weight", "F32", (self.experts, self.hidden)),
            ("ffn_gate_exps.weight", experts, up),
            ("ffn_up_exps.weight", experts, up),
            ("ffn_down_exps.weight", experts, (self.experts, self.hidden, self.expert_size)),
            ("attn_norm.weight", "F32", (self.hidden,)),
        ]
        if self.is_gpt_oss:
            matrices = [(name, size) for name, _, size in layer if name != "attn_norm.weight"]
            layer += [(name.replace(".weight", ".bias"), "F32", size[:-1]) for name, size in matrices]
            layer += [
                ("attn_sinks.weight", "F32", (self.heads,)),
                ("post_attention_norm.weight", "F32", (self.hidden,)),
            ]
        else:
            layer += [(f"attn_{name}_norm.weight", "F32", (self.head_size,)) for name in "qk"]
            layer.append(("ffn_norm.weight", "F32", (self.hidden,)))
        table = self.vocabulary, self.hidden
        ends: Tensors = [("token_embd.weight", rest, table), ("output.weight", rest, table)]
        ends.append(("output_norm.weight", "F32", (self.hidden,)))
        return ends + [(f"blk.{i}.{name}", kind, size) for i in range(self.layers) for name, kind, size in layer]

    def fields(self) -> dict[str, Any]:
        sizes = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.expert_size,
            "expert_feed_forward_length": self.expert_size,
            "expert_count": self.experts,
            "expert_used_count": self.chosen,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.layer_norm_rms_epsilon": self.norm_epsilon,
            "rope.freq_base": self.rope_base,
            "vocab_size": self.vocabulary,
        }
        if self.window:
            sizes["attention.sliding_window"] = self.window
        about = {f"{self.architecture}.{name}": value for name, value in sizes.items()}
        return {"general.architecture": self.architecture} | about


SHAPES = {
    "8b": Shape(layers=32, hidden=4096, feed_forward=14336, heads=32, kv_heads=8),  # Llama-3-8B
    "1b": Shape(layers=16, hidden=2048, feed_forward=8192, heads=32, kv_heads=8, tied=True),  # Llama-3.2-1B
}
MIXTURES = {
    "gpt-oss-20b": MixtureShape(
        "gpt-oss", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, 150000.0, "mxfp4", "q8_0", window=128, norm_epsilon=1e-5
    ),
    "qwen3-30b-a3b": MixtureShape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 1e6, "q4_0", "q4_0"),
}

QWEN35 = {  # the config.json of Qwen3.5-0.8B, as far as it makes a difference
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


def pieces(count: int) -> list[str]:
    """A vocabulary of byte-level BPE: one piece for each byte, one merge, and names for the rest."""
    known = [*byte_characters(), "ab"]
    return [*known, *(f"<{i}>" for i in range(len(known), count))]


def random_blocks(rng: np.random.Generator, n: int, k: int, blocks: str = "q4_0") -> NDArray[np.uint8]:
    """W [n, k] as bytes [n, k / 32 * 18], or 17 for mxfp4, 34 for q8_0; for f16, normal numbers, of which PERIOD are
    repeated. A row of x of size 1 gives a row of y of about size 1."""
    if blocks == "f16":
        some = rng.standard_normal(min(n * k, PERIOD), np.float32) / np.float32(np.sqrt(k))
        return np.resize(some.astype(np.float16), (n, k)).view(np.uint8)
    block = BLOCKS[blocks]
    size = n * k // BLOCK * block.itemsize
    data = rng.integers(0, 1 << 64, -(-size // 8), np.uint64).view(np.uint8)[:size]  # faster than rng.bytes
    scale = 1 / (CODE_DEVIATION[blocks] * np.sqrt(k))
    data.view(block)["scale"] = 127 + round(np.log2(scale)) if blocks == "mxfp4" else scale
    return data.reshape(n, -1)


def random_numbers(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """An unquantized tensor: a router's matrix is random, norms are ones, biases and sinks zeros; states decay."""
    if len(size) == 2 and name.endswith(".weight"):
        return rng.standard_normal(size, np.float32) / np.float32(np.sqrt(size[1]))
    if name.endswith((".bias", "attn_sinks.weight")):
        return np.zeros(size, np.float32)
    return np.full(size, -1 if name.endswith("ssm_a") else 1, np.float32)


def write_random_model(
    path: Path, shape: Shape | MixtureShape, seed: int = 0, blocks: str | None = None, *, end: bool = False
) -> None:
    """Write the file, a tensor at a time: 4.5 GB of Llama-3-8B take seconds. No token ends a text.

    blocks: of the matrices, or of the experts; by default q4_0, or what the shape says. end: the last token does end a
    text, which grammars need. Its logit is 0: greedy decoding does not choose it.
    """
    tensors = shape.tensors(blocks or "q4_0") if isinstance(shape, Shape) else shape.tensors(blocks)
    fields = shape.fields() | {"general.name": f"random weights, {shape.layers} layers of {shape.hidden}"}
    about, head = _tokenizer("llama-bpe", shape.vocabulary), ""
    if end:
        about["tokenizer.ggml.eos_token_id"] = shape.vocabulary - 1
        about["tokenizer.ggml.token_type"][-1] = CONTROL
        head = next(name for name in ("output.weight", "token_embd.weight") if any(name == each[0] for each in tensors))
    _write(path, fields | about, list(tensors), seed, head)


def write_random_architecture(path: Path, config: dict[str, Any], tokenizer: str) -> None:
    """Write a model of any architecture in q4_0, from its config.json. tokenizer: GGUF's name of how text is cut."""
    architecture, vocabulary = of_config(config, path), config["vocab_size"]
    fields = {
        f"{architecture.gguf}.{name}": value
        for name, value in architecture.fields(architecture.completed(config)).items()
    }
    fields |= {"general.architecture": architecture.gguf, "general.name": "random weights"}
    tensors: dict[str, Any] = {}
    for each in tensors_in(describe(fields, vocabulary)):
        if isinstance(each, Vector):
            tensors[each.name] = "F32", each.stored or (each.size,)
        elif isinstance(each, Convolution):
            tensors[f"{each.name}.weight"] = "F32", (each.channels, each.taps)
        elif not (each.name == "output" and config["tie_word_embeddings"]):
            tensors[f"{each.name}.weight"] = "Q4_0", each.shape
    _write(path, fields | _tokenizer(tokenizer, vocabulary), [(name, *about) for name, about in tensors.items()])


def _write(path: Path, fields: dict[str, Any], tensors: list[Any], seed: int = 0, ending: str = "") -> None:
    """ending: the matrix whose last row is 0."""
    rng = np.random.default_rng(seed)
    with replacing(path) as file:
        file.write(header_bytes(typed(fields), tensors))
        for name, kind, size in tensors:
            data: NDArray[Any]
            if kind == "F32":
                data = random_numbers(rng, name, size)
            else:
                data = random_blocks(rng, int(np.prod(size[:-1])), size[-1], kind.lower())
            if name == ending:
                data[-1] = 0
            file.write(data.tobytes())
            file.write(b"\0" * (-data.nbytes % ALIGNMENT))


def _tokenizer(pre: str, vocabulary: int) -> dict[str, Any]:
    """pre: GGUF's name of how text is cut."""
    fields: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": pieces(vocabulary), "merges": ["a b"]}
    fields |= {"token_type": [NORMAL] * vocabulary}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
