"""Files that once cost gigabytes or minutes, ended the process, or raised errors of others. Each must be cheap now."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import billfish as bf
from attack.cases import Case, as_json, read_all, run_model
from attack.folders import CONFIG, tokenizer, use_tokenizer, weights
from attack.gguf_files import LIST, STRING, U32, Gguf, Tensor, add, collection, model
from attack.mutated_files import statistics, use_statistics
from attack.packed_files import multiply, npy
from attack.packed_files import weights as packed_weights
from attack.safetensors_files import joined

RNG = random.Random(0)


def small_model(architecture: str = "llama") -> Gguf:
    """A model of this architecture that runs."""
    return next(file for seed in range(100) if (file := model(random.Random(seed))).fields[0][2] == architecture)


def gguf(file: Gguf, attempt: Callable[[Path], object] = run_model) -> Case:
    return Case("gguf", {"m.gguf": file.bytes()}, lambda folder: attempt(folder / "m.gguf"))


def set_field(file: Gguf, name: str, value: object) -> None:
    for one in file.fields:
        if one[0].endswith(name):
            one[2] = value


def no_layers() -> Case:
    """Without layers no tensor tells the other sizes."""
    file = small_model()
    for name, value in {"block_count": 0, "feed_forward_length": 2**30, "attention.head_count": 2**20}.items():
        set_field(file, name, value)
    return gguf(file)


def many_layers() -> Case:
    """A count of layers that no file could have."""
    file = small_model()
    set_field(file, "block_count", 2**32 - 1)
    return gguf(file)


def layers_on_one_matrix() -> Case:
    file = small_model()
    set_field(file, "block_count", 400)
    first = [tensor for tensor in file.tensors if tensor.name.startswith("blk.0.")]
    file.tensors = [tensor for tensor in file.tensors if not tensor.name.startswith("blk.")]
    for i in range(400):
        file.tensors += [Tensor(t.name.replace("blk.0.", f"blk.{i}."), t.extents, t.type, t.offset) for t in first]
    return gguf(file)


def tiny_layers() -> Case:
    """Matrices of one weight are padded, and each has its objects."""
    file = small_model()
    for one in file.fields:
        sizes = {"block_count": 4000, "embedding_length": 1, "feed_forward_length": 1, "head_count": 1}
        one[2] = sizes.get(one[0].split(".")[-1], one[2])
    rows = next(len(one[2][1]) for one in file.fields if one[0].endswith(".tokens"))
    file.tensors, end = [Tensor("token_embd.weight", [1, rows], 0, 0), Tensor("output_norm.weight", [1], 0, 2048)], 2080
    shapes = {"attn_q": [1, 16], "attn_k": [1, 16], "attn_v": [1, 16], "attn_output": [16, 1], "ffn_gate": [1, 1]}
    shapes |= {"ffn_up": [1, 1], "ffn_down": [1, 1], "attn_norm": [1], "ffn_norm": [1]}
    for i in range(4000):
        for name, extents in shapes.items():
            file.tensors.append(Tensor(f"blk.{i}.{name}.weight", extents, 0, end))
            end += 64
    file.data = bytes(end)
    return gguf(file)


def list_for_a_number() -> Case:
    """Two bytes of the file, and 36 of memory."""
    file = small_model()
    file.fields = [one for one in file.fields if not one[0].endswith("block_count")]
    file.fields.append(["llama.block_count", LIST, (2, np.arange(6_000_000).astype("<u2").tobytes())])
    return gguf(file)


def many_fields() -> Case:
    file = collection(RNG)
    file.fields += [[f"f{i}", 0, 1] for i in range(100_000)]
    return gguf(file, read_all)


def many_tensors() -> Case:
    file = collection(RNG)
    file.tensors += [Tensor(f"t{i}", [0], 0, 0) for i in range(100_000)]
    return gguf(file, read_all)


def holes(head: bytes, size: int) -> Case:
    """A file that has so many bytes and takes up a page: zeros are tensors and strings without a name."""

    def attempt(folder: Path) -> None:
        (folder / "m.gguf").write_bytes(head)
        os.truncate(folder / "m.gguf", size)
        read_all(folder / "m.gguf")

    return Case("holes", {}, attempt)


def header_of_holes() -> Case:
    return holes(struct.pack("<4sIQQ", b"GGUF", 3, 800_000, 0), 100 << 20)


def list_of_holes() -> Case:
    count = 20_000_000
    return holes(struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"a", LIST, STRING, count), 8 * count + 100)


def metadata_for_modules() -> Case:
    """Many modules, whose formats the metadata of the file says: it is read once."""
    count = 5000
    about = json.dumps({"format": "q4_0", "group_size": 32, "modules": {f"m{i}": {} for i in range(count)}})
    header: dict[str, object] = {"__metadata__": {"billfish": about}}
    for i in range(count):
        header[f"m{i}.blocks"] = {"dtype": "U8", "shape": [1, 18], "data_offsets": [18 * i, 18 * i + 18]}
    content = joined(as_json(header), bytes(18 * count))
    return Case("safetensors", {"m.safetensors": content}, lambda folder: read_all(folder / "m.safetensors"))


def modules_of_mlx() -> Case:
    """A configuration with as many exceptions as there are modules."""
    shapes = {"weight": ("U32", [1, 8], 32), "scales": ("F16", [1, 1], 2), "biases": ("F16", [1, 1], 2)}
    header, end = {}, 0
    for i in range(3000):
        for name, (kind, shape, size) in shapes.items():
            header[f"m{i}.{name}"] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
            end += size
    config = {"quantization": {"bits": 4, "group_size": 64, **{f"m{i}": {"bits": 4} for i in range(3000)}}}
    files = {"m.safetensors": joined(as_json(header), bytes(end)), "config.json": as_json(config)}
    return Case("mlx", files, read_all)


def with_pieces(architecture: str, more: list[str]) -> Gguf:
    """A model with more pieces, and rows of the embedding for them."""
    file = small_model(architecture)
    for one in file.fields:
        added = {"tokens": more, "token_type": [1] * len(more), "scores": [0.0] * len(more)}.get(one[0].split(".")[-1])
        if added is not None:
            one[2] = (one[2][0], [*one[2][1], *added])
        if one[0].endswith(".tokens"):
            rows = len(one[2][1])
    file.tensors = [tensor for tensor in file.tensors if tensor.name != "token_embd.weight"]
    add(file, "token_embd.weight", "Q4_0", (rows, 32), np.random.default_rng(0))
    return file


def long_piece(architecture: str) -> Case:
    """A piece of a megabyte, beside pieces of all lengths that it begins and ends with."""
    return gguf(with_pieces(architecture, ["a" * 1_000_000, *("a" * i for i in range(3, 100))]))


def vocabulary_without_rows() -> Case:
    """config.json may say anything about its vocabulary: the rows of the embedding count."""
    return folder_with(vocab_size=10**12)


def merges_of_everything() -> Case:
    """Pieces aa, aaa, aaaa, ...: each is made of two others in all ways."""
    return gguf(with_pieces("gemma", ["a" * i for i in range(2, 1500)]))


def folder_with(**settings: object) -> Case:
    files = {"model.safetensors": weights(), "config.json": as_json({**CONFIG, **settings})}
    return Case("config.json", {**files, "tokenizer.json": as_json(tokenizer())}, run_model)


def heads_without_end() -> Case:
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return folder_with(head_dim=2**40, rope_scaling={**rule, "original_max_position_embeddings": 32})


def token_without_end() -> Case:
    known = tokenizer()
    known["model"]["vocab"]["far"] = 2**31
    return Case("tokenizer.json", {"tokenizer.json": as_json(known)}, use_tokenizer)


def panic() -> Case:
    """Inside the library, which raises what is no Exception."""
    known = tokenizer()
    known["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    return Case("tokenizer.json", {"tokenizer.json": as_json(known)}, use_tokenizer)


def nested_json() -> Case:
    """Lists in a list: 3 bytes of a file, and 70 of memory."""
    return Case(
        "config.json", {"model.safetensors": weights(), "config.json": b"[" + b"[]," * 2_000_000 + b"0]"}, read_all
    )


def inflating_archive() -> Case:
    """A file of packed weights whose arrays are compressed."""
    held, out = packed_weights("q4_0"), io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data.npy", npy(held.data, RNG, True))
        file.writestr("about.npy", npy(np.zeros(120_000_000, np.uint8), RNG, True))
    return Case("packed", {"packed.npz": out.getvalue()}, lambda folder: multiply(folder / "packed.npz"))


def lying_archive() -> Case:
    """An array that says that it has a terabyte."""
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + "\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("data.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode())
    return Case("packed", {"packed.npz": out.getvalue()}, lambda folder: multiply(folder / "packed.npz"))


def axes_without_end() -> Case:
    """Half a million axes, whose product takes seconds."""
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (" + "9," * 500_000 + "), }\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("data.npy", b"\x93NUMPY\1\0\0\0" + header.encode())
    return Case("packed", {"packed.npz": out.getvalue()}, lambda folder: multiply(folder / "packed.npz"))


def members_without_number() -> Case:
    """40,000 members, and the end of the file says that there are three."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for i in range(40_000):
            file.writestr(f"{i}", b"")
    content = bytearray(out.getvalue())
    content[-14:-10] = struct.pack("<HH", 3, 3)
    return Case("packed", {"packed.npz": bytes(content)}, lambda folder: multiply(folder / "packed.npz"))


