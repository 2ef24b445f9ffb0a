"""Which kernel runs a product, and in which of its shapes: the figures behind these choices are in docs/cuda.md.

`gemm_small` reads weights as fast as memory gives them and is right for any M; `gemm_large` is Hopper's, for more rows
of x. Where neither is good (many rows on another GPU, float32 x) a plan is None: weights are decoded, and the library
whose arrays came in multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from billfish.backends.cuda.driver import Device, Launch, Macros
from billfish.backends.cuda.layout import Kind

MANY_ROWS = 64  # above this, a GPU without wgmma decodes the weights once for all rows
ACTIVATIONS = {None: "IDENTITY", "relu": "RELU", "silu": "SILU", "gelu": "GELU"}


@dataclass(frozen=True)
class Product:
    """y [m, n] = activation(x [m, k] @ W.T + bias), on weights of a kind."""

    kind: Kind
    m: int
    n: int
    k: int
    bfloat16: bool = False
    float_bias: bool = False
    activation: str | None = None
    batch_invariant: bool = False

    def macros(self, **more: object) -> Macros:
        names = self.kind.macros() | {"TYPE": "BF16" if self.bfloat16 else "F16"}
        names |= {name: str(value) for name, value in more.items()}
        if self.float_bias:
            names["BIAS_F32"] = "1"
        if self.activation is not None:
            names["ACTIVATION"] = ACTIVATIONS[self.activation]
        return tuple(sorted(names.items()))


@dataclass(frozen=True)
class Plan:
    """A launch, and how many rows of x one bulk copy takes: the tensor map has to know."""

    launch: Launch
    box_rows: int


@lru_cache(maxsize=4096)
def plan(product: Product, device: Device) -> Plan | None:
    """The way to run a product on a device, or None: decode the weights and let a library multiply."""
    m, hopper = product.m, device.capability == (9, 0)
    if product.batch_invariant or m <= 8 or (m <= 16 and product.n < 6144):
        return small(product, device)
    if hopper:
        return large(product, device)
    return small(product, device) if m <= MANY_ROWS else None


# ---- few rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """A shape of gemm_small; the names are those of its macros."""

    teams: int
    tiles: int
    slots: int
    resident: int = 1
    sharers: int = 1

    def rounds(self, tiles: int, device: Device) -> int:
        """How often a CTA has to start over. Where kernels overlap, there are no more CTAs than there is room for."""
        at_once = self.tiles * device.multiprocessors * self.resident
        return -(-tiles // at_once) if device.capability >= (9, 0) else 1

    def grid(self, tiles: int, device: Device) -> int:
        return -(-tiles // (self.tiles * self.rounds(tiles, device)))

    def cost(self, tiles: int, device: Device) -> float:
        """Tiles of the multiprocessor that has most to do, and what meeting once more costs."""
        grid, rounds = self.grid(tiles, device), self.rounds(tiles, device)
        most = -(-grid // device.multiprocessors) * rounds * self.tiles
        if self.resident == 1:
            return most + (rounds - 1) * (0.1 if self.sharers > 1 else 0.5)
        # Room for two, but hardly more than one: the next kernel's CTAs would share some of them and leave others.
        uneven = 5 * grid < 6 * device.multiprocessors
        # Two that share a multiprocessor leave bandwidth to those that are alone on theirs.
        return (most + tiles / device.multiprocessors) / 2 + (rounds - 1) * 2 + (tiles if uneven else 0)


def rows_at_once(product: Product) -> int:
    """ROWS of gemm_small: more columns of an mma for each row of x than a brick has groups are of no use."""
    least = 8 if product.batch_invariant else 8 // product.kind.groups
    return next(rows for rows in (1, 2, 4, 8, 16, 32) if rows == 32 or rows >= max(product.m, least))


def small_shapes(product: Product, hopper: bool) -> list[Small]:
    """That are worth weighing, of equal ones the better first. Some 100 KB under way on a multiprocessor are enough."""
    if product.batch_invariant:
        return [Small(8, 2, 16)]  # the teams decide about the order of additions
    rows, wide, long = rows_at_once(product), product.n >= 12288, product.k > 4096
    if rows == 32:
        return [Small(4, 4, 8) if wide else Small(8, 1, 16)]
    if rows == 16:
        return [Small(8, 4, 16) if wide else Small(8, 2, 16)]
    if not hopper:
        return [Small(8, 4, 16, 2), Small(8, 8, 16), Small(12, 4, 24), Small(16, 2, 32), Small(16, 1, 32)]
    two = Small(16, 2, 32) if long and product.m == 1 else Small(8, 2, 24 if long else 16)
    return [Small(8, 4, 16, 2), Small(8, 4, 24, sharers=2), Small(4, 8, 16, sharers=4), two, Small(16, 1, 32)]


def small(product: Product, device: Device) -> Plan:
    tiles = -(-product.n // 16)
    shapes = [fitting(product, device, shape) for shape in small_shapes(product, device.capability >= (9, 0))]
    return launch_small(product, device, min(shapes, key=lambda shape: shape.cost(tiles, device)))


def small_bytes(product: Product, device: Device, shape: Small) -> int:
    """Of shared memory, as in gemm_small.cu: the ring, and the teams' sums in its place, or behind it."""
    rows, rounds, alone = rows_at_once(product), shape.rounds(-(-product.n // 16), device), product.m == 1
    ring = shape.slots * ((1 if alone else max(8, rows)) * 256 + shape.tiles * product.kind.brick_bytes)
    sums = (shape.teams * (1 if alone else rows) * (16 * shape.tiles + 4) + 2 * 16 * shape.tiles) * 4
    return ring + sums if rounds > 1 else max(ring, sums)


def fitting(product: Product, device: Device, shape: Small) -> Small:
    """With as many slots, and then tiles, as there is room for; its barriers, and the system, want a kilobyte each."""
    room = (device.shared_bytes + 2048) // shape.resident - 2048
    while small_bytes(product, device, shape) > room and (shape.slots > shape.teams or shape.tiles > shape.sharers):
        if shape.slots > shape.teams:
            shape = replace(shape, slots=shape.slots - shape.teams)
        else:
            shape = replace(shape, tiles=shape.tiles // 2)
    return shape


def launch_small(product: Product, device: Device, shape: Small) -> Plan:
    rows, tiles = rows_at_once(product), -(-product.n // 16)
    named = {name.upper(): value for name, value in vars(shape).items()}
    macros = product.macros(ROWS=rows, ALONE=int(product.m == 1), **named)
    grid = (shape.grid(tiles, device), -(-product.m // rows))
    threads, overlap = shape.teams * shape.sharers * 32, device.capability >= (9, 0)
    shared_bytes = small_bytes(product, device, shape)
    if overlap:  # no room for one more: which multiprocessors the next kernel's CTAs then find is left to chance
        shared_bytes = max(shared_bytes, (device.shared_bytes + 2048) // (shape.resident + 1))
    launch = Launch("gemm_small.cu", "marlin_gemm_small", macros, grid, threads, shared_bytes, 1, overlap)
    return Plan(launch, min(product.m, rows))


# ---- many rows, on Hopper -------------------------------------------------------------------------------------------

# Nanoseconds of a multiprocessor for a brick of K, by the height (columns of y; 96 and 224 where tiles are paired) and
# width (rows of x) of a tile; what a call and a tile cost besides; and sums that meet. What two tiles share is decoded
# twice, which takes time where decoding does. Measured on an H200, roughly: for weighing shapes against each other.
BRICK_NS = {
    64: {16: 150, 32: 170, 64: 230, 128: 540},
    96: {64: 360, 128: 490},
    128: {16: 255, 32: 290, 64: 390, 128: 620, 256: 1190},
    224: {128: 1030},
    256: {16: 480, 32: 560, 64: 770, 128: 1190},
}
CALL_NS, TILE_NS, MEETING_NS, DECODED_TWICE = 1500, 1000, 1000, 1.08


@dataclass(frozen=True)
class Shape:
    """A shape of gemm_large; the names are those of its macros."""

    width: int
    warpgroups: int = 2
    teams: int = 1
    tall: int = 1
    stages: int = 4
    split: int = 1
    paired: bool = False
    buffers: int = 4
    batch: int = 2

    @property
    def strips(self) -> int:
        """Of 64 columns; two tiles that are paired share one."""
        return self.tall * self.warpgroups // self.teams

    @property
    def height(self) -> int:
        return 64 * self.strips - 32 * self.paired

    @property
    def partners(self) -> int:
        return self.split * self.teams

    def ctas(self, m: int, n: int) -> int:
        columns = -(-n // 64) * 64  # of whole strips
        return -(-columns // self.height) * -(-m // self.width) * self.split

    def cost(self, m: int, n: int, bricks: int, multiprocessors: int) -> float:
        """Of a product, in nanoseconds, roughly. Clusters of more than two do not find room everywhere."""
        room = multiprocessors if self.split <= 2 else multiprocessors * 9 // 10
        rounds = -(-self.ctas(m, n) // (room // self.split * self.split))
        tile = BRICK_NS[self.height][self.width] * bricks / self.split + TILE_NS
        return CALL_NS + rounds * (tile + (MEETING_NS if self.split > 1 else 0))


def shapes(m: int, kind: Kind) -> list[Shape]:
    """That are worth weighing, of equal ones the better first. Two strips for each warpgroup, or four, leave fewer
    instructions beside each wgmma."""
    if m <= 32:
        width = 16 if m <= 16 else 32
        both = Shape(width, teams=2, tall=2, stages=12 if m <= 16 else 8)
        four = Shape(width, teams=2, tall=4, stages=8)
        if kind.offset == "ZERO" or kind.scale == "ScaleF32" or kind.element == "Table4":  # which take longer to decode
            both = replace(both, buffers=2, batch=1)
        if kind.scale != "ScaleF32":  # with those, there are too few registers for it
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


def large(product: Product, device: Device) -> Plan:
    m, n, bricks, kind = product.m, product.n, -(-product.k // 128), product.kind
    # With eight offsets for each row of a brick, the tallest tiles have no registers left; nor have four strips, with
    # many bytes of scales, or a table.
    many = kind.groups == 8 and kind.offset != "NONE"
    scale_bytes = kind.brick_bytes - kind.code_bytes

    def spills(s: Shape) -> bool:
        if s.tall == 4:
            most = 512 if s.width == 16 else 128
            return scale_bytes > most or kind.element == "Table4" or (kind.groups == 8 and s.width == 32)
        return s.tall > 1 and many and s.width > 64

    fitting = [s for s in shapes(m, kind) if s.partners <= bricks and not spills(s)]
    # Two stages are too few to copy while something is multiplied; for two teams, they would stand still.
    flowing = [s for s in fitting if ring(s, kind, device)[0] > 2] or fitting
    costs_to_decode = kind.offset != "NONE" or kind.scale != "ScaleF16"

    def cost(shape: Shape) -> float:
        factor = DECODED_TWICE if shape.paired and costs_to_decode else 1
        return shape.cost(m, n, bricks, device.multiprocessors) * factor

    return launch_large(product, device, min(flowing, key=cost))


def ring(shape: Shape, kind: Kind, device: Device) -> tuple[int, int]:
    """Stages of the ring, and bytes of shared memory with what else is in it, as in gemm_large.cu: y on its way out,
    and the sums that partners send."""
    stage = shape.width * 256 + shape.strips * 4 * kind.brick_bytes
    owned = -(-shape.width // 8 // shape.partners)
    letters = shape.teams * (shape.partners - 1) * shape.tall * owned * (shape.warpgroups // shape.teams) * 2048
    rest = shape.warpgroups * 4096 + letters
    stages = min(shape.stages, (device.shared_bytes - rest) // stage) // shape.teams * shape.teams
    return stages, stages * stage + rest


def launch_large(product: Product, device: Device, shape: Shape) -> Plan:
    kind = product.kind
    stages, shared_bytes = ring(shape, kind, device)
    # With bytes, ptxas is sure that wgmmas may overlap only if there are two buffers.
    buffers, batch = (shape.buffers, shape.batch) if kind.words == 1 else (2, 1)
    macros = product.macros(
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
    ctas = shape.ctas(product.m, product.n)
    if shape.partners == 1:
        ctas = min(ctas, device.multiprocessors)
    threads = 128 * (shape.warpgroups + 1)
    launch = Launch("gemm_large.cu", "marlin_gemm_large", macros, (ctas, 1), threads, shared_bytes, shape.split, True)
    return Plan(launch, shape.width)


def wgmma_macros(name: str, width: int) -> dict[str, str]:
    """The instruction names all its registers; see wgmma.cuh."""
    count = width // 2
    a = ", ".join(f"%{count + i}" for i in range(4))
    return {
        f"{name}_WIDTH": f'"{width}"',
        f"{name}_D": '"' + ", ".join(f"%{i}" for i in range(count)) + '"',
        f"{name}_A_B": f'"{{{a}}}, %{count + 4}"',
        f"{name}_FLAG": f'"%{count + 5}"',
        f"{name}_OUTPUTS": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
    }
