"""Count what a decode step costs on Apple GPUs: launches, bytes and estimated time, beside mlx-lm's; no Mac is needed.

Both steps are traced by `mx.export_function` on this machine: nodes of the graph are what MLX would launch. Our kernels
and MLX's matmuls run in the emulator, which counts bytes and instructions. So does a kernel of ours in the place of
MLX's RMSNorm, whose source is not in its wheel. MLX's other operations are charged the bytes of their arrays alone.
Weights are q4_0 and MLX's 4 bits in groups of 64, 4.5 bits each; in "8b-mixed", v and down are q8_0 and MLX's 8 bits.
docs/metal.md says what the estimate leaves out.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.metal_profile import counted_with, versions
from benchmarks.metal_profile.cost import CHIPS, device_bytes, estimate
from benchmarks.metal_profile.counts import LARGEST_WHOLE, PART
from benchmarks.metal_profile.mlx_kernels import run_mlx
from benchmarks.random_model import SHAPES, Shape, write_random_model
from billfish.backends import emulator
from billfish.backends.emulator import Launch
from billfish.backends.metal import Kernels
from billfish.backends.metal.kernels import WEIGHT_INPUTS, up
from billfish.core.tables import print_table
from billfish.llm.metal import MetalDecoder
from billfish.llm.metal_cache import KeysAndValues

SMOLLM2 = Shape(30, 576, 1536, 9, 3, 49152, tied=True, rope_base=100000.0)
MODELS = {"smollm2": SMOLLM2, "8b": SHAPES["8b"], "8b-mixed": replace(SHAPES["8b"], finer="q8_0")}
BITS = {"q4_0": 4, "q8_0": 8}  # of a code, here and in mlx-lm's weights
GROUP = 64  # of mlx-lm's weights
# Primitives of MLX that launch nothing where their input is contiguous, as all of ours and mlx-lm's are at one row.
VIEWS = {
    *("Reshape", "Flatten", "Unflatten", "Transpose", "Slice", "ExpandDims", "Squeeze", "Broadcast", "AsStrided"),
    *("Split", "StopGradient", "View"),
}
MARKS = ("mlx_rms_norm", "mlx_rope", "mlx_attention", "mlx_dequantize", "mlx_swiglu")
CONSTANTS = {*WEIGHT_INPUTS, "count", "numbers"}  # inputs of our kernels


class Node(NamedTuple):
    """An operation of a traced graph; the bytes of its arrays, by name."""

    name: str
    inputs: dict[str, int]
    outputs: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]  # of inputs

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("marlin_")

    @property
    def nbytes(self) -> int:
        """What it moves: rows that are taken or written, not the table or cache around them."""
        if self.name in ("Gather", "GatherAxis"):
            return 2 * sum(self.outputs.values())
        if self.name == "SliceUpdate":
            return 2 * list(self.inputs.values())[1]
        return sum({**self.inputs, **self.outputs}.values())


class Moved(NamedTuple):
    """A launch: its bytes, and microseconds on each chip."""

    name: str
    nbytes: int
    us: tuple[float, ...]

    @classmethod
    def of(cls, launch: Launch) -> Moved:
        return cls(launch.name, device_bytes(launch), tuple(estimate(launch, chip).us for chip in CHIPS))

    @classmethod
    def by_bytes(cls, node: Node) -> Moved:
        return cls(node.name, node.nbytes, tuple(node.nbytes / (chip.bandwidth * 1e3) for chip in CHIPS))


def trace(step: Callable[..., Any], *inputs: mx.array) -> list[Node]:
    """What a step launches, views left out."""
    nodes: list[Node] = []

    def add(said: dict[str, Any]) -> None:
        if said["type"] == "primitive" and said["name"] not in VIEWS:
            sizes = [{n: int(np.prod(s)) * t.size for n, s, t in said[side]} for side in ("inputs", "outputs")]
            name = said["name"]
            if name == "CustomKernel":
                name = said["arguments"][0].removeprefix("custom_kernel_")
                name = next((mark for mark in MARKS if name.startswith(mark)), name)
            nodes.append(Node(name, *sizes, tuple(tuple(shape) for _, shape, _ in said["inputs"])))

    mx.export_function(add, step, *inputs)
    return nodes


# ---- our step ----------------------------------------------------------------------------------------------------


class CountedKernels:
    """`mx.fast.metal_kernel` for a graph; what is called runs in the emulator, too, and is counted."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._counted: dict[str, Launch] = {}

    def metal_kernel(self, **about: Any) -> Callable[..., Any]:
        traced, emulated = mx.fast.metal_kernel(**about), emulator.metal_kernel(**about)

        def call(inputs: Sequence[mx.array], **how: Any) -> Any:
            key = str((about["name"], [(each.shape, each.dtype) for each in inputs], how))
            if key not in self._counted:
                most = PART if max(each.size for each in inputs) * 8 > LARGEST_WHOLE else 0
                with emulator.launches(instructions=True, most=most) as log:
                    emulated(inputs=list(map(_numbers, about["input_names"], inputs)), **how)
                (self._counted[key],) = log
            self.launches.append(self._counted[key])
            return traced(inputs=inputs, **how)

        return call