def overlap(container: str) -> Case:
    """Two tensors in the same bytes."""
    if container == "gguf":
        file = collection(RNG)
        one = file.tensors[0]
        file.tensors = [one, Tensor("twin", one.extents, one.type, one.offset)]
        return gguf(file, read_all)
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": at} for name, at in {"a": [0, 4], "b": [2, 6]}.items()
    }
    return Case(
        "safetensors",
        {"m.safetensors": joined(as_json(header), bytes(6))},
        lambda folder: read_all(folder / "m.safetensors"),
    )


def pipe(name: str) -> Case:
    """Whoever opens it waits for a writer."""

    def attempt(folder: Path) -> None:
        os.mkfifo(folder / name)
        bf.PackedWeights.load(folder / name) if name.endswith(".npz") else bf.load(folder / name)

    return Case("pipe", {}, attempt)


def no_parts() -> Case:
    files = {"m-00001-of-00000.gguf": collection(RNG).bytes()}
    return Case("split", files, lambda folder: read_all(folder / "m-00001-of-00000.gguf"))


def embedding_without_axes() -> Case:
    about = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    files = {"model.safetensors": joined(as_json({"model.embed_tokens.weight": about}), bytes(4))}
    return Case("0-d", {**files, "config.json": as_json(CONFIG), "tokenizer.json": as_json(tokenizer())}, run_model)


