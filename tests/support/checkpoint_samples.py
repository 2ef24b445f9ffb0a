"""Small checkpoints in every layout, made by other libraries where they can, and by loops as plain as can be elsewhere.

Each function writes files and returns the weights [N, K] that they mean, in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import mlx.core as mx
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

N, K = 24, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MODULE = "model.layers.0.mlp.up_proj"


def write_config(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))


def pack_along(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes to 32-bit words along an axis, one code at a time. Field i holds code order[i]."""
    codes = np.moveaxis(codes, axis, -1)
    per = 32 // bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint32)
    for at in np.ndindex(*words.shape):
        word = 0
        for i in range(per):
            source = order[i] if order else i
            word |= int(codes[(*at[:-1], at[-1] * per + source)]) << (bits * i)
        words[at] = word
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def integers(bits: int, group: int, seed: int = 0, n: int = N, k: int = K) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [K, N], scales float16 [G, N], zero points [G, N]: all values that a format has."""
    rng = np.random.default_rng(seed)
    groups = -(-k // group)
    codes = rng.integers(0, 2**bits, (k, n))
    scales = (rng.standard_normal((groups, n)) / 64).astype(np.float16)
    return codes, scales, rng.integers(0, 2**bits, (groups, n))


def gptq(
    folder: Path,
    *,
    bits: int = 4,
    version: int = 1,
    declared: str | None = None,
    symmetric: bool = False,
    act_order: bool = False,
    group: int = 64,
    n: int = N,
    k: int = K,
) -> np.ndarray:
    codes, scales, zeros = integers(bits, group, n=n, k=k)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    elif version == 1:
        zeros += 1  # 1 .. 16: what is stored is 0 .. 15
    g_idx = np.arange(k) // group
    if act_order:
        g_idx = np.random.default_rng(1).permutation(g_idx)
    stored = zeros - 1 if version == 1 else zeros
    write_config(
        folder,
        quantization_config={
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": act_order,
            "checkpoint_format": declared or ("gptq" if version == 1 else "gptq_v2"),
        },
    )
    arrays = {
        f"{MODULE}.qweight": pack_along(codes, bits, 0).view(np.int32),
        f"{MODULE}.qzeros": pack_along(stored, bits, 1).view(np.int32),
        f"{MODULE}.scales": scales,
        f"{MODULE}.g_idx": g_idx.astype(np.int32),
        f"{MODULE}.bias": np.arange(n, dtype=np.float16),
    }
    save_file(arrays, folder / "model.safetensors")
    w = (codes - zeros[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
    return w.T


def awq(folder: Path, *, group: int = 64, n: int = N, k: int = K) -> np.ndarray:
    codes, scales, zeros = integers(4, group, 2, n, k)
    write_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"})
    arrays = {
        f"{MODULE}.qweight": pack_along(codes, 4, 1, AWQ_ORDER).view(np.int32),
        f"{MODULE}.qzeros": pack_along(zeros, 4, 1, AWQ_ORDER).view(np.int32),
        f"{MODULE}.scales": scales,
    }
    save_file(arrays, folder / "model.safetensors")
    spread = np.arange(k) // group
    return ((codes - zeros[spread]).astype(np.float32) * scales[spread].astype(np.float32)).T


# ---- compressed-tensors, written and decoded by its own package ---------------------------------------------------


def scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressor(name: str) -> Any:
    from compressed_tensors.compressors.base import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


def packed_scheme(bits: int, symmetric: bool, group: int | None) -> Any:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return scheme(num_bits=bits, type="int", symmetric=symmetric, **strategy)


def compressed(
    folder: Path,
    *,
    bits: int = 4,
    symmetric: bool = True,
    group: int | None = 64,
    dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False,
    scale: float = 1 / 64,
    n: int = N,
    k: int = K,
) -> np.ndarray:
    """Pack-quantized; returns what the package itself decodes the file to."""
    rng = torch.Generator().manual_seed(bits)
    groups = k // group if group else 1
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    scales = (torch.rand(n, groups, generator=rng) + 0.5) * scale
    g_idx = torch.arange(k) // (k // groups)
    if act_order:
        g_idx = g_idx[torch.randperm(k, generator=rng)]
    zero = torch.randint(low, high, (n, groups), generator=rng, dtype=torch.int8)
    codes = torch.randint(low, high, (n, k), generator=rng, dtype=torch.int8)
    state = {"weight_scale": scales.to(dtype), "weight_shape": torch.tensor([n, k])}
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    state["weight_packed"] = pack_to_int32(codes, bits)
    if not symmetric:
        state["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0).contiguous()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    weights["strategy"] = "group" if group else "channel"
    write_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    )
    if act_order:
        # The package has no decoder for weight_g_idx; its meaning is the loop below.
        save_torch(
            {f"{MODULE}.{k}": v for k, v in {**state, "weight_g_idx": g_idx.int()}.items()}, folder / "a.safetensors"
        )
        offset = zero[:, g_idx].float() if not symmetric else 0
        return ((codes.float() - offset) * scales.to(dtype).float()[:, g_idx]).to(dtype).float().numpy()
    save_torch({f"{MODULE}.{k}": v for k, v in state.items()}, folder / "a.safetensors")
    decoded = compressor("pack-quantized").decompress(state, packed_scheme(bits, symmetric, group))["weight"]
    return decoded.float().numpy()


def random_fp4(format: str, seed: int = 3, n: int = N, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and scale bytes without NaN."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    high = 126 if format == "nvfp4" else 140
    return packed, rng.integers(
        1 if format == "nvfp4" else 110, high, (n, k // (16 if format == "nvfp4" else 32)), np.uint8
    )


def compressed_fp4(folder: Path, format: str, divisor: float = 512.0) -> np.ndarray:
    packed, scales = random_fp4(format)
    state = {"weight_packed": torch.from_numpy(packed)}
    group = 16 if format == "nvfp4" else 32
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    weights["strategy"] = "tensor_group" if format == "nvfp4" else "group"
    if format == "nvfp4":
        state["weight_scale"] = torch.from_numpy(scales).view(torch.float8_e4m3fn)
        state["weight_global_scale"] = torch.tensor([float(divisor)])
    else:
        state["weight_scale"] = torch.from_numpy(scales)
    write_config(
        folder,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": f"{format}-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        },
    )
    save_torch({f"{MODULE}.{k}": v for k, v in state.items()}, folder / "a.safetensors")
    decoded = compressor(f"{format}-pack-quantized").decompress(state, scheme(**weights))["weight"]
    return decoded.float().numpy()


def fp4_values(packed: np.ndarray) -> np.ndarray:
    """E2M1 by the table, low nibble first."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    return np.stack([table[packed & 15], table[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)


