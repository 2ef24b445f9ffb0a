"""Which kernel runs products with experts, and in which shape: docs/cuda.md has the figures, docs/words.md the words.

Visits are sorted by expert on the device, so nobody here knows how many rows an expert has. What is known: how many
visits and experts there are, and so the mean. All rows of an expert are tiles of `width` rows. CTAs walk along the
tiles that there are, each with a share of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from billfish.backends.cuda.driver import Device, KernelLaunch
from billfish.backends.cuda.kind import BRICK, COURSE
from billfish.backends.cuda.plans import (
    STAGE_NS,
    STRIP,
    TILE_NS,
    Gemm,
    Plan,
    Shape,
    Small,
    fitting,
    launch_large,
    launch_small,
    ring,
    rows_at_once,
    small_shapes,
    spills,
)

FEW = 8  # rows of a tile of gemm_small
FILLED = 0.6  # of a tile, if all experts have as many rows: some have more, and should not need another tile


@dataclass(frozen=True)
class Routing:
    """Visits of tokens to experts, each token to `chosen` of them."""

    tokens: int
    chosen: int
    experts: int
    batch_invariant: bool = False

    @property
    def visits(self) -> int:
        return self.tokens * self.chosen

    def width(self, device: Device) -> int:
        """Rows of a tile: the fewest that most experts' rows have room in."""
        if self.tokens <= FEW:  # a token visits an expert once
            return next(width for width in (1, 2, 4, 8) if width >= self.tokens)
        mean = self.visits / self.experts
        large = device.capability == (9, 0) and not self.batch_invariant
        widths = (FEW, 16, 32, 64, 128) if large else (FEW, 16, 32)
        return next((width for width in widths if mean <= FILLED * width), widths[-1])

    def entries(self, width: int) -> int:
        """Tiles that the rows of all experts can be at most: those of the table that route.cu writes."""
        busy = min(self.experts, self.visits)
        return min(self.visits, busy + (self.visits - busy) // width)

    def expected(self, width: int) -> float:
        """Tiles of the rows of all experts if visits are even: the last tile of an expert is half full."""
        busy = self.experts * (1 - (1 - 1 / self.experts) ** self.visits)
        return min(self.entries(width), max(busy, self.visits / width + busy / 2))


@lru_cache(maxsize=4096)
def plan_experts(gemm: Gemm, routing: Routing, device: Device) -> Plan:
    """The plan of y [visits, n], gemm.m being all visits."""
    width = routing.width(device)
    if width <= FEW or device.capability != (9, 0) or routing.batch_invariant:
        return few(gemm, routing, width, device)
    return many(gemm, routing, width, device)


def few(gemm: Gemm, routing: Routing, width: int, device: Device) -> Plan:
    """gemm_small."""
    tile, courses, hopper = replace(gemm, m=width), -(-gemm.n // COURSE), device.capability >= (9, 0)
    shapes = [fitting(tile, device, shape, walks(routing, device)) for shape in small_shapes(tile, hopper)]
    all_courses = round(routing.expected(width) * courses)

    def cost(shape: Small) -> float:
        # Two CTAs on a multiprocessor share its bandwidth to the end. One row of each of two experts, N = 28672 and
        # K = 4096, takes 31.8 us so, and 34.0 in the shape that `Small.cost` prefers.
        shared = width == 1 and all_courses >= shape.courses * shape.resident * device.multiprocessors
        return (
            all_courses / device.multiprocessors if shared and shape.resident > 1 else shape.cost(all_courses, device)
        )

    return launch_few(gemm, routing, width, device, min(shapes, key=cost))


def walks(routing: Routing, device: Device) -> bool:
    """Whether CTAs of gemm_small have several passes. The order of additions depends on which pass it is."""
    return device.capability >= (9, 0) and not routing.batch_invariant


def launch_few(gemm: Gemm, routing: Routing, width: int, device: Device, shape: Small) -> Plan:
    tile, walking = replace(gemm, m=width), walks(routing, device)
    launch = launch_small(tile, device, shape, walking).launch
    passes = routing.entries(width) * -(-gemm.n // (COURSE * shape.courses))
    ctas = min(passes, device.multiprocessors * shape.resident) if walking else passes
    rows = 1 if width == 1 else min(gemm.m, rows_at_once(tile))
    return Plan(routed(launch, "marlin_experts_small", width, ctas), rows)


def many(gemm: Gemm, routing: Routing, width: int, device: Device) -> Plan:
    """gemm_large."""
    one = {16: Shape(16, stages=10), 32: Shape(32, stages=10), 64: Shape(64, stages=8), 128: Shape(128)}[width]
    kind, two = gemm.kind, replace(one, tall=2, stages=min(one.stages, 6))
    few_scales = kind.brick_bytes - kind.code_bytes == 2 * COURSE  # a float16 number for each row of a brick
    if width == 128:  # With products of half a tile, too, registers are few, and fewer beside many scales.
        two = replace(two, batch=1, buffers=4 if few_scales else 2)
    crowded = spills(two, kind) or (width == 128 and kind.scale == "ScaleF32" and kind.groups == 8)
    shapes = [one] if crowded or ring(two, kind, device)[0] < 3 else [two, one]

    def cost(shape: Shape) -> float:
        tiles = routing.expected(width) * -(-gemm.n // shape.height)
        stage = STAGE_NS[shape.height][width] * -(-gemm.k // BRICK) + TILE_NS
        return -(-tiles // device.multiprocessors) * stage

    return launch_many(gemm, routing, device, min(shapes, key=cost))


def launch_many(gemm: Gemm, routing: Routing, device: Device, shape: Shape) -> Plan:
    launch = launch_large(gemm, device, shape).launch
    tiles = routing.entries(shape.width) * -(-gemm.n // (STRIP * shape.strips))
    return Plan(routed(launch, "marlin_experts_large", shape.width, min(tiles, device.multiprocessors)), shape.width)


def routed(launch: KernelLaunch, name: str, width: int, ctas: int) -> KernelLaunch:
    """The same kernel, for rows of experts."""
    macros = tuple(sorted((*launch.macros, ("EXPERTS", str(width)))))
    return replace(launch, name=name, macros=macros, grid=(ctas, 1))