def terminal_in_a_name() -> Case:
    """Control characters, and a name of 100,000 characters: the message has neither."""
    file = collection(RNG)
    file.tensors[0].name = file.tensors[1].name = "\x1b[2J\x07\u202e" + "x" * 100_000
    return gguf(file, read_all)


def alignment_of_everything() -> Case:
    file = small_model()
    file.fields.append(["general.alignment", U32, 2**31])
    return gguf(file)


def sums_beyond_float32() -> Case:
    """Sums of squares that an imatrix file would hold as infinity."""
    known = statistics()
    next(iter(known.values())).squares[3] = 1e300

    def attempt(folder: Path) -> None:
        known.save(folder / "s.safetensors")
        use_statistics(folder / "s.safetensors")

    return Case("statistics", {}, attempt)


def signaling_nan() -> Case:
    """An imatrix file whose first number warns when it is widened."""
    numbers = struct.pack("<4I", 0x7F800001, 0, 0, 0)
    name = b"blk.0.attn_q.weight"
    content = struct.pack(f"<ii{len(name)}sii", 1, len(name), name, 1, 4) + numbers
    return Case("statistics", {"s.dat": content}, lambda folder: use_statistics(folder / "s.dat"))


# By name: the case, and whether it is refused.
FINDINGS: dict[str, tuple[Callable[[], Case], bool]] = {
    "no layers": (no_layers, True),
    "many layers": (many_layers, True),
    "400 layers on one matrix": (layers_on_one_matrix, True),
    "4,000 tiny layers": (tiny_layers, True),
    "a list for a number": (list_for_a_number, True),
    "100,000 fields": (many_fields, True),
    "100,000 tensors": (many_tensors, True),
    "a header of holes": (header_of_holes, True),
    "a list of holes": (list_of_holes, True),
    "metadata for each module": (metadata_for_modules, False),
    "exceptions for each module": (modules_of_mlx, False),
    "a piece of 1 MB, byte-level": (functools.partial(long_piece, "qwen2"), False),
    "a piece of 1 MB, SentencePiece": (functools.partial(long_piece, "gemma"), False),
    "merges of everything": (merges_of_everything, True),
    "vocab_size of 10**12": (vocabulary_without_rows, False),
    "heads without end": (heads_without_end, True),
    "a token without end": (token_without_end, True),
    "a panic inside tokenizers": (panic, True),
    "lists in a list": (nested_json, True),
    "an archive that inflates": (inflating_archive, True),
    "an archive that lies": (lying_archive, True),
    "an array of 500,000 axes": (axes_without_end, True),
    "an archive of members without number": (members_without_number, True),
    "tensors that overlap in GGUF": (functools.partial(overlap, "gguf"), True),
    "tensors that overlap in safetensors": (functools.partial(overlap, "safetensors"), True),
    "a pipe as GGUF": (functools.partial(pipe, "m.gguf"), True),
    "a pipe as packed weights": (functools.partial(pipe, "packed.npz"), True),
    "part 1 of 0": (no_parts, True),
    "an embedding without axes": (embedding_without_axes, True),
    "a terminal in a name": (terminal_in_a_name, True),
    "an alignment of 2 GB": (alignment_of_everything, True),
    "sums beyond float32": (sums_beyond_float32, True),
    "a signaling NaN": (signaling_nan, True),
}
