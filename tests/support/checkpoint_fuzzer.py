"""Damages checkpoints and opens them: `checkpoint_fuzzer.py FOLDER gguf|safetensors|model FIRST LAST`.

Every case is made from its number alone. A case passes if all of the checkpoint can be listed and read, or if what is
raised is a CheckpointError, without more memory than twice the file's size (and a little for Python's own objects). The
last line on standard output counts both; a crash shows as the exit status, a hang as the alarm. "model" damages
language models and asks them for the next token: that works, or raises an error of ours.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
import signal
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import gguf
import numpy as np
from llm_models import Small, write_model
from safetensors.numpy import save_file

import billfish as bf
from billfish.checkpoints.gguf_header import read_header
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.checkpoints.safetensors_files import MappedFile

OVERHEAD = 100_000  # bytes: the objects of an open checkpoint, whatever its size
SECONDS = 60
HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


def make_sources(folder: Path, container: str) -> dict[str, Path]:
    """One small checkpoint of each kind that comes in this container."""
    if container == "gguf":
        for kinds in (("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), ("Q4_K", "Q6_K", "F32"), ("MXFP4", "NVFP4", "BF16")):
            samples.gguf_file(folder / kinds[0] / "m.gguf", kinds)
        return {path.name: path for path in sorted(folder.iterdir())}
    if container == "model":
        for small in (Small("llama"), Small("qwen2", quantization="Q4_0"), Small("gemma", tied=True)):
            (folder / small.architecture).mkdir(parents=True)
            write_model(folder / small.architecture / "m.gguf", small)
        return {path.name: path for path in sorted(folder.iterdir())}
    size = {"n": 64, "k": 1024}
    samples.gptq(folder / "gptq", act_order=True, **size)
    samples.awq(folder / "awq", **size)
    samples.compressed(folder / "packed", symmetric=False, act_order=True, **size)
    samples.compressed_fp4(folder / "nvfp4", "nvfp4")
    samples.compressed_fp4(folder / "mxfp4", "mxfp4")
    samples.modelopt(folder / "modelopt")
    samples.gpt_oss(folder / "gpt-oss")
    samples.fp8(folder / "fp8")
    samples.nf4(folder / "nf4")
    samples.mlx(folder / "mlx")
    samples.write_config(folder / "sharded")
    for i in range(3):
        save_file({f"t{i}": np.ones((64, 64), np.float32)}, folder / "sharded" / f"model-{i}.safetensors")
    index = {"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(3)}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    samples.write_config(folder / "plain")
    save_file(
        {f"t{i}": samples.integers(4, 32)[0].T.astype(np.float32) for i in range(3)}, folder / "plain" / "m.safetensors"
    )
    keep = {"t1": "q4_k", "t2": "affine8", "t": "u4"}
    bf.quantize_checkpoint(folder / "plain", folder / "native", "u4", method="rtn", keep=keep)
    samples.write_config(folder / "experts")
    stack = samples.integers(4, 32, n=4 * 64, k=64)[0].T.astype(np.float32).reshape(4, 64, 64)
    save_file({"a.experts.gate_up_proj": stack, "b.experts.down_proj": stack}, folder / "experts" / "m.safetensors")
    bf.quantize_checkpoint(folder / "experts", folder / "stacks", "u4b8", method="rtn")
    bf.quantize_checkpoint(folder / "experts", folder / "one each", "u4b8", method="rtn", to="compressed-tensors")
    return {path.name: path for path in sorted(folder.iterdir())}


# ---- kinds of damage: each takes the copy of a folder and a random generator --------------------------------------


def weights_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors")))


def truncate(folder: Path, rng: random.Random) -> None:
    path = weights_file(folder, rng)
    data = path.read_bytes()
    end = rng.choice([rng.randrange(len(data)), rng.randrange(min(200, len(data))), len(data) - rng.randrange(1, 64)])
    path.write_bytes(data[:end])


def extend(folder: Path, rng: random.Random) -> None:
    path = weights_file(folder, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 5000)))


def header_end(data: bytes) -> int:
    return 2000 if data[:4] == b"GGUF" else min(len(data), 8 + int.from_bytes(data[:8], "little"))


def flip_bits(folder: Path, rng: random.Random) -> None:
    path = weights_file(folder, rng)
    data = bytearray(path.read_bytes())
    end = rng.choice([len(data), header_end(data), 32])
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(min(end, len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def lie_about_a_size(folder: Path, rng: random.Random) -> None:
    """A number of 4 or 8 bytes in the header of the file becomes another, mostly a huge one."""
    path = weights_file(folder, rng)
    data = bytearray(path.read_bytes())
    width = rng.choice([4, 8])
    at = rng.choice([8, 16, 0, rng.randrange(header_end(data) - 8)])
    value = rng.choice([*HUGE, rng.randrange(2**20), len(data), len(data) // 2])
    data[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    path.write_bytes(data)


def damage_json(value: object, rng: random.Random) -> object:
    """Somewhere in a JSON value, something else."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: damage_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], damage_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(
        [
            None,
            True,
            -1,
            0,
            1,
            3,
            4,
            8,
            32,
            64,
            0.5,
            10**18,
            10**400,
            "",
            "x",
            [],
            {},
            [1] * 9,
            "\udc00",
            2**63,
            "BF16",
            "I32",
            "F8_E4M3",
            "4",
        ]
    )


