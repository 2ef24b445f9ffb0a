"""safetensors files: the grammar of the header, and layouts whose arrays are whole but do not fit each other."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

import billfish as bf
from attack.cases import ODD_NAMES, Case, as_json, edge, odd_json, odd_text, read_all
from billfish.checkpoints.safetensors_files import KINDS, TYPES
from billfish.core.format_tag import About

M = "model.layers.0.mlp.up_proj"
Arrays = dict[str, tuple[str, list[int]]]  # by name: type and shape; the bytes are random


def words(n: int, k: int, group: int, bits: int = 4) -> Arrays:
    """GPTQ."""
    return {
        f"{M}.qweight": ("I32", [k * bits // 32, n]),
        f"{M}.qzeros": ("I32", [k // group, n * bits // 32]),
        f"{M}.scales": ("F16", [k // group, n]),
        f"{M}.g_idx": ("I32", [k]),
    }


def layout(rng: random.Random) -> tuple[str, Arrays, dict[str, Any]]:
    """One of the layouts that are read: its name, its arrays and its config.json."""
    n, k, group = rng.choice([8, 32]), rng.choice([128, 256]), rng.choice([32, 64, 128])
    kind = rng.choice(LAYOUTS)
    if kind == "gptq":
        about = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": rng.random() < 0.5}
        return kind, words(n, k, group, rng.choice([4, 8])), {"quantization_config": about}
    if kind == "awq":
        about = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
        arrays = words(n, k, group)
        arrays[f"{M}.qweight"] = ("I32", [k, n // 8])
        del arrays[f"{M}.g_idx"]
        return kind, arrays, {"quantization_config": about}
    if kind == "compressed":
        weights = {"num_bits": 4, "group_size": group, "symmetric": False}
        about = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        arrays = {
            f"{M}.weight_packed": ("I32", [n, k // 8]),
            f"{M}.weight_scale": ("BF16", [n, k // group]),
            f"{M}.weight_shape": ("I64", [2]),
            f"{M}.weight_zero_point": ("I32", [n // 8, k // group]),
            f"{M}.weight_g_idx": ("I32", [k]),
        }
        return kind, arrays, {"quantization_config": about}
    if kind == "fp4":
        scale = rng.choice([("F8_E4M3", 16), ("U8", 32)])
        arrays = {f"{M}.weight_packed": ("U8", [n, k // 2]), f"{M}.weight_scale": (scale[0], [n, k // scale[1]])}
        return kind, arrays | ({f"{M}.weight_global_scale": ("F32", [1])} if scale[1] == 16 else {}), {}
    if kind == "modelopt":
        arrays = {f"{M}.weight": ("U8", [n, k // 2]), f"{M}.weight_scale": ("F8_E4M3", [n, k // 16])}
        return kind, arrays | {f"{M}.weight_scale_2": ("F32", [])}, {}
    if kind == "gpt-oss":
        return kind, {"x_blocks": ("U8", [2, n, k // 32, 16]), "x_scales": ("U8", [2, n, k // 32])}, {}
    if kind == "mlx":
        bits = rng.choice([4, 8])
        arrays = {f"{M}.weight": ("U32", [n, k * bits // 32])}
        arrays |= {f"{M}.{name}": ("F16", [n, k // group]) for name in ("scales", "biases")}
        return kind, arrays, {"quantization": {"bits": bits, "group_size": group, M: {"bits": bits}}}
    if kind == "plain":
        kinds = rng.sample(list(TYPES), 4)
        return kind, {f"t{i}.weight": (one, [4, 8]) for i, one in enumerate(kinds)} | {"s": ("F32", [])}, {}
    format = rng.choice(list(bf.FORMATS.values()))
    size = rng.choice(format.group_sizes)
    arrays = {}
    for name, spec in format.storage_spec(n, 256, size).items():
        arrays[f"{M}.{name}"] = (KINDS[spec.dtype], list(spec.shape))
    if rng.random() < 0.3:
        arrays[f"{M}.permutation"] = ("I32", [256])
    if rng.random() < 0.3:
        arrays[f"{M}.about"] = ("U8", [About(format.name, size).array().size])
    about = {"quant_method": "billfish", "format": format.name, "group_size": size, "modules": {M: {}}}
    return kind, arrays, {"quantization_config": about}


LAYOUTS = ("gptq", "awq", "compressed", "fp4", "modelopt", "gpt-oss", "mlx", "plain", "native")


def content_of(name: str, kind: str, shape: list[int], arrays: Arrays, rng: random.Random) -> bytes:
    """Bytes of an array: what a reader hopes for, or any."""
    count = int(np.prod(shape, dtype=np.int64)) if shape else 1
    size = count * TYPES[kind][0] // 8
    if rng.random() < 0.2:
        return rng.randbytes(size)
    if name.endswith("weight_shape"):
        packed = arrays.get(f"{M}.weight_packed", ("", [8, 16]))[1]
        right = [*packed[:1], packed[-1] * 8][-2:] if packed else [8, 128]
        numbers = right if rng.random() < 0.8 else [edge(rng, *right) % 2**63 for _ in right]
        return (
            np.resize(np.array(numbers, np.int64), count)
            .astype("<i8" if kind == "I64" else "<i4")
            .tobytes()[:size]
            .ljust(size)
        )
    if name.endswith(("g_idx", "permutation")):
        order = np.arange(count) // (1 if name.endswith("permutation") else rng.choice([32, 64, 128]))
        return rng.choice([order, order[::-1], order * 0 - 1, order * 2]).astype("<i4").tobytes()[:size].ljust(size)
    if name.endswith(".about"):
        return About("q4_0", 32).array().tobytes()[:size].ljust(size)
    if TYPES[kind][1] is not None and np.dtype(TYPES[kind][1]).kind == "f":
        return np.full(count, 0.01).astype(TYPES[kind][1]).tobytes()
    return rng.randbytes(size)


def file_of(arrays: Arrays, rng: random.Random, metadata: dict[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """A header that is right, and the bytes behind it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (kind, shape) in arrays.items():
        content = content_of(name, kind, shape, arrays, rng)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return header, data