def _numbers(name: str, array: mx.array) -> mx.array:
    """What a kernel executes does not depend on activations, which a graph does not have."""
    return array if name in CONSTANTS else mx.zeros(array.shape, array.dtype)


def our_step(shape: Shape, context: int) -> list[Moved]:
    """Of a model with random weights, with `context` positions in the end."""
    counted = CountedKernels()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, shape)
        decoder = bf.llm.load(path, device="metal-emulator").decoder
        assert isinstance(decoder, MetalDecoder)
        decoder._backend = _Backend(Kernels(counted.metal_kernel))
        decoder.pack(lambda: None)
    cache = decoder.cache()
    cache.tokens.extend([0] * (context - 1))
    for layer, held in cache.keys.items():
        _, heads, _, size = held.both.shape
        cache.keys[layer] = KeysAndValues(_empty((2, heads, room(context), size)))

    def step(token: mx.array) -> Any:
        hidden = decoder._forward(token, [decoder._span(cache, 0, 1, [])])
        keys = [held.both for held in cache.keys.values()]
        return [mx.argmax(decoder._logits(hidden), axis=-1), *keys]

    nodes = trace(step, mx.array([1], mx.uint32))
    launches = iter(counted.launches)
    moved = [Moved.of(next(launches)) if node.is_ours else Moved.by_bytes(node) for node in nodes]
    assert next(launches, None) is None
    return moved


@dataclass(frozen=True)
class _Backend:
    kernels: Kernels


def _empty(shape: tuple[int, ...]) -> mx.array:
    """Zeros that are there, and no node of a graph."""
    array = mx.zeros(shape, mx.float16)
    mx.eval(array)
    return array


def room(context: int) -> int:
    """Positions of a cache: both grow by 256."""
    return up(context, 256) * 256


# ---- mlx-lm's ----------------------------------------------------------------------------------------------------


def mlx_step(shape: Shape, context: int) -> list[Moved]:
    """The step of mlx-lm's `generate_step` with its greedy sampler, as far as it is one graph."""
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    model = llama.Model(llama.ModelArgs.from_dict(shape.transformers() | {"model_type": "llama"}))
    _quantize(model, shape)
    caches = make_prompt_cache(model)
    for each in caches:
        size = (1, shape.kv_heads, room(context), shape.head_size)
        each.keys, each.values, each.offset = _empty(size), _empty(size), context - 1

    def step(token: mx.array) -> Any:
        logits = model(token[None], cache=caches)[:, -1, :]
        scores = logits - mx.logsumexp(logits, keepdims=True)
        return [mx.argmax(scores, axis=-1), *(array for each in caches for array in (each.keys, each.values))]

    nodes = trace(step, mx.array([1], mx.uint32))
    return [_of_mlx(node) for node in nodes]