def damage_header(folder: Path, rng: random.Random) -> None:
    """Types, shapes and offsets of a safetensors header."""

    def damage(header: dict[str, Any]) -> dict[str, Any]:
        for _ in range(rng.choice([1, 1, 2])):
            damaged = damage_json(header, rng)
            header = damaged if isinstance(damaged, dict) else header
        return header

    change_header(folder, rng, damage)


def swap_types(folder: Path, rng: random.Random) -> None:
    """Another type of the same size, and a shape of the same product: what only the layout can notice."""

    def swap(header: dict[str, Any]) -> dict[str, Any]:
        about = header[rng.choice(sorted(name for name in header if name != "__metadata__"))]
        same_size = [
            ["F32", "I32", "U32"],
            ["F16", "BF16", "I16"],
            ["U8", "I8", "BOOL", "F8_E4M3", "F8_E8M0"],
            ["I64", "F64"],
        ]
        about["dtype"] = rng.choice(next(kinds for kinds in same_size if about["dtype"] in kinds))
        if rng.random() < 0.5 and about["shape"]:
            rng.shuffle(about["shape"])
            about["shape"] = rng.choice([about["shape"], [int(np.prod(about["shape"]))], [1, *about["shape"]]])
        return header

    change_header(folder, rng, swap)


def change_header(folder: Path, rng: random.Random, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Another header before the same data; of a GGUF file, another size."""
    path = weights_file(folder, rng)
    if path.suffix == ".gguf":
        return lie_about_a_size(folder, rng)
    data = path.read_bytes()
    end = header_end(data)
    text = json.dumps(change(json.loads(data[8:end]))).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return None


def damage_config(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    if not path.exists():
        return flip_bits(folder, rng)
    config = json.loads(path.read_text())
    for _ in range(rng.choice([1, 2, 4])):
        damaged = damage_json(config, rng)
        config = damaged if isinstance(damaged, dict) else config
    text = json.dumps(config).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        text = rng.choice([text[: rng.randrange(len(text))], b"[" * 5000, b"", b"\xff\xfe", b"NaN", text + b"}"])
    path.write_bytes(text)
    return None


def trick_paths(folder: Path, rng: random.Random) -> None:
    """An index that names files elsewhere, twice, or not there."""
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        return truncate(folder, rng)
    tricks = ["../x.safetensors", "/etc/passwd", "/dev/zero", "a/../../b.safetensors", "..", "", "C:\\x.safetensors"]
    tricks += [
        "\0.safetensors",
        "x" * 5000 + ".safetensors",
        "missing.safetensors",
        "config.json",
        None,
        3,
        [],
        *shards,
    ]
    index = {"weight_map": {f"t{i}": rng.choice(tricks) for i in range(rng.randrange(4))}}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(rng.choice([index, index, damage_json(index, rng)]))
    )
    return None


def random_data(folder: Path, rng: random.Random) -> None:
    """The header as it is, and anything behind it: scales that are NaN, permutations that are none."""
    path = weights_file(folder, rng)
    data = path.read_bytes()
    end = header_end(data)
    path.write_bytes(data[:end] + rng.randbytes(len(data) - end))


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    truncate,
    extend,
    flip_bits,
    flip_bits,
    lie_about_a_size,
    lie_about_a_size,
    damage_header,
    damage_header,
    swap_types,
    damage_config,
    trick_paths,
    random_data,
]


# ---- one case -------------------------------------------------------------------------------------------------------


Tensors = dict[str, bf.QuantizedTensor | bf.QuantizedExperts | np.ndarray]


def read_all(path: Path) -> tuple[bf.Checkpoint, Tensors]:
    """List, describe and read everything, and keep it. Of tensors that cannot be read, the others still can."""
    ck, tensors, problems = bf.load(path), {}, 0
    for name in ck:
        ck.describe(name)
        try:
            tensors[name] = ck[name]
            ck.permutation(name)
        except bf.CheckpointError:
            problems += 1
    if problems:
        raise bf.CheckpointError(f"{problems} tensors")
    return ck, tensors


def check_with_the_library(path: Path) -> None:
    """A header that we take is one that the `gguf` library takes, and both read the same tensors and fields in it.

    The library alone would not do: it loops on a count that lies, which we have refused.
    """
    header = read_header(MappedFile(path))
    theirs = gguf.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: field.kind for name, field in header.fields.items()} == {n: f.types[0] for n, f in fields.items()}
    tensors = [(t.name, t.tensor_type.name, tuple(t.shape.tolist())[::-1], t.data_offset) for t in theirs.tensors]
    assert [info[:4] for info in header.tensors] == tensors


def check_all(ck: bf.Checkpoint, tensors: Tensors) -> None:
    """Whatever came out is what was promised."""
    for name, tensor in tensors.items():
        about, order = ck.describe(name), ck.permutation(name)
        if isinstance(tensor, bf.QuantizedTensor):
            assert tensor.shape == (int(np.prod(about.shape[:-1])), about.shape[-1]), name
            w = bf.dequantize(tensor)
            assert order is None or np.array_equal(np.sort(order), np.arange(w.shape[1])), name
            if about.column_step < tensor.shape[1]:
                ck.read(name, rows=(0, 1), columns=(0, about.column_step))
        else:
            assert tensor.shape == about.shape, name
            if isinstance(tensor, bf.QuantizedExperts):
                assert bf.dequantize(tensor).shape == about.shape, name
    with contextlib.suppress(bf.CheckpointError):  # experts that are not all there, or unlike
        stacks = by_stacks(ck)
        for name in stacks:
            assert stacks[name].shape == stacks.describe(name).shape or len(stacks.describe(name).shape) == 1, name


def run_model(folder: Path) -> None:
    """Load a language model and feed it two tokens."""
    logits = bf.llm.load(folder / "m.gguf").logits([5, 6])
    assert len(logits) == 2


def run(case: int, sources: dict[str, Path], scratch: Path, container: str) -> bool:
    """Whether a damaged checkpoint loads; False for a CheckpointError. Anything else is raised."""
    rng = random.Random(case)
    name = sorted(sources)[case % len(sources)]
    folder = scratch / f"case-{case}"
    shutil.copytree(sources[name], folder)
    rng.choice(DAMAGE)(folder, rng)
    if container == "model":
        signal.alarm(SECONDS)
        try:
            run_model(folder)
            return True
        except bf.BillfishError:
            return False
        finally:
            signal.alarm(0)
    size = sum(path.stat().st_size for path in folder.iterdir())
    signal.alarm(SECONDS)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        found = read_all(folder)
    except bf.CheckpointError:
        found = None
    used = tracemalloc.get_traced_memory()[1] - before
    assert used <= 2 * size + OVERHEAD, f"{used} bytes for a file of {size}"
    if found is not None:
        check_all(*found)
        for path in folder.glob("*.gguf"):
            check_with_the_library(path)
    signal.alarm(0)
    shutil.rmtree(folder)
    return found is not None


def main() -> None:
    scratch, container, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sources = make_sources(scratch / "sources", container)
    for path in sources.values():
        check_all(*read_all(path))
        if container == "model":
            run_model(path)
    tracemalloc.start()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20),) * 2)  # also what libraries allocate by themselves
    counts = {True: 0, False: 0}
    for case in range(first, last):
        try:
            counts[run(case, sources, scratch, container)] += 1
        except BaseException as error:
            print(f"case {case}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
    print(json.dumps({"loaded": counts[True], "refused": counts[False]}))


if __name__ == "__main__":
    main()