def joined(text: bytes, data: bytes, length: int | None = None) -> bytes:
    return ((len(text) if length is None else length) % 2**64).to_bytes(8, "little") + text + data


# ---- broken headers ------------------------------------------------------------------------------------------------


def headers(rng: random.Random) -> Case:
    """Values of the header at their edges, offsets that overlap or leave gaps, keys twice, text that is no JSON."""
    _, arrays, config = layout(rng)
    header, data = file_of(arrays, rng, {"format": "pt"} if rng.random() < 0.3 else None)
    length, rule = (
        None,
        rng.choice(["value", "shape", "offsets", "key", "text", "length", "metadata", "data", "names", "many"]),
    )
    name = rng.choice(list(arrays))
    about = header[name]
    if rule == "value":
        header[name] = odd_json(
            about, rng, (None, True, -1, 0, 0.5, 2**63, 2**64, 10**30, "", "F32", "F4", "f32", [], {})
        )
    elif rule == "shape":
        size = int(np.prod(about["shape"], dtype=np.int64))
        lies = [[2**32, 2**32], [2**63, 2], [size, 1], [1, size], [], [0], [size], [-1], [1] * 50, [2**64 - 1, size]]
        about["shape"] = rng.choice([*lies, [edge(rng, *about["shape"]) for _ in about["shape"]]])
    elif rule == "offsets":
        other = rng.choice(list(header.values()))
        start, end = about["data_offsets"]
        lies = [
            other.get("data_offsets"),
            [end, start],
            [start, len(data) + 1],
            [0, len(data)],
            [start + 1, end + 1],
            [0, 0],
        ]
        about["data_offsets"] = rng.choice([*lies, [edge(rng, start), edge(rng, end)], [start], [start, end, end]])
    elif rule == "names":
        header = {rng.choice([*ODD_NAMES, key]): value for key, value in header.items()}
    elif rule == "metadata":
        header["__metadata__"] = rng.choice(
            [None, [], {"a": 1}, {"billfish": "{"}, {"billfish": "[" * 9999}, {"": "\ud800"}]
        )
    elif rule == "many":
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [len(data)] * 2}
        header |= {f"e{i}{rng.choice(['', '.blocks', '.weight'])}": empty for i in range(3000)}
    text = as_json(header)
    if rule == "key":
        text = text.replace(b'"dtype"', rng.choice([b'"dtype": "U8", "dtype"', b'"dtypes"', b'"d\\u0074ype"']), 1)
    elif rule == "text":
        text = rng.choice(
            [odd_text(text, rng), text + b" " * 40, b" " + text, text[:-1], text + b"{}", b"{}", b"{" * 5000]
        )
    elif rule == "length":
        length = edge(rng, len(text), len(text) + len(data))
    elif rule == "data":
        data = rng.choice([data[:-1], data + b"\0", b"", data[: rng.randrange(len(data) + 1)]])
    files = {"model.safetensors": joined(text, data, length), "config.json": as_json(config)}
    return Case(rule, files, read_all)


