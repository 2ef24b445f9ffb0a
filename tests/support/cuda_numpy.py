"""A fake GPU whose kernels compute, in NumPy: that every launch gets the right memory and the right numbers.

Each function does what the kernel of its name does, in float32, and rounds where the kernel stores. Weights are kept
as numbers beside their bricks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_fake_gpu import FakeGpu, adjust_rows, chosen_tokens, drawn_tokens, log_probabilities, set_pages
from cuda_numpy_mixture import MixtureKernels
from cuda_numpy_recurrent import RecurrentKernels
from cuda_views import finite, gated, rms, rows_at, sigmoid, view

import billfish as bf
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.memory import address

PAGE = 64
E4M3 = ml_dtypes.float8_e4m3fn


class NumpyGpu(MixtureKernels, RecurrentKernels, FakeGpu):
    """Computes what the decoder launches. `computed`: the kernels that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.weights: dict[int, np.ndarray] = {}
        self.computed: set[str] = set()
        for name in ("pack", "pack_plain"):
            monkeypatch.setattr(DeviceWeights, name, classmethod(self._remembering(getattr(DeviceWeights, name))))
        self.remember_experts(monkeypatch)

    def _remembering(self, pack: Any) -> Any:
        def remember(cls: type, tensor: Any, place: str) -> DeviceWeights:
            weights = pack(tensor, place)
            dense = bf.dequantize(tensor) if isinstance(tensor, bf.QuantizedTensor) else tensor
            self.weights[address(weights.bricks)] = np.asarray(dense, np.float32)
            return weights

        return remember

    def compute(self, function: int, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        source, macros = self._kernels[function]
        name = source.removesuffix(".cu")
        if name in ("pack", "unpack"):
            return
        self.computed.add(name)
        if name.startswith("gemm"):
            name = "experts" if "EXPERTS" in macros else "gemm"
        getattr(self, name)(macros, grid, *values)

    # ---- around blocks --------------------------------------------------------------------------------------------

    def embed(
        self, macros: dict[str, str], grid: tuple[int, ...], bricks: int, _: int, tokens: int, chosen: int,
        positions: int, frequencies: int, magnitudes: int, x: int, angles: int, n: int, k: int, pairs: int,
        scale: float,
    ) -> None:  # fmt: skip
        rows = grid[1]
        at, taken = view(positions, np.int32, rows), chosen_tokens(tokens, chosen, rows)
        turned = at[:, None] * view(frequencies, np.float64, pairs)
        both = np.stack([np.cos(turned), np.sin(turned)], axis=-1) * view(magnitudes, np.float64, pairs)[:, None]
        view(angles, np.float32, rows, pairs, 2)[:] = both
        view(x, np.float32, rows, k)[:] = self.weights[bricks][taken] * np.float32(scale)

    def layer_inputs(
        self, macros: dict[str, str], grid: tuple[int, ...], bricks: int, _: int, tokens: int, chosen: int,
        projected: int, norm: int, out: int, n: int, k: int, rows: int, epsilon: float, scale: float,
        projection_scale: float,
    ) -> None:  # fmt: skip
        layers, size = grid[0], int(macros["SIZE"])
        own = view(projected, np.float16, rows, layers, size).astype(np.float32) * np.float32(projection_scale)
        own = rms(own, epsilon) * view(norm, np.float32, size)
        table = self.weights[bricks][chosen_tokens(tokens, chosen, rows)].reshape(rows, layers, size)
        both = (own + np.float32(scale) * table) * np.float32(0.5**0.5)
        view(out, np.float16, layers, rows, size)[:] = finite(both).transpose(1, 0, 2)

    def normalize(
        self, macros: dict[str, str], grid: tuple[int, ...], hidden: int, added: int, weight: int, rows: int, x: int,
        post: int, factors: int, epsilon: float, scale: float, output_scale: float,
    ) -> None:  # fmt: skip
        count, size = grid[0], int(macros["HIDDEN"])
        which = view(rows, np.int32, count) if rows else np.arange(count)
        residual = view(hidden, np.float32, which.max() + 1, size)
        new = residual[which]
        if macros["ADD"] == "1":
            more = view(added, np.float16, which.max() + 1, size)[which].astype(np.float32)
            if macros["POST"] == "1":
                more = rms(more, epsilon) * view(post, np.float32, size)
            new = (new + np.float32(scale) * more) * np.float32(output_scale)
            if not rows:
                residual[which] = new
        out = rms(new, epsilon) * view(weight, np.float32, size) if macros["NORM"] == "1" else new
        view(x, np.float16, count, size)[:] = finite(out)
        if factors:
            view(factors, np.float32, count, 2)[:, 0] = 1 / np.sqrt((new * new).mean(axis=1) + np.float32(epsilon))

    def gemm(
        self, macros: dict[str, str], grid: tuple[int, ...], _map: Any, bricks: int, _scale: int, x: int, bias: int,
        y: int, m: int, n: int, k: int, x_stride: int, *rest: int,
    ) -> None:  # fmt: skip
        out = rows_at(x, np.float16, m, k, x_stride).astype(np.float32) @ self.weights[bricks].T
        if "NORMED" in macros:
            out *= self.folded_factors(m, k, *rest)[:, None]
        if bias:
            out += view(bias, np.float32, n)
        if "RESIDUAL" in macros:
            self.folded_residual(out, y, *rest)
            return
        if "GATE" in macros:
            pairs = out.reshape(m, -1, 2, 8)
            out = gated(macros["GATE"], pairs[:, :, 0].reshape(m, -1), pairs[:, :, 1].reshape(m, -1))
        if "Y_F32" in macros:
            view(y, np.float32, *out.shape)[:] = out
        else:
            view(y, np.float16, *out.shape)[:] = finite(out)

    def folded_factors(
        self, m: int, k: int, hidden: int, weight: int, squares: int, factors: int, epsilon: float, scale: float
    ) -> np.ndarray:
        """As folded_norm.cuh does."""
        kept = view(factors, np.float32, m, 2)
        sums = view(squares, np.float32, m, k // 16).sum(axis=1)
        kept[:, 0] = 1 / np.sqrt(sums / np.float32(k) + np.float32(epsilon))
        return kept[:, 0] * kept[:, 1]

    def folded_residual(
        self, out: np.ndarray, x: int, hidden: int, weight: int, squares: int, factors: int, epsilon: float,
        scale: float,
    ) -> None:  # fmt: skip
        kept = view(factors, np.float32, len(out), 2)
        power = np.exp2(np.floor(np.log2(kept[:, 0])) - 6).astype(np.float32)
        residual = view(hidden, np.float32, *out.shape)
        residual += np.float32(scale) * out
        view(x, np.float16, *out.shape)[:] = finite(residual * view(weight, np.float32, out.shape[1]) * power[:, None])
        view(squares, np.float32, len(out), out.shape[1] // 16)[:] = (residual**2).reshape(len(out), -1, 16).sum(axis=2)
        kept[:, 1] = 1 / power

    def set_pages(self, macros: dict[str, str], grid: tuple[int, ...], *arguments: int) -> None:
        set_pages(*arguments)

    def reorder(self, macros: dict[str, str], grid: tuple[int, ...], x: int, order: int, out: int, k: int) -> None:
        rows = grid[0]
        view(out, np.float16, rows, k)[:] = view(x, np.float16, rows, k)[:, view(order, np.int32, k)]

    def add_outer(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, y: int, sums: int, rows: int, k: int, n: int
    ) -> None:
        left, right = (view(at, np.float16, rows, width).astype(np.float32) for at, width in ((x, k), (y, n)))
        view(sums, np.float32, k, n)[:] += left.T @ right

    def add_squares(self, macros: dict[str, str], grid: tuple[int, ...], x: int, sums: int, rows: int, k: int) -> None:
        numbers = view(x, np.float16, rows, k).astype(np.float64)
        view(sums, np.float64, k)[:] += np.square(numbers).sum(axis=0)

    def gate(
        self, macros: dict[str, str], grid: tuple[int, ...], gates: int, numbers: int, out: int, rows: int,
        columns: int, stride: int,
    ) -> None:  # fmt: skip
        both = (view(each, np.float16, rows, columns).astype(np.float32) for each in (gates, numbers))
        rows_at(out, np.float16, rows, columns, stride)[:] = finite(gated(macros["GATE"], *both))

    def cap(self, macros: dict[str, str], grid: tuple[int, ...], scores: int, count: int, cap: float) -> None:
        of_rows = view(scores, np.float32, grid[1], count)
        of_rows[:] = cap * np.tanh(of_rows / cap)

    def choose(
        self, macros: dict[str, str], grid: tuple[int, ...], scores: int, vocabulary: int, choices: int, picked: int,
        chosen: int,
    ) -> None:  # fmt: skip
        tokens = drawn_tokens(view(scores, np.float32, grid[1], vocabulary), choices)
        self.put_chosen(tokens, choices, picked, chosen)

    def adjust(self, macros: dict[str, str], grid: tuple[int, ...], *pointers: int) -> None:
        adjust_rows(grid, *pointers)

    def log_probabilities(self, macros: dict[str, str], grid: tuple[int, ...], *pointers: int) -> None:
        log_probabilities(grid, *pointers)

    # ---- attention ------------------------------------------------------------------------------------------------

    def head_scales(
        self, macros: dict[str, str], grid: tuple[int, ...], q: int, k: int, scales: int, q_stride: int, k_stride: int,
        q_size: int, k_size: int, epsilon: float,
    ) -> None:  # fmt: skip
        rows = grid[0]
        out = view(scales, np.float32, rows, 2)
        for i, (at, size, stride) in enumerate(((q, q_size, q_stride), (k, k_size, k_stride))):
            x = rows_at(at, np.float16, rows, size, stride).astype(np.float32)
            out[:, i] = 1 / np.sqrt((x * x).mean(axis=1) + np.float32(epsilon))

    def rotate(
        self, macros: dict[str, str], grid: tuple[int, ...], q: int, k: int, v: int, q_stride: int, k_stride: int,
        v_stride: int, angles: int, positions: int, texts: int, pages: int, q_norm: int, k_norm: int, head_scales: int,
        epsilon: float, scale: float, growth: float, growth_length: int, angle_stride: int, heads: int, kv_heads: int,
        offset: int, pages_of_text: int, rows: int,
    ) -> None:  # fmt: skip
        head, pairs, gate = (int(macros[name]) for name in ("HEAD", "PAIRS", "OUTPUT_GATE"))
        at, whose = view(positions, np.int32, rows), view(texts, np.int32, rows)
        turned = rows_at(angles, np.float32, rows, 2 * pairs, 2 * angle_stride).reshape(rows, 1, pairs, 2)

        def made(x: np.ndarray, norm: int, column: int) -> np.ndarray:
            x = x.astype(np.float32)
            if macros["NORMED"] == "1":
                x = rms(x, epsilon) * view(norm, np.float32, head)
            elif macros["NORMED"] == "2":
                factor = view(head_scales, np.float32, rows, 2)[:, column]
                x = x * factor[:, None, None] * view(norm, np.float32, *x.shape[1:])
            if pairs:
                adjacent = macros["ADJACENT"] == "1"
                first = np.arange(pairs) * (2 if adjacent else 1)
                second = first + (1 if adjacent else pairs)
                a, b, x = x[..., first], x[..., second], x.copy()
                x[..., first] = a * turned[..., 0] - b * turned[..., 1]
                x[..., second] = a * turned[..., 1] + b * turned[..., 0]
            return x

        queries = rows_at(q, np.float16, rows, heads * (1 + gate) * head, q_stride)
        wanted = (np.arange(heads)[:, None] * (1 + gate) * head + np.arange(head)).ravel()
        grown = np.float32(scale) * (1 + np.float32(growth) * np.log1p((at // growth_length).astype(np.float32)))
        new = made(queries[:, wanted].reshape(rows, heads, head), q_norm, 0) * grown[:, None, None]
        queries[:, wanted] = finite(new).reshape(rows, -1)
        if grid[0] == heads:
            return
        keys, values = (
            rows_at(each, np.float16, rows, kv_heads * head, stride).reshape(rows, kv_heads, head).astype(np.float32)
            for each, stride in ((k, k_stride), (v, v_stride))
        )
        if macros["VALUES_NORMED"] == "1":
            values = rms(values, epsilon)
        keys = made(keys, k_norm, 1)
        table = view(pages, np.uint64, int(whose.max()) + 1, pages_of_text)
        for row in range(rows):
            page = int(table[whose[row], at[row] // PAGE])
            for i, each in enumerate((keys, values)):
                tile, scales = self.tile(macros, page, offset, i, kv_heads)
                codes = finite(each[row])
                if scales is not None:
                    codes, scales[:, at[row] % PAGE] = quantized(each[row])
                tile[:, at[row] % PAGE, :] = 0
                tile[:, at[row] % PAGE, self.places(head, tile.itemsize)[at[row] % PAGE]] = codes

    def tile(
        self, macros: dict[str, str], page: int, offset: int, values: int, kv_heads: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """[kv_heads, PAGE, wide], each row as it lies; and the scales [kv_heads, PAGE] of E4M3."""
        wide, fp8 = -(-int(macros["HEAD"]) // 64) * 64, macros["FP8"] == "1"
        row_bytes = wide + 4 if fp8 else 2 * wide
        self._room(page, offset + 2 * kv_heads * PAGE * row_bytes)
        whole = view(page + offset + values * kv_heads * PAGE * row_bytes, np.uint8, kv_heads, PAGE * row_bytes)
        if not fp8:
            return whole.view(np.float16).reshape(kv_heads, PAGE, wide), None
        rows, scales = whole[:, : PAGE * wide], whole[:, PAGE * wide :]
        return rows.view(E4M3).reshape(kv_heads, PAGE, wide), scales.view(np.float32)

    @staticmethod
    @cache
    def places(head: int, itemsize: int) -> np.ndarray:
        """Where the numbers of each row of a page lie: [PAGE, head]."""
        row, i = np.ogrid[:PAGE, :head]
        sixteen = 16 // itemsize
        swizzle = row & 7 if -(-head // 64) * itemsize % 2 == 0 else row >> 1 & 3
        return (i // sixteen ^ swizzle) * sixteen + i % sixteen

    def attend(
        self, macros: dict[str, str], grid: tuple[int, ...], q: int, blocks: int, pages: int, out: int, sinks: int,
        q_stride: int, heads: int, kv_heads: int, offset: int, pages_of_text: int, window: int, cap: float,
    ) -> None:  # fmt: skip
        head, gate, group = (int(macros[name]) for name in ("HEAD", "OUTPUT_GATE", "GROUP"))
        assert group * kv_heads == heads
        few = macros["FEW"] == "1"
        found = view(blocks, np.int32, grid[2] if few else grid[0], 4)
        if not few:
            assert found[:, 1].max() <= int(macros["WARPS"]) * 16 // group
        places = [(b[0] + i, b[2], b[3] + i) for b in found.tolist() for i in range(1 if few else b[1])]
        for row, text, position in places:
            first = max(0, position + 1 - window) if macros["WINDOWED"] == "1" else 0
            table = view(pages + 8 * text * pages_of_text, np.uint64, pages_of_text)
            both = []
            for i in range(2):
                seen = []  # of each page: [rows, kv_heads, head]
                for page in range(first // PAGE, position // PAGE + 1):
                    rows = slice(max(0, first - page * PAGE), min(PAGE, position + 1 - page * PAGE))
                    tile, scales = self.tile(macros, int(table[page]), offset, i, kv_heads)
                    places = self.places(head, tile.itemsize)[rows]
                    where = np.broadcast_to(places, (kv_heads, *places.shape))
                    numbers = np.take_along_axis(tile[:, rows], where, axis=2).astype(np.float32)
                    if scales is not None:
                        numbers *= scales[:, rows, None]
                    seen.append(numbers.swapaxes(0, 1))
                both.append(np.concatenate(seen))
            keys, values = (np.repeat(each, group, axis=1) for each in both)
            whole = view(q + 2 * row * q_stride, np.float16, heads, 1 + gate, head).astype(np.float32)
            s = np.einsum("hd,khd->hk", whole[:, 0], keys)
            if macros["CAPPED"] == "1":
                s = cap * np.tanh(s / cap)
            if sinks:
                s = np.concatenate([s, view(sinks, np.float32, heads)[:, None]], axis=1)
            p = np.exp2(s - s.max(axis=1, keepdims=True))
            p = (p / p.sum(axis=1, keepdims=True))[:, : len(keys)]
            made = np.einsum("hk,khd->hd", p, values)
            if gate:
                made *= sigmoid(whole[:, 1])
            view(out + 2 * row * heads * head, np.float16, heads, head)[:] = finite(made)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., numbers] in E4M3, and the scale of each row, as pages.cuh has them."""
    x = np.clip(x, -61440, 61440)
    fraction, exponent = np.frexp(np.abs(x).max(axis=-1))  # fraction in [0.5, 1), and 448 is 0.875 * 2^9
    powers = np.where(fraction == 0, -24, np.maximum(exponent - 9 + (fraction > 0.875), -24))
    scales = np.ldexp(np.float32(1), powers)
    return (x / scales[..., None]).astype(E4M3), scales
