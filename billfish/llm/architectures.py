"""What architectures are made of, a row each. All else models have in common, or say in their metadata.

A new architecture is a row here, its words in checkpoints/hyperparameters.py and names.py, and a row in
tests/support/llm_architectures.py.
"""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True)
class Windows:
    """Layers whose tokens see no more than the last `attention.sliding_window` positions, their own included."""

    step: int  # every so many-th layer sees all; 0: none does
    required: bool = True  # the file must say how long a window is; else none is said by 0, or by nothing
    local_base: float = 0.0  # these layers rotate with a base of their own, this unless the file says, and unscaled


@dataclass(frozen=True)
class Routing:
    """How a token chooses experts: those with the largest scores. Of equal scores the lower index goes first."""

    renormalized: bool  # the weights of a token's experts are made to sum to 1
    required: bool = True  # there are no models without experts
    shared: bool = False  # beside the chosen experts there is one for all tokens, with a gate of its own
    biases: bool = False  # of the router, and of every expert's products


@dataclass(frozen=True)
class Architecture:
    """What families of models differ in."""

    rope: str = "halves"  # which numbers of a head rotate together: i and i + half, or "adjacent" 2i and 2i + 1
    biases: tuple[str, ...] = ()  # products that must have one; every other may
    head_norms: str = ""  # RMSNorm of q and k before they rotate: of "each" head, or of "all" heads together
    gate: str = "silu"  # what the gate of the feed-forward part goes through: "gelu", or "clamped_silu" as in gates.py
    scaled_embedding: bool = False  # embedding times sqrt(hidden)
    feed_forward_norm: str = "ffn_norm"  # what files call the norm before the feed-forward part
    post_norms: bool = False  # RMSNorm of what attention and feed-forward part give, before it is added
    sinks: bool = False  # each head has one more score in its softmax, and no value for it
    joined: bool = False  # q, k and v are one matrix in files, gate and up another
    windows: Windows | None = None
    unrotated: int = 0  # every so many-th layer does not rotate q and k
    caps: tuple[float, float] = (0.0, 0.0)  # c of scores and of logits, which become c tanh(s / c), if nothing is said
    wide_queries: int = 0  # layers of the model whose scores are divided by sqrt(hidden / heads), not sqrt(head size)
    whole_ramp: bool = True  # YaRN's ramp begins and ends at whole numbers of pairs
    routing: Routing | None = None

    @property
    def must_have_biases(self) -> tuple[str, ...]:
        """Matrices by name in files."""
        return (*self.biases, "ffn_gate_inp") if self.routing is not None and self.routing.biases else self.biases


# llama.cpp's converter reorders the rows of q and k of some models, so that pairs are adjacent; the others' it leaves.
ARCHITECTURES = {
    "llama": Architecture(rope="adjacent", routing=Routing(renormalized=True, required=False)),  # Mixtral has experts
    "qwen2": Architecture(biases=ATTENTION),
    "qwen2moe": Architecture(biases=ATTENTION, routing=Routing(renormalized=False, shared=True)),
    "qwen3": Architecture(head_norms="each"),
    "qwen3moe": Architecture(head_norms="each", routing=Routing(renormalized=True)),
    "gemma": Architecture(gate="gelu", scaled_embedding=True),
    "gemma2": Architecture(
        gate="gelu", scaled_embedding=True, post_norms=True, windows=Windows(2), caps=(50.0, 30.0), wide_queries=46
    ),
    "gemma3": Architecture(
        head_norms="each",
        gate="gelu",
        scaled_embedding=True,
        post_norms=True,
        windows=Windows(6, required=False, local_base=10000.0),
        wide_queries=62,
    ),
    "gpt-oss": Architecture(
        biases=(*ATTENTION, "attn_output"),
        gate="clamped_silu",
        feed_forward_norm="post_attention_norm",
        sinks=True,
        windows=Windows(2),
        whole_ramp=False,
        routing=Routing(renormalized=True, biases=True),
    ),
    "granitemoe": Architecture(rope="adjacent", routing=Routing(renormalized=True)),
    "olmoe": Architecture(head_norms="all", routing=Routing(renormalized=False)),
    "phi3": Architecture(joined=True, windows=Windows(0, required=False)),
    "smollm3": Architecture(rope="adjacent", unrotated=4),
}