def _of_mlx(node: Node) -> Moved:
    if node.name == "QuantizedMatmul":
        return _count_matmul(*node.shapes[1:3])
    return _count_norm(node.shapes[0][-1]) if node.name == "mlx_rms_norm" else Moved.by_bytes(node)


# RMSNorm of a row, the way such kernels are written: four numbers for a thread, and one threadgroup.
RMS_NORM = """
threadgroup float scratch[32];
const uint first = 4 * thread_position_in_threadgroup.x, simdgroup = simdgroup_index_in_threadgroup;
float numbers[4], squares = 0.0f;
for (uint i = 0; i < 4; i++) {
  numbers[i] = first + i < uint(x_shape[0]) ? float(x[first + i]) : 0.0f;
  squares = fma(numbers[i], numbers[i], squares);
}
squares = simd_sum(squares);
if (thread_index_in_simdgroup == 0) scratch[simdgroup] = squares;
threadgroup_barrier(mem_flags::mem_threadgroup);
squares = simd_sum(thread_index_in_simdgroup < simdgroups_per_threadgroup ? scratch[thread_index_in_simdgroup] : 0.0f);
const float normal = rsqrt(squares / float(x_shape[0]) + 1e-5f);
for (uint i = 0; i < 4; i++) {
  if (first + i < uint(x_shape[0])) y[first + i] = half(numbers[i] * normal) * weight[first + i];
}
"""


@cache
def _count_norm(width: int) -> Moved:
    """In the place of MLX's kernel for one row."""
    kernel = emulator.metal_kernel(
        name="mlx_rms_norm", input_names=["x", "weight"], output_names=["y"], source=RMS_NORM
    )
    x, threads = np.ones(width, np.float16), up(width, 128) * 32
    with emulator.launches(instructions=True) as log:
        kernel(
            inputs=[x, x],
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )
    (launch,) = log
    return Moved.of(launch)


@cache
def _count_matmul(codes: tuple[int, int], scales: tuple[int, int]) -> Moved:
    """MLX's kernel for one row of x, in the emulator."""
    storage = {
        "packed": np.zeros((codes[0], codes[1] * 4), np.uint8),
        "scales": np.zeros(scales, np.float16),
        "biases": np.zeros(scales, np.float16),
    }
    bits = codes[1] * 32 // (scales[1] * GROUP)
    q = bf.QuantizedTensor.from_storage(bf.get_format(f"affine{bits}"), storage, GROUP)
    with emulator.launches(instructions=True, most=PART) as log:
        run_mlx(q, np.zeros((1, q.shape[1]), np.float16))
    (launch,) = log
    return Moved.of(launch)


def _quantize(model: Any, shape: Shape) -> None:
    """In groups of 64, all zeros, and scales in float16."""
    from mlx import nn
    from mlx.utils import tree_map

    names = {"v_proj": "attn_v", "down_proj": "ffn_down"}

    def how(path: str, module: Any) -> Any:
        name = f"{names.get(path.rpartition('.')[2], path)}.weight"
        return hasattr(module, "to_quantized") and {"group_size": GROUP, "bits": BITS[shape.blocks_of(name, "q4_0")]}

    nn.quantize(model, class_predicate=how)

    def empty(array: mx.array) -> mx.array:
        return mx.zeros(array.shape, array.dtype if array.dtype == mx.uint32 else mx.float16)

    model.update(tree_map(empty, model.parameters()))
    mx.eval(model.parameters())