# ---- whole headers, of arrays that do not fit ------------------------------------------------------------------------


def layouts(rng: random.Random) -> Case:
    """Arrays of other types and shapes, missing or too many, beside a configuration that says something else."""
    kind, arrays, config = layout(rng)
    rules = rng.sample(
        ["shape", "shape", "type", "missing", "more", "config", "config", "native", "index"], rng.choice([1, 1, 2])
    )
    metadata = None
    for rule in rules:
        name = rng.choice(list(arrays))
        type_, shape = arrays[name]
        if rule == "shape":
            small = [0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 128, 256]
            shape = rng.choice(
                [
                    [*shape[:-1], rng.choice(small)],
                    [rng.choice(small), *shape[1:]],
                    shape[::-1],
                    [],
                    [1, *shape],
                    [rng.choice(small) for _ in range(rng.choice([1, 2, 3, 4]))],
                ]
            )
            arrays[name] = type_, shape
        elif rule == "type":
            arrays[name] = rng.choice(list(TYPES)), shape
        elif rule == "missing":
            arrays = {key: value for key, value in arrays.items() if key != name} or arrays
        elif rule == "more":
            _, others, _ = layout(rng)
            arrays = arrays | others
        elif rule == "config":
            config = (
                odd_json(config, rng)
                if config
                else {"quantization_config": odd_json({"bits": 4, "group_size": 64}, rng)}
            )
        elif rule == "native":
            metadata = {
                "billfish": json.dumps(
                    odd_json(
                        {"format": "q4_0", "group_size": 32, "modules": {M: {"bare": True, "shape": [2, 4, 256]}}}, rng
                    )
                )
            }
    bits = {name: np.prod(shape, dtype=float) * TYPES[type_][0] for name, (type_, shape) in arrays.items()}
    arrays = {name: about for name, about in arrays.items() if bits[name] % 8 == 0 and bits[name] < 1e7}
    header, data = file_of(arrays, rng, metadata)
    files = {"model.safetensors": joined(as_json(header), data), "config.json": odd_text(as_json(config), rng)}
    if "index" in rules:
        shards = [
            "model.safetensors",
            "../model.safetensors",
            "/dev/zero",
            "x.safetensors",
            "",
            "a\0b.safetensors",
            3,
            None,
        ]
        index = {
            "weight_map": {name: rng.choice(shards[:1] * 9 + shards) for name in [*arrays, "more"][: rng.randrange(9)]}
        }
        files["model.safetensors.index.json"] = odd_text(
            as_json(odd_json(index, rng) if rng.random() < 0.3 else index), rng
        )
    return Case(f"{kind}: {', '.join(rules)}", files, read_all)
