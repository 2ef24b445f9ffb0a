"""Which kernel runs a product, and in which of its shapes: the figures behind these choices are in docs/cuda.md.

`gemm_small` reads weights as fast as memory gives them and is right for any M; `gemm_large` is Hopper's, for more rows
of x. Where neither is good (many rows on another GPU, float32 x) a plan is None: weights are decoded, and the library
whose arrays came in multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from billfish.backends.cuda.driver import Device, Launch, Macros
from billfish.backends.cuda.layout import Kind

SMALL_ROWS = 32  # of x, that one CTA of gemm_small can take
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
    if product.batch_invariant or product.m <= 16:
        return small(product, device)
    if device.capability == (9, 0):
        if product.m <= SMALL_ROWS and product.n >= 12288:
            return small(product, device)
        return large(product, device)
    return small(product, device) if product.m <= MANY_ROWS else None


# ---- few rows -------------------------------------------------------------------------------------------------------


def small(product: Product, device: Device) -> Plan:
    """Enough bytes in flight are what counts: some 64 KB on every multiprocessor."""
    m, n, kind = product.m, product.n, product.kind
    columns = 1 if m <= 8 else 2 if m <= 16 else 4
    if product.batch_invariant:
        warps, tiles, depth = 8, 2, 2  # the warps decide about the order of additions
    elif columns == 4:
        warps, tiles, depth = (4, 4, 2) if n >= 12288 else (8, 1, 2)
    elif n >= 12288:
        warps, tiles, depth = 8, 4, 3 - columns
    elif columns == 2:
        warps, tiles, depth = 8, 2, 2
    else:
        warps, tiles, depth = (16, 2, 1) if n >= 6144 else (8, 2, 4)
    rows = 8 * columns

    def shared_bytes() -> int:
        ring = warps * depth * (rows * 256 + tiles * kind.brick_bytes)
        return max(ring, warps * rows * (16 * tiles + 4) * 4 + 16 * tiles * 4)

    while shared_bytes() > device.shared_bytes and depth * tiles > 1:
        depth, tiles = (depth - 1, tiles) if depth > 1 else (depth, tiles // 2)
    macros = product.macros(WARPS=warps, TILES=tiles, COLUMNS=columns, DEPTH=depth)
    grid = (-(-n // (16 * tiles)), -(-m // rows))
    overlap = device.capability >= (9, 0)
    launch = Launch("gemm_small.cu", "marlin_gemm_small", macros, grid, warps * 32, shared_bytes(), 1, overlap)
    return Plan(launch, min(m, rows))


# ---- many rows, on Hopper -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A shape of gemm_large; the names are those of its macros."""

    width: int
    teams: int = 1
    tall: int = 1
    stages: int = 4
    split: int = 1
    steps: int = 4
    share: int = 1
    cost: float = 1.0  # of one tile, where all multiprocessors have one, for all of K

    @property
    def height(self) -> int:
        return 64 * self.tall * (2 // self.teams)

    def ctas(self, m: int, n: int) -> int:
        blocks = -(-n // (self.height * self.share)) * -(-m // self.width)
        return blocks * self.share * self.split


def large(product: Product, device: Device) -> Plan:
    m, n, bricks = product.m, product.n, -(-product.k // 128)
    if m <= 128:
        width = 32 if m <= 32 else 64 if m <= 64 else 128
        stages = {32: 8, 64: 6, 128: 4}[width]
        # The smallest tiles that all multiprocessors can take at once.
        shapes = [Shape(width, stages=stages), Shape(width, stages=stages, split=2)]
        shapes.append(Shape(width, teams=2, stages=stages, split=2))
        if width == 128:
            shapes.insert(0, Shape(width, tall=2, steps=2, share=2))
        fitting = [s for s in shapes if s.ctas(m, n) <= device.multiprocessors and s.split <= bricks]
        return launch_large(product, device, (fitting or shapes[:1])[-1])
    shapes = [
        Shape(256, stages=3) if m < 2048 else Shape(256, stages=3, steps=2, share=2),
        Shape(128, cost=0.58),
        Shape(128, split=2, cost=0.36),
        Shape(160, tall=2, stages=3, steps=1, share=2, cost=1.28),
    ]

    def cost(shape: Shape) -> float:
        return -(-shape.ctas(m, n) // device.multiprocessors) * shape.cost

    return launch_large(product, device, min((s for s in shapes if s.split <= bricks), key=cost))


def launch_large(product: Product, device: Device, shape: Shape) -> Plan:
    kind = product.kind
    meets = shape.split * shape.teams > 1
    stage = shape.width * 256 + shape.height // 16 * kind.brick_bytes
    sums = shape.teams * shape.width * (shape.height + 4) * 4
    stages = min(shape.stages, (device.shared_bytes - (0 if meets else 8192)) // stage) // shape.teams * shape.teams
    # Scales of several groups, and wider codes, take registers that the widest tiles do not have.
    plain = kind.groups == 1 and kind.words == 1 and kind.offset == "NONE"
    steps = shape.steps if plain or shape.width * shape.tall <= 128 else min(shape.steps, 2 if kind.groups < 8 else 1)
    macros = product.macros(
        WARPGROUPS=2,
        TEAMS=shape.teams,
        TALL=shape.tall,
        WIDTH=shape.width,
        STAGES=stages,
        STEPS=steps,
        SPLIT=shape.split,
        SHARE=shape.share,
        **wgmma_macros(shape.width),
    )
    ctas = shape.ctas(product.m, product.n)
    if not meets:
        ctas = min(ctas, device.multiprocessors // shape.share * shape.share)
    shared_bytes = max(stages * stage, sums) if meets else stages * stage + 8192
    cluster = shape.split * shape.share
    launch = Launch("gemm_large.cu", "marlin_gemm_large", macros, (ctas, 1), 384, shared_bytes, cluster, True)
    return Plan(launch, shape.width // shape.share)


def wgmma_macros(width: int) -> dict[str, str]:
    """The instruction names all its registers; see wgmma.cuh."""
    count = width // 2
    a = ", ".join(f"%{count + i}" for i in range(4))
    return {
        "WGMMA_WIDTH": f'"{width}"',
        "WGMMA_D": '"' + ", ".join(f"%{i}" for i in range(count)) + '"',
        "WGMMA_A_B": f'"{{{a}}}, %{count + 4}"',
        "WGMMA_FLAG": f'"%{count + 5}"',
        "WGMMA_OUTPUTS": ", ".join(f'"+f"(d[{i}])' for i in range(count)),
    }
