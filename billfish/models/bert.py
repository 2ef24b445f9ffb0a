"""Encoders: BERT, and ModernBERT. They read a text from both sides, and make a vector or a score of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import FULL, MOST_LAYERS, NORMALIZED_VECTORS, SLIDING, Architecture, Config, Field
from billfish.models.description import (
    Activation,
    Attention,
    Block,
    Classifier,
    Dense,
    Encoder,
    LayerNorm,
    Matrix,
    Model,
    Pooling,
    Vector,
)
from billfish.models.fields import CONFIG_CALL, Fields, number, positive, refuse, section
from billfish.models.rope import Rope

EPSILON = "attention.layer_norm_epsilon"
RMS_EPSILON = "attention.layer_norm_rms_epsilon"  # of other architectures
PADDING = "tokenizer.ggml.padding_token_id"
CLASSIFIER_POOLING = "classifier.pooling_type"
# By their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_erf",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "silu": "silu",
}


class TextEncoder(Architecture):
    """What both have in common: LayerNorm, attention to both sides, GELU."""

    hidden_acts = tuple(ACTIVATIONS)
    epsilon = 1e-12  # where config.json does not say
    epsilon_names: ClassVar[tuple[str, ...]] = ("layer_norm_eps",)

    def fields(self, config: Config) -> dict[str, Field]:
        fields = super().fields(config)
        del fields[RMS_EPSILON]
        said = next((config[name] for name in self.epsilon_names if config.get(name) is not None), self.epsilon)
        act = config.get("hidden_activation") or config.get("hidden_act") or "gelu"
        return {
            **fields,
            EPSILON: float(positive(self.epsilon_names[0], said)),
            "attention.causal": False,
            "hidden_activation": act,
        }

    def model(self, f: Fields, vocabulary: int) -> Model:
        hidden, layers = f.size("embedding_length"), self.layers(f)
        refuse(hidden < 1 or hidden % 16 != 0, "embedding_length", hidden, "a multiple of 16")
        refuse(not 1 <= layers <= MOST_LAYERS, "block_count", layers, f"1 to {MOST_LAYERS} layers")
        causal = f.get("attention.causal", False)
        refuse(bool(causal), "attention.causal", causal, "false (attention to both sides)")
        classifier = self.classifier(f, hidden)
        pooling: Pooling = "rank" if classifier else self.pooling(f)
        refuse(pooling == "rank" and not classifier, "pooling_type", "rank", "a classifier (cls.output) for rank")
        return Model(
            name=str(f.metadata.get("general.name", self.gguf)),
            architecture=self.gguf,
            hidden=hidden,
            vocabulary=vocabulary,
            context=f.size("context_length"),
            norm_epsilon=f.positive(EPSILON),
            blocks=tuple(self.block(f, i) for i in range(layers)),
            ropes=self.ropes(f),
            final_norm=self.last_norm(f),
            embedding=Matrix("token_embd", vocabulary, hidden, bias="none"),
            head=Matrix("token_embd", vocabulary, hidden, bias="none"),
            encoder=self.encoder(f, hidden, classifier),
            pooling=pooling,
            normalized=bool(f.metadata.get(NORMALIZED_VECTORS, True)) and pooling != "rank",
            unused=("cls.weight", "cls.bias"),
        )

    def encoder(self, f: Fields, hidden: int, classifier: Classifier | None) -> Encoder:
        return Encoder(classifier=classifier)

    def classifier(self, f: Fields, hidden: int) -> Classifier | None:
        if not f.has("cls.output.weight", default=False):
            return None
        labels = f.size("classifier.labels", 1)
        refuse(labels < 1, "classifier.labels", labels, "one score at least")
        dense = Matrix("cls", hidden, hidden) if f.has("cls.weight", default=False) else None
        return Classifier(Matrix("cls.output", labels, hidden), dense)

    def last_norm(self, f: Fields) -> LayerNorm:
        return self.layer_norm(f, "output_norm")

    def layer_norm(self, f: Fields, name: str, *, of_residual: bool = False) -> LayerNorm:
        """A norm by its name in GGUF. It has a bias where the file has one."""
        size = f.size("embedding_length")
        bias = Vector(f"{name}.bias", size) if f.has(f"{name}.bias", default=False) else None
        return LayerNorm(f"{name}.weight", size, bias=bias, of_residual=of_residual)

    def own_activation(self, f: Fields) -> Activation:
        name = f.get("hidden_activation", "gelu")
        refuse(name not in ACTIVATIONS, "hidden_activation", repr(name), f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]


class Bert(TextEncoder):
    """BERT, MiniLM, BGE, E5, GTE: encoder, positions in a table, LayerNorm behind each part."""

    gguf, model_type, transformers = "bert", "bert", "BertModel"
    layer_prefix = "encoder.layer."
    top = {
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    }
    modules = {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    }
    defaults = {"max_position_embeddings": 512}
    fixed = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

    def prefixes(self, layers: int) -> dict[str, str]:
        """Position numbers of old files, and heads for training, are not read."""
        left_out = ("embeddings.position_ids", "cls.predictions.", "cls.seq_relationship.")
        unread = {f"{at}{name}": "" for at in ("", "bert.") for name in left_out}
        parts = {f"bert.{part}": part for part in ("embeddings.", "pooler.")}
        return unread | parts | {f"{at}{self.layer_prefix}": "model.layers." for at in ("", "bert.")}

    def config(
        self, fields: Fields, vocabulary: int, tensors: Container[str], factors: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Any]:
        config = super().config(fields, vocabulary, tensors, factors)
        config = {name: value for name, value in config.items() if not name.startswith(("rope", "num_key", "head_dim"))}
        types = fields.metadata.get("tokenizer.ggml.token_type_count", 2)
        config |= {"layer_norm_eps": fields.get(EPSILON), "hidden_act": fields.get("hidden_activation", "gelu")}
        return {
            **config,
            "type_vocab_size": types,
            "tie_word_embeddings": True,
            "pad_token_id": fields.metadata.get(PADDING),
        }

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        return ()

    def encoder(self, f: Fields, hidden: int, classifier: Classifier | None) -> Encoder:
        positions = Matrix("position_embd", f.size("context_length"), hidden, bias="none")
        count = int(f.metadata.get("tokenizer.ggml.token_type_count", f.get("token_types", 2)))
        refuse(not 0 <= count <= 16, "token_type_count", count, "0 to 16")
        types = Matrix("token_types", count, hidden, bias="none") if f.has("token_types.weight") and count else None
        return Encoder(positions, types, classifier)

    def fields(self, config: Config) -> dict[str, Field]:
        fields = super().fields(config)
        for name in [name for name in fields if name.startswith("rope.")]:
            del fields[name]
        return {**fields, "token_types": int(number("type_vocab_size", config.get("type_vocab_size", 2)))}

    def last_norm(self, f: Fields) -> LayerNorm:
        return self.layer_norm(f, f"blk.{self.layers(f) - 1}.layer_output_norm")

    def block(self, f: Fields, i: int) -> Block:
        """The norm behind a part is the one before the next, whose residual stream is what it gives."""
        before = f"blk.{i - 1}.layer_output_norm" if i else "token_embd_norm"
        return Block(
            self.attention(f, i, rope=None, bidirectional=True),
            self.feed_forward(f, i),
            mixer_norm=self.layer_norm(f, before, of_residual=True),
            feed_forward_norm=self.layer_norm(f, f"blk.{i}.attn_output_norm", of_residual=True),
        )

    def feed_forward(self, f: Fields, i: int) -> Dense:
        size, hidden, at = f.size("feed_forward_length", layer=i), f.size("embedding_length"), f"blk.{i}.ffn_"
        gate, down = Matrix(f"{at}up", size, hidden), Matrix(f"{at}down", hidden, size)
        return Dense(size, gate, None, down, self.own_activation(f))


class ModernBert(TextEncoder):
    """ModernBERT: encoder, RoPE, GeGLU, windows in two layers of three, LayerNorm before each part."""

    gguf, model_type, transformers = "modern-bert", "modernbert", "ModernBertModel"
    top = {
        "token_embd": "model.embeddings.tok_embeddings",
        "token_embd_norm": "model.embeddings.norm",
        "output_norm": "model.final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    }
    modules = {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    }
    epsilon, epsilon_names = 1e-5, ("norm_eps",)
    defaults = {"max_position_embeddings": 8192, "local_attention": 128}
    fixed = {"classifier_activation": "gelu"}
    theta = 160000.0
    local_theta = 10000.0
    rope_layers = FULL
    windows, window_step = True, 3

    def prefixes(self, layers: int) -> dict[str, str]:
        """The base model alone has shorter names; the head that guesses tokens is not read."""
        parts = ("layers.", "embeddings.", "final_norm.")
        return {"decoder.": "", **{part: f"model.{part}" for part in parts}}

    def fields(self, config: Config) -> dict[str, Field]:
        rule = section(section(config, "rope_parameters"), SLIDING)
        scaled = any(
            part.get("rope_type", "default") != "default"
            for part in (rule, section(section(config, "rope_parameters"), FULL))
        )
        if scaled or config.get("rope_scaling"):
            raise CheckpointError(
                bad_argument(CONFIG_CALL, "rope_parameters", "a scaled rule", "'default' for modern-bert")
            )
        local = rule.get("rope_theta") or config.get("local_rope_theta") or self.local_theta
        everywhere = config.get("global_rope_theta")
        pooling = config.get("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise CheckpointError(bad_argument(CONFIG_CALL, "classifier_pooling", repr(pooling), "'cls' or 'mean'"))
        own = dict(config)
        if everywhere is not None:
            own["rope_theta"] = everywhere
        return {
            **super().fields(own),
            "attention.sliding_window": int(number("local_attention", config.get("local_attention"))),
            "rope.freq_base_swa": float(positive("local_rope_theta", local)),
            CLASSIFIER_POOLING: 1 if pooling == "mean" else 2,
        }

    def _pattern(self, config: Config) -> dict[str, Field]:
        """Every so many-th layer, the first among them, has no window."""
        every, kinds, layers = config.get("global_attn_every_n_layers", self.window_step), config.get("layer_types"), 0
        layers = config["num_hidden_layers"]
        step = int(number("global_attn_every_n_layers", every))
        usual = [i % step != 0 for i in range(layers)] if step else [True] * layers
        if kinds is not None:
            if (
                not isinstance(kinds, list)
                or len(kinds) != layers
                or any(kind not in (SLIDING, FULL) for kind in kinds)
            ):
                expected = f"{layers} of {SLIDING} or {FULL}"
                raise CheckpointError(bad_argument(CONFIG_CALL, "layer_types", repr(kinds)[:80], expected))
            narrow = [kind == SLIDING for kind in kinds]
            if narrow != usual:
                return {"attention.sliding_window_pattern": narrow}
        return {"attention.sliding_window_pattern": step}

    def config(
        self, fields: Fields, vocabulary: int, tensors: Container[str], factors: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Any]:
        config = super().config(fields, vocabulary, tensors, factors)
        config = {name: value for name, value in config.items() if not name.startswith(("rope", "num_key", "head_dim"))}
        layers = config["num_hidden_layers"]
        config["layer_types"] = [SLIDING if self.is_narrow(fields, i) else FULL for i in range(layers)]
        rules = {
            FULL: fields.get("rope.freq_base", self.theta),
            SLIDING: fields.get("rope.freq_base_swa", self.local_theta),
        }
        config["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in rules.items()
        }
        config |= {
            "norm_eps": fields.get(EPSILON),
            "local_attention": fields.get("attention.sliding_window", 128),
            "hidden_activation": fields.get("hidden_activation", "gelu"),
            "classifier_pooling": "cls" if fields.get(CLASSIFIER_POOLING) == 2 else "mean",
            "norm_bias": "output_norm.bias" in tensors,
            "attention_bias": "blk.0.attn_qkv.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "classifier_bias": "cls.bias" in tensors,
        }
        return {**config, "tie_word_embeddings": True, "pad_token_id": fields.metadata.get(PADDING)}

    def is_narrow(self, f: Fields, i: int) -> bool:
        pattern = f.get("attention.sliding_window_pattern", self.window_step)
        if isinstance(pattern, int) and not isinstance(pattern, bool):
            refuse(pattern < 0, "attention.sliding_window_pattern", pattern, "a number of layers, or a list")
            return pattern == 0 or i % pattern != 0
        return super().is_narrow(f, i)

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        size = self._rope_size(f)
        bases = f.positive("rope.freq_base", self.theta), f.positive("rope.freq_base_swa", self.local_theta)
        return tuple(Rope(size, base, divisors=False) for base in bases)

    def classifier(self, f: Fields, hidden: int) -> Classifier | None:
        plain = super().classifier(f, hidden)
        if plain is None or plain.dense is None:
            return plain
        pooling: Pooling = "cls" if f.get(CLASSIFIER_POOLING, 1) == 2 else "mean"
        return Classifier(plain.output, plain.dense, "gelu_erf", self.layer_norm(f, "cls.norm"), pooling)

    def block(self, f: Fields, i: int) -> Block:
        before = (
            self.layer_norm(f, f"blk.{i}.attn_norm") if i else self.layer_norm(f, "token_embd_norm", of_residual=True)
        )
        size = f.size("feed_forward_length", layer=i)
        dense = self.dense(f, i, size, joined=True)
        return Block(
            self.mixer(f, i),
            Dense(size, dense.gate, dense.up, dense.down, self.own_activation(f)),
            mixer_norm=before,
            feed_forward_norm=self.layer_norm(f, f"blk.{i}.ffn_norm"),
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        window = self.window(f, i, required=False)
        return self.attention(f, i, joined=True, window=window, rope=1 if window else 0, bidirectional=True)
