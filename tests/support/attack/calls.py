"""Arguments of public calls: arrays of odd shapes, types and strides, and numbers at their edges."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from attack.cases import Case, edge
from attack.gguf_files import model as model_file
from billfish.backends.cpu.packed import PlainWeights
from billfish.llm.cpu import CpuCache

SIZES = (0, 1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 128, 256)
TYPES = ("f4", "f2", "f8", "i4", "u4", "u1", "i1", "i8", "?", ">f4", "c8", "U3", "O")
ODD = (
    None,
    True,
    -1,
    0,
    1,
    0.5,
    2**31,
    2**63,
    10**30,
    float("nan"),
    "",
    "x",
    "q4_0",
    "\0",
    b"x",
    [],
    {},
    [[1.0]],
    object,
)


@functools.cache
def small_model() -> Any:
    """A language model in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.gguf")
        path.write_bytes(model_file(random.Random(0)).bytes())
        return bf.llm.load(path, progress=False)


def array(rng: random.Random, *near: int) -> Any:
    """An array of some shape, type and layout in memory; now and then something else."""
    if rng.random() < 0.1:
        return rng.choice(ODD)
    sizes = (*SIZES, *near, *near, *near)
    shape = tuple(rng.choice(sizes) for _ in range(rng.choice([2, 2, 2, 2, 1, 0])))
    if rng.random() < 0.1:
        shape = (rng.choice([0, 1, 2, 3]), *shape)
    type_ = rng.choice(["f4", "f4", "f4", "f4", "u1", "u4", "i4", *TYPES])
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, 100, shape)
    made: Any = values.astype(type_)
    if made.dtype.kind == "f" and rng.random() < 0.2 and made.size:
        made.flat[0] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -0.0, 1e-45]) if made.itemsize > 2 else np.nan
    layout = rng.random()
    if layout < 0.1 or not made.ndim:
        return made.T
    if layout < 0.2:
        return made[::2]
    if layout < 0.3:
        return made[..., ::-1]
    if layout < 0.35:
        return np.broadcast_to(made[:1], made.shape) if made.ndim and len(made) else made
    if layout < 0.4:
        return (
            np.frombuffer(b"\0" + made.tobytes(), np.uint8)[1:].view(made.dtype).reshape(made.shape)
            if made.dtype != object
            else made
        )
    return made


def format_of(rng: random.Random) -> Any:
    return rng.choice([*bf.FORMATS, *bf.FORMATS, *ODD])


def number(rng: random.Random, *good: Any) -> Any:
    return rng.choice([*good, *good, *good, edge(rng), *ODD])


def tensor(rng: random.Random) -> bf.QuantizedTensor:
    name, k = rng.choice(list(bf.FORMATS)), rng.choice([256, 512])
    return bf.quantize(np.random.default_rng(1).standard_normal((rng.choice([1, 5, 16]), k), np.float32), name)


def odd_storage(rng: random.Random, q: bf.QuantizedTensor) -> dict[str, Any]:
    storage: dict[str, Any] = dict(q.storage)
    name = rng.choice(list(storage))
    held = storage[name]
    if not held.ndim:
        return {**storage, name: array(rng)}
    storage[name] = rng.choice(
        [held.T, held[:1], held[..., ::2], held.astype("f8"), held.reshape(-1), array(rng), None]
    )
    if rng.random() < 0.1:
        del storage[name]
    return storage


def activations(rng: random.Random) -> Any:
    return rng.choice(["exact", "q8", "q16", "exact", "q8", "q16", "q4", None, 8])


# ---- the calls, each with arguments that may be right ----------------------------------------------------------------


def quantize(rng: random.Random) -> Any:
    return bf.quantize(
        array(rng, 256),
        format_of(rng),
        group_size=number(rng, None, 32, 128),
        method=rng.choice(["rtn", "mse", "x", None]),
    )


