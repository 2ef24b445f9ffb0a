"""Which products multiply x in bytes, and in which shape of gemm_bytes.cu: docs/cuda.md has the figures.

`activations="fp8"` rounds x to E4M3, "q8" to int8, with one scale for each row of x. Weights stay exact, so only some
kinds can: `why_exact` says why others cannot. Where the kernels of 16 bits are the faster ones, up to FEW_ROWS rows of
x for one, `byte_plan` gives None: x is multiplied as it is, and `why_as_it_is` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from billfish.backends.cuda.driver import Device, KernelLaunch
from billfish.backends.cuda.kind import BRICK, Kind
from billfish.backends.cuda.plans import (
    COURSES_IN_STRIP,
    LETTER_BYTES,
    OUT_BYTES,
    STRIP,
    Gemm,
    large_shape,
    plan,
    rounds_of,
    wgmma_macros,
)

FEW_ROWS = 64
MORE_ROWS = 256  # whose scales gemm_bytes.cu may read, as it reads those of whole tiles
ROW_BYTES = 8  # of row_of_x.cuh
SIXTEEN = 16  # k that quantize_rows.cu writes at a time

# Nanoseconds for one stage, 128 k, of a tile, by rows of x: of two strips, and of one, which two teams share along K.
# Measured on an H200, for weights that are folded, weights whose sums are scaled, and int8, as plans.STAGE_NS.
STAGE_NS = {
    "folded": ({64: 326, 128: 455, 152: 490, 176: 545, 192: 595, 208: 605, 256: 800}, {128: 404}),
    "scaled": ({64: 295, 128: 480, 152: 550, 176: 615, 192: 665, 208: 650}, {128: 430}),
    "int8": ({64: 293, 128: 549, 176: 740, 192: 820}, {128: 486}),
}
CALL_NS, TILE_NS, MEETING_NS = 1500, 2300, 1300
PAIR_GAINS = 0.95  # two launches have to gain more than estimates are off by
# quantize_rows.cu takes CALL_NS, and from there on what memory takes: 2 bytes read, one written.
BYTES_PER_NS = 3500
AS_IT_IS = (
    1.2  # such products of 16 bits took 0.93 to 1.25 of what plans.Shape.cost says, and bytes gain more than they lose
)


def why_exact(kind: Kind, activations: str) -> str:
    """Why weights of a kind are not multiplied with x in bytes, or ""."""
    if kind.offset != "NONE":
        return "weights with a zero point or a minimum"
    if kind.element == "E2M1" and activations == "fp8":
        if kind.scale == "ScaleE5M2":
            return "" if kind.narrow else "a row whose powers of two span more than 16 octaves"
    elif kind.element != "Int4":
        takes = "4-bit integers and E2M1" if activations == "fp8" else "4-bit integers"
        return f"weights of {kind.element}; {activations} takes {takes}"
    if kind.groups > 1:
        size = BRICK // kind.groups
        return f"groups of {size}: to scale sums every {size} of K takes longer than to multiply x in 16 bits"
    return ""


@dataclass(frozen=True)
class ByteShape:
    """A shape of gemm_bytes. Its fields are macros of gemm_bytes.cu, as those of gemm_large.cu."""

    width: int
    teams: int = 1
    split: int = 1
    stages: int = 8

    warpgroups = 2

    @property
    def strips(self) -> int:
        return self.warpgroups // self.teams

    @property
    def partners(self) -> int:
        return self.split * self.teams

    def places(self, n: int) -> int:
        """Tiles along the columns of y."""
        return -(-n // (STRIP * self.strips))

    def across(self, m: int) -> int:
        """Tiles along the rows of y."""
        return -(-m // self.width)

    def cost(self, way: str, gemm: Gemm, places: int, multiprocessors: int) -> float:
        """Nanoseconds of so many places of a product, roughly, as plans.Shape.cost. way: of STAGE_NS."""
        rounds = rounds_of(places * self.across(gemm.m) * self.split, self.split, multiprocessors)
        stages = -(-gemm.k // BRICK) / self.partners
        tile = STAGE_NS[way][self.teams - 1][self.width] * stages + TILE_NS
        return CALL_NS + rounds * (tile + (MEETING_NS if self.split > 1 else 0))


Parts = tuple[tuple[ByteShape, int], ...]  # of a product: shapes, and how many places along the columns of y each has


@dataclass(frozen=True)
class BytePart:
    """A launch of gemm_bytes for some of the columns of y: `places` times 128, from the `first_place` on."""

    launch: KernelLaunch
    box_rows: int
    first_place: int
    places: int


@dataclass(frozen=True)
class BytePlan:
    """Launches, and the memory between them: x in bytes, rows `stride` bytes apart, and its scales behind them."""

    quantize: KernelLaunch  # or split_blocks.cu
    parts: tuple[BytePart, ...]
    stride: int
    work_bytes: int


def launches(gemm: Gemm, device: Device) -> list[KernelLaunch]:
    """What a product will launch, x in bytes or as it is; none: decoded weights go to a library."""
    in_bytes = byte_plan(gemm, device)
    if in_bytes is not None:
        return [in_bytes.quantize, *(part.launch for part in in_bytes.parts)]
    chosen = plan(gemm, device)
    return [] if chosen is None else [chosen.launch]


def most_work(rows: int, k: int) -> int:
    """Memory that products with up to so many rows and columns of x want for x in bytes."""
    return rows * -(-k // SIXTEEN) * SIXTEEN + ROW_BYTES * (rows + MORE_ROWS) if rows > FEW_ROWS else 0


def way_of(kind: Kind, activations: str) -> str:
    """Of STAGE_NS."""
    return "int8" if activations == "q8" else "folded" if kind.scale == "ScaleE5M2" else "scaled"


def why_as_it_is(gemm: Gemm, device: Device) -> str:
    """Why a product whose x may go in bytes takes x as it is, or ""."""
    if gemm.activations == "exact":
        return "nobody asked for 8 bits"
    if device.capability != (9, 0):
        return f"{device.name} is no Hopper GPU"
    reason = why_exact(gemm.kind, gemm.activations)
    if reason:
        return reason
    if gemm.batch_invariant or gemm.float_y:
        return "gemm_small alone gives the same bits in any batch, and float32"
    if gemm.m <= FEW_ROWS:
        return f"{gemm.m} rows: up to {FEW_ROWS}, x in 16 bits is as fast"
    if fastest(gemm, device) is None:
        return f"{gemm.m} rows of {gemm.k} x {gemm.n}: rounding x would take longer than 8 bits gain"
    return ""


@lru_cache(maxsize=4096)
def byte_plan(gemm: Gemm, device: Device) -> BytePlan | None:
    """The plan of a product whose x goes in bytes; None: x as it is, and `why_as_it_is` says why."""
    parts = None if why_as_it_is(gemm, device) else fastest(gemm, device)
    return None if parts is None else launch_bytes(gemm, device, parts)


def fastest(gemm: Gemm, device: Device) -> Parts | None:
    """The shapes with the least estimated time; None: x in 16 bits takes less."""
    way, bricks = way_of(gemm.kind, gemm.activations), -(-gemm.k // BRICK)
    too_wide = 208 if gemm.gate is not None and way == "folded" else 0  # registers are too few
    shapes = [ByteShape(width) for width in STAGE_NS[way][0] if width > FEW_ROWS and width != too_wide]
    shapes += [ByteShape(128, split=split) for split in (2, 3)]
    if gemm.m <= 128:
        shapes += [ByteShape(64, split=2), *(ByteShape(128, teams=2, split=split) for split in (1, 2, 3))]
    fitting = [shape for shape in shapes if shape.partners <= bricks]

    def cost(parts: Parts) -> float:
        return sum(shape.cost(way, gemm, places, device.multiprocessors) for shape, places in parts)

    one = min((((shape, shape.places(gemm.n)),) for shape in fitting), key=cost)
    two = min(pairs(fitting, gemm, device.multiprocessors), key=cost, default=one)
    chosen = two if cost(two) < PAIR_GAINS * cost(one) else one
    quantizing = CALL_NS + 3 * gemm.m * gemm.k / BYTES_PER_NS
    as_it_is = large_shape(gemm, device).cost(gemm.m, gemm.n, bricks, device.multiprocessors)
    factor = 1 if gemm.m <= 128 else AS_IT_IS
    return chosen if cost(chosen) + quantizing < factor * as_it_is else None


def pairs(shapes: list[ByteShape], gemm: Gemm, multiprocessors: int) -> Iterator[Parts]:
    """Two shapes for one product: whole rounds of tiles of the first one, and the second one for the columns left.

    1024 rows of 4096 x 14336 are 560 tiles of 208 rows: five rounds of 132, the last one with 32. Three rounds of these
    and one of 132 tiles of 256 rows take 0.9 of the time.
    """
    alike = [shape for shape in shapes if shape.teams == 1]  # tiles of 128 columns
    for first in alike:
        across, all_places = first.across(gemm.m), first.places(gemm.n)
        whole = all_places * across // multiprocessors
        for rounds in range(max(1, whole - 1), whole + 1) if first.split == 1 else ():
            places = rounds * multiprocessors // across
            if 0 < places < all_places:
                yield from (((first, places), (second, all_places - places)) for second in alike)


def ring(shape: ByteShape, kind: Kind, device: Device, given: bool) -> tuple[int, int]:
    """Stages of the ring, and all dynamic shared memory as gemm_bytes.cu lays it out."""
    stage = shape.width * (BRICK + (16 if given else ROW_BYTES)) + shape.strips * COURSES_IN_STRIP * kind.brick_bytes
    owned = -(-shape.width // 8 // shape.partners)
    letters = shape.teams * (shape.partners - 1) * shape.strips * owned * LETTER_BYTES
    rest = shape.warpgroups * (OUT_BYTES + 32 * owned * shape.partners) + letters
    stages = min(shape.stages, (device.shared_bytes - rest) // stage) // shape.teams * shape.teams
    return stages, stages * stage + rest


def launch_bytes(gemm: Gemm, device: Device, parts: Parts) -> BytePlan:
    """A plan in these shapes."""
    stride = -(-gemm.k // SIXTEEN) * SIXTEEN
    firsts = accumulate((places for _, places in parts), initial=0)
    launched = tuple(
        BytePart(_launch(gemm, device, shape, places), shape.width, first, places)
        for (shape, places), first in zip(parts, firsts, strict=False)
    )
    return BytePlan(quantize(gemm, stride), launched, stride, most_work(gemm.m, gemm.k))


def given_plan(gemm: Gemm, device: Device, block_bytes: int) -> BytePlan:
    """x is blocks of q8_0 or q8_1, and y float32: sums are scaled every 32 of K, whatever the groups of the weights."""
    gemm = replace(gemm, activations="q8")
    shape = ByteShape(64 if gemm.m <= FEW_ROWS else 128)
    macros = (("BLOCK_BYTES", str(block_bytes)), ("CODES_AT", str(block_bytes - 32)))
    split = KernelLaunch("split_blocks.cu", "marlin_split_blocks", macros, (gemm.m,), 128, overlap=True)
    work_bytes = gemm.m * gemm.k + 16 * (gemm.m * -(-gemm.k // BRICK) + MORE_ROWS)
    places = shape.places(gemm.n)
    part = BytePart(_launch(gemm, device, shape, places, given=True), shape.width, 0, places)
    return BytePlan(split, (part,), gemm.k, work_bytes)


def why_not_given(kind: Kind) -> str:
    """Why weights of a kind are not multiplied with x in blocks, or ""."""
    if kind.element != "Int4" or kind.offset != "NONE" or kind.groups > 4:
        return "it multiplies blocks of x with 4-bit integers without zero points, in groups of 32 or more"
    return ""


def _launch(gemm: Gemm, device: Device, shape: ByteShape, places: int, given: bool = False) -> KernelLaunch:
    """Of so many places of a product."""
    integers = gemm.activations == "q8"
    stages, shared_bytes = ring(shape, gemm.kind, device, given)
    macros = gemm.macros(
        BYTES="INT8" if integers else "FP8",
        GIVEN=int(given),
        PARTS=int(places < shape.places(gemm.n)),
        WARPGROUPS=shape.warpgroups,
        TEAMS=shape.teams,
        TALL=1,
        WIDTH=shape.width,
        STAGES=stages,
        SPLIT=shape.split,
        PAIRED=0,
        **wgmma_macros("WGMMA", shape.width, "r" if integers else "f"),
    )
    ctas = places * shape.across(gemm.m) * shape.split
    if shape.partners == 1:
        ctas = min(ctas, device.multiprocessors)
    threads, cluster = 128 * (shape.warpgroups + 1), shape.split
    return KernelLaunch(
        "gemm_bytes.cu", "marlin_gemm_bytes", macros, (ctas, 1), threads, shared_bytes, cluster, overlap=True
    )


def quantize(gemm: Gemm, stride: int) -> KernelLaunch:
    """One CTA a row, whose threads hold all of it up to 256 * 8 * 16 k."""
    blocks = stride // SIXTEEN
    threads = min(256, -(-blocks // 32) * 32)
    way = way_of(gemm.kind, gemm.activations)
    macros = {
        "TYPE": "BF16" if gemm.bfloat16 else "F16",
        "INTEGERS": str(int(way == "int8")),
        "STEEPNESS": str(int(way != "int8")),
        "THREADS": str(threads),
        "HELD": str(min(8, -(-blocks // threads))),
    }
    defined = tuple(sorted(macros.items()))
    return KernelLaunch("quantize_rows.cu", "marlin_quantize_rows", defined, (gemm.m,), threads, overlap=True)
