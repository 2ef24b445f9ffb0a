"""A mixture of experts on a GPU, inside a step: all memory is the step's, and nothing waits for the device.

    router    logits, the experts of each row and their weights; up to FEW_ROWS rows also the table of tiles (router.cu)
    route     the table, for more rows                                  (route.cu)
    gather    rows of x in the order of experts; not for one row        (gather.cu)
    multiply  gate and up, with the activation as epilogue              (gemm_small.cu, gemm_large.cu)
    multiply  down, rows back in the order of tokens
    mix       the weighted sum of a token's experts, and the shared one (mix.cu)

So one row is four launches, a few are five. Weights of experts that no row takes are not read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from billfish.backends.cuda.axes import BRICK, COURSE
from billfish.backends.cuda.dense import DeviceDense
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, KernelLaunch, copy_out
from billfish.backends.cuda.experts import (
    ENTRY_BYTES,
    MOST_CTAS,
    NOTHING,
    THREADS,
    DeviceExperts,
    Numbers,
    grouped_product,
    mix_shape,
    route_shape,
)
from billfish.backends.cuda.launcher import DeviceMatrix, Launcher, RoutedRows
from billfish.backends.cuda.memory import address
from billfish.backends.cuda.plans import GATE_COLUMNS, GATES, ExpertRouting, gate_ctas
from billfish.backends.cuda.products import row_stride
from billfish.backends.cuda.step_memory import Batch, StepMemory

FEW_ROWS = 256  # for which router.cu writes the table itself
BLOCK, LARGE_BLOCK = 8, 32  # rows of a CTA of router.cu: for up to FEW_ROWS, and for more
MOST_ROWS = 1 << 16  # of a step
TICKETS = 1 + MOST_ROWS // LARGE_BLOCK
MOST_CHOSEN = MOST_GROUPS = 32  # a lane has one of each
MOST_EXPERTS = 1024
ROUTER_WARPS = 4, 8, 16


@dataclass(frozen=True)
class DeviceRouter:
    """How rows choose experts, as models/description.py says.

    weights: unquantized [experts, hidden], and one row more where a shared expert has a gate. tickets: uint32
    [TICKETS], zeros.
    """

    weights: DeviceWeights
    experts: int
    chosen: int
    tickets: Buffer
    bias: Buffer | None = None
    sigmoid: bool = False
    renormalized: bool = True
    scale: float = 1.0
    selection_bias: Buffer | None = None
    expert_scale: Buffer | None = None
    groups: int = 1
    groups_used: int = 1

    @property
    def outputs(self) -> int:
        return self.weights.shape[0]

    def why_not(self) -> str:
        """What the kernels cannot do, or ""."""
        if self.chosen > min(MOST_CHOSEN, self.experts):
            return f"a token takes {self.chosen} of {self.experts} experts; the limit is {MOST_CHOSEN}"
        if self.experts > MOST_EXPERTS:
            return f"{self.experts} experts; the limit is {MOST_EXPERTS}"
        if self.groups > MOST_GROUPS:
            return f"{self.groups} groups of experts; the limit is {MOST_GROUPS}"
        return ""

    def run(
        self, launcher: Launcher, stream: int, step: StepMemory, routing: ExpertRouting, x: int, *, shared: int
    ) -> None:
        """Logits, ids, weights and the table of x [rows, hidden]. shared: 0, 1 or 2, as router.cu has it."""
        at, rows, k = step.at, routing.tokens, self.weights.shape[1]
        sorted = rows <= FEW_ROWS
        block = BLOCK if sorted else LARGE_BLOCK
        warps = next((warps for warps in ROUTER_WARPS if warps * BRICK >= k), ROUTER_WARPS[-1])
        macros = {
            "TYPE": launcher.type,
            "ROWS": block,
            "WARPS": warps,
            "EACH": -(-self.experts // 32),
            "SIGMOIDAL": int(self.sigmoid),
            "RENORMALIZED": int(self.renormalized),
            "SHARED": shared,
            "SORTED": int(sorted),
        }
        optional = (_at(buffer) for buffer in (self.bias, self.selection_bias, self.expert_scale))
        read = address(self.weights.bricks), address(self.weights.row_scale), *optional, x
        written = at("router_logits"), at("expert_ids"), at("expert_weights"), self.tickets.pointer
        table = at("expert_table"), at("expert_order"), at("expert_rows")
        numbers = rows, self.experts, self.outputs, k, self.chosen, self.groups, self.groups_used
        width, grid = routing.width(launcher.device), (-(-self.outputs // COURSE), -(-rows // block))
        shared_bytes = 4 * (warps * (self.experts + 1) + 2 * (self.experts + 2)) if sorted and rows > 1 else 0
        arguments = *read, *written, *table, *numbers, width, float(self.scale)
        launcher.launch(stream, "router", macros, grid, warps * 32, *arguments, shared_bytes=shared_bytes)
        if not sorted:
            warps, shared_bytes = route_shape(routing, launcher.device)
            pointers = at("expert_ids"), at("expert_table"), at("expert_order")
            sizes = routing.visits, self.experts, width
            route = {"ID": "int", "WARPS": warps}
            launcher.launch(stream, "route", route, (1,), warps * 32, *pointers, *sizes, shared_bytes=shared_bytes)


@dataclass(frozen=True)
class DeviceMixture:
    """gate_up: one stack, of eight rows of gate, eight of up, and so on, whose epilogue is the gate; or two. Biases are
    float32 [experts, n], of one stack with those of all gates first. shared: a dense part for all rows, times the
    sigmoid of the router's last logit where it is gated."""

    router: DeviceRouter
    size: int
    gate_up: tuple[DeviceExperts, ...]
    down: DeviceExperts
    gate_up_biases: tuple[Buffer | None, ...]
    activation: str = "silu"
    down_bias: Buffer | None = None
    shared: DeviceDense | None = None

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def nbytes(self) -> int:
        """Of experts and of the router, not of the shared expert."""
        return self.router.weights.nbytes + sum(stack.nbytes for stack in (*self.gate_up, self.down))

    @property
    def key(self) -> Hashable:
        router = self.router
        about = router.experts, router.chosen, router.sigmoid, router.renormalized, router.outputs
        biases = *(bias is None for bias in self.gate_up_biases), self.down_bias is None
        kinds = tuple(stack.kind for stack in (*self.gate_up, self.down))
        shared = None if self.shared is None else self.shared.key
        return "mixture", self.activation, self.size, about, biases, kinds, shared

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return () if self.shared is None else self.shared.matrices

    def memory(self, rows: int) -> dict[str, int]:
        visits = rows * self.router.chosen
        sizes = {
            "router_logits": 4 * rows * self.router.outputs,
            "expert_ids": 4 * visits,
            "expert_weights": 4 * (visits + rows),
            "expert_table": ENTRY_BYTES * (1 + visits),
            "expert_order": 4 * visits,
            "expert_rows": 2 * visits * row_stride(self.hidden),
            "expert_opened": 2 * visits * row_stride(self.size),
            "expert_apart": 2 * 2 * visits * self.size if len(self.gate_up) > 1 else 0,
            "expert_given": 2 * visits * self.hidden,
        }
        return sizes if self.shared is None else sizes | self.shared.memory(rows)

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        if self.shared is not None:
            self.shared.run(launcher, stream, step, batch)
        x, added = step.at("x"), step.at("added")
        self.run_experts(launcher, stream, step, batch.rows, x, x, added)

    def run_experts(
        self, launcher: Launcher, stream: int, step: StepMemory, rows: int, x: int, router_x: int, y: int
    ) -> None:
        """y [rows, hidden] of x, chosen by router_x. The output of the shared expert, if there is one, is at y."""
        at, router = step.at, self.router
        routing = ExpertRouting(rows, router.chosen, router.experts, launcher.batch_invariant)
        visits, stride = routing.visits, row_stride(self.hidden)
        gated = router.outputs > router.experts
        launcher.tell(router, router_x, rows)
        router.run(launcher, stream, step, routing, router_x, shared=0 if self.shared is None else 1 + gated)
        alone = rows == 1 and router_x == x  # the router has copied x
        if not alone:
            pointers = x, at("expert_table"), at("expert_order"), at("expert_rows"), 0
            sizes = visits, self.hidden, self.hidden, stride, router.chosen, 0
            launcher.launch(stream, "gather", {}, (min(visits, MOST_CTAS),), THREADS, *pointers, *sizes)
        gathered = Numbers(at("expert_rows"), launcher.type, stride)
        opened = Numbers(at("expert_opened"), launcher.type, row_stride(self.size))
        routed = self._routed(stream, step, visits) if launcher.observed else None
        launcher.tell(self.gate_up[0], gathered.at, visits, routed)
        table, order = at("expert_table"), at("expert_order")
        one, fresh = len(self.gate_up) == 1, alone
        places = [opened.at] if one else [at("expert_apart"), at("expert_apart") + 2 * visits * self.size]
        gate = self.activation if one else None
        for stack, bias, place in zip(self.gate_up, self.gate_up_biases, places, strict=True):
            about = _numbers(bias), place, table, 0
            product = grouped_product(stack, routing, launcher.device, launcher.bfloat16, gathered, *about, gate=gate)
            _launch(launcher, stream, *product, fresh=fresh)
            fresh = False  # the next kernel starts when this one has waited for the table
        if gate is None:
            self._open(launcher, stream, places, opened, visits)
        launcher.tell(self.down, opened.at, visits, routed)
        last = _numbers(self.down_bias), at("expert_given"), table, order
        product = grouped_product(self.down, routing, launcher.device, launcher.bfloat16, opened, *last)
        _launch(launcher, stream, *product)
        macros = {"TYPE": launcher.type, "ID": "int", "WEIGHT": "Float"}
        shared = 0 if self.shared is None else y
        read = at("expert_given"), at("expert_ids"), at("expert_weights"), shared
        numbers = router.experts, router.chosen, router.chosen + (self.shared is not None), self.hidden
        ctas, threads = mix_shape(rows, self.hidden)
        launcher.launch(stream, "mix", macros, (ctas,), threads, *read, y, *numbers)

    def _routed(self, stream: int, step: StepMemory, visits: int) -> RoutedRows:
        """How the rows of `expert_rows` and `expert_opened` are routed. Waits for the device."""
        ids, order = np.empty(visits, np.int32), np.empty(visits, np.int32)
        copy_out(ids, step.at("expert_ids"), stream)
        copy_out(order, step.at("expert_order"), stream)
        return RoutedRows(ids[order], order // self.router.chosen)

    def _open(self, launcher: Launcher, stream: int, places: list[int], opened: Numbers, visits: int) -> None:
        macros, grid = {"TYPE": launcher.type, "GATE": GATES[self.activation]}, (gate_ctas(visits, self.size),)
        sizes = visits, self.size, opened.stride
        launcher.launch(stream, "gate", macros, grid, GATE_COLUMNS, *places, opened.at, *sizes)


@dataclass(frozen=True)
class DeviceDenseAndMixture:
    """A dense part and experts side by side: models/description.py. Norms are float32 [hidden]."""

    dense: DeviceDense
    mixture: DeviceMixture
    dense_post_norm: Buffer
    router_norm: Buffer
    mixture_norm: Buffer
    mixture_post_norm: Buffer

    @property
    def key(self) -> Hashable:
        return "dense and mixture", self.dense.key, self.mixture.key

    @property
    def matrices(self) -> tuple[DeviceMatrix, ...]:
        return *self.dense.matrices, *self.mixture.matrices

    def memory(self, rows: int) -> dict[str, int]:
        size = 2 * rows * self.mixture.hidden
        own = {"router_x": size, "mixture_x": size, "mixed": size}
        return own | self.dense.memory(rows) | self.mixture.memory(rows)

    def run(self, launcher: Launcher, stream: int, step: StepMemory, batch: Batch) -> None:
        at, rows, hidden = step.at, batch.rows, self.mixture.hidden
        self.dense.run(launcher, stream, step, batch)
        launcher.normalize(stream, step, rows, self.mixture_norm, x=at("mixture_x"))
        launcher.normalize(stream, step, rows, self.router_norm, x=at("router_x"))
        self.mixture.run_experts(launcher, stream, step, rows, at("mixture_x"), at("router_x"), at("mixed"))
        threads = min(1024, -(-hidden // 8 // 32) * 32)
        macros = {"TYPE": launcher.type, "HIDDEN": hidden, "THREADS": threads}
        dense, mixed = (at("added"), self.dense_post_norm.pointer), (at("mixed"), self.mixture_post_norm.pointer)
        arguments = *dense, *mixed, at("added"), float(launcher.epsilon)
        launcher.launch(stream, "add_norms", macros, (rows,), threads, *arguments)


def _at(buffer: Buffer | None) -> int:
    return 0 if buffer is None else buffer.pointer


def _numbers(bias: Buffer | None) -> Numbers:
    return NOTHING if bias is None else Numbers(bias.pointer, "float32")


def _launch(
    launcher: Launcher, stream: int, launch: KernelLaunch, arguments: tuple[object, ...], *, fresh: bool = False
) -> None:
    """fresh: the kernel before this one writes the table."""
    if fresh:
        launch = replace(launch, macros=tuple(sorted((*launch.macros, ("FRESH", "1")))))
    if launcher.heard is None:
        launch(launcher.ordinal, stream, *arguments)
    else:
        launcher.heard.add(launch)