def modelopt(folder: Path, multiplier: float = 0.0123) -> np.ndarray:
    packed, scales = random_fp4("nvfp4")
    (folder).mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    arrays = {
        f"{MODULE}.weight": packed,
        f"{MODULE}.weight_scale": scales.view(ml_dtypes.float8_e4m3fn),
        f"{MODULE}.weight_scale_2": np.float32(multiplier),
        f"{MODULE}.input_scale": np.float32(0.5),
    }
    save_torch(
        {
            name: torch.from_numpy(np.array(a.view(np.uint8))).view(torch.float8_e4m3fn)
            if getattr(a, "dtype", None) == ml_dtypes.float8_e4m3fn
            else torch.from_numpy(np.array(a))
            for name, a in arrays.items()
        },
        folder / "model.safetensors",
    )
    scale = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(multiplier)
    return fp4_values(packed) * np.repeat(scale, 16, axis=1)


def fp8(
    folder: Path,
    shape: tuple[int, ...] = (N, K),
    scales: np.ndarray | None = None,
    name: str = "_scale_inv",
    **about: Any,
) -> np.ndarray:
    """Bytes of E4M3 beside scales; returns the bytes' values, without them."""
    codes = np.random.default_rng(3).integers(0, 0x7F, shape, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    if scales is None:
        scales = np.linspace(0.5, 2, K // 128, dtype=np.float32)[None]
    write_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], **about})
    save_file({f"{MODULE}.weight": codes, f"{MODULE}.weight{name}": scales}, folder / "model.safetensors")
    return codes.astype(np.float32)


