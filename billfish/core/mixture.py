"""What a mixture of experts computes besides products: which experts the rows of x chose, checked and sorted; and the
gated activation between its products, the names and the formulas in NumPy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import FLOAT_NAMES, FLOATS, Input
from billfish.core.errors import DataError, DTypeError, FormatError, ShapeError, bad_argument

ID_TYPES = ("int32", "int64", "uint32")  # of NumPy, torch and MLX


def ids_input(call: str, source: object, tokens: int) -> Input:
    """`ids` [tokens, k] as an argument, k > 0. Its numbers are not looked at."""
    ids = Input(call, "ids", source)
    if ids.dtype_name not in ID_TYPES:
        raise DTypeError(bad_argument(call, "ids.dtype", ids.dtype_name, " or ".join(ID_TYPES)))
    if len(ids.shape) != 2 or ids.shape[0] != tokens:
        raise ShapeError(bad_argument(call, "ids.shape", ids.shape, f"[{tokens}, k], as x has {tokens} rows"))
    if ids.shape[1] == 0:
        raise ShapeError(bad_argument(call, "ids.shape", ids.shape, "[tokens, k] with k > 0"))
    return ids


def routing_input(call: str, source: object, shape: tuple[int, ...]) -> Input:
    """Routing weights of the shape of `ids` as an argument. Their numbers are not looked at."""
    routing = Input(call, "weights", source)
    if routing.dtype_name not in FLOATS:
        raise DTypeError(bad_argument(call, "weights.dtype", routing.dtype_name, FLOAT_NAMES))
    if routing.shape != shape:
        raise ShapeError(bad_argument(call, "weights.shape", routing.shape, f"{shape}, as ids"))
    return routing


def checked_ids(ids: Input, experts: int) -> NDArray[np.int32]:
    """`ids` [T, k] in CPU memory, each of them below `experts`."""
    numbers = ids.numpy()
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < experts:
        t, j = (int(i) for i in np.argwhere((numbers < 0) | (numbers >= experts))[0])
        raise DataError(bad_argument(ids.call, f"ids[{t}, {j}]", int(numbers[t, j]), f"0 to {experts - 1}"))
    return np.ascontiguousarray(numbers, np.int32)


def checked_routing(routing: Input) -> NDArray[np.float32]:
    """Routing weights [T, k] in CPU memory, all finite."""
    numbers = np.ascontiguousarray(routing.numpy(), np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        t, j = (int(i) for i in np.argwhere(~finite)[0])
        raise DataError(bad_argument(routing.call, f"weights[{t}, {j}]", float(numbers[t, j]), "a finite number"))
    return numbers


def rows_by_expert(ids: NDArray[np.int32]) -> dict[int, NDArray[np.int64]]:
    """For each chosen expert, in their order, where it stands in `ids` [T * k], in order."""
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    chosen, first = np.unique(flat[order], return_index=True)
    return dict(zip(chosen.tolist(), np.split(order, first[1:]), strict=True)) if flat.size else {}


# By the number that kernels know an activation by.
GATES = ("silu", "gelu", "clamped_silu")
# Of "clamped_silu", as gpt-oss has it.
CLAMP, STEEPNESS = 7.0, 1.702


def check_gate(call: str, activation: str) -> str:
    """Raises unless `activation` is one of GATES."""
    if activation not in GATES:
        raise FormatError(bad_argument(call, "hidden_act", repr(activation), " or ".join(map(repr, GATES))))
    return activation


def open_gate(gate: NDArray[np.float32], up: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """h of gate and up, all of one shape: computed in float64, rounded once.

    "silu": silu(gate) * up. "gelu": gelu(gate) * up, by its tanh formula. "clamped_silu": with g = min(gate, 7) and
    u = clamp(up, -7, 7), g * sigmoid(1.702 g) * (u + 1).
    """
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "clamped_silu":
            g, u = np.minimum(g, CLAMP), np.clip(u, -CLAMP, CLAMP) + 1
            z = STEEPNESS * g
        elif activation == "gelu":
            z = np.sqrt(8 / np.pi) * (g + 0.044715 * g**3)
        else:
            z = g
        return (g / (1 + np.exp(-z)) * u).astype(np.float32)
