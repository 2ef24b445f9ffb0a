"""GGUF files: every field at every edge, lying products of dimensions, overlapping offsets, counts, types, names."""

from __future__ import annotations

import copy
import math
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attack.cases import ODD_NAMES, Case, edge, read_all, run_model
from billfish.checkpoints.gguf_header import GGML_TYPES
from billfish.checkpoints.tokenizer.tokenizer import BYTE, CONTROL, NORMAL, byte_characters

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, F32, BOOL, STRING, LIST = 4, 6, 7, 8, 9
TYPES = {about.name: number for number, about in GGML_TYPES.items()}


@dataclass
class Tensor:
    """What the header says about a tensor, true or not."""

    name: Any  # a string, or bytes
    extents: list[int]  # fastest first
    type: int
    offset: int
    axes: int | None = None  # other than there are


@dataclass
class Gguf:
    """A file in the words of its grammar: each can be set by itself."""

    fields: list[list[Any]] = field(default_factory=list)  # name, type, value; of lists (type, items)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    field_count: int | None = None
    tensor_count: int | None = None
    string_length: dict[int, int] = field(default_factory=dict)  # of the n-th string, instead of its own
    list_count: dict[int, int] = field(default_factory=dict)

    def bytes(self) -> bytes:
        self._strings = self._lists = 0
        counts = len(self.tensors) if self.tensor_count is None else self.tensor_count
        fields = len(self.fields) if self.field_count is None else self.field_count
        out = [self.magic, struct.pack("<IQQ", self.version % 2**32, counts % 2**64, fields % 2**64)]
        for name, kind, value in self.fields:
            out += [self._string(name), struct.pack("<I", kind % 2**32), self._value(kind, value)]
        for tensor in self.tensors:
            axes = len(tensor.extents) if tensor.axes is None else tensor.axes
            out += [self._string(tensor.name), struct.pack("<I", axes % 2**32)]
            out += [struct.pack("<Q", extent % 2**64) for extent in tensor.extents]
            out += [struct.pack("<IQ", tensor.type % 2**32, tensor.offset % 2**64)]
        header = b"".join(out)
        return header + bytes(-len(header) % 32) + self.data

    def _string(self, text: Any) -> bytes:
        content = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
        length = self.string_length.get(self._strings, len(content))
        self._strings += 1
        return struct.pack("<Q", length % 2**64) + content

    def _value(self, kind: int, value: Any) -> bytes:
        if kind == STRING:
            return self._string(value)
        if kind == LIST and isinstance(value, tuple):
            item, items = value
            if isinstance(items, bytes):  # many numbers
                return struct.pack("<IQ", item, len(items) // struct.calcsize(NUMBERS[item])) + items
            count = self.list_count.get(self._lists, len(items))
            self._lists += 1
            return struct.pack("<IQ", item % 2**32, count % 2**64) + b"".join(self._value(item, one) for one in items)
        letter = NUMBERS.get(kind, "Q")
        try:
            return struct.pack(f"<{letter}", value)
        except (struct.error, OverflowError, TypeError):
            return random.Random(str(value)).randbytes(struct.calcsize(f"<{letter}"))


def add(file: Gguf, name: str, kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """A tensor whose bytes are random, with scales that are numbers and divisors that are positive."""
    about = GGML_TYPES[TYPES[kind]]
    count = int(np.prod(shape, dtype=np.int64)) // about.block_size
    if name == "rope_freqs.weight":
        content = rng.uniform(1, 8, count).astype("<f4").tobytes()
    elif kind == "F32":
        content = rng.standard_normal(count).astype("<f4").tobytes()
    else:
        blocks = rng.integers(0, 256, (count, about.block_bytes), np.uint8)
        if about.block_bytes >= 2:
            blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        content = blocks.tobytes()
    file.tensors.append(Tensor(name, list(reversed(shape)), TYPES[kind], len(file.data)))
    file.data += content + bytes(-len(content) % 32)


def collection(rng: random.Random) -> Gguf:
    """Tensors of several types, and fields of all types."""
    file, numbers = Gguf(), np.random.default_rng(rng.randrange(2**32))
    file.fields = [["general.architecture", STRING, "llama"], ["general.alignment", U32, 32]]
    file.fields += [[f"n.{kind}", kind, 1] for kind in NUMBERS]
    file.fields += [["s", STRING, "text"], ["l", LIST, (STRING, ["a", "", "ü"])]]
    file.fields += [[f"l.{kind}", LIST, (kind, [1, 0, 1])] for kind in rng.sample(list(NUMBERS), 3)]
    for i, kind in enumerate(rng.sample([*TYPES, "F32", "Q4_0", "Q4_K", "NVFP4", "MXFP4"], 5)):
        shape = rng.choice([(2, 256), (3, 2, 256), (256,), (1, 512)])
        add(file, f"t{i}.weight", kind, shape, numbers)
    return file


def model(rng: random.Random) -> Gguf:
    """A language model that runs, small enough to be loaded in milliseconds."""
    architecture = rng.choice(["llama", "qwen2", "qwen3", "gemma"])
    kind = rng.choice(["F32", "Q8_0", "Q4_0", "F16", "Q5_1"])
    numbers, file = np.random.default_rng(rng.randrange(2**32)), Gguf()
    hidden, heads, kv_heads, head, forward, layers = 32, 2, 1, 16, 64, rng.choice([1, 2])
    sizes = {
        "block_count": layers,
        "context_length": 64,
        "embedding_length": hidden,
        "feed_forward_length": forward,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
    }
    control = ["<s>", "</s>"]
    pieces, kinds = [*control, *byte_characters(), "ab"], [CONTROL] * 2 + [NORMAL] * 257
    more = [["tokenizer.ggml.pre", STRING, "default"], ["tokenizer.ggml.merges", LIST, (STRING, ["a b"])]]
    if architecture == "gemma":
        words = ["▁", "a", "b", "▁a", "ab", "▁ab"]
        pieces, kinds = (
            [*control, *(f"<0x{b:02X}>" for b in range(256)), *words],
            [CONTROL] * 2 + [BYTE] * 256 + [1] * 6,
        )
        more = [["tokenizer.ggml.scores", LIST, (F32, [-float(i) for i in range(len(pieces))])]]
    file.fields = [["general.architecture", STRING, architecture], ["general.name", STRING, "small"]]
    file.fields += [[f"{architecture}.{name}", U32, size] for name, size in sizes.items()]
    file.fields += [[f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5]]
    file.fields += [[f"{architecture}.rope.freq_base", F32, 10000.0]]
    file.fields += [["tokenizer.ggml.model", STRING, "llama" if architecture == "gemma" else "gpt2"]]
    file.fields += [["tokenizer.ggml.tokens", LIST, (STRING, pieces)], ["tokenizer.ggml.token_type", LIST, (5, kinds)]]
    file.fields += [["tokenizer.ggml.bos_token_id", U32, 0], ["tokenizer.ggml.eos_token_id", U32, 1], *more]
    add(file, "token_embd.weight", kind, (len(pieces), hidden), numbers)
    matrices = {
        "attn_q": (heads * head, hidden),
        "attn_k": (kv_heads * head, hidden),
        "attn_v": (kv_heads * head, hidden),
        "attn_output": (hidden, heads * head),
        "ffn_gate": (forward, hidden),
        "ffn_up": (forward, hidden),
        "ffn_down": (hidden, forward),
    }
    for i in range(layers):
        for name, shape in matrices.items():
            add(file, f"blk.{i}.{name}.weight", kind, shape, numbers)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                add(file, f"blk.{i}.{name}.bias", "F32", shape[:1], numbers)
        for name, size in {"attn_norm": hidden, "ffn_norm": hidden}.items():
            add(file, f"blk.{i}.{name}.weight", "F32", (size,), numbers)
        if architecture == "qwen3":
            add(file, f"blk.{i}.attn_q_norm.weight", "F32", (head,), numbers)
            add(file, f"blk.{i}.attn_k_norm.weight", "F32", (head,), numbers)
    add(file, "output_norm.weight", "F32", (hidden,), numbers)
    if rng.random() < 0.2:
        add(file, "rope_freqs.weight", "F32", (head // 2,), numbers)
    return file


# ---- rules of the grammar, broken ----------------------------------------------------------------------------------


def counts(file: Gguf, rng: random.Random) -> None:
    name = rng.choice(["field_count", "tensor_count", "version"])
    setattr(file, name, edge(rng, len(file.fields), len(file.tensors)))


def magic(file: Gguf, rng: random.Random) -> None:
    file.magic = rng.choice([b"GGUF"[::-1], b"GGML", b"\0\0\0\0", b"PK\3\4", b"GGU", b""])


def string_length(file: Gguf, rng: random.Random) -> None:
    file.string_length[rng.randrange(len(file.fields) + len(file.tensors))] = edge(rng, 4)


def list_count(file: Gguf, rng: random.Random) -> None:
    file.list_count[rng.randrange(4)] = edge(rng, 3, 259)


def field_type(file: Gguf, rng: random.Random) -> None:
    rng.choice(file.fields)[1] = rng.choice([*range(14), 2**32 - 1])


def field_value(file: Gguf, rng: random.Random) -> None:
    """A number of the type that stands there, at an edge; or another type with the same meaning."""
    one = rng.choice([f for f in file.fields if f[1] != LIST])
    one[1] = rng.choice([one[1], one[1], *NUMBERS, STRING])
    whole = one[2] if isinstance(one[2], int) else 1
    values: list[Any] = [edge(rng, whole), -1, 0, whole, 1e38, float("nan"), float("inf"), -0.5]
    one[2] = rng.choice(ODD_NAMES) if one[1] == STRING else rng.choice(values)


def field_name(file: Gguf, rng: random.Random) -> None:
    rng.choice(file.fields)[0] = rng.choice([*ODD_NAMES, rng.choice(file.fields)[0], b"\xff\xfe", "general.alignment"])


def field_missing(file: Gguf, rng: random.Random) -> None:
    file.fields.remove(rng.choice(file.fields))


def list_items(file: Gguf, rng: random.Random) -> None:
    """Another type of items, items at an edge, or more or fewer than there should be."""
    lists = [f for f in file.fields if f[1] == LIST and isinstance(f[2], tuple)]
    if not lists:
        return
    one = rng.choice(lists)
    kind, items = one[2]
    items = list(items)
    for _ in range(rng.choice([1, 3])):
        at = rng.randrange(len(items) + 1)
        odd = rng.choice([*ODD_NAMES, b"\xff", "<0x0A>", "<0xZZ>", "a b", "ab c", " "]) if kind == STRING else edge(rng)
        items[at : at + rng.choice([0, 1])] = [odd]
    if rng.random() < 0.3:
        items = rng.choice([[], items[:1], items * 3, items[::-1], items[:-1]])
    if rng.random() < 0.15:
        kind = rng.choice([*NUMBERS, STRING, LIST, 13])
    one[2] = (kind, items)


def alignment(file: Gguf, rng: random.Random) -> None:
    kind = rng.choice([U32, U32, 10, 5, STRING])
    file.fields = [f for f in file.fields if f[0] != "general.alignment"]
    file.fields.append(["general.alignment", kind, rng.choice([0, 1, 2, 3, 31, 33, 64, 2**31, 2**32 - 1, -1])])


def extents(file: Gguf, rng: random.Random) -> None:
    """Dimensions whose product lies: too large, as large by wrapping around, zero, or the same in another shape."""
    tensor = rng.choice(file.tensors)
    size = math.prod(tensor.extents)
    at = rng.randrange(max(1, len(tensor.extents)))
    wrapped = [[2**32, 2**32, size], [2**63, 2, size], [2**62, 4], [size, 2**64 - 1], [2**33, 2**31], [32, 2**59]]
    same = [[size], [size, 1], [1, size], [size, 1, 1, 1], tensor.extents[::-1], [32, size // 32], [256, size // 256]]
    edged = [*tensor.extents[:at], edge(rng, *tensor.extents), *tensor.extents[at + 1 :]]
    tensor.extents = rng.choice([edged, edged, edged, rng.choice(wrapped), rng.choice(same), [], [0], [0, 2**63]])


def axes(file: Gguf, rng: random.Random) -> None:
    rng.choice(file.tensors).axes = rng.choice([0, 1, 2, 3, 4, 5, 255, 2**31, 2**32 - 1])


def tensor_type(file: Gguf, rng: random.Random) -> None:
    rng.choice(file.tensors).type = rng.choice([*range(45), 2**31, 2**32 - 1])


def offset(file: Gguf, rng: random.Random) -> None:
    """In another tensor, at its end, beyond the file, between two multiples of the alignment."""
    one, other = rng.choice(file.tensors), rng.choice(file.tensors)
    end = len(file.data)
    one.offset = rng.choice(
        [other.offset, other.offset + 32, end, end - 32, end + 32, edge(rng, end), -32, one.offset + 1]
    )


def tensor_name(file: Gguf, rng: random.Random) -> None:
    rng.choice(file.tensors).name = rng.choice([*ODD_NAMES, rng.choice(file.tensors).name, b"\xc3\x28", "t0.scale"])


def tensor_missing(file: Gguf, rng: random.Random) -> None:
    file.tensors.remove(rng.choice(file.tensors))


def all_in_one(file: Gguf, rng: random.Random) -> None:
    """Many tensors on the bytes of one."""
    one = rng.choice(file.tensors)
    for i in range(rng.choice([2, 50, 400])):
        file.tensors.append(
            Tensor(f"blk.{i}.{rng.choice(['attn_q', 'ffn_up', 'x'])}.weight", one.extents, one.type, one.offset)
        )


def many(file: Gguf, rng: random.Random) -> None:
    """Thousands of fields or tensors of next to nothing."""
    count = rng.choice([1000, 5000])
    if rng.random() < 0.5:
        file.fields += [[f"f{i}", rng.choice([0, 7]), 1] for i in range(count)]
    else:
        file.tensors += [Tensor(f"e{i}", rng.choice([[0], [], [1]]), rng.choice([0, 24]), 0) for i in range(count)]


def data(file: Gguf, rng: random.Random) -> None:
    at = rng.randrange(len(file.data) + 1)
    file.data = rng.choice([file.data[:at], b"", file.data + b"x", rng.randbytes(len(file.data)), file.data[:-1]])


RULES = [counts, magic, string_length, list_count, field_type, field_value, field_value, field_value, field_name]
RULES += [field_missing, list_items, list_items, alignment, extents, extents, extents, axes, tensor_type, tensor_type]
RULES += [offset, offset, tensor_name, tensor_missing, all_in_one, many, data]


def broken(file: Gguf, rng: random.Random) -> tuple[str, bytes]:
    """One to three rules broken, and which."""
    file = copy.deepcopy(file)
    rules = rng.sample(RULES, rng.choice([1, 1, 1, 2, 3]))
    for rule in rules:
        if file.tensors and file.fields:
            rule(file, rng)
    content = file.bytes()
    if rng.random() < 0.05:
        content = content[: rng.randrange(len(content))]
    return ", ".join(rule.__name__ for rule in rules), content


def headers(rng: random.Random) -> Case:
    """Files with tensors of all types: listed, read and decoded."""
    name, content = broken(collection(rng), rng)
    return Case(name, {"m.gguf": content}, lambda folder: read_all(folder / "m.gguf"))


def models(rng: random.Random) -> Case:
    """Language models: loaded and run."""
    name, content = broken(model(rng), rng)
    return Case(name, {"m.gguf": content}, lambda folder: run_model(folder / "m.gguf"))


def splits(rng: random.Random) -> Case:
    """Parts of one model under odd names."""
    total = rng.choice([0, 1, 2, 3, 5, 99999])
    file = collection(rng)
    files = {}
    for number in range(rng.choice([0, 1]), min(total, 3) + rng.choice([0, 1])):
        part = copy.deepcopy(file)
        for tensor in part.tensors:
            tensor.name = f"{number}.{tensor.name}" if rng.random() < 0.9 else tensor.name
        files[f"m-{number:05}-of-{total:05}.gguf"] = broken(part, rng)[1] if rng.random() < 0.2 else part.bytes()
    odd = rng.choice(["00000", "0000a", "99999", "\u0660\u0660\u0660\u0660\u0661"])
    files = files or {f"m-00001-of-{odd}.gguf": file.bytes()}
    first = rng.choice([*sorted(files), ""])
    return Case("names of parts", files, lambda folder: read_all(folder / first))
