"""DeviceWeights: bricks in the memory of one device, what can be done with them, and the way back to storage."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cuda.axes import COURSE, Description, Kind, describe, describe_planes, read_kind
from billfish.backends.cuda.driver import (
    BFLOAT16,
    BYTES,
    FLOAT16,
    KernelLaunch,
    copy_in,
    device,
    launcher,
    native,
    synchronize,
)
from billfish.backends.cuda.layout import brick_shape, group_parts
from billfish.backends.cuda.memory import Memory, Room, address, as_tensor, fetch, room_for, room_of, send
from billfish.backends.cuda.packed import PackedBricks
from billfish.backends.cuda.plans import BytePlan, Gemm, byte_plan, plan
from billfish.core.errors import DataError, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.structure import structure_of
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor

OUTPUTS = {"float32": "float", "float16": "Stored<F16>", "bfloat16": "Stored<BF16>"}
# gridDim.y of gemm_small, at most 65,535, counts rows of x; a CTA has 8 of them or more where there are many.
ROWS_AT_ONCE = 1 << 18
ROWS_SENT = 4096  # of an unquantized matrix at a time
PLAIN = Kind("Half", "ScaleF16", "NONE", 1)
PRODUCTS_KEPT = 1024  # of one matrix, each for another number of rows


@dataclass(frozen=True)
class BrickInfo:
    """Weights, apart from the memory they are in."""

    kind: Kind
    shape: tuple[int, int]
    shift: int = 0  # bricks hold codes plus this, modulo 256
    planes: tuple[tuple[str, str, tuple[int, ...]], ...] | None = None  # name, type and shape of all but the codes

    def spelled(self) -> str:
        return json.dumps(asdict(self) | {"kind": self.kind.spelled()})


@lru_cache(maxsize=4096)
def read_brick_info(text: str) -> BrickInfo:
    """What `BrickInfo.spelled` spelled."""
    about = json.loads(text)
    n, k = about["shape"]
    planes = tuple((name, dtype, tuple(shape)) for name, dtype, shape in about["planes"])
    return BrickInfo(read_kind(about["kind"]), (n, k), about["shift"], planes)


@dataclass(frozen=True, eq=False)
class DeviceWeights:
    """A matrix [N, K] on one device. The tensor that it was packed from is not kept.

    planes: scales and offsets as the format has them, beside the bricks' own. With them `unpack` gives the storage
    back; a few percent of the memory, up to a tenth where groups are small.
    """

    about: BrickInfo
    bricks: Memory
    row_scale: Memory  # float32 [N]
    planes: tuple[Memory, ...] = ()
    streams: set[int] = field(default_factory=set, repr=False, init=False)  # of torch, that have read the weights
    _products: dict[Gemm, Any] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def pack(cls, tensor: QuantizedTensor, place: str) -> DeviceWeights:
        """Beside x in that place. Done when this returns, so that any stream may use the weights."""
        description = describe(tensor)
        stored = stored_codes(tensor, description.shift)
        codes, macros = (description.codes, {}) if stored is None else stored
        return cls._pack(description, codes, tensor.scale_planes, place, **macros)

    @classmethod
    def pack_planes(cls, format: Format, planes: Planes, group_size: int, place: str) -> DeviceWeights:
        """The same of planes, in CPU memory or (core.device_array) in that very place, which they do not leave."""
        description = describe_planes(format, planes, group_size)
        scales = {name: plane for name, plane in planes.items() if name != "codes"}
        return cls._pack(description, description.codes, scales, place)

    @classmethod
    def _pack(
        cls, description: Description, codes: NDArray[Any], planes: Planes, place: str, **macros: str
    ) -> DeviceWeights:
        """codes: as pack.cu finds them by these macros. planes: all the others."""
        room = room_for(place)
        specs = tuple((name, plane.dtype.name, plane.shape) for name, plane in planes.items())
        about = BrickInfo(description.kind, description.shape, description.shift, specs)
        with room.current():
            bricks = pack_bricks(about, send(codes, room), group_parts(description), room, **macros)
            row_scale = send(description.row_scale, room)
            beside = tuple(send(plane, room) for plane in planes.values())
        return cls(about, bricks, row_scale, beside)

    @classmethod
    def pack_plain(cls, w: NDArray[Any], place: str) -> DeviceWeights:
        """Numbers [N, K] as float16. Rows of float32 and bfloat16 get a power of two: their largest is 2^14 to 2^15.

        So a bfloat16 number is not rounded, if it is no less than 2^-31 of its row's largest.
        """
        about, room = BrickInfo(PLAIN, (w.shape[0], w.shape[1])), room_for(place)
        row_scale = np.empty(len(w), np.float32)
        with room.current():
            codes = room.empty(2 * w.size)
            for start in range(0, len(w), ROWS_SENT):
                part, row_scale[start : start + ROWS_SENT] = as_halves(w[start : start + ROWS_SENT])
                copy_in(address(codes) + 2 * start * w.shape[1], part, room.stream)
            down, along = brick_shape(*w.shape)
            ones = np.ones((down * along, COURSE), np.float16).view(np.uint8)
            bricks = pack_bricks(about, codes, ones, room, CODE="u16")
            return cls(about, bricks, send(row_scale, room))

    @classmethod
    def load(cls, packed: PackedBricks, place: str = "cuda:0") -> DeviceWeights:
        """Of bricks that were packed, and perhaps saved, on the CPU."""
        room = room_for(place)
        with room.current():
            bricks, row_scale = send(packed.bricks, room), send(packed.row_scale, room)
        return cls(BrickInfo(packed.kind, packed.shape), bricks, row_scale)

    def without_planes(self) -> DeviceWeights:
        """The same bricks, which then cannot be unpacked: what beside them is only for that is let go."""
        return DeviceWeights(BrickInfo(self.kind, self.shape), self.bricks, self.row_scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceWeights:
        """In other memory, so without the products, which know addresses."""
        return DeviceWeights(self.about, *(deepcopy(part, memo) for part in (self.bricks, self.row_scale, self.planes)))

    @property
    def kind(self) -> Kind:
        return self.about.kind

    @property
    def shape(self) -> tuple[int, int]:
        return self.about.shape

    @property
    def room(self) -> Room:
        return room_of(self.bricks)

    @property
    def nbytes(self) -> int:
        """Of bricks and row scales, the bytes that a product reads."""
        return int(self.bricks.nbytes + self.row_scale.nbytes)

    def dequantize(self, stream: int, dtype: str, out: int) -> None:
        """W [N, K] to the memory at `out`. The device is current."""
        zero = {"ONE_ZERO": "1"} if self.kind.one_zero else {}
        launch = brick_kernel("dequantize", self.about, 32, OUTPUT=OUTPUTS[dtype], **zero)
        pointers = address(self.bricks), address(self.row_scale), out
        launch(self.room.ordinal, stream, *pointers, *self.shape)

    def unpack(self, format: Format) -> Storage:
        """The storage that the weights were packed from, bit for bit."""
        if self.about.planes is None:
            raise DataError(failure("unpack", "weights that were loaded packed cannot be unpacked", "Keep the tensor."))
        room, (n, k) = self.room, self.shape
        with room.current():
            codes = room.empty(n * k)
            launch, pointers = brick_kernel("unpack", self.about, 128), map(address, (self.bricks, codes))
            launch(room.ordinal, room.stream, *pointers, n, k, self.about.shift)
            planes: Planes = {"codes": fetch(codes, room, np.uint8, (n, k))}
            for (name, dtype, shape), memory in zip(self.about.planes, self.planes, strict=True):
                planes[name] = fetch(memory, room, np.dtype(dtype), shape)
        return format.pack(planes)

    def work_bytes(self, gemm: Gemm) -> int:
        """Memory that `multiply` wants beside x and y: for x in bytes, or none."""
        plan = self._byte_plan(replace(gemm, m=min(gemm.m, ROWS_AT_ONCE)))
        return 0 if plan is None else plan.work_bytes

    def _byte_plan(self, gemm: Gemm) -> BytePlan | None:
        return None if gemm.activations == "exact" else byte_plan(gemm, device(self.room.ordinal))

    def multiply(
        self,
        stream: int,
        gemm: Gemm,
        x: int,
        x_stride: int,
        bias: int,
        y: int,
        work: int = 0,
        norm: tuple[int | float, ...] = (),
    ) -> bool:
        """y = x W.T + bias, at these addresses; False if the product is one for a library (see plans.py).

        The device is current. Rows of x [m, k] are `x_stride` numbers apart, as `tensor_map` wants them. work: the
        address of `work_bytes`, at a multiple of 16. norm: what folded_norm.cuh takes, where `gemm.norm` says so.
        """
        if gemm.m > ROWS_AT_ONCE:
            return all(
                self.multiply(
                    stream,
                    replace(gemm, m=min(ROWS_AT_ONCE, gemm.m - first)),
                    x + 2 * first * x_stride,
                    x_stride,
                    bias,
                    y + first * gemm.row_bytes,
                    work,
                )
                for first in range(0, gemm.m, ROWS_AT_ONCE)
            )
        product = self.product(gemm)
        if product is None:
            return False
        if isinstance(product, ByteProduct):
            product(stream, x, x_stride, bias, y, work)
        else:
            product(stream, x, x_stride, bias, y, *norm)
        return True

    def product(self, gemm: Gemm) -> Any:
        """A product in native code, `_cuda.NativeProduct`, kept for the next call; None if it is one for a library.

        With x in bytes it is a ByteProduct.
        """
        found = self._products.get(gemm, self)  # itself for none, as None is a finding
        if found is self:
            found = self._planned(gemm)
            if len(self._products) >= PRODUCTS_KEPT:
                self._products.clear()
            self._products[gemm] = found
        return found

    def _planned(self, gemm: Gemm) -> Any:
        ordinal = self.room.ordinal
        found = device(ordinal)
        memory, sizes = (address(self.bricks), address(self.row_scale)), (gemm.m, gemm.n, gemm.k)
        in_bytes = self._byte_plan(gemm)
        if in_bytes is not None:
            parts = native_parts(in_bytes, self, gemm.m)
            return ByteProduct(native(in_bytes.quantize, ordinal), parts, gemm.k, in_bytes.stride)
        chosen = plan(gemm, found)
        if chosen is None:
            return None
        box_rows = chosen.box_rows if found.capability >= (9, 0) else 0
        numbers = BFLOAT16 if gemm.bfloat16 else FLOAT16
        return launcher().NativeProduct(native(chosen.launch, ordinal), *memory, *sizes, numbers, box_rows)

    def note(self, stream: int) -> None:
        """torch's current stream reads the weights from now on.

        Weights that die before a stream has read them stay in their memory until then, whatever stream they were made
        on. torch remembers a stream as long as the memory is in use, so it is told once.
        """
        if stream not in self.streams:
            self.streams.add(stream)
            record(self.bricks, self.row_scale)


@dataclass(frozen=True, eq=False)
class ByteProduct:
    """Launches: x to bytes, which are `stride` bytes from row to row, and their product, in one part or two."""

    quantize: Any  # _cuda.NativeLaunch
    parts: list[Any]  # _cuda.NativeProduct
    k: int
    stride: int

    def __call__(self, stream: int, x: int, x_stride: int, bias: int, y: int, work: int) -> None:
        self.quantize(stream, x, work, self.k, x_stride, self.stride)
        for part in self.parts:
            part(stream, work, self.stride, bias, y)


def native_parts(plan: BytePlan, weights: DeviceWeights, m: int) -> list[Any]:
    """The parts of a plan in native code, `_cuda.NativeProduct`."""
    (n, k), ordinal = weights.shape, weights.room.ordinal
    memory = address(weights.bricks), address(weights.row_scale)
    return [
        launcher().NativeProduct(
            native(part.launch, ordinal),
            *memory,
            m,
            n,
            k,
            BYTES,
            part.box_rows,
            first_place=part.first_place,
            places=part.places,
        )
        for part in plan.parts
    ]


def record(*memories: Memory) -> None:
    """torch's current stream reads these memories from now on."""
    stream = sys.modules["torch"].cuda.current_stream(room_of(memories[0]).ordinal)
    for memory in memories:
        as_tensor(memory).record_stream(stream)