def linear(rng: random.Random) -> Any:
    q = tensor(rng)
    out = array(rng, q.shape[0]) if rng.random() < 0.3 else None
    weights = rng.choice([q, q, bf.prepack(q), array(rng)])
    bias = array(rng, q.shape[0]) if rng.random() < 0.4 else None
    return bf.quantized_linear(array(rng, q.shape[1]), weights, bias=bias, activations=activations(rng), out=out)


def linears(rng: random.Random) -> Any:
    many = [tensor(rng) for _ in range(3)]
    x = rng.choice([array(rng, 256), [array(rng, q.shape[1]) for q in many], array(rng, 512)])
    biases = rng.choice([None, [None] * 3, [array(rng, q.shape[0]) for q in many], [None]])
    return bf.quantized_linears(
        x, rng.choice([many, tuple(many), many[:1] * 3, [], None]), biases=biases, activations=activations(rng)
    )


def dequantize(rng: random.Random) -> Any:
    return bf.dequantize(
        rng.choice([tensor(rng), array(rng)]), dtype=rng.choice([None, "float16", "float32", "int8", 3])
    )


def from_storage(rng: random.Random) -> Any:
    q = tensor(rng)
    order = rng.choice([None, None, np.arange(q.shape[1]), np.arange(q.shape[1]) - 1, array(rng, q.shape[1])])
    format = rng.choice([q.format.name, format_of(rng)])
    return bf.QuantizedTensor.from_storage(format, odd_storage(rng, q), number(rng, q.group_size), permutation=order)


def made_tensor(rng: random.Random) -> Any:
    """The dataclass itself, with a false shape, group or storage; what it lets through is multiplied with."""
    q = tensor(rng)
    changes: dict[str, Any] = {
        "shape": rng.choice([(q.shape[0], 2**40), (0, 0), q.shape[::-1], (q.shape[0] + 1, q.shape[1]), q.shape]),
        "group_size": number(rng, q.group_size),
        "storage": odd_storage(rng, q),
        "permutation": rng.choice([np.arange(q.shape[1]), np.arange(q.shape[1]) + 1, np.full(q.shape[1], -(2**31))]),
    }
    name = rng.choice(list(changes))
    made = dataclasses.replace(q, **{name: changes[name]})
    return bf.quantized_linear(np.ones((2, made.shape[1]), np.float32), made)


def made_packed(rng: random.Random) -> Any:
    """Packed weights that say something false about their stream."""
    held = bf.prepack(tensor(rng))
    n, k = held.shape
    changes: dict[str, Any] = {
        "shape": rng.choice(
            [(n + 64, k), (n, 2 * k), (-1, k), (n, 2**62), (2**40, 2**40), (n,), (n, float(k)), (k, n)]
        ),
        "data": rng.choice([held.data[:-1], held.data[::2], held.data.view(np.int8), held.data.reshape(1, -1), None]),
        "axes": dataclasses.replace(
            held.axes, group=rng.choice([0, 7, -32, 2**31, 512]), codes=rng.choice(["u4", "x", "s8"])
        ),
        "permutation": rng.choice([np.arange(k) + 1, np.arange(2 * k), np.full(k, 2**31 - 1)]),
        "level": rng.choice(["abacus", None, held.level]),
        "group_size": rng.choice([None, "x", 32]),
    }
    name = rng.choice(list(changes))
    made = dataclasses.replace(held, **{name: changes[name]})
    return bf.quantized_linear(np.ones((2, made.shape[1]), np.float32), made)


def made_plain(rng: random.Random) -> Any:
    held = small_model().decoder._backend.level
    return PlainWeights(
        rng.choice(["float32", "int8", None]),
        rng.choice([(4, 32), (2**40, 2**40), (-1, 1)]),
        held,
        rng.choice([np.zeros(9, np.uint8), None, np.zeros((2, 2), np.uint8)]),
    )


def packing(rng: random.Random) -> Any:
    kind = rng.choice(["fp4", "u4", "s4"])
    if rng.random() < 0.5:
        return getattr(bf, f"pack_{kind}_weights")(array(rng, 256), group_size=number(rng, 32, 128, -1))
    arrays = [array(rng, 32, 8) for _ in range(3 if kind == "u4" else 2)]
    return getattr(bf, f"unpack_{kind}_weights")(*arrays, group_size=number(rng, 32, 128, -1))


