"""Kernels of recurrent mixers in NumPy, for the fake GPU of cuda_numpy.py: token by token, whatever the form."""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda_views import view


def silu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.tanh(0.5 * x))


def row_of(pointer: int, row: int, stride: int, count: int) -> np.ndarray:
    return view(pointer + 2 * row * stride, np.float16, count).astype(np.float32)


class RecurrentKernels:
    """Methods as the kernels of their names. `chunk_products` leaves all to `chunk_scan`."""

    def _rows(self, rows: int, counts: int) -> list[list[int]]:
        """Of each sequence that decodes its rows: the next token, and drafted ones."""
        return [[*range(i, i + count)] for i, count in enumerate(view(counts, np.int32, rows).tolist()) if count]

    def _texts(self, few: bool, rows: int, chunks: int, ranges: int) -> list[list[tuple[int, int, int]]]:
        """Of each text its chunks: the first row, how many rows, the chunk's number."""
        if few:
            return [[(row, 1, -1) for row in rows] for rows in self._rows(rows, chunks)]
        found = []
        for first, count in view(ranges, np.int32, rows, 2).tolist():
            table = view(chunks + 16 * first, np.int32, max(count, 1), 4)[:count].tolist()
            found.append([(row, length, first + i) for i, (row, length, _, _) in enumerate(table)])
        return found

    def recurrence_inputs(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, betas: int, alphas: int, weight: int, bias: int,
        decay: int, step: int, states: int, chunks: int, kq: int, overlap: int, v: int, gates: int, stride: int,
        beta_stride: int, alpha_stride: int, channels: int, k_at: int, q_at: int, v_at: int, tail_at: int,
        key_heads: int, heads: int,
    ) -> None:  # fmt: skip
        taps, keys, values = (int(macros[name]) for name in ("TAPS", "KEYS", "VALUES"))
        few, delta, half = (macros[name] == "1" for name in ("FEW", "DELTA", "HALF"))
        if few:  # the last row first: behind the first one, states go to where all begin
            table = [(row, 1, rows[0], rows[0]) for rows in self._rows(grid[1], chunks) for row in reversed(rows)]
        else:
            table = view(chunks, np.int32, grid[1] // 4, 4).tolist()
        weights = view(weight, np.float32, taps, channels)
        for first, count, text, start in table:
            tail = view(int(view(states, np.uint64, text + 1)[text]) + 4 * tail_at, np.float32, taps - 1, channels)
            whole = np.stack([*tail, *(row_of(x, row, stride, channels) for row in range(start, first + count))])
            for row in range(first, first + count):
                seen = whole[row - start : row - start + taps]
                mixed = (seen * weights).sum(axis=0) + (view(bias, np.float32, channels) if bias else 0)
                mixed = silu(mixed)
                k, q = (mixed[at : at + key_heads * keys].reshape(key_heads, keys) for at in (k_at, q_at))
                if delta:
                    k, q = (e / np.sqrt((e * e).sum(axis=1, keepdims=True) + 1e-6) for e in (k, q))
                    q = q / np.sqrt(np.float32(keys))
                of_row = view(kq, np.float16 if half else np.float32, (row + 1) * key_heads * 2 * keys)
                of_row[row * key_heads * 2 * keys :] = np.concatenate([k, q], axis=1).ravel()
                view(overlap, np.float32, row + 1, key_heads)[row] = (k * q).sum(axis=1)
                view(v, np.float32, row + 1, heads * values)[row] = mixed[v_at : v_at + heads * values]
                t = np.logaddexp(0, row_of(alphas, row, alpha_stride, heads) + view(step, np.float32, heads))
                beta = 1 / (1 + np.exp(-row_of(betas, row, beta_stride, heads))) if delta else t
                own = np.stack([view(decay, np.float32, heads) * t, beta], axis=1)
                view(gates, np.float32, row + 1, heads, 2)[row] = own
            if few:
                own = view(int(view(states, np.uint64, first + 1)[first]) + 4 * tail_at, np.float32, *tail.shape)
                own[:] = whole[-len(own) :]

    def keep_inputs(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, others: int, states: int, chunks: int, ranges: int,
        saves: int, stride: int, channels: int, tail_at: int,
    ) -> None:  # fmt: skip
        before = int(macros["TAPS"]) - 1
        for text, parts in enumerate(self._texts(False, grid[1], chunks, ranges)):
            own = view(int(view(states, np.uint64, text + 1)[text]) + 4 * tail_at, np.float32, before, channels)
            rows = [row for first, count, _ in parts for row in range(first, first + count)]
            inputs = [row_of(x, row, stride, channels) for row in rows]
            if others:
                inputs = [a * row_of(others, row, stride, channels) for a, row in zip(inputs, rows, strict=True)]
            whole = np.stack([*own, *inputs])
            for first, count, chunk in parts:
                save, end = int(view(saves, np.uint64, chunk + 1)[chunk]), first + count - parts[0][0]
                if save:
                    view(save + 4 * tail_at, np.float32, before, channels)[:] = whole[end : end + before]
            own[:] = whole[len(rows) :]

    def short_convolution(
        self, macros: dict[str, str], grid: tuple[int, ...], bcx: int, weight: int, bias: int, states: int, chunks: int,
        y: int, channels: int, tail_at: int,
    ) -> None:  # fmt: skip
        few, taps = macros["FEW"] == "1", int(macros["TAPS"])
        if few:
            table = [(rows[0], len(rows), rows[0], rows[0]) for rows in self._rows(grid[1], chunks)]
        else:
            table = view(chunks, np.int32, grid[1] // 4, 4).tolist()
        for first, count, text, start in table:
            tail = view(int(view(states, np.uint64, text + 1)[text]) + 4 * tail_at, np.float32, taps - 1, channels)
            rows = view(bcx, np.float16, first + count, 3, channels)[start:].astype(np.float32)
            whole = np.concatenate([tail, rows[:, 0] * rows[:, 2]])
            for row in range(first, first + count):
                mixed = (whole[row - start : row - start + taps] * view(weight, np.float32, taps, channels)).sum(axis=0)
                mixed += view(bias, np.float32, channels) if bias else 0
                view(y, np.float16, row + 1, channels)[row] = rows[row - start, 1] * mixed
                if few:
                    own = view(int(view(states, np.uint64, row + 1)[row]) + 4 * tail_at, np.float32, *tail.shape)
                    own[:] = whole[row - start + 1 : row - start + taps]

    def recurrence(
        self, macros: dict[str, str], grid: tuple[int, ...], kq: int, overlap: int, v: int, gates: int, skips: int,
        states: int, chunks: int, ranges: int, saves: int, out: int, z: int, norm: int, y: int, epsilon: float,
        z_stride: int, state_at: int, key_heads: int, heads: int,
    ) -> None:  # fmt: skip
        few, values = macros["FEW"] == "1", int(macros["VALUES"])
        texts = self._texts(few, grid[2], chunks, ranges)
        tables = kq, v, gates, skips, states, saves, out
        self._scan(macros, np.float32, texts, *tables, state_at, key_heads, heads)
        if few and macros["DELTA"] == "1":
            macros = macros | {"GROUP": str(values), "GATE_FIRST": "0"}
            self.gated_norm(macros, grid, out, z, norm, y, epsilon, grid[2], heads, z_stride, 0)

    def chunk_products(self, macros: dict[str, str], grid: tuple[int, ...], *values: int) -> None:
        pass

    def chunk_scan(
        self, macros: dict[str, str], grid: tuple[int, ...], kq: int, w: int, u: int, attention: int, gates: int,
        skips: int, states: int, chunks: int, ranges: int, saves: int, out: int, state_at: int, key_heads: int,
        heads: int,
    ) -> None:  # fmt: skip
        texts = self._texts(False, grid[2], chunks, ranges)
        tables = kq, u, gates, skips, states, saves, out
        self._scan(macros, np.float16, texts, *tables, state_at, key_heads, heads)

    def _scan(
        self, macros: dict[str, str], dtype: Any, texts: list[list[tuple[int, int, int]]], kq: int, v: int, gates: int,
        skips: int, states: int, saves: int, out: int, state_at: int, key_heads: int, heads: int,
    ) -> None:  # fmt: skip
        keys, values = int(macros["KEYS"]), int(macros["VALUES"])
        numbers = np.arange(heads)
        which = numbers % key_heads if macros["TILED"] == "1" else numbers // (heads // key_heads)
        shape = heads, values // 8, keys, 8
        for number, parts in enumerate(texts):
            few = bool(parts) and parts[0][2] < 0
            text = parts[0][0] if few else number
            own = view(int(view(states, np.uint64, text + 1)[text]) + 4 * state_at, np.float32, *shape)
            s = own.transpose(0, 2, 1, 3).reshape(heads, keys, values)
            for first, count, chunk in parts:
                for row in range(first, first + count):
                    both = view(kq, dtype, row + 1, key_heads, 2, keys)[row][which].astype(np.float32)
                    k, q, x = both[:, 0], both[:, 1], view(v, np.float32, row + 1, heads, values)[row]
                    gate = view(gates, np.float32, row + 1, heads, 2)[row]
                    s = s * np.exp(gate[:, :1, None])
                    recalled = (k[:, None] @ s)[:, 0] if macros["DELTA"] == "1" else 0
                    s = s + k[:, :, None] * (gate[:, 1:] * (x - recalled))[:, None]
                    made = (q[:, None] @ s)[:, 0]
                    if skips:
                        made = made + view(skips, np.float32, heads)[:, None] * x
                    view(out, np.float32, row + 1, heads, values)[row] = made
                places, place = (states, row) if few else (saves, chunk)
                save = int(view(places, np.uint64, place + 1)[place])
                if save:
                    kept = view(save + 4 * state_at, np.float32, *shape)
                    kept[:] = s.reshape(heads, keys, -1, 8).transpose(0, 2, 1, 3)
            if not few:
                own[:] = s.reshape(heads, keys, -1, 8).transpose(0, 2, 1, 3)

    def gated_norm(
        self, macros: dict[str, str], grid: tuple[int, ...], x: int, z: int, weight: int, y: int, epsilon: float,
        rows: int, count: int, stride: int, apart: int,
    ) -> None:  # fmt: skip
        group, first = int(macros["GROUP"]), macros["GATE_FIRST"] == "1"
        weights = view(weight, np.float32, count if apart else 1, group)
        for row in range(rows):
            own = view(x, np.float32, row + 1, count, group)[row]
            gate = silu(row_of(z, row, stride, count * group)).reshape(count, group)
            if first:
                own = own * gate
            made = own / np.sqrt((own * own).mean(axis=1, keepdims=True) + np.float32(epsilon)) * weights
            view(y, np.float16, row + 1, count, group)[row] = made if first else made * gate
