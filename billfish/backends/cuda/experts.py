"""Products with experts on the device: the launches of a call, in their order. Nothing waits for the device.

route     visits sorted by expert, and the table of tiles      (route.cu)
gather    rows of x in that order                              (gather.cu)
multiply  gate and up, the gate being the epilogue             (gemm_small.cu, gemm_large.cu)
multiply  down, rows back in the order of tokens
mix       the weighted sum of a token's experts                (mix.cu)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from billfish.backends.cuda.array_products import row_stride
from billfish.backends.cuda.driver import Device, KernelLaunch, device, no_tensor_map, tensor_map
from billfish.backends.cuda.expert_plans import Routing, plan_experts
from billfish.backends.cuda.expert_weights import DeviceExperts
from billfish.backends.cuda.memory import Memory, Room, TorchRoom, address
from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, Gemm, gate_ctas

ID_TYPES = {"int32": "int", "uint32": "unsigned", "int64": "long long"}  # in route.cu and mix.cu
WEIGHT_TYPES = {"float32": "Float", "float16": "Halves<F16>", "bfloat16": "Halves<BF16>"}  # in mix.cu
THREADS, MIXED = 256, 2048  # of a CTA of gather.cu and mix.cu; columns of a CTA of mix.cu
MOST_CTAS = 4096  # of gather.cu, which go on with further rows
ENTRY_BYTES = 16


@dataclass(frozen=True)
class Numbers:
    """An array of a call at an address: a matrix whose rows are `stride` numbers apart, or a contiguous array."""

    at: int
    dtype: str
    stride: int = 0


NOTHING = Numbers(0, "float32")


@dataclass(frozen=True, eq=False)
class Visits:
    """One call's visits, sorted: how many rows of x each expert has is known on the device alone.

    bfloat16: the type of x; else it is float16. The device is current.
    """

    room: Room
    routing: Routing
    ids: Numbers
    bfloat16: bool

    @cached_property
    def device(self) -> Device:
        return device(self.room.ordinal)

    @cached_property
    def _sorted(self) -> tuple[Memory, Memory]:
        """The table and the order of visits, as rows.cuh has them: launches route.cu."""
        routing, width = self.routing, self.routing.width(self.device)
        table, order = self.room.empty(ENTRY_BYTES * (1 + routing.entries(width))), self.room.empty(4 * routing.visits)
        warps, shared = route_shape(routing, self.device)
        macros = {"ID": ID_TYPES[self.ids.dtype], "WARPS": warps}
        numbers = routing.visits, routing.experts, width
        pointers = self.ids.at, address(table), address(order)
        self._launch("route", macros, 1, warps * 32, *pointers, *numbers, shared_bytes=shared)
        return table, order

    def gathered(self, x: Numbers, k: int, together: int, y: int = 0, n: int = 0) -> tuple[Memory, Numbers]:
        """Rows of x, of which each is that of `together` visits. y [visits, n]: rows of bad ids become NaN there."""
        (table, order), stride, visits = self._sorted, row_stride(k), self.routing.visits
        out = self.room.empty(2 * visits * stride)
        pointers = x.at, address(table), address(order), address(out), y
        numbers = visits, k, x.stride, stride, together, n
        self._launch("gather", {}, min(visits, MOST_CTAS), THREADS, *pointers, *numbers)
        return out, Numbers(address(out), x.dtype, stride)

    def multiply(
        self, weights: DeviceExperts, x: Numbers, bias: Numbers, y: int, *, gate: str | None = None, sorted: bool
    ) -> None:
        """y [visits, n]: x has sorted rows. sorted: those of y are, too; else they are in the order of visits."""
        (table, order), (_, n, k), visits = self._sorted, weights.shape, self.routing.visits
        if isinstance(self.room, TorchRoom):
            weights.note(self.room.stream)
        float_bias = bias.at != 0 and bias.dtype == "float32"
        invariant = self.routing.batch_invariant
        gemm = Gemm(weights.kind, visits, n, k, self.bfloat16, float_bias, None, invariant, gate)
        plan = plan_experts(gemm, self.routing, self.device)
        map_of_x = x.at, self.bfloat16, visits, k, x.stride, plan.box_rows
        box = tensor_map(*map_of_x) if self.device.capability >= (9, 0) else no_tensor_map()
        held = address(weights.bricks), address(weights.row_scale)
        routed = address(table), 0 if sorted else address(order)
        plan.launch(self.room.ordinal, self.room.stream, box, *held, x.at, bias.at, y, *routed, visits, n, k, x.stride)

    def open_gate(self, gate: int, up: int, activation: str, inner: int) -> tuple[Memory, Numbers]:
        """Gated numbers, of two products [visits, inner]."""
        stride, visits = row_stride(inner), self.routing.visits
        out = self.room.empty(2 * visits * stride)
        macros = {"TYPE": self._type, "GATE": GATES[activation]}
        ctas = gate_ctas(visits, inner)
        self._launch("gate", macros, ctas, GATE_COLUMNS, gate, up, address(out), visits, inner, stride)
        return out, Numbers(address(out), "", stride)

    def mix(self, x: int, weights: Numbers, y: int, n: int) -> None:
        """y [tokens, n]: the weighted sums of x [tokens, chosen, n]."""
        macros = {"TYPE": self._type, "ID": ID_TYPES[self.ids.dtype], "WEIGHT": WEIGHT_TYPES[weights.dtype]}
        numbers = self.routing.experts, self.routing.chosen, n
        ctas = self.routing.tokens * -(-n // MIXED)
        self._launch("mix", macros, ctas, THREADS, x, self.ids.at, weights.at, y, *numbers)

    @property
    def _type(self) -> str:
        return "BF16" if self.bfloat16 else "F16"

    def _launch(
        self, name: str, macros: dict[str, Any], ctas: int, threads: int, *arguments: int, shared_bytes: int = 0
    ) -> None:
        defined = tuple(sorted((macro, str(value)) for macro, value in macros.items()))
        overlap = self.device.capability >= (9, 0)
        launch = KernelLaunch(f"{name}.cu", f"marlin_{name}", defined, (ctas,), threads, shared_bytes, 1, overlap)
        launch(self.room.ordinal, self.room.stream, *arguments)


def route_shape(routing: Routing, device: Device) -> tuple[int, int]:
    """Warps of route.cu, and its shared memory: a count for each warp and expert, and what is before each expert."""
    columns, warps = routing.experts + 1, 32

    def shared(warps: int) -> int:
        return 4 * (warps * columns + 2 * (columns + 1))

    while warps > 2 and (warps * 16 >= routing.visits or shared(warps) > device.shared_bytes):
        warps //= 2
    return warps, shared(warps)


def linear(visits: Visits, weights: DeviceExperts, x: Numbers, together: int, bias: Numbers, y: int) -> None:
    """y [visits, n], in the order of visits; `together` visits share a row of x."""
    _, n, k = weights.shape
    _held, rows = visits.gathered(x, k, together, y, n)
    visits.multiply(weights, rows, bias, y, sorted=False)


def block(
    visits: Visits,
    x: Numbers,
    gate_up: list[DeviceExperts],
    down: DeviceExperts,
    activation: str,
    gate_up_biases: list[Numbers],
    down_biases: Numbers,
    weights: Numbers,
    y: int,
) -> None:
    """y [tokens, H]. gate_up: one gated stack, or gate and up."""
    (_, hidden, inner), room, count = down.shape, visits.room, visits.routing.visits
    _rows, rows = visits.gathered(x, hidden, visits.routing.chosen)
    if gate_up[0].gated:
        opened_at = room.empty(2 * count * inner)
        opened = Numbers(address(opened_at), "", inner)
        visits.multiply(gate_up[0], rows, gate_up_biases[0], opened.at, gate=activation, sorted=True)
    else:
        parts = [room.empty(2 * count * inner) for _ in gate_up]
        for part, stack, bias in zip(parts, gate_up, gate_up_biases, strict=True):
            visits.multiply(stack, rows, bias, address(part), sorted=True)
        opened_at, opened = visits.open_gate(address(parts[0]), address(parts[1]), activation, inner)
    given = room.empty(2 * count * hidden)
    visits.multiply(down, opened, down_biases, address(given), sorted=False)
    visits.mix(address(given), weights, y, hidden)
