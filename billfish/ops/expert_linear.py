"""The verbs for experts, a mixture's matrices W [E, N, K] of which each row of x is multiplied with a few."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from billfish.backends import BACKENDS, Backend, Problem, choose
from billfish.backends.base import ExpertBlock, ExpertProduct
from billfish.backends.cpu.experts import PackedExperts
from billfish.core.activations import check_activations
from billfish.core.arrays import FLOATS, Input, float_input
from billfish.core.errors import BackendUnavailable, DTypeError, ShapeError, bad_argument, type_of
from billfish.core.mixture import check_gate, checked_ids, checked_routing, ids_input, routing_input
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.renamed import renamed
from billfish.core.typing import Activations, AnyArray, ArrayT, Gate
from billfish.ops.matmul import rows_input

Stack = QuantizedExperts | PackedExperts  # what a product with experts takes


def expert_linear(
    x: ArrayT,
    w: Stack,
    ids: AnyArray,
    *,
    biases: AnyArray | None = None,
    activations: Activations = "exact",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """Multiply each row by the matrices of its experts: y[t, j] = W[ids[t, j]] @ x[t] + biases[ids[t, j]].

    x: [T, K]; or [T, k, K] where each chosen expert has a row of its own, and y[t, j] is of x[t, j].
    w: QuantizedExperts [E, N, K], or what :func:`prepack` made of them. Experts that no row has are not read.
    ids: int32, int64 or uint32 [T, k], the experts of each row, where one may come twice. T may be 0, k may not.
    biases: [E, N].
    activations, backend: as in :func:`quantized_linear`.
    check: ids in CPU memory are always checked. On a GPU, an id out of range gives rows of NaN; with True it is read
    and raises.

    Returns y [T, k, N], of x's type and library. Raises ShapeError, DTypeError and DataError for what does not fit.

        >>> w = bf.quantize(np.ones((4, 8, 32), np.float32), "q8_0")
        >>> ids = np.array([[0, 3], [1, 2]])
        >>> bf.expert_linear(np.ones((2, 32), np.float32), w, ids).shape
        (2, 2, 8)
    """
    call = "expert_linear"
    rows = rows_input(call, x)
    stack = _stack(call, "w", w)
    if len(rows.shape) not in (2, 3) or rows.shape[-1] != stack.shape[2]:
        expected = f"[T, {stack.shape[2]}] or [T, k, {stack.shape[2]}] for w {list(stack.shape)}"
        raise ShapeError(bad_argument(call, "x.shape", rows.shape, expected))
    taken = ids_input(call, ids, rows.shape[0])
    if len(rows.shape) == 3 and rows.shape[:2] != taken.shape:
        raise ShapeError(bad_argument(call, "ids.shape", taken.shape, f"{rows.shape[:2]}, as x {list(rows.shape)}"))
    _check_place(call, rows, taken)
    added = _biases(call, "biases", biases, stack, rows)
    chosen = _choose(call, [stack], rows, taken, activations, backend)
    if check:
        checked_ids(_here(taken), len(stack))
    weights = _packed(stack, chosen, rows)
    y: ArrayT = chosen.expert_linear(
        ExpertProduct(rows, taken, weights, len(stack), stack.shape[1], added), activations
    )
    return y


@renamed("activation", "hidden_act")
def experts(
    x: ArrayT,
    gate_up: Stack | Sequence[Stack],
    down: Stack,
    ids: AnyArray,
    weights: AnyArray,
    *,
    hidden_act: Gate = "silu",
    gate_up_biases: AnyArray | Sequence[AnyArray | None] | None = None,
    down_biases: AnyArray | None = None,
    activations: Activations = "exact",
    check: bool = False,
    backend: str | None = None,
) -> ArrayT:
    """Run the feed-forward part of a mixture of experts: x [T, H] -> y [T, H].

    y[t] = sum over j of weights[t, j] * (down[e] @ h[t, j] + down_biases[e]) with e = ids[t, j], and h[t, j] [I] made
    of the gate and up rows of expert e times x[t]. The sum goes in the order of j, in float32, and is rounded once.

    x: [T, H]. gate_up: [E, 2 I, H], all gate rows first, then all up rows; or a pair (gate [E, I, H], up [E, I, H]).
    down: [E, H, I]. Stacks are QuantizedExperts, or what :func:`prepack` made of them.
    ids: [T, k], as in :func:`expert_linear`. weights: the routing weights [T, k], finite numbers.
    hidden_act: "silu" for silu(gate) * up; "gelu" for gelu(gate) * up, by the tanh formula; "clamped_silu", gpt-oss's:
    with g = min(gate, 7) and u = clamp(up, -7, 7), g * sigmoid(1.702 g) * (u + 1). `activation` is its older name.
    gate_up_biases: [E, 2 I], or a pair beside a pair. down_biases: [E, H].
    activations, backend: as in :func:`quantized_linear`; x and h are rounded to integers.
    check: as in :func:`expert_linear`, for ids and weights. A weight on a GPU that is not finite gives NaN.

    Returns y, of x's type and library. Raises ShapeError, DTypeError, DataError and FormatError for what does not fit.

        >>> gate_up = bf.quantize(np.ones((4, 64, 32), np.float32), "q8_0")
        >>> down = bf.quantize(np.ones((4, 32, 32), np.float32), "q8_0")
        >>> ids, weights = np.array([[0, 3], [1, 2]]), np.full((2, 2), 0.5, np.float32)
        >>> bf.experts(np.ones((2, 32), np.float32), gate_up, down, ids, weights, hidden_act="silu").shape
        (2, 32)
    """
    call = "experts"
    rows = rows_input(call, x)
    pair = isinstance(gate_up, (list, tuple))
    given: Sequence[object] = gate_up if isinstance(gate_up, (list, tuple)) else [gate_up]
    stacks = [_stack(call, "gate_up", stack) for stack in given]
    last = _stack(call, "down", down)
    inner = _check_sizes(call, rows, stacks, last)
    taken = ids_input(call, ids, rows.shape[0])
    routing = routing_input(call, weights, taken.shape)
    for numbers in (taken, routing):
        _check_place(call, rows, numbers)
    check_gate(call, hidden_act)
    given_biases = _paired(call, gate_up_biases, len(stacks), pair)
    added = [_biases(call, "gate_up_biases", b, stack, rows) for b, stack in zip(given_biases, stacks, strict=True)]
    last_added = _biases(call, "down_biases", down_biases, last, rows)
    chosen = _choose(call, [*stacks, last], rows, taken, activations, backend)
    if check:
        checked_ids(_here(taken), len(last))
        checked_routing(_here(routing))
    opening, closing = _packed_gate_up(stacks, chosen, rows), _packed(last, chosen, rows)
    y: ArrayT = chosen.experts(
        ExpertBlock(rows, taken, routing, opening, closing, len(last), inner, added, last_added, hidden_act),
        activations,
    )
    return y


def _stack(call: str, argument: str, stack: object) -> Stack:
    if not isinstance(stack, (QuantizedExperts, PackedExperts)):
        expected = "QuantizedExperts [E, N, K], or what `prepack` made of them"
        raise DTypeError(bad_argument(call, argument, type_of(stack), expected))
    return stack


def _check_sizes(call: str, x: Input, gate_up: list[Stack], down: Stack) -> int:
    """I, the rows of a gate; raises unless the stacks belong together and to x."""
    count, hidden, inner = down.shape
    if len(gate_up) not in (1, 2):
        raise ShapeError(bad_argument(call, "gate_up", f"{len(gate_up)} stacks", "one [E, 2 I, H], or gate and up"))
    wanted = (count, 2 * inner // len(gate_up), hidden)
    for stack in gate_up:
        if stack.shape != wanted:
            expected = f"{list(wanted)} for down {list(down.shape)}"
            raise ShapeError(bad_argument(call, "gate_up.shape", list(stack.shape), expected))
    if len(x.shape) != 2 or x.shape[1] != hidden:
        raise ShapeError(bad_argument(call, "x.shape", x.shape, f"[T, {hidden}] for down {list(down.shape)}"))
    return inner


def _check_place(call: str, x: Input, other: Input) -> None:
    if other.place != x.place:
        raise DTypeError(bad_argument(call, f"device of {other.argument}", other.place, f"{x.place}, as x"))


def _biases(call: str, argument: str, biases: Any, stack: Stack, x: Input) -> Input | None:
    if biases is None:
        return None
    taken = float_input(call, argument, biases)
    if taken.shape != stack.shape[:2]:
        expected = f"{stack.shape[:2]}, one for each row of each expert"
        raise ShapeError(bad_argument(call, f"shape of {argument}", taken.shape, expected))
    _check_place(call, x, taken)
    return taken


def _paired(call: str, biases: Any, stacks: int, pair: bool) -> Sequence[Any]:
    """The biases of gate_up, one for each stack."""
    if biases is None:
        return [None] * stacks
    if pair != isinstance(biases, (list, tuple)) or (pair and len(biases) != stacks):
        expected = "a pair, as gate_up is" if pair else "one array [E, 2 I], as gate_up is one stack"
        raise ShapeError(bad_argument(call, "gate_up_biases", type_of(biases), expected))
    return biases if pair else [biases]


def _choose(call: str, stacks: Sequence[Stack], x: Input, ids: Input, activations: str, backend: str | None) -> Backend:
    """The best backend that can run the products with all stacks, for these rows."""
    check_activations(call, activations)
    packed = [isinstance(stack, PackedExperts) for stack in stacks]
    if any(packed):
        if backend not in (None, "cpu") or x.device != "cpu":
            value = repr(backend) if x.device == "cpu" else f"{backend!r} for x on {x.device}"
            raise BackendUnavailable(bad_argument(call, "backend", value, "'cpu', as the weights are packed"))
        backend = "cpu"
    if all(packed):
        return BACKENDS["cpu"]
    (tokens, k), dtype = ids.shape, FLOATS[x.dtype_name]
    problems = [
        Problem(
            "matmul", w.format, w.group_size, tokens * k, *w.shape[1:], dtype, x.kind, x.device, activations, len(w), k
        )
        for w in stacks
        if isinstance(w, QuantizedExperts)
    ]
    # Stacks of several formats may have several best backends: the last of them in their order runs all.
    order = list(BACKENDS)
    found = [choose(call, problem, backend) for problem in problems]
    last = max(found, key=lambda one: order.index(one.name))
    if any(one is not last for one in found):
        for problem in problems:
            choose(call, problem, last.name)
    return last


def _packed(stack: Stack, backend: Backend, x: Input) -> Any:
    if isinstance(stack, PackedExperts):
        return stack
    place = x.place
    return stack.made((backend.name, place), lambda: backend.pack_experts(stack, place))


def _packed_gate_up(stacks: Sequence[Stack], backend: Backend, x: Input) -> Sequence[Any]:
    own = [stack for stack in stacks if isinstance(stack, QuantizedExperts)]
    if len(own) == len(stacks):
        first, *rest = own  # a pair is kept with its first stack, until that comes with another second one
        key = backend.name, x.place, "gate_up"

        def pack() -> tuple[list[weakref.ref[QuantizedExperts]], Sequence[Any] | None]:
            return list(map(weakref.ref, rest)), backend.pack_gate_up(own, x.place)

        beside, together = first.made(key, pack)
        if [stack() for stack in beside] != rest:
            _, together = first._made[key] = pack()  # not read again: another thread may put its own pair there
        if together is not None:
            return together
    return [_packed(stack, backend, x) for stack in stacks]


def _here(numbers: Input) -> Input:
    """The argument in CPU memory."""
    if numbers.device == "cpu":
        return numbers
    moved = numbers.source.cpu() if numbers.kind == "torch" else numbers.source.get()
    return numbers.with_source(moved)