def as_halves(w: NDArray[Any]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Numbers [N, K] as float16 numbers and the power of two of each row that they are multiplied with."""
    if w.dtype == np.float16:
        return w, np.ones(len(w), np.float32)
    numbers = w.astype(np.float32)
    largest = np.where(np.isfinite(numbers), np.abs(numbers), 0).max(axis=1)
    scale = np.ldexp(np.float32(1), np.where(largest > 0, np.frexp(largest)[1] - 15, 0))
    with np.errstate(over="ignore"):  # an infinite weight stays one
        return (numbers / scale[:, None]).astype(np.float16), scale


def stored_codes(tensor: QuantizedTensor, shift: int) -> tuple[NDArray[np.uint8], dict[str, str]] | None:
    """The bytes that a tensor's codes are in, and how pack.cu reads them; None: its storage is not known."""
    structure, k = structure_of(tensor.format), tensor.shape[1]
    if structure is None or k % structure.block:
        return None
    held = next(iter(tensor.storage.values())).view(np.uint8)
    if structure.words:
        return held, {"WORD_BITS": str(structure.code_fields[0][2]), "SHIFT": str(shift)}
    fields = ", ".join(f"{{{offset}, {run}, {bits}}}" for offset, run, bits in structure.code_fields)
    sizes = {"BLOCK": str(structure.block), "BLOCK_BYTES": str(structure.block_bytes)}
    return held, {"FIELDS": fields, "SHIFT": str(shift), **sizes}


def pack_bricks(about: BrickInfo, codes: Memory, groups: NDArray[np.uint8], room: Room, **macros: str) -> Memory:
    """Bricks of codes on the device and of what follows these in every brick. The device is current."""
    down, along = brick_shape(*about.shape)
    bricks = room.empty(down * along * about.kind.brick_bytes)
    pack_to(address(bricks), about, codes, groups, room, **macros)
    return bricks


def pack_to(bricks: int, about: BrickInfo, codes: Memory, groups: NDArray[np.uint8], room: Room, **macros: str) -> None:
    """The same to the memory at `bricks`."""
    beside = send(groups, room)
    pointers = address(codes), address(beside), bricks
    brick_kernel("pack", about, 128, **macros)(room.ordinal, room.stream, *pointers, *about.shape)
    synchronize(room.stream)  # `codes` and `beside` must stay until the kernel has read them


def brick_kernel(name: str, about: BrickInfo, threads: int, **macros: str) -> KernelLaunch:
    """A kernel with a CTA for each brick: pack, unpack or dequantize."""
    down, along = brick_shape(*about.shape)
    defined = tuple(sorted((about.kind.macros() | macros).items()))
    return KernelLaunch(f"{name}.cu", f"marlin_{name}", defined, (down * along, 1), threads)