@contextmanager
def marked() -> Iterator[None]:
    """What MLX has one kernel for on a GPU, and several operations on the CPU, is one node of the graph."""
    from mlx_lm.models import llama

    def mark(name: str, codes: int = 1) -> Any:
        def call(*given: Any, **_: Any) -> mx.array:
            arrays = [each for each in given if isinstance(each, mx.array)]
            names = [f"input{i}" for i in range(len(arrays))]
            built = mx.fast.metal_kernel(name=name, input_names=names, output_names=["y"], source="")
            *rows, width = arrays[0].shape
            (y,) = built(
                inputs=arrays,
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(*rows, width * codes)],
                output_dtypes=[mx.float16],
            )
            return y

        return call

    with (
        patch.object(mx.fast, "rms_norm", mark("mlx_rms_norm")),
        patch.object(mx.fast, "rope", mark("mlx_rope")),
        patch.object(mx.fast, "scaled_dot_product_attention", mark("mlx_attention")),
        patch.object(mx, "dequantize", mark("mlx_dequantize", codes=8)),
        patch.object(llama, "swiglu", mark("mlx_swiglu")),
    ):
        yield


# ---- both, of whole models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A decode step of a model. least: bytes of all weights and of the KV cache."""

    model: str
    context: int
    owner: str
    layer: list[str]  # its launches
    launches: int
    nbytes: int
    least: int
    estimated_us: dict[str, float]  # by chip


STEPS = {"mlx-lm": mlx_step, "billfish": our_step}
SMALL = 1024  # tokens of models that differ in layers alone


def count_steps(model: str, context: int) -> list[Step]:
    """mlx-lm's and ours."""
    with marked():
        return [_count(model, context, owner) for owner in STEPS]


def _count(model: str, context: int, owner: str) -> Step:
    """From one layer: every other one is what the second of two has more."""
    shape, step = MODELS[model], STEPS[owner]
    whole = step(replace(shape, layers=1), context)
    one, two = (step(replace(shape, layers=layers, vocabulary=SMALL), context) for layers in (1, 2))
    layer = list((Counter(two) - Counter(one)).elements())
    every = whole + layer * (shape.layers - 1)
    us = {chip.name: sum(each.us[i] for each in every) for i, chip in enumerate(CHIPS)}
    nbytes = sum(each.nbytes for each in every)
    return Step(model, context, owner, [each.name for each in layer], len(every), nbytes, least(shape, context), us)


def least(shape: Shape, context: int) -> int:
    """Matrices, with half a bit more than their codes have, but for a table of embeddings that is nothing else; norms,
    keys and values in float16."""
    matrices = {
        name: n * k * (2 * BITS[shape.blocks_of(name, "q4_0")] + 1) // 16 for name, (n, k) in shape.matrices().items()
    }
    if not shape.tied:
        del matrices["token_embd.weight"]
    cache = shape.layers * 2 * shape.kv_heads * shape.head_size * context * 2
    return sum(matrices.values()) + 2 * shape.hidden * len(shape.norms()) + cache


def main(words: Sequence[str] | None = None) -> None:
    made = command.parser(__spec__, __doc__)
    made.listed("--models", f"of {', '.join(MODELS)}", ",".join(MODELS))
    made.option("--context", "positions in the cache", 512, command.positive, "N")
    flags = made.parse_args(words)
    unknown = [name for name in flags.models if name not in MODELS]
    if unknown:
        made.error(f"--models: {unknown[0]!r} is none of {', '.join(MODELS)}")
    steps = [step for model in flags.models for step in count_steps(model, flags.context)]
    rows = [["model", "step of", "launches a layer", "a token", "MB", "of least", *(f"{c.name}, us" for c in CHIPS)]]
    for step in steps:
        cells = [step.model, step.owner, len(step.layer), step.launches, f"{step.nbytes / 1e6:.1f}"]
        cells += [f"{step.nbytes / step.least:.4f}", *(f"{us:,.0f}" for us in step.estimated_us.values())]
        rows.append([str(cell) for cell in cells])
    print_table(rows, sys.stdout, left=2, keys=2)
    for step in steps:
        print(f"\n{step.model}, a layer of {step.owner}: {', '.join(step.layer)}")
    about = {
        "machine": {"cpu": machine.cpu_name()} | machine.today(),
        "versions": versions(),
        "compiler": counted_with(),
    }
    records.write(flags.json, about | {"records": [asdict(step) for step in steps]})


if __name__ == "__main__":
    main()
