"""Which kernel runs a GEMM, and in which tile shape: docs/cuda.md has the table.

A *course* is a row block of W (16 rows, so 16 columns of y), a *strip* four of them (64 columns, the M of a wgmma), a
*visit* a (token, expert) pair, a *letter* the partial sums that one partner of a cluster sends to another.

`gemm_small` reads weights as fast as memory gives them and is right for any M. `gemm_large` is Hopper's, for more rows
of x. For more than MANY_ROWS rows on another GPU the plan is None: weights are decoded, and x's own library multiplies.

N and K of 4096, 8192, 14336 and 28672 were measured on an H200. SMALL_N, WIDE_N and LONG_K lie between two of these:
nothing is known of where exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from billfish.backends.cuda.axes import BRICK, COURSE, Kind
from billfish.backends.cuda.driver import STATIC_BYTES, Device, KernelLaunch, Macros

PASS_ROWS = 32  # rows of x for which gemm_small reads the weights once
MANY_ROWS = 64  # gemm_small decodes a brick once for each 32 rows: for more rows a library is the better one
SMALL_N = 6144  # with 9 to 16 rows gemm_small is the faster one for N = 4096, gemm_large for N = 8192
WIDE_N = 12288  # a CTA has more courses for N = 14336, and not yet for N = 8192
LONG_K = 4096  # a team has more slots for K = 8192, and not yet for K = 4096
# Shared memory of a CTA beside its dynamic part: STATIC_BYTES, and 1024 that CUDA takes for itself.
CTA_BYTES = STATIC_BYTES + 1024
X_BYTES = 2 * BRICK  # of a row of x, 128 k of 16 bits
ACTIVATIONS = {None: "IDENTITY", "relu": "RELU", "silu": "SILU", "gelu": "GELU"}
GATES = {"silu": "SILU", "gelu": "GELU_TANH", "clamped_silu": "CLAMPED_SILU"}
GATE_COLUMNS, GATE_CTAS = 256, 4096  # columns of a CTA of gate.cu; about the most CTAs, which go on with further rows


def gate_ctas(rows: int, columns: int) -> int:
    """CTAs of gate.cu: those that the columns of a row need, for as many rows as there is room for."""
    parts = -(-columns // GATE_COLUMNS)
    return parts * min(rows, max(1, GATE_CTAS // parts))


@dataclass(frozen=True)
class Gemm:
    """y [m, n] = activation(x [m, k] @ W.T + bias), on weights of a kind."""

    kind: Kind
    m: int
    n: int
    k: int
    bfloat16: bool = False
    float_bias: bool = False
    activation: str | None = None
    batch_invariant: bool = False
    gate: str | None = None  # columns of x W.T are eight gates, eight numbers, and so on; y [m, n / 2]
    float_y: bool = False  # y is float32: the logits
    activations: str = "exact"  # "fp8" or "q8": x may be multiplied in bytes
    norm: str | None = None  # of an RMSNorm between two products (folded_norm.cuh), this is the "first" or "second" one

    @property
    def row_bytes(self) -> int:
        """Of y."""
        return (4 if self.float_y else 2) * (self.n if self.gate is None else self.n // 2)

    def macros(self, **more: object) -> Macros:
        names = self.kind.macros() | {"TYPE": "BF16" if self.bfloat16 else "F16"}
        names |= {name: str(value) for name, value in more.items()}
        if self.float_bias:
            names["BIAS_F32"] = "1"
        if self.activation is not None:
            names["ACTIVATION"] = ACTIVATIONS[self.activation]
        if self.gate is not None:
            names["GATE"] = GATES[self.gate]
        if self.float_y:
            names["Y_F32"] = "1"
        if self.norm is not None:
            names[{"first": "RESIDUAL", "second": "NORMED"}[self.norm]] = "1"
        return tuple(sorted(names.items()))


@dataclass(frozen=True)
class Plan:
    """A launch, and what its tensor map has to say."""

    launch: KernelLaunch
    box_rows: int  # rows of x in one bulk copy


@lru_cache(maxsize=4096)
def plan(gemm: Gemm, device: Device) -> Plan | None:
    """The plan of a product on a device; None: decode the weights and let a library multiply."""
    m, hopper = gemm.m, device.capability == (9, 0)
    few = m <= 8 or (m <= 16 and gemm.n < SMALL_N)
    if gemm.batch_invariant or few or (gemm.float_y and (m <= PASS_ROWS or not hopper)):
        return small(gemm, device)
    if hopper:
        return large(gemm, device)
    return small(gemm, device) if m <= MANY_ROWS else None


def can_fold(gemm: Gemm, device: Device) -> bool:
    """Whether a product can be one of the two that a norm is folded into."""
    chosen = plan(gemm, device) if byte_plan(gemm, device) is None else None
    return chosen is not None and chosen.launch.source == "gemm_small.cu"


# ---- few rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A shape of gemm_small. Its fields are macros of gemm_small.cu."""

    teams: int  # of a CTA; teams split K
    courses: int  # of a CTA in one pass
    slots: int  # of the ring; a slot has 128 k of x and of the courses
    resident: int = 1  # CTAs with room on one multiprocessor
    sharers: int = 1  # warps of a team; sharers split the courses

    def passes(self, courses: int, device: Device) -> int:
        """How often a CTA begins with other courses. Where kernels overlap, all CTAs of a grid have room at once."""
        at_once = self.courses * device.multiprocessors * self.resident
        return -(-courses // at_once) if device.capability >= (9, 0) else 1

    def grid(self, courses: int, device: Device) -> int:
        """CTAs that make `courses` of y."""
        return -(-courses // (self.courses * self.passes(courses, device)))

    def cost(self, courses: int, device: Device) -> float:
        """Courses of the busiest multiprocessor. A further pass costs as much as 0.1, 0.5 or 2 courses on an H200."""
        grid, passes = self.grid(courses, device), self.passes(courses, device)
        most = -(-grid // device.multiprocessors) * passes * self.courses
        if self.resident == 1:
            return most + (passes - 1) * (0.1 if self.sharers > 1 else 0.5)
        # Where each multiprocessor has room for two CTAs and there is about one, the next kernel's CTAs double up on
        # some multiprocessors and leave others. Measured on 132: the 128 CTAs of N = 8192 (0.97 for each) are uneven,
        # the 224 of N = 14336 (1.70 for each) are not. The limit, 1.2, lies between.
        uneven = grid < 1.2 * device.multiprocessors
        # Two CTAs on one multiprocessor leave bandwidth to CTAs that are alone on theirs: the mean of most and average.
        return (most + courses / device.multiprocessors) / 2 + (passes - 1) * 2 + (courses if uneven else 0)


def rows_at_once(gemm: Gemm) -> int:
    """ROWS of gemm_small. A row of x takes 8 / ROWS columns of an mma, one for each group of a brick at most."""
    least = 8 if gemm.batch_invariant else 8 // gemm.kind.groups
    return next(rows for rows in (1, 2, 4, 8, 16, 32) if rows == 32 or rows >= max(gemm.m, least))


def small_shapes(gemm: Gemm, hopper: bool) -> list[Small]:
    """Shapes worth weighing. The first of equal cost wins.

    About 100 KB under way on a multiprocessor are enough: with more than 110 KB, one row of 4096 x 14336 takes 9.4 us
    instead of 8.9.
    """
    if gemm.batch_invariant:
        return [Small(8, 2, 16)]  # the number of teams fixes the order of additions
    rows, wide, long = rows_at_once(gemm), gemm.n >= WIDE_N, gemm.k > LONG_K
    if rows == 32:
        return [Small(4, 4, 8) if wide else Small(8, 1, 16)]
    if rows == 16:
        return [Small(8, 4, 16) if wide else Small(8, 2, 16)]
    if not hopper:
        return [Small(8, 4, 16, 2), Small(8, 8, 16), Small(12, 4, 24), Small(16, 2, 32), Small(16, 1, 32)]
    two = Small(16, 2, 32) if long and gemm.m == 1 else Small(8, 2, 24 if long else 16)
    found = [Small(8, 4, 16, 2), Small(8, 4, 24, sharers=2), Small(4, 8, 16, sharers=4), two, Small(16, 1, 32)]
    # In a decode step, CTAs that are small enough come while those of the product before are still there.
    between = gemm.norm == "second" and gemm.m == 1 and not wide and not long
    return [Small(8, 2, 16, 2), *found] if between else found


def small(gemm: Gemm, device: Device) -> Plan:
    courses = -(-gemm.n // COURSE)
    shapes = [fitting(gemm, device, shape) for shape in small_shapes(gemm, device.capability >= (9, 0))]
    return launch_small(gemm, device, min(shapes, key=lambda shape: shape.cost(courses, device)))


def small_bytes(gemm: Gemm, device: Device, shape: Small, again: bool = False) -> int:
    """Dynamic shared memory, as gemm_small.cu lays it out: the ring, and the teams' sums in its place or behind it.

    again: a CTA may have several passes, however many courses there are.
    """
    rows, passes, alone = rows_at_once(gemm), shape.passes(-(-gemm.n // COURSE), device), gemm.m == 1
    columns = COURSE * shape.courses
    ring = shape.slots * ((1 if alone else max(8, rows)) * X_BYTES + shape.courses * gemm.kind.brick_bytes)
    sums = (shape.teams * (1 if alone else rows) * (columns + 4) + 2 * columns) * 4
    return ring + sums if again or passes > 1 else max(ring, sums)


def fitting(gemm: Gemm, device: Device, shape: Small, again: bool = False) -> Small:
    """The shape with as many slots, and then courses, as `resident` CTAs of a multiprocessor have room for."""
    room = (device.shared_bytes + CTA_BYTES) // shape.resident - CTA_BYTES
    while small_bytes(gemm, device, shape, again) > room and (
        shape.slots > shape.teams or shape.courses > shape.sharers
    ):
        if shape.slots > shape.teams:
            shape = replace(shape, slots=shape.slots - shape.teams)
        else:
            shape = replace(shape, courses=shape.courses // 2)
    return shape


def launch_small(gemm: Gemm, device: Device, shape: Small, again: bool = False) -> Plan:
    rows, courses = rows_at_once(gemm), -(-gemm.n // COURSE)
    named = {name.upper(): value for name, value in vars(shape).items()}
    macros = gemm.macros(ROWS=rows, ALONE=int(gemm.m == 1), **named)
    grid = (shape.grid(courses, device), -(-gemm.m // rows))
    threads, overlap = shape.teams * shape.sharers * 32, device.capability >= (9, 0)
    shared_bytes = small_bytes(gemm, device, shape, again)
    if overlap:  # Room for one CTA more would go to the next kernel, on some multiprocessors and not on others.
        shared_bytes = max(shared_bytes, (device.shared_bytes + CTA_BYTES) // (shape.resident + 1))
    name = "marlin_gemm_small" if gemm.norm is None else "marlin_gemm_small_normed"
    launch = KernelLaunch("gemm_small.cu", name, macros, grid, threads, shared_bytes, 1, overlap)
    return Plan(launch, min(gemm.m, rows))


# ---- many rows, on Hopper -------------------------------------------------------------------------------------------

STRIP, COURSES_IN_STRIP = 64, 4
LETTER_BYTES = 128 * 16  # from each thread of a warpgroup, float32 sums of eight rows of x and a strip
OUT_BYTES = 4096  # of a warpgroup, for y on its way out

# Nanoseconds that a multiprocessor takes for one stage, 128 k, of a tile: by height (columns of y), then by width (rows
# of x). Paired tiles share a strip of 64: 2 strips make a height of 2 * 64 - 32 = 96, and 4 strips one of
# 4 * 64 - 32 = 224. A call costs CALL_NS besides, a tile TILE_NS, an exchange of sums MEETING_NS. Both tiles of a
# pair decode the shared strip: times DECODED_TWICE, where decoding takes time. Measured on an H200, roughly: good for
# weighing shapes against each other.
STAGE_NS = {
    64: {16: 150, 32: 170, 64: 230, 128: 540},
    96: {64: 360, 128: 490},
    128: {16: 255, 32: 290, 64: 390, 128: 620, 256: 1190},
    224: {128: 1030},
    256: {16: 480, 32: 560, 64: 770, 128: 1190},
}
CALL_NS, TILE_NS, MEETING_NS, DECODED_TWICE = 1500, 1000, 1000, 1.08


@dataclass(frozen=True)
class LargeShape:
    """A shape of gemm_large. Its fields are macros of gemm_large.cu."""

    width: int  # rows of x in a tile
    warpgroups: int = 2  # that multiply
    teams: int = 1  # of warpgroups; teams alternate along K
    tall: int = 1  # strips of a warpgroup
    stages: int = 4  # of the ring, at most; a stage has 128 k of x and of the strips
    split: int = 1  # CTAs of a cluster that share a tile, each with a part of K
    paired: bool = False  # two tiles share a strip
    buffers: int = 4  # decoded fragments in registers
    batch: int = 2  # fragments decoded, then multiplied, at a time

    @property
    def strips(self) -> int:
        """Strips of a tile, a shared one included."""
        return self.tall * self.warpgroups // self.teams

    @property
    def height(self) -> int:
        """Columns of y in a tile. Half of a shared strip counts."""
        return STRIP * self.strips - STRIP // 2 * self.paired

    @property
    def partners(self) -> int:
        """Teams of all CTAs that add up their sums of one tile."""
        return self.split * self.teams

    def ctas(self, m: int, n: int) -> int:
        """CTAs that y [m, n] takes if each makes one tile, or a part of one."""
        columns = -(-n // STRIP) * STRIP
        return -(-columns // self.height) * -(-m // self.width) * self.split

    def cost(self, m: int, n: int, bricks: int, multiprocessors: int) -> float:
        """Nanoseconds of a product, roughly: `bricks` stages, one round of tiles after the other."""
        rounds = rounds_of(self.ctas(m, n), self.split, multiprocessors)
        tile = STAGE_NS[self.height][self.width] * bricks / self.split + TILE_NS
        return CALL_NS + rounds * (tile + (MEETING_NS if self.split > 1 else 0))


def rounds_of(ctas: int, split: int, multiprocessors: int) -> int:
    """How often a multiprocessor gets a tile, where CTAs come in clusters of `split`."""
    # An H200 holds 39 clusters of three CTAs, on 117 of its 132 multiprocessors.
    room = multiprocessors if split <= 2 else multiprocessors * 9 // 10
    return -(-ctas // (room // split * split))


def shapes(m: int, kind: Kind) -> list[LargeShape]:
    """Shapes worth weighing. The first of equal cost wins.

    A warpgroup with two strips, or four, has fewer instructions beside each wgmma.
    """
    if m <= 32:
        width = 16 if m <= 16 else 32
        both = LargeShape(width, teams=2, tall=2, stages=12 if m <= 16 else 8)
        four = LargeShape(width, teams=2, tall=4, stages=8)
        if kind.offset == "ZERO" or kind.scale == "ScaleF32" or kind.element == "Table4":  # slow to decode
            both = replace(both, buffers=2, batch=1)
        if kind.scale != "ScaleF32":  # float32 scales leave too few registers
            four = replace(four, buffers=2, batch=1)
        return [
            *(replace(both, split=split) for split in (1, 2, 3)),
            LargeShape(width, teams=2, stages=10, split=2, batch=4),
            LargeShape(width, teams=2, stages=10, split=3, batch=4),
            four,
            LargeShape(width, tall=2, stages=6),
        ]
    two = LargeShape(64, stages=8)
    if m <= 64:
        team = replace(two, teams=2)
        return [
            *(replace(two, split=split) for split in (1, 2, 3)),
            *(replace(team, split=split) for split in (2, 3)),
            LargeShape(64, tall=2, stages=6),
            replace(two, paired=True),
        ]
    one = LargeShape(128)
    found = [replace(one, split=split) for split in (1, 2, 3)]
    found += [replace(one, paired=True), replace(one, tall=2, paired=True)]
    if m <= 128:
        return [*found, replace(one, tall=2), *(replace(two, stages=6, split=split) for split in (2, 3))]
    return [*found, replace(one, tall=2, batch=1) if m > 2048 else LargeShape(256, stages=3)]


def large(gemm: Gemm, device: Device) -> Plan:
    return launch_large(gemm, device, large_shape(gemm, device))


def large_shape(gemm: Gemm, device: Device) -> LargeShape:
    m, n, bricks, kind = gemm.m, gemm.n, -(-gemm.k // BRICK), gemm.kind
    fitting = [s for s in shapes(m, kind) if s.partners <= bricks and not spills(s, kind)]
    # With two stages nothing is copied while the kernel multiplies, and two teams would wait for each other.
    flowing = [s for s in fitting if ring(s, kind, device)[0] > 2] or fitting
    costs_to_decode = kind.offset != "NONE" or kind.scale != "ScaleF16"

    def cost(shape: LargeShape) -> float:
        factor = DECODED_TWICE if shape.paired and costs_to_decode else 1
        return shape.cost(m, n, bricks, device.multiprocessors) * factor

    return min(flowing, key=cost)


def spills(shape: LargeShape, kind: Kind) -> bool:
    """Whether registers are too few. tests/backends/cuda/test_products.py has ptxas count spills.

    Eight offsets for each row of a brick leave too few for wide tiles where a warpgroup has several strips. Many bytes
    of scales, or a table, leave too few for four strips.
    """
    if shape.tall == 4:
        most = 512 if shape.width == 16 else 128
        scale_bytes = kind.brick_bytes - kind.code_bytes
        return scale_bytes > most or kind.element == "Table4" or (kind.groups == 8 and shape.width == 32)
    return shape.tall > 1 and kind.groups == 8 and kind.offset != "NONE" and shape.width > 64


def ring(shape: LargeShape, kind: Kind, device: Device) -> tuple[int, int]:
    """Stages of the ring, and all dynamic shared memory as gemm_large.cu lays it out: ring, y on its way out, and the
    sums that partners send."""
    stage = shape.width * X_BYTES + shape.strips * COURSES_IN_STRIP * kind.brick_bytes
    owned = -(-shape.width // 8 // shape.partners)  # eights of rows of x that each partner finishes
    letters = shape.teams * (shape.partners - 1) * shape.strips * owned * LETTER_BYTES
    rest = shape.warpgroups * OUT_BYTES + letters
    stages = min(shape.stages, (device.shared_bytes - rest) // stage) // shape.teams * shape.teams
    return stages, stages * stage + rest


def launch_large(gemm: Gemm, device: Device, shape: LargeShape) -> Plan:
    kind = gemm.kind
    stages, shared_bytes = ring(shape, kind, device)
    # With more than two buffers for 8-bit codes, and more than one for float16 weights, ptxas serializes the wgmmas.
    buffers, batch = {1: (shape.buffers, shape.batch), 2: (2, 1), 4: (1, 1)}[kind.words]
    macros = gemm.macros(
        WARPGROUPS=shape.warpgroups,
        TEAMS=shape.teams,
        TALL=shape.tall,
        WIDTH=shape.width,
        STAGES=stages,
        SPLIT=shape.split,
        PAIRED=int(shape.paired),
        BUFFERS=buffers,
        BATCH=batch,
        **wgmma_macros("WGMMA", shape.width),
        **wgmma_macros("WGMMA_HALF", shape.width // 2),
    )
    ctas = shape.ctas(gemm.m, gemm.n)
    if shape.partners == 1:
        ctas = min(ctas, device.multiprocessors)
    threads = 128 * (shape.warpgroups + 1)
    launch = KernelLaunch(
        "gemm_large.cu", "marlin_gemm_large", macros, (ctas, 1), threads, shared_bytes, shape.split, True
    )
    return Plan(launch, shape.width)


def wgmma_macros(name: str, width: int, register: str = "f") -> dict[str, str]:
    """Lists of registers, all of which the instruction names; see wgmma.cuh. register: "f" for float32 sums, or "r"."""
    count = width // 2
    a = ", ".join(f"%{count + i}" for i in range(4))
    return {
        f"{name}_WIDTH": f'"{width}"',
        f"{name}_D": '"' + ", ".join(f"%{i}" for i in range(count)) + '"',
        f"{name}_A_B": f'"{{{a}}}, %{count + 4}"',
        f"{name}_FLAG": f'"%{count + 5}"',
        f"{name}_OUTPUTS": ", ".join(f'"+{register}"(d[{i}])' for i in range(count)),
    }


# ---- x in 8 bits -----------------------------------------------------------------------------------------------------
#
# `activations="fp8"` rounds x to E4M3, "q8" to int8, with one scale for each row of x. Weights stay exact, so only some
# kinds can: `why_exact` says why others cannot. Where the kernels of 16 bits are the faster ones, up to FEW_ROWS rows
# of x for one, `byte_plan` gives None: x is multiplied as it is, and `why_as_it_is` says so.

FEW_ROWS = 64
MORE_ROWS = 256  # whose scales gemm_bytes.cu may read, as it reads those of whole tiles
ROW_BYTES = 8  # of row_of_x.cuh
SIXTEEN = 16  # k that quantize_rows.cu writes at a time

# Nanoseconds for one stage, 128 k, of a tile, by rows of x: of two strips, and of one, which two teams share along K.
# Measured on an H200, for weights that are folded, weights whose sums are scaled, and int8, as STAGE_NS.
BYTE_STAGE_NS = {
    "folded": ({64: 326, 128: 455, 152: 490, 176: 545, 192: 595, 208: 605, 256: 800}, {128: 404}),
    "scaled": ({64: 295, 128: 480, 152: 550, 176: 615, 192: 665, 208: 650}, {128: 430}),
    "int8": ({64: 293, 128: 549, 176: 740, 192: 820}, {128: 486}),
}
BYTE_CALL_NS, BYTE_TILE_NS, BYTE_MEETING_NS = 1500, 2300, 1300
PAIR_GAINS = 0.95  # two launches have to gain more than estimates are off by
# quantize_rows.cu takes BYTE_CALL_NS, and from there on what memory takes: 2 bytes read, one written.
BYTES_PER_NS = 3500
# Such products of 16 bits took 0.93 to 1.25 of what LargeShape.cost says, and bytes gain more than they lose.
AS_IT_IS = 1.2


def why_exact(kind: Kind, activations: str) -> str:
    """Why weights of a kind are not multiplied with x in bytes, or ""."""
    if kind.offset != "NONE":
        return "weights with a zero point or a minimum"
    if kind.element == "E2M1" and activations == "fp8":
        if kind.scale == "ScaleE5M2":
            return "" if kind.narrow else "a row whose powers of two span more than 16 octaves"
    elif kind.element != "Int4":
        supported = "4-bit integers and E2M1" if activations == "fp8" else "4-bit integers"
        return f"{activations} supports weights of {supported}, not {kind.element}"
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
        """Nanoseconds of so many places of a product, roughly, as LargeShape.cost. way: of BYTE_STAGE_NS."""
        rounds = rounds_of(places * self.across(gemm.m) * self.split, self.split, multiprocessors)
        stages = -(-gemm.k // BRICK) / self.partners
        tile = BYTE_STAGE_NS[way][self.teams - 1][self.width] * stages + BYTE_TILE_NS
        return BYTE_CALL_NS + rounds * (tile + (BYTE_MEETING_NS if self.split > 1 else 0))


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
    """Of BYTE_STAGE_NS."""
    return "int8" if activations == "q8" else "folded" if kind.scale == "ScaleE5M2" else "scaled"


def why_as_it_is(gemm: Gemm, device: Device) -> str:
    """Why a product whose x may go in bytes takes x as it is, or ""."""
    if gemm.activations == "exact":
        return "nobody asked for 8 bits"
    if device.capability != (9, 0):
        return f"{device.name} is not a Hopper GPU"
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
    shapes = [ByteShape(width) for width in BYTE_STAGE_NS[way][0] if width > FEW_ROWS and width != too_wide]
    shapes += [ByteShape(128, split=split) for split in (2, 3)]
    if gemm.m <= 128:
        shapes += [ByteShape(64, split=2), *(ByteShape(128, teams=2, split=split) for split in (1, 2, 3))]
    fitting = [shape for shape in shapes if shape.partners <= bricks]

    def cost(parts: Parts) -> float:
        return sum(shape.cost(way, gemm, places, device.multiprocessors) for shape, places in parts)

    one = min((((shape, shape.places(gemm.n)),) for shape in fitting), key=cost)
    two = min(pairs(fitting, gemm, device.multiprocessors), key=cost, default=one)
    chosen = two if cost(two) < PAIR_GAINS * cost(one) else one
    quantizing = BYTE_CALL_NS + 3 * gemm.m * gemm.k / BYTES_PER_NS
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


def byte_ring(shape: ByteShape, kind: Kind, device: Device, given: bool) -> tuple[int, int]:
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
        BytePart(_launch_part(gemm, device, shape, places), shape.width, first, places)
        for (shape, places), first in zip(parts, firsts, strict=False)
    )
    return BytePlan(quantize_launch(gemm, stride), launched, stride, most_work(gemm.m, gemm.k))


def given_plan(gemm: Gemm, device: Device, block_bytes: int) -> BytePlan:
    """x is blocks of q8_0 or q8_1, and y float32: sums are scaled every 32 of K, whatever the groups of the weights."""
    gemm = replace(gemm, activations="q8")
    shape = ByteShape(64 if gemm.m <= FEW_ROWS else 128)
    macros = (("BLOCK_BYTES", str(block_bytes)), ("CODES_AT", str(block_bytes - 32)))
    split = KernelLaunch("split_blocks.cu", "marlin_split_blocks", macros, (gemm.m,), 128, overlap=True)
    work_bytes = gemm.m * gemm.k + 16 * (gemm.m * -(-gemm.k // BRICK) + MORE_ROWS)
    places = shape.places(gemm.n)
    part = BytePart(_launch_part(gemm, device, shape, places, given=True), shape.width, 0, places)
    return BytePlan(split, (part,), gemm.k, work_bytes)


def why_not_given(kind: Kind) -> str:
    """Why weights of a kind are not multiplied with x in blocks, or ""."""
    if kind.element != "Int4" or kind.offset != "NONE" or kind.groups > 4:
        return "it multiplies blocks of x with 4-bit integers without zero points, in groups of 32 or more"
    return ""


def _launch_part(gemm: Gemm, device: Device, shape: ByteShape, places: int, given: bool = False) -> KernelLaunch:
    """Of so many places of a product."""
    integers = gemm.activations == "q8"
    stages, shared_bytes = byte_ring(shape, gemm.kind, device, given)
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


def quantize_launch(gemm: Gemm, stride: int) -> KernelLaunch:
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


# ---- products with experts -------------------------------------------------------------------------------------------
#
# Visits are sorted by expert on the device, so the host does not know how many rows an expert has. It knows how many
# visits and experts there are, and so the mean. All rows of an expert are tiles of `width` rows. CTAs walk along the
# tiles that there are, each with a share of them.

FEW = 8  # rows of a tile of gemm_small
FILLED = 0.6  # of a tile, if all experts have as many rows: some have more, and should not need another tile
FEW_FILLED = 0.45  # of a tile of gemm_small beside gemm_large, which with 4 rows an expert is the faster one
# With few columns of x a pass is short, and several small CTAs on a multiprocessor hide its beginning and end:
# docs/notes/2026-11-18-cuda-mixtures.md has what was tried. One row: of gate and up, of other products; then more rows.
SHORT_GATED, SHORT_ALONE, SHORT = Small(8, 4, 16, 3), Small(6, 4, 12, 2), Small(4, 4, 8, 3)


@dataclass(frozen=True)
class ExpertRouting:
    """(token, expert) pairs, `chosen` for each token."""

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
        if mean <= (FEW_FILLED if large else FILLED) * FEW:
            return FEW
        widths = (16, 32, 64, 128) if large else (16, 32)
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
def plan_experts(gemm: Gemm, routing: ExpertRouting, device: Device) -> Plan:
    """The plan of y [visits, n], gemm.m being all visits."""
    width = routing.width(device)
    if width <= FEW or device.capability != (9, 0) or routing.batch_invariant:
        return few(gemm, routing, width, device)
    return many(gemm, routing, width, device)


def few(gemm: Gemm, routing: ExpertRouting, width: int, device: Device) -> Plan:
    """gemm_small."""
    tile, courses, hopper = replace(gemm, m=width), -(-gemm.n // COURSE), device.capability >= (9, 0)
    if walks(routing, device) and gemm.k < LONG_K and gemm.kind.words == 1:
        short = SHORT if width > 1 else SHORT_ALONE if gemm.gate is None else SHORT_GATED
        return launch_few(gemm, routing, width, device, fitting(tile, device, short, again=True))
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


def walks(routing: ExpertRouting, device: Device) -> bool:
    """Whether CTAs of gemm_small have several passes. The order of additions depends on which pass it is."""
    return device.capability >= (9, 0) and not routing.batch_invariant


def launch_few(gemm: Gemm, routing: ExpertRouting, width: int, device: Device, shape: Small) -> Plan:
    tile, walking = replace(gemm, m=width), walks(routing, device)
    launch = launch_small(tile, device, shape, walking).launch
    passes = routing.entries(width) * -(-gemm.n // (COURSE * shape.courses))
    ctas = min(passes, device.multiprocessors * shape.resident) if walking else passes
    rows = 1 if width == 1 else min(gemm.m, rows_at_once(tile))
    return Plan(routed(launch, "marlin_experts_small", width, ctas), rows)


def many(gemm: Gemm, routing: ExpertRouting, width: int, device: Device) -> Plan:
    """gemm_large."""
    one = {
        16: LargeShape(16, stages=10),
        32: LargeShape(32, stages=10),
        64: LargeShape(64, stages=8),
        128: LargeShape(128),
    }[width]
    kind, two = gemm.kind, replace(one, tall=2, stages=min(one.stages, 6))
    few_scales = kind.brick_bytes - kind.code_bytes == 2 * COURSE  # a float16 number for each row of a brick
    if width == 128:  # With products of half a tile, too, registers are few, and fewer beside many scales.
        two = replace(two, batch=1, buffers=4 if few_scales else 2)
    crowded = spills(two, kind) or (width == 128 and kind.scale == "ScaleF32" and kind.groups == 8)
    shapes = [one] if crowded or ring(two, kind, device)[0] < 3 else [two, one]

    def cost(shape: LargeShape) -> float:
        tiles = routing.expected(width) * -(-gemm.n // shape.height)
        stage = STAGE_NS[shape.height][width] * -(-gemm.k // BRICK) + TILE_NS
        return -(-tiles // device.multiprocessors) * stage

    return launch_many(gemm, routing, device, min(shapes, key=cost))


def launch_many(gemm: Gemm, routing: ExpertRouting, device: Device, shape: LargeShape) -> Plan:
    launch = launch_large(gemm, device, shape).launch
    tiles = routing.entries(shape.width) * -(-gemm.n // (STRIP * shape.strips))
    return Plan(routed(launch, "marlin_experts_large", shape.width, min(tiles, device.multiprocessors)), shape.width)


def routed(launch: KernelLaunch, name: str, width: int, ctas: int) -> KernelLaunch:
    """The same kernel, for rows of experts."""
    macros = tuple(sorted((*launch.macros, ("EXPERTS", str(width)))))
    return replace(launch, name=name, macros=macros, grid=(ctas, 1))
