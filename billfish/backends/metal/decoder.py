"""Kernels of a decoder on an Apple GPU between its matmuls: norms, rotation, recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billfish.backends.metal.kernels import (
    MATVEC_ROWS,
    SAFE,
    Kernels,
    constants_array,
    library,
    more_numbers,
    source,
    up,
)

# Threads of a norm's threadgroup at most, and what each takes at once; numbers of a row for each of its threadgroups,
# of which a few rows have several.
NORM_THREADS, NORM_NUMBERS, NORM_SHARE = 512, 4, 256


def _arguments(name: str, inputs: list[str], outputs: list[str], header: str = "") -> dict[str, Any]:
    return {
        "name": f"marlin_{name}",
        "input_names": inputs,
        "output_names": outputs,
        "source": source(f"{name}.metal"),
        "header": header,
        "compile_options": SAFE,
    }


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer, as rotate.metal takes them. frequencies: of its RoPE; none: no positions."""

    heads: int
    kv_heads: int  # 0: the layer has none of its own
    size: int
    frequencies: Any = None
    magnitude: float = 1.0
    adjacent: bool = False
    gated: bool = False
    same: bool = False  # values are keys
    q_norm: Any = None
    k_norm: Any = None
    v_norm: bool = False


class DecoderKernels:
    """Built by the same `metal_kernel` as those of the matmuls."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def _built(self, name: str, inputs: list[str], outputs: list[str], header: str = "") -> Any:
        return self._kernels.get((name,), lambda: _arguments(name, inputs, outputs, header))

    def add_norm(
        self, residual: Any, y: Any, post: Any, weight: Any, *, epsilon: float, scale: float, dtype: Any
    ) -> tuple[Any, Any]:
        """The residual stream float32 [rows, hidden] takes in `scale` times y, normalized by `post` if that is there.
        Returns it, and its norm by `weight`, or itself without one, in `dtype`. y may be none."""
        inputs = ["residual", "y", "post", "weight", "numbers"]
        built = self._built("add_norm", inputs, ["h", "x"], source("rounding.metal"))
        rows, width = residual.shape
        threads = min(up(width, 32 * NORM_NUMBERS) * 32, NORM_THREADS)
        shares = max(width // NORM_SHARE, 1) if rows <= MATVEC_ROWS else 1
        template = {"T": dtype, "ADD": y is not None, "POST": post is not None, "NORM": weight is not None}
        h, x = built(
            inputs=[
                residual,
                residual if y is None else y,
                residual if post is None else post,
                residual if weight is None else weight,
                _floats(residual, epsilon, scale),
            ],
            template=list(template.items()),
            grid=(threads, rows, shares),
            threadgroup=(threads, 1, 1),
            output_shapes=[residual.shape, residual.shape],
            output_dtypes=[residual.dtype, dtype],
        )
        return h, x

    def rotate(self, qkv: Any, about: Heads, positions: Any, epsilon: float, v: Any = None) -> tuple[Any, Any]:
        """q, k and v [rows, all of them] -> q [heads, rows, size] and keys and values [2, KV heads, rows, size].
        positions: int32 [rows]. v: [rows, v], if qkv is without v."""
        rows, a = qkv.shape[0], about
        built = self._built(
            "rotate",
            ["qkv", "v", "frequencies", "positions", "q_norm", "k_norm", "numbers"],
            ["q", "kv"],
            source("rounding.metal"),
        )
        pairs = 0 if a.frequencies is None else a.frequencies.shape[0]
        template = {
            "T": qkv.dtype,
            "HEADS": a.heads,
            "KV_HEADS": a.kv_heads,
            "SIZE": a.size,
            "PAIRS": pairs,
            "ADJACENT": a.adjacent,
            "GATED": a.gated,
            "SAME": a.same,
            "APART": v is not None,
            "Q_NORM": a.q_norm is not None,
            "K_NORM": a.k_norm is not None,
            "V_NORM": a.v_norm,
        }
        q, kv = built(
            inputs=[
                qkv,
                qkv if v is None else v,
                qkv if a.frequencies is None else more_numbers(a.frequencies),
                more_numbers(positions),
                qkv if a.q_norm is None else a.q_norm,
                qkv if a.k_norm is None else a.k_norm,
                _floats(qkv, epsilon, a.magnitude),
            ],
            template=list(template.items()),
            grid=(32, rows, a.heads + 2 * a.kv_heads),
            threadgroup=(32, 1, 1),
            output_shapes=[(a.heads, rows, a.size), (2, max(a.kv_heads, 1), rows, a.size)],
            output_dtypes=[qkv.dtype, qkv.dtype],
        )
        return q, kv

    def recurrence(
        self, q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, *, delta: bool, tiled: bool
    ) -> tuple[Any, Any]:
        """Take the states [heads, value, key] of a sequence through its next tokens; see recurrence.metal.

        q, k [tokens, key heads, key], v [tokens, heads, value], decay and beta [tokens, heads], all float32. tiled:
        head i goes with key head i % key heads; else neighbours share one. Returns (out, state behind the tokens).
        """
        (tokens, key_heads, key), (_, heads, value) = k.shape, v.shape
        built = self._built("recurrence", ["q", "k", "v", "decay", "beta", "state", "tokens"], ["out", "after"])
        sizes = {"KEY": key, "VALUE": value, "KEY_HEADS": key_heads, "HEADS": heads, "DELTA": delta, "TILED": tiled}
        out, after = built(
            inputs=[q, k, v, more_numbers(decay), more_numbers(beta), state, constants_array([tokens], beside=q)],
            template=list(sizes.items()),
            grid=(32, value, heads),
            threadgroup=(32, 1, 1),
            output_shapes=[v.shape, state.shape],
            output_dtypes=[v.dtype, state.dtype],
        )
        return out, after


def _floats(beside: Any, *numbers: float) -> Any:
    """A few float32, which kernels get as constants."""
    xp = library(beside)
    return xp.array(numbers, xp.float32)