def blocks(rng: random.Random) -> Any:
    name = rng.choice(["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1"])
    return getattr(bf, f"{rng.choice(['quantize', 'dequantize'])}_{name}")(array(rng, 32, 18, 20, 22, 24, 34, 36))


def w4a8(rng: random.Random) -> Any:
    q = bf.quantize(np.ones((8, 128), np.float32), rng.choice(["u4", "u4b8", "q4_0"]))
    x = bf.quantize(np.ones((3, 128), np.float32), rng.choice(["q8_0", "q8_1", "q4_0"]))
    return bf.gemm_w4a8(
        rng.choice([x, x.storage["blocks"], array(rng, 136, 144)]),
        rng.choice([q, array(rng, 72)]),
        format=rng.choice([None, "q4_0", 3]),
    )


def load(rng: random.Random) -> Any:
    path = rng.choice(
        ["", "\0", "x" * 5000, "/", "/dev/null", "/dev/zero", "/proc/self/mem", "\udcff", "~", "a\nb", *ODD]
    )
    return rng.choice([bf.load, bf.llm.load if path is not None else bf.load, bf.PackedWeights.load])(path)


def tokens(rng: random.Random) -> list[Any]:
    good = range(small_model().config.vocabulary)
    return [
        rng.choice([rng.choice(good), rng.choice(good), edge(rng, len(good)), -1])
        for _ in range(rng.choice([0, 1, 3, 70]))
    ]


def embed(rng: random.Random) -> Any:
    return small_model().decoder.embed(tokens(rng))


def logits(rng: random.Random) -> Any:
    return small_model().logits(tokens(rng), activations=activations(rng))


def scores(rng: random.Random) -> Any:
    """Hidden states of any shape."""
    return small_model().decoder.logits(array(rng, 32), activations(rng))


def generate(rng: random.Random) -> Any:
    settings = {"max_tokens": rng.choice([0, 1, 3, -1]), "temperature": rng.choice([0.0, 1.0, -1.0, float("nan")])}
    settings |= {
        "top_k": rng.choice([0, 5, -1]),
        "top_p": rng.choice([1.0, 0.5, 0.0, 2.0]),
        "seed": rng.choice([0, -1]),
    }
    name = rng.choice(list(settings))
    prompt = rng.choice([tokens(rng), "ab", "", [1, 2], [{"role": "user"}], [1, "a"]])
    return "".join(
        small_model().generate(prompt, raw=True, **{name: settings[name], "max_tokens": 2} | {name: settings[name]})
    )


def foreign_cache(rng: random.Random) -> Any:
    """A cache of sizes that are not the model's, or of another capacity."""
    model = small_model()
    c = model.config
    mixer = dataclasses.replace(c.blocks[0].mixer, **{rng.choice(["kv_heads", "head_size"]): rng.choice([1, 2, 16])})
    block = dataclasses.replace(c.blocks[0], mixer=mixer)
    wrong = dataclasses.replace(c, **rng.choice([{"context": rng.choice([1, 2, 16])}, {"blocks": (block,)}]))
    cache = CpuCache(rng.choice([c, wrong]), rng.choice([0, 1, 16, 100, -1, 2**40, 0.5]))
    return "".join(model.generate([1, 2, 3], max_tokens=3, cache=cache))


def threads(rng: random.Random) -> Any:
    bf.set_threads(rng.choice(ODD))
    return bf.set_threads(0)


CALLS = [quantize, linear, linear, linears, dequantize, from_storage, made_tensor, made_packed, made_plain, packing]
CALLS += [blocks, w4a8, load, embed, logits, scores, generate, foreign_cache, threads]


def calls(rng: random.Random) -> Case:
    """One call. Warnings of NumPy about odd numbers are nobody's errors."""
    call = rng.choice(CALLS)

    def attempt(folder: Path) -> None:
        small_model()
        with np.errstate(all="ignore"):
            call(rng)

    return Case(call.__name__, {}, attempt)
