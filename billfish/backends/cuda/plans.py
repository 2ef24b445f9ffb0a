"""Which kernel runs a product, and in which shape: docs/cuda.md has the figures, docs/words.md the words.

`gemm_small` reads weights as fast as memory gives them and is right for any M. `gemm_large` is Hopper's, for more rows
of x. For more than MANY_ROWS rows on another GPU the plan is None: weights are decoded, and x's own library multiplies.

N and K of 4096, 8192, 14336 and 28672 were measured on an H200. SMALL_N, WIDE_N and LONG_K lie between two of these:
nothing is known of where exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from billfish.backends.cuda.driver import STATIC_BYTES, Device, KernelLaunch, Macros
from billfish.backends.cuda.kind import BRICK, COURSE, Kind

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
    float_y: bool = False  # y is float32; gemm_small alone writes it
    activations: str = "exact"  # "fp8" or "q8": x may be multiplied in bytes (byte_plans.py)

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
    if gemm.batch_invariant or gemm.float_y or m <= 8 or (m <= 16 and gemm.n < SMALL_N):
        return small(gemm, device)
    if hopper:
        return large(gemm, device)
    return small(gemm, device) if m <= MANY_ROWS else None


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
    return [Small(8, 4, 16, 2), Small(8, 4, 24, sharers=2), Small(4, 8, 16, sharers=4), two, Small(16, 1, 32)]


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
    launch = KernelLaunch("gemm_small.cu", "marlin_gemm_small", macros, grid, threads, shared_bytes, 1, overlap)
    return Plan(launch, min(gemm.m, rows))


# ---- many rows, on Hopper -------------------------------------------------------------------------------------------

STRIP, COURSES_IN_STRIP = 64, 4
LETTER_BYTES = 128 * 16  # from each thread of a warpgroup, float32 sums of eight rows of x and a strip
OUT_BYTES = 4096  # of a warpgroup, for y on its way out

# Nanoseconds that a multiprocessor takes for one stage, 128 k, of a tile: by height (columns of y), then by width (rows
# of x). Paired tiles share a strip of 64: 2 strips make a height of 2 * 64 - 32 = 96, and 4 strips one of
# 4 * 64 - 32 = 224. A call costs CALL_NS besides, a tile TILE_NS, a meeting of partners MEETING_NS. Both tiles of a
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
class Shape:
    """A shape of gemm_large. Its fields are macros of gemm_large.cu."""

    width: int  # rows of x in a tile
    warpgroups: int = 2  # that multiply
    teams: int = 1  # of warpgroups; teams take turns along K
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


def shapes(m: int, kind: Kind) -> list[Shape]:
    """Shapes worth weighing. The first of equal cost wins.

    A warpgroup with two strips, or four, has fewer instructions beside each wgmma.
    """
    if m <= 32:
        width = 16 if m <= 16 else 32
        both = Shape(width, teams=2, tall=2, stages=12 if m <= 16 else 8)
        four = Shape(width, teams=2, tall=4, stages=8)
        if kind.offset == "ZERO" or kind.scale == "ScaleF32" or kind.element == "Table4":  # slow to decode
            both = replace(both, buffers=2, batch=1)
        if kind.scale != "ScaleF32":  # float32 scales leave too few registers
            four = replace(four, buffers=2, batch=1)
        return [
            *(replace(both, split=split) for split in (1, 2, 3)),
            Shape(width, teams=2, stages=10, split=2, batch=4),
            Shape(width, teams=2, stages=10, split=3, batch=4),
            four,
            Shape(width, tall=2, stages=6),
        ]
    two = Shape(64, stages=8)
    if m <= 64:
        team = replace(two, teams=2)
        return [
            *(replace(two, split=split) for split in (1, 2, 3)),
            *(replace(team, split=split) for split in (2, 3)),
            Shape(64, tall=2, stages=6),
            replace(two, paired=True),
        ]
    one = Shape(128)
    found = [replace(one, split=split) for split in (1, 2, 3)]
    found += [replace(one, paired=True), replace(one, tall=2, paired=True)]
    if m <= 128:
        return [*found, replace(one, tall=2), *(replace(two, stages=6, split=split) for split in (2, 3))]
    return [*found, replace(one, tall=2, batch=1) if m > 2048 else Shape(256, stages=3)]


def large(gemm: Gemm, device: Device) -> Plan:
    return launch_large(gemm, device, large_shape(gemm, device))


def large_shape(gemm: Gemm, device: Device) -> Shape:
    m, n, bricks, kind = gemm.m, gemm.n, -(-gemm.k // BRICK), gemm.kind
    fitting = [s for s in shapes(m, kind) if s.partners <= bricks and not spills(s, kind)]
    # With two stages nothing is copied while the kernel multiplies, and two teams would stand still by turns.
    flowing = [s for s in fitting if ring(s, kind, device)[0] > 2] or fitting
    costs_to_decode = kind.offset != "NONE" or kind.scale != "ScaleF16"

    def cost(shape: Shape) -> float:
        factor = DECODED_TWICE if shape.paired and costs_to_decode else 1
        return shape.cost(m, n, bricks, device.multiprocessors) * factor

    return min(flowing, key=cost)


def spills(shape: Shape, kind: Kind) -> bool:
    """Whether registers are too few. tests/backends/cuda/test_products.py has ptxas count spills.

    Eight offsets for each row of a brick leave too few for wide tiles where a warpgroup has several strips. Many bytes
    of scales, or a table, leave too few for four strips.
    """
    if shape.tall == 4:
        most = 512 if shape.width == 16 else 128
        scale_bytes = kind.brick_bytes - kind.code_bytes
        return scale_bytes > most or kind.element == "Table4" or (kind.groups == 8 and shape.width == 32)
    return shape.tall > 1 and kind.groups == 8 and kind.offset != "NONE" and shape.width > 64


def ring(shape: Shape, kind: Kind, device: Device) -> tuple[int, int]:
    """Stages of the ring, and all dynamic shared memory as gemm_large.cu lays it out: ring, y on its way out, and the
    sums that partners send."""
    stage = shape.width * X_BYTES + shape.strips * COURSES_IN_STRIP * kind.brick_bytes
    owned = -(-shape.width // 8 // shape.partners)  # eights of rows of x that each partner finishes
    letters = shape.teams * (shape.partners - 1) * shape.strips * owned * LETTER_BYTES
    rest = shape.warpgroups * OUT_BYTES + letters
    stages = min(shape.stages, (device.shared_bytes - rest) // stage) // shape.teams * shape.teams
    return stages, stages * stage + rest


def launch_large(gemm: Gemm, device: Device, shape: Shape) -> Plan:
    kind = gemm.kind
    stages, shared_bytes = ring(shape, kind, device)
    # With more than two buffers for codes of 8 bits, and more than one for plain weights, ptxas serializes the wgmmas.
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
