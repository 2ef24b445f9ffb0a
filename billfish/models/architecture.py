"""What architectures have in common. Each is a subclass in a file of its own, and says what is different about it.

A class is one type of model in transformers. It holds three things:

- names: the modules of a layer in GGUF and in transformers, and how tensors differ between the two;
- hyperparameters: settings of config.json and the fields of GGUF that they become, in both directions;
- the description: `model` makes a `Model` of GGUF's fields, block by block.

Several types may be one architecture of GGUF (`gguf`). `matches` then says which of them a file is.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import CheckpointError, ModelError, bad_argument, failure
from billfish.models.description import (
    Activation,
    Attention,
    Bias,
    Block,
    Dense,
    FeedForward,
    Matrix,
    Mixer,
    Mixture,
    Model,
    Pooling,
    Router,
    Stack,
    Vector,
)
from billfish.models.difference import SAME, Difference, neighbours
from billfish.models.fields import CALL, CONFIG_CALL, Fields, number, positive, refuse
from billfish.models.rope import Rope, Rule, read_scaling, rule_of

Config = Mapping[str, Any]  # a config.json
Field = int | float | str | list[bool] | list[int]
MOST_LAYERS = 4096
LARGEST_HEAD = 1 << 16  # numbers of a head, and heads

# ---- names -----------------------------------------------------------------------------------------------------------

# The modules of a decoder with gated feed-forward blocks: llama.cpp's names, and those of transformers.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMS = {  # after each part, before it is added
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# How tensors begin that are of images or of sound.
IMAGES = tuple(
    f"{at}{part}."
    for at in ("", "model.")
    for part in (
        *("visual", "vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio"),
        "multi_modal_projector",
    )
)
TEXT_PREFIXES = {  # how tensors of the language model begin beside such parts, and how they do without
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# How folders have experts: a matrix each, called gate_proj, up_proj and down_proj, or Mixtral's w1, w3 and w2; stacks
# `experts.gate_up_proj` [E, 2 I, H], gate above up; Granite's `input_linear.weight` and `output_linear.weight`; or
# gpt-oss's, whose rows of gate and up alternate and which are [E, K, N] where they are not quantized.
ExpertFiles = Literal["apart", "mixtral", "stacked", "granite", "gpt_oss"]


def expert_modules(block: str, router: str, shared: str = "") -> dict[str, str]:
    """The modules of a feed-forward block with experts, and of the expert for all tokens where it has a name."""
    parts = ("gate", "up", "down")
    at = f"{block}." if block else ""
    names = {"ffn_gate_inp": f"{at}{router}"}
    names |= {f"ffn_{part}_exps": f"{at}experts.{part}_proj" for part in (*parts, "gate_up")}
    return names | ({f"ffn_{part}_shexp": f"{at}{shared}.{part}_proj" for part in parts} if shared else {})


# ---- hyperparameters -------------------------------------------------------------------------------------------------

# Names in config.json, and in GGUF behind the architecture. No model is without the first four.
NEEDED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
SIZES = NEEDED | {
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED_SIZE = "expert_shared_feed_forward_length"  # the field for the expert of all tokens
NORMALIZED = {"norm_topk_prob": "expert_weights_norm"}
WINDOW = {"sliding_window": "attention.sliding_window"}
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")  # names of one setting
SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers in config.json
POOLINGS: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # GGUF's numbers; 0 is none
NORMALIZED_VECTORS = "billfish.normalize_embeddings"  # ours: GGUF has no field for it
GATING = {"softmax": (1, 3), "sigmoid": (2,)}  # llama.cpp's numbers; 3 is a softmax behind the choice of experts


def expert_settings(count: str = "num_local_experts") -> dict[str, str]:
    """The numbers of experts. count: what transformers calls that of all."""
    return {"num_experts_per_tok": "expert_used_count", count: "expert_count"}


class UnknownModel(CheckpointError):
    """A model that there is no architecture for."""


class Architecture:
    """A Llama, unless a subclass says otherwise: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    The docstring of a subclass is a row of docs/models.md: models, and after a colon what they have beside a Llama's
    parts.
    """

    gguf: ClassVar[str]  # `general.architecture`
    model_type: ClassVar[str]  # in transformers
    transformers: ClassVar[str]  # the class there

    # Names.
    modules: ClassVar[dict[str, str]] = LAYER  # of a layer, by GGUF's names
    parameters: ClassVar[dict[str, str]] = {}  # tensors of a layer that are no weight or bias of a module, in either
    top: ClassVar[dict[str, str]] = TOP  # modules outside of layers
    layer_prefix: ClassVar[str] = "model.layers."  # of a layer's names in folders
    reordered: ClassVar[bool] = False  # llama.cpp's converter makes rotary pairs of q and k adjacent
    joined: ClassVar[tuple[tuple[str, ...], ...]] = ()  # modules of GGUF that folders have as one, rows below rows
    reordered_columns: ClassVar[tuple[str, ...]] = ()  # modules whose columns may be in another order in GGUF
    unpublished_head: ClassVar[bool] = False  # llama.cpp refuses a head that is a copy of the embedding
    expert_files: ClassVar[ExpertFiles] = "apart"

    # Hyperparameters.
    settings: ClassVar[dict[str, str]] = {}  # of config.json beside SIZES, and GGUF's fields for them
    defaults: ClassVar[dict[str, Any]] = {}  # what transformers takes for settings that a config.json does not name
    fixed: ClassVar[dict[str, Any]] = {}  # settings that GGUF has no field for: these values alone are run
    biases: ClassVar[dict[str, str]] = {}  # settings that say whether modules have a bias
    hidden_acts: ClassVar[tuple[str, ...]] = ("silu",)
    head_dim: ClassVar[int] = 0  # where config.json does not say; 0: heads share out hidden_size
    theta: ClassVar[float] = 10000.0  # where config.json does not say
    partial_rotation: ClassVar[bool] = False  # of heads, some numbers may not rotate
    whole_ramp: ClassVar[bool] = True  # YaRN's ramp begins and ends at whole numbers of pairs
    adjacent: ClassVar[bool] = False  # rotary pairs are side by side, in GGUF
    rope_layers: ClassVar[str] = ""  # kind of layers whose rotary rule is the model's
    windows: ClassVar[bool] = False  # GGUF has a field for the window; elsewhere the context ends with it
    window_step: ClassVar[int | None] = None  # every so many-th layer has no window, if nothing is said; 0: all have

    # The description.
    activation: ClassVar[Activation] = "silu"
    logit_cap: ClassVar[float] = 0.0  # if nothing is said

    known: ClassVar[list[Architecture]] = []

    def __init_subclass__(cls) -> None:
        if "model_type" in cls.__dict__:
            Architecture.known.append(cls())

    def matches(self, fields: Fields) -> bool:
        """Whether a GGUF file of this architecture is of this type, and not of another one that shares its name."""
        return True

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def prefixes(self, layers: int) -> dict[str, str]:
        """How names of tensors may begin in folders, and how they then would without parts for images, sound or drafts:
        only so do tables of modules know them. "" for tensors that are not read."""
        return {**TEXT_PREFIXES, **dict.fromkeys(IMAGES, "")}

    def own_name(self, f: Fields, module: str) -> str:
        """GGUF's name of a module of a layer, where it depends on the hyperparameters."""
        return module

    def difference(self, f: Fields, name: str, shape: tuple[int, ...]) -> Difference:
        """How a tensor differs between GGUF and folders. name: in GGUF, without its layer. shape: on the side where it
        is."""
        module = name.rpartition(".")[0]
        if self.reordered and module in ("attn_q", "attn_k"):
            field = "attention.head_count"
            heads = (f.get(f"{field}_kv") if module == "attn_k" else None) or f.get(field)
            if isinstance(heads, (list, tuple)):  # 0 for layers without attention
                heads = next(iter(set(heads) - {0}), None) if len(set(heads) - {0}) == 1 else heads
            if not isinstance(heads, int) or heads < 1:
                takes = "the number of heads, the same in all layers"
                raise CheckpointError(bad_argument(CONFIG_CALL, f"{self.gguf}.{field}", repr(heads), takes))
            n = shape[0] if shape else 0
            if n % (2 * heads) or n == 0:
                raise CheckpointError(
                    failure(CONFIG_CALL, f"{name} has {n} rows for {heads} heads, not an even number each")
                )
            return Difference(rows=neighbours(n, heads))
        if name == "ffn_gate_inp_shexp.weight" and len(shape) == 1:  # a matrix of one row; in old GGUF files, a vector
            return Difference(folder_axis=0)
        return SAME

    # ---- config.json to GGUF -----------------------------------------------------------------------------------------

    def completed(self, config: Config) -> dict[str, Any]:
        """A config.json with the settings that transformers fills in. A null is named: it stands for none."""
        usual = dict(self.defaults)
        if "rope_scaling" in config:  # the older name
            usual.pop("rope_parameters", None)
        return {**usual, **config}

    def rule(self, config: Config) -> Rule:
        return Rule(config, self.theta, self.rope_layers, self.whole_ramp)

    def fields(self, config: Config) -> dict[str, Field]:
        """GGUF's fields for a config.json that is `completed`. Raises for what GGUF cannot say."""
        for name in NEEDED:
            most = MOST_LAYERS if name == "num_hidden_layers" else (1 << 31) - 1
            if type(config.get(name)) is not int or not 1 <= config[name] <= most:
                raise UnknownModel(bad_argument(CONFIG_CALL, name, repr(config.get(name)), "a positive integer"))
        self.check(config)
        heads, rule = config["num_attention_heads"], self.rule(config)
        head_size = config.get("head_dim") or self.head_dim or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        for name, size in (("head_dim", head_size), ("num_key_value_heads", kv_heads)):
            if type(size) is not int or not 1 <= size <= LARGEST_HEAD:
                raise UnknownModel(bad_argument(CONFIG_CALL, name, repr(size), f"1 to {LARGEST_HEAD}"))
        known = {
            **config,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": self._context(config),
            "head_dim": head_size,
            "rms_norm_eps": float(positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6))),
            "rope_theta": float(rule.theta),
        }
        fields: dict[str, Field] = {field: known[name] for name, field in SIZES.items() if known[name] is not None}
        fields |= {"attention.value_length": head_size, "rope.dimension_count": int(head_size * rule.rotary_share)}
        fields |= {f"rope.scaling.{name}": value for name, value in rule.fields().items()}
        for name, field in self.settings.items():
            names = EXPERT_COUNTS if name in EXPERT_COUNTS else (name,)
            value = next((config[each] for each in names if config.get(each) is not None), None)
            if value is not None or field in ("expert_used_count", "expert_count"):
                fields[field] = number(name, value)
        if isinstance(config.get("vocab_size"), int):
            fields["vocab_size"] = config["vocab_size"]
        return fields | self._pattern(config)

    def check(self, config: Config) -> None:
        """Raise for settings that change what a decoder computes, and that GGUF has no field for."""

        def refuse_setting(name: str, takes: str) -> None:
            raise CheckpointError(bad_argument(CONFIG_CALL, name, repr(config[name]), f"{takes} for {self.gguf}"))

        for name in ("hidden_act", "hidden_activation"):
            if config.get(name) and config[name] not in self.hidden_acts:
                refuse_setting(name, " or ".join(map(repr, self.hidden_acts)))
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # which text does not see
            refuse_setting("use_bidirectional_attention", "none, or 'vision',")
        for name, only in self.fixed.items():
            if config.get(name, only) != only:
                raise CheckpointError(
                    bad_argument(CONFIG_CALL, name, repr(config[name]), f"{only!r} for {self.model_type}")
                )
        share = self.rule(config).rotary_share
        if not self.partial_rotation and share != 1:
            raise CheckpointError(bad_argument(CONFIG_CALL, "partial_rotary_factor", share, f"1 for {self.gguf}"))

    def _context(self, config: Config) -> int | None:
        limits = [config.get("max_position_embeddings")]
        if config.get("use_sliding_window", True) and not self.windows:
            limits.append(config.get("sliding_window"))
        return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)

    def _pattern(self, config: Config) -> dict[str, Field]:
        """Which layers have a window, if it is not as in all models of this type."""
        step, layers, kinds = self.window_step, config["num_hidden_layers"], config.get("layer_types")
        if not step:
            return {}
        field = "attention.sliding_window_pattern"
        if kinds is None:
            own = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", step))
            return {} if own == step else {field: int(number("sliding_window_pattern", own))}
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
            expected = f"{layers} of {SLIDING} or {FULL}"
            raise CheckpointError(bad_argument(CONFIG_CALL, "layer_types", repr(kinds)[:80], expected))
        narrow = [kind == SLIDING for kind in kinds]
        return {} if narrow == [(i + 1) % step != 0 for i in range(layers)] else {field: narrow}

    # ---- GGUF to config.json -----------------------------------------------------------------------------------------

    def config(
        self, fields: Fields, vocabulary: int, tensors: Container[str], factors: Mapping[str, NDArray[np.float32]]
    ) -> dict[str, Any]:
        """The config.json of a GGUF file. tensors: their names. factors: those with divisors of rotary frequencies."""
        config: dict[str, Any] = {"architectures": [self.transformers], "model_type": self.model_type}
        named = SIZES | self.settings
        config |= {name: fields.get(field) for name, field in named.items() if fields.get(field) is not None}
        config |= {"vocab_size": vocabulary, "tie_word_embeddings": HEAD not in tensors}
        config |= {setting: f"blk.0.{module}.bias" in tensors for setting, module in self.biases.items()}
        step, pattern = self.window_step, fields.get("attention.sliding_window_pattern")
        if step:
            every, layers = pattern if isinstance(pattern, int) else step, config["num_hidden_layers"]
            narrow = pattern if isinstance(pattern, list) else [(i + 1) % every != 0 for i in range(layers)]
            config["layer_types"] = [SLIDING if each else FULL for each in narrow]
        for name in ("bos", "eos", "pad"):
            if f"tokenizer.ggml.{name}_token_id" in fields.metadata:
                config[f"{name}_token_id"] = fields.metadata[f"tokenizer.ggml.{name}_token_id"]
        theta = config.get("rope_theta", self.theta)
        prefix = f"{self.gguf}.rope.scaling."
        said = {name.removeprefix(prefix): fields.metadata[name] for name in fields.metadata if name.startswith(prefix)}
        rule = rule_of(said, theta, factors)
        if rule and not self.whole_ramp:
            rule["truncate"] = False
        config |= {"rope_scaling": rule} if rule else {}  # where mlx-lm looks
        config |= self.rope_settings(fields, {"rope_type": "default", **rule, "rope_theta": theta})
        return {**config, "hidden_act": self.hidden_acts[0], "torch_dtype": "float16"}

    def rope_settings(self, fields: Fields, rule: dict[str, Any]) -> dict[str, Any]:
        """Rotary settings of a config.json. rule: as GGUF has it for all layers."""
        head, size = fields.get("attention.key_length"), fields.get("rope.dimension_count")
        if self.partial_rotation and head and size and size != head:
            rule["partial_rotary_factor"] = size / head
        return {"rope_parameters": rule}

    # ---- the description ---------------------------------------------------------------------------------------------

    def model(self, f: Fields, vocabulary: int) -> Model:
        """The model that GGUF's fields describe. Raises ModelError for one that cannot be run."""
        hidden, layers = f.size("embedding_length"), self.layers(f)
        causal = f.get("attention.causal", True)
        refuse(not causal, "attention.causal", causal, "true (causal attention)")
        refuse(layers < 1, "block_count", layers, "at least one layer")
        refuse(layers > MOST_LAYERS, "block_count", layers, f"at most {MOST_LAYERS} layers")
        return Model(
            name=str(f.metadata.get("general.name", self.gguf)),
            architecture=self.gguf,
            hidden=hidden,
            vocabulary=vocabulary,
            context=f.size("context_length"),
            norm_epsilon=float(f.number("attention.layer_norm_rms_epsilon")),
            blocks=tuple(self.block(f, i) for i in range(layers)),
            ropes=self.ropes(f),
            final_norm=Vector("output_norm.weight", hidden),
            embedding=Matrix("token_embd", vocabulary, hidden, bias="none"),
            head=Matrix("output" if f.has(HEAD) else "token_embd", vocabulary, hidden, bias="none"),
            embedding_scale=f.positive("embedding_scale", self.embedding_scale(hidden)),
            logit_scale=f.positive("logit_scale", 1.0),
            logit_cap=f.cap("final_logit_softcapping", self.logit_cap),
            pooling=self.pooling(f),
            normalized=bool(f.metadata.get(NORMALIZED_VECTORS, True)),
            draft_blocks=f.size("nextn_predict_layers", 0),
        )

    def layers(self, f: Fields) -> int:
        """Without those that only draft, which come last."""
        return f.size("block_count") - f.size("nextn_predict_layers", 0)

    def embedding_scale(self, hidden: int) -> float:
        return 1.0

    def pooling(self, f: Fields) -> Pooling:
        """What makes a vector of a text's hidden states."""
        number = f.get("pooling_type", 1)
        refuse(number not in POOLINGS, "pooling_type", repr(number), "1 to 4 (mean, cls, last, rank)")
        return POOLINGS[number]

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        """The rotary tables that layers choose from."""
        base = f.positive("rope.freq_base", 10000.0)
        return (Rope(self._rope_size(f), base, self.adjacent, read_scaling(f, base, self.whole_ramp)),)

    def _rope_size(self, f: Fields) -> int:
        head_size = f.size("attention.key_length", self.head_size(f, 0))
        size = f.size("rope.dimension_count", head_size)
        expected = f"an even number up to {head_size}"
        refuse(size not in range(2, head_size + 1, 2), "rope.dimension_count", size, expected)
        return size

    def head_size(self, f: Fields, i: int) -> int:
        """Of layer i."""
        heads, hidden = f.size("attention.head_count", layer=i), f.size("embedding_length")
        refuse(heads < 1 or hidden < 1, "attention.head_count", f"{heads} heads of {hidden}", "positive sizes")
        return f.size("attention.key_length", hidden // heads)

    def block(self, f: Fields, i: int) -> Block:
        """Layer i."""
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "ffn_norm"),
            residual_scale=f.positive("residual_scale", 1.0),
        )

    def norm(self, f: Fields, i: int, name: str) -> Vector:
        return Vector(f"blk.{i}.{name}.weight", f.size("embedding_length"))

    def mixer(self, f: Fields, i: int) -> Mixer:
        return self.attention(f, i)

    def attention(
        self,
        f: Fields,
        i: int,
        *,
        qkv_bias: Bias = "allowed",
        output_bias: Bias = "allowed",
        head_norms: Literal["", "each", "all"] = "",
        rope: int | None = 0,
        window: int = 0,
        scale: float | None = None,
        cap: float = 0.0,
        sinks: bool = False,
        joined: bool = False,
        temperature: tuple[float, int] | None = None,
        gated: bool = False,
        bidirectional: bool = False,
    ) -> Attention:
        """The attention of layer i.

        head_norms: RMSNorm of q and k before they rotate, of "each" head or of "all" heads together. joined: q, k and v
        are one matrix in files. scale: of scores; None: 1 / sqrt(head size). gated: q has rows of an output gate, too.
        """
        heads, hidden, size = f.size("attention.head_count", layer=i), f.size("embedding_length"), self.head_size(f, i)
        kv_heads = f.size("attention.head_count_kv", heads, i)
        key_size, value_size = (f.number(f"attention.{name}_length", size) for name in ("key", "value"))
        refuse(heads < 1, "attention.head_count", heads, "a positive size")
        refuse(value_size != key_size, "attention.value_length", value_size, f"{key_size}, the key length")
        refuse(
            kv_heads < 1 or heads % kv_heads != 0, "attention.head_count_kv", kv_heads, f"a divisor of {heads} heads"
        )
        refuse(size < 1 or size % 16 != 0, "attention.key_length", size, "a multiple of 16")
        at, rows = f"blk.{i}.", {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
        counts = rows | {"q": 2 * rows["q"]} if gated else rows
        if joined:
            q, k, v = split_rows(f"{at}attn_qkv", list(counts.values()), hidden, qkv_bias)
        else:
            q, k, v = (Matrix(f"{at}attn_{name}", count, hidden, qkv_bias) for name, count in counts.items())
        lengths = {"each": (size, size), "all": (rows["q"], rows["k"]), "": (0, 0)}[head_norms]
        q_norm, k_norm = (
            Vector(f"{at}attn_{name}_norm.weight", length) if length else None
            for name, length in zip("qk", lengths, strict=True)
        )
        return Attention(
            heads,
            kv_heads,
            size,
            q,
            Matrix(f"{at}attn_output", hidden, rows["q"], output_bias),
            k,
            v,
            scale=f.positive("attention.scale", size**-0.5 if scale is None else scale),
            rope=rope,
            window=window,
            cap=f.cap("attn_logit_softcapping", cap),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=Vector(f"{at}attn_sinks.weight", heads) if sinks else None,
            temperature=temperature,
            gated=gated,
            bidirectional=bidirectional,
        )

    def window(self, f: Fields, i: int, *, required: bool = True) -> int:
        """Positions that layer i attends to; 0: all. required: the file must say how long a window is."""
        name = "attention.sliding_window"
        window = f.size(name, None if required else 0)
        expected = "the length of a window" if required else "the length of a window, or 0 for none"
        refuse(window < int(required), name, window, expected)
        return window if self.is_narrow(f, i) else 0

    def is_narrow(self, f: Fields, i: int) -> bool:
        """Whether layer i has a window, in models that have one."""
        name, layers = "attention.sliding_window_pattern", self.layers(f)
        pattern = f.get(name, self.window_step or 0)
        if isinstance(pattern, int):
            refuse(pattern < 0, name, pattern, "a number of layers, or a list")
            return pattern == 0 or (i + 1) % pattern != 0
        listed = pattern if isinstance(pattern, (list, tuple, np.ndarray)) else []
        refuse(len(listed) < layers, name, f"{len(listed)} layers", f"{layers}, or the step of full attention")
        return bool(listed[i])

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        count = f.size("expert_count", 0)
        refuse(count != 0, "expert_count", count, f"0: {self.gguf} has no experts")
        return self.dense(f, i, f.size("feed_forward_length", layer=i))

    def dense(self, f: Fields, i: int, size: int, suffix: str = "", *, joined: bool = False) -> Dense:
        """A gated feed-forward part. suffix: of its tensors' names. joined: gate and up are one matrix in files."""
        hidden, at = f.size("embedding_length"), f"blk.{i}.ffn_"
        if joined:
            gate, up = split_rows(f"{at}up{suffix}", [size, size], hidden)
        else:
            gate, up = (Matrix(f"{at}{name}{suffix}", size, hidden) for name in ("gate", "up"))
        return Dense(size, gate, up, Matrix(f"{at}down{suffix}", hidden, size), self.activation)

    def mixture(
        self,
        f: Fields,
        i: int,
        *,
        renormalized: bool,
        bias: Bias = "allowed",
        scores: Literal["softmax", "sigmoid"] = "softmax",
        selection_bias: bool = False,
        grouped: bool = False,
        shared: Dense | None = None,
        shared_gate: bool = False,
    ) -> Mixture:
        """The experts of layer i. bias: of the router, and of every expert's products. grouped: experts may be chosen
        among some groups. shared: the expert for all tokens; shared_gate: it has a gate."""
        count, hidden, at = f.size("expert_count", 0), f.size("embedding_length"), f"blk.{i}."
        refuse(count < 1, "expert_count", count, "at least one expert")
        chosen = f.size("expert_used_count")
        expected = f"1 to {count}, the number of experts"
        refuse(not 1 <= chosen <= count, "expert_used_count", chosen, expected)
        groups = f.size("expert_group_count", 1)
        refuse(groups > 1 and not grouped, "expert_group_count", groups, "1: groups of experts are not supported")
        groups_used = f.size("expert_group_used_count", groups)
        gating = f.number("expert_gating_func", GATING[scores][0])
        expected = f"{' or '.join(map(str, GATING[scores]))} ({scores})"
        refuse(gating not in GATING[scores], "expert_gating_func", gating, expected)
        size = f.size("expert_feed_forward_length", f.get("feed_forward_length"))
        refuse(size % 16 != 0 or size < 0, "expert_feed_forward_length", size, "a multiple of 16")
        router = Router(
            Matrix(f"{at}ffn_gate_inp", count, hidden, bias),
            chosen,
            scores=scores,
            renormalized=bool(f.get("expert_weights_norm", renormalized)),
            scale=f.positive("expert_weights_scale", 1.0),
            selection_bias=Vector(f"{at}exp_probs_b.bias", count) if selection_bias else None,
            groups=groups,
            groups_used=groups_used,
        )
        if f.has(f"{at}ffn_gate_up_exps.weight", default=False):
            gate, up = Stack(f"{at}ffn_gate_up_exps", count, 2 * size, hidden, bias), None
        else:
            gate, up = (Stack(f"{at}ffn_{name}_exps", count, size, hidden, bias) for name in ("gate", "up"))
        down = Stack(f"{at}ffn_down_exps", count, hidden, size, bias)
        opened = Vector(f"{at}ffn_gate_inp_shexp.weight", hidden) if shared_gate else None
        return Mixture(count, size, router, gate, up, down, self.activation, shared, opened)


def split_rows(name: str, rows: list[int], columns: int, bias: Bias = "allowed") -> list[Matrix]:
    """Matrices that a file has below each other as one."""
    starts = [sum(rows[:at]) for at in range(len(rows))]
    return [Matrix(name, n, columns, bias, first, sum(rows)) for n, first in zip(rows, starts, strict=True)]


# ---- finding one -----------------------------------------------------------------------------------------------------


def of_gguf(metadata: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a GGUF file; None for one that is not known."""
    name = metadata.get("general.architecture")
    candidates = [each for each in Architecture.known if each.gguf == name]
    fields = Fields(metadata, str(name))
    return next((each for each in reversed(candidates) if each.matches(fields)), None)


def of_config(config: Config, path: Path | str) -> Architecture:
    """The architecture of a config.json; raises UnknownModel for one that is not known."""
    for each in Architecture.known:
        if each.model_type == config.get("model_type"):
            return each
    what = f"model_type {config.get('model_type')!r} in config.json" if config else "no config.json"
    fix = f"Supported are {', '.join(each.model_type for each in Architecture.known)}."
    raise UnknownModel(failure(CONFIG_CALL, f"{path} has {what}", fix))


def describe(metadata: Mapping[str, Any], vocabulary: int, tensors: Container[str] | None = None) -> Model:
    """The model that GGUF's fields describe, and the names of its tensors where they are known. Raises ModelError for
    one that cannot be run."""
    architecture = of_gguf(metadata)
    if architecture is None:
        names = dict.fromkeys(each.gguf for each in Architecture.known)
        problem = f"the architecture {metadata.get('general.architecture')!r} is not supported"
        raise ModelError(failure(CALL, problem, f"Supported are {', '.join(names)}."))
    return architecture.model(Fields(metadata, architecture.gguf, tensors), vocabulary)