def nf4(folder: Path, name: str = "double", **changed: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray]:
    """What bitsandbytes made (vectors/make_nf4_vectors.py), with other parts; the original and its meaning."""
    recorded = load_file(Path(__file__).parent / "vectors" / "nf4.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write_config(folder, quantization_config=config)
    known = {part.removeprefix(f"{name}.weight"): array for part, array in recorded.items() if f"{name}.weight" in part}
    state = ".quant_state.bitsandbytes__nf4"
    known |= {state if part == "state" else f".{part}": array for part, array in changed.items()}
    arrays = {f"{MODULE}.weight{part}": array for part, array in known.items() if array is not None}
    save_file(arrays, folder / "model.safetensors")
    return recorded.get(f"{name}.original"), recorded[f"{name}.expected"]


def gpt_oss(folder: Path, experts: int = 3) -> np.ndarray:
    """[E, N, K]."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (experts, N, K // 32, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (experts, N, K // 32), dtype=np.uint8)
    write_config(folder, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bias = np.ones((experts, N), np.float32)
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}, folder / "model.safetensors")
    values = fp4_values(blocks.reshape(experts, N, K // 2))
    return values * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=-1)


def mlx(
    folder: Path, *, mode: str = "affine", bits: int = 4, group: int = 64, dtype: Any = mx.float16, experts: int = 0
) -> np.ndarray:
    """Quantized and decoded by MLX, in float32."""
    shape = (experts, N, K) if experts else (N, K)
    w = mx.random.normal(shape, key=mx.random.key(5)).astype(dtype)
    parts = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    arrays = dict(zip((f"{MODULE}.weight", f"{MODULE}.scales", f"{MODULE}.biases"), parts, strict=False))
    quantization = {"group_size": group, "bits": bits, "mode": mode}
    write_config(folder, quantization=quantization, quantization_config=quantization)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    if mode == "affine":
        # In float32: in float16, MLX rounds after each step.
        parts = (parts[0], parts[1].astype(mx.float32), parts[2].astype(mx.float32))
        return np.array(mx.dequantize(*parts, group_size=group, bits=bits)).reshape(-1, K)
    decoded = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    return np.array(decoded).reshape(-1, K)


def gguf_file(
    path: Path, types: tuple[str, ...] = ("Q4_0", "Q4_K", "Q8_0", "F16", "BF16", "F32")
) -> dict[str, np.ndarray]:
    """A GGUF file with one tensor of each type, and what gguf itself decodes each to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "a", "ü"])
    writer.add_array("list.of.ints", [1, 2, 3])
    expected = {}
    w = np.random.default_rng(6).standard_normal((N, K)).astype(np.float32)
    for name in types:
        kind = gguf.GGMLQuantizationType[name]
        if name == "F32":
            data = w
        elif name == "F16":
            data = w.astype(np.float16)
        else:
            data = encoded(w, name)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=None if name in ("F32", "F16") else kind)
        expected[f"blk.0.{name}.weight"] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def encoded(w: np.ndarray, name: str) -> np.ndarray:
    """Bytes of a ggml type: by gguf, or by us for the types that gguf says it cannot quantize to."""
    kind = gguf.GGMLQuantizationType[name]
    try:
        return gguf.quants.quantize(w, kind)
    except NotImplementedError:
        import billfish as bf

        return bf.quantize(w, {"NVFP4": "nvfp4_gguf"}.get(name, name.lower())).storage["blocks"]
