"""Statistics of inputs: what they mean, and the files that hold them, ours and llama.cpp's."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy

import billfish as bf
from billfish.checkpoints import mixes
from billfish.core.errors import BillfishError
from billfish.statistics import InputStatistics, Statistics, imatrix
from billfish.statistics.inputs import Sums

NAMES = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_down.weight")


def inputs(k: int, rows: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k), np.float32)


def summed(x: np.ndarray, outer: bool = False) -> InputStatistics:
    sums = Sums(x.shape[1:], outer)
    sums.add(x)
    return sums.finish("x")


def small_statistics(outer: bool = False) -> Statistics:
    shared = summed(inputs(24), outer)
    known = dict(zip(NAMES, (shared, shared, summed(inputs(40, seed=1), outer)), strict=True))
    shapes = {name: (8, known[name].squares.shape[-1]) for name in NAMES}
    return Statistics(known, architecture="llama", shapes=shapes, window=10, texts=("a text",), run="abc")


def partly_outer() -> Statistics:
    """X^T X of one of two inputs."""
    return Statistics({NAMES[0]: summed(inputs(24), outer=True), NAMES[2]: summed(inputs(40, seed=1))})


def expert_statistics() -> InputStatistics:
    """Of three experts, the second of which saw nothing."""
    squares = np.array([[2.0, 4.0], [0.0, 0.0], [9.0, 3.0]])
    return InputStatistics(squares, np.array([2, 0, 3], np.int64))


@pytest.mark.parametrize("k", [1, 15, 16, 70, 600])
def test_sums_are_those_of_numpy(k):
    x = inputs(k, 300)
    known = summed(x, outer=True)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(known.squares, (exact**2).sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(known.outer, exact.T @ exact, rtol=1e-4, atol=1e-3)
    assert (known.outer == known.outer.T).all()
    assert known.counts == 300
    np.testing.assert_allclose(known.importance(), (exact**2).mean(axis=0), rtol=1e-6)


def test_sums_do_not_depend_on_threads():
    x = inputs(200, 256)
    found = []
    for threads in (1, 2, 3):
        bf.set_threads(threads)
        found.append(summed(x, outer=True).outer)
    bf.set_threads(0)
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()


def test_inputs_that_are_not_finite_are_refused():
    x = inputs(20)
    x[3, 4] = np.nan
    with pytest.raises(bf.DataError, match=r"calibrate.*x.*sums of squares are negative or not finite"):
        summed(x)


def test_an_expert_without_tokens_gets_the_mean_of_the_others():
    known = expert_statistics()
    np.testing.assert_array_equal(known.importance(), [[1, 2], [2, 1.5], [3, 1]])
    np.testing.assert_array_equal(known.importance(1), [2, 1.5])


def test_names_of_files_folders_and_modules_find_the_same():
    statistics = small_statistics()
    for name in ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj"):
        assert statistics[name] is statistics["blk.0.attn_k.weight"]
    assert "blk.1.attn_q.weight" not in statistics


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [False, True])
def test_our_files_hold_everything(tmp_path, outer):
    statistics = small_statistics(outer)
    statistics.save(tmp_path / "s.safetensors")
    read = Statistics.load(tmp_path / "s.safetensors")
    assert list(read) == list(statistics)
    assert read.has_outer is outer
    assert (read.architecture, read.shapes, read.window) == ("llama", statistics.shapes, 10)
    assert (read.texts, read.run, read.tokens) == (("a text",), "abc", 50)
    assert read.shapes == statistics.shapes
    assert read[NAMES[0]] is read[NAMES[1]]
    for name in NAMES:
        for part in ("squares", "counts", "outer"):
            assert np.array_equal(getattr(read[name], part), getattr(statistics[name], part)), (name, part)


def test_imatrix_files_are_what_the_library_of_llama_cpp_reads(tmp_path):
    statistics = small_statistics()
    statistics.save(tmp_path / "imatrix.gguf")
    reader = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a text"],
        "imatrix.chunk_count": 5,
        "imatrix.chunk_size": 10,
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(tensors) == {f"{name}.{part}" for name in NAMES for part in ("in_sum2", "counts")}
    for name in NAMES:
        known = statistics[name]
        assert tensors[f"{name}.in_sum2"].shape == (1, known.squares.size)
        np.testing.assert_array_equal(tensors[f"{name}.in_sum2"][0], known.squares.astype(np.float32))
        np.testing.assert_array_equal(tensors[f"{name}.counts"], [[50]])


def write_imatrix(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> None:
    """As the library writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_imatrix_files_of_others_are_read(tmp_path):
    experts = expert_statistics()
    name = "blk.0.ffn_gate_exps.weight"
    plain = np.arange(6, dtype=np.float32).reshape(1, 6)
    write_imatrix(
        tmp_path / "i.gguf",
        {
            f"{NAMES[0]}.in_sum2": plain,
            f"{NAMES[0]}.counts": np.array([[4]], np.float32),
            f"{name}.in_sum2": experts.squares.astype(np.float32),
            f"{name}.counts": experts.counts.astype(np.float32).reshape(-1, 1),
        },
    )
    read = Statistics.load(tmp_path / "i.gguf")
    np.testing.assert_array_equal(read[NAMES[0]].squares, plain[0])
    assert read[NAMES[0]].counts == 4
    np.testing.assert_array_equal(read[name].importance(), experts.importance())


def test_experts_go_to_imatrix_files_and_back(tmp_path):
    name = "blk.0.ffn_down_exps.weight"
    Statistics({name: expert_statistics()}).save(tmp_path / "i.gguf")
    read = Statistics.load(tmp_path / "i.gguf")[name]
    np.testing.assert_array_equal(read.squares, expert_statistics().squares)
    np.testing.assert_array_equal(read.counts, [2, 0, 3])


def test_dat_files_are_written_and_read(tmp_path):
    statistics = small_statistics()
    statistics.save(tmp_path / "i.dat")
    data = (tmp_path / "i.dat").read_bytes()
    (entries,) = struct.unpack_from("<i", data)
    assert entries == 3
    (length,) = struct.unpack_from("<i", data, 4)
    assert data[8 : 8 + length] == b"blk.0.attn_k.weight"
    calls, count = struct.unpack_from("<ii", data, 8 + length)
    assert (calls, count) == (5, 24)
    numbers = np.frombuffer(data, "<f4", count, 16 + length)
    np.testing.assert_allclose(numbers, statistics[NAMES[1]].importance() * 5)
    assert data.endswith(struct.pack("<ii", 5, 6) + b"a text")
    read = Statistics.load(tmp_path / "i.dat")
    assert read.texts == ("a text",)
    for name in NAMES:
        np.testing.assert_allclose(read[name].importance(), statistics[name].importance(), rtol=1e-6)


def test_experts_of_dat_files_are_told_by_the_shape_of_the_stack(tmp_path):
    name = "blk.0.ffn_down_exps.weight"
    Statistics({name: expert_statistics()}).save(tmp_path / "i.dat")
    read = Statistics.load(tmp_path / "i.dat")
    _, settings = read.settings("quantize", name, (3, 8, 2), "mse", 1)
    np.testing.assert_allclose(settings["importance"], [2, 1.5])


def test_x_t_x_has_no_place_in_files_of_llama_cpp(tmp_path):
    for statistics in (small_statistics(outer=True), partly_outer()):
        with pytest.raises(bf.CheckpointError, match=r"i\.gguf.*X\^T X.*\.safetensors"):
            statistics.save(tmp_path / "i.gguf")
    with pytest.raises(bf.CheckpointError, match=r"i\.txt.*\.safetensors or \.gguf or \.dat"):
        small_statistics().save(tmp_path / "i.txt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [NAMES[::2], NAMES[::-2]])
def test_x_t_x_of_some_matrices_is_kept(tmp_path, names):
    statistics = Statistics({name: partly_outer()[name] for name in names})
    statistics.save(tmp_path / "s.safetensors")
    read = Statistics.load(tmp_path / "s.safetensors")
    for name, known in statistics.items():
        assert np.array_equal(read[name].squares, known.squares)
        assert (read[name].outer is None) == (known.outer is None)
    assert np.array_equal(read[NAMES[0]].outer, statistics[NAMES[0]].outer)


# ---- bad files ----------------------------------------------------------------------------------------------------


def changed(path: Path, part: str, value: object) -> None:
    """The file with one array changed."""
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    array = arrays[f"{NAMES[0]}.{part}"]
    array[...] = value
    safetensors.numpy.save_file(arrays, path, metadata)


def described(path: Path, **metadata: str) -> None:
    """The file with other metadata, and a digest that fits."""
    with safetensors.safe_open(path, "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        metadata = file.metadata() | metadata
    safetensors.numpy.save_file(arrays, path, metadata)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("squares", np.nan, "sums of squares are negative or not finite"),
        ("squares", -1, "sums of squares are negative or not finite"),
        ("counts", 0, "0 tokens"),
        ("counts", -3, "-3 tokens"),
    ],
)
def test_bad_numbers_are_refused_by_name(tmp_path, part, value, message):
    small_statistics().save(tmp_path / "s.safetensors")
    changed(tmp_path / "s.safetensors", part, value)
    with pytest.raises(bf.DataError, match=rf"blk\.0\.attn_q\.weight.*{message}"):
        Statistics.load(tmp_path / "s.safetensors")


def test_x_t_x_that_is_not_finite_is_refused_where_it_is_used(tmp_path):
    small_statistics(outer=True).save(tmp_path / "s.safetensors")
    changed(tmp_path / "s.safetensors", "outer", np.inf)
    statistics = Statistics.load(tmp_path / "s.safetensors")
    with pytest.raises(bf.DataError, match=r"quantize.*blk\.0\.attn_q\.weight.*X\^T X is not finite"):
        statistics.settings("quantize", NAMES[0], (8, 24), "gptq")


@pytest.mark.parametrize("shape", ["[Infinity]", "[1e400]", "[NaN, 2]", '["8", 24]', "[true, 24]", "3"])
def test_shapes_that_are_no_sizes_are_refused(tmp_path, shape):
    small_statistics().save(tmp_path / "s.safetensors")
    described(tmp_path / "s.safetensors", matrices=f'{{"a": {{"shape": {shape}, "input": "a"}}}}')
    with pytest.raises(bf.DataError, match="damaged header"):
        Statistics.load(tmp_path / "s.safetensors")


@pytest.mark.parametrize("window", ["0", "-1", "9" * 4000, "9" * 12])
def test_windows_that_are_no_counts_are_refused(tmp_path, window):
    small_statistics().save(tmp_path / "s.safetensors")
    described(tmp_path / "s.safetensors", window=window)
    with pytest.raises(bf.DataError, match=r"window|damaged header"):
        Statistics.load(tmp_path / "s.safetensors")


@pytest.mark.parametrize("name", ["s.gguf", "s.dat"])
def test_counts_that_imatrix_files_cannot_hold_are_refused(tmp_path, name):
    known = InputStatistics(np.ones(24), np.array(2**63 - 1, np.int64))
    with pytest.raises(bf.DataError, match=r"\.safetensors"):
        Statistics({NAMES[0]: known}, window=1).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_tensor_that_no_array_can_hold_is_refused(tmp_path):
    shapes = {f"{NAMES[0]}.in_sum2": (0, 2**62), f"{NAMES[0]}.counts": (1, 1)}
    header = imatrix.gguf_header(shapes, (), 1, 1)
    (tmp_path / "i.gguf").write_bytes(header + b"\0" * 64)
    with pytest.raises(bf.CheckpointError, match="too large"):
        Statistics.load(tmp_path / "i.gguf")
    text = json.dumps({"a": {"dtype": "F64", "shape": [0, 2**62], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "i.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(bf.CheckpointError, match=r"shape|damaged header"):
        bf.load(tmp_path / "i.safetensors")["a"]


def test_an_imatrix_file_is_no_model(tmp_path):
    small_statistics().save(tmp_path / "i.gguf")
    with pytest.raises(bf.CheckpointError, match=r"i\.gguf.*general\.architecture"):
        bf.convert(tmp_path / "i.gguf", tmp_path / "o.gguf", "gguf", raw_names=True)


def test_layers_with_thousands_of_digits_are_no_layers(tmp_path):
    """Python refuses to read such a number."""
    name = f"model.layers.{'1' * 5000}.self_attn.q_proj.weight"
    statistics = small_statistics()
    statistics.check_model("quantize", "llama", [name])
    with pytest.raises(bf.DataError, match="there are none"):
        statistics.check_matrix("quantize", name, (8, 24), "mse")
    assert mixes.MIXES["q4_k_m"].assign({name.replace("model.layers", "blk"): (8, 256)})


@pytest.mark.parametrize("name", ["s.safetensors", "s.gguf", "s.dat"])
def test_every_cut_of_a_file_is_refused(tmp_path, name):
    path = tmp_path / name
    small_statistics().save(path)
    content = path.read_bytes()
    # Behind the last matrix, .dat may end anywhere, and GGUF pads its last number.
    end = len(content) - {"s.dat": 14, "s.gguf": 28}.get(name, 0)
    for size in [*range(0, end, max(1, end // 60)), end - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(BillfishError):
            Statistics.load(path)


@pytest.mark.parametrize("name", ["s.safetensors", "s.gguf", "s.dat"])
def test_random_bytes_in_a_file_give_our_errors_or_statistics(tmp_path, name):
    path, rng = tmp_path / name, np.random.default_rng(0)
    small_statistics().save(path)
    content = path.read_bytes()
    for _ in range(200):
        hurt = bytearray(content)
        for at in rng.integers(0, len(hurt), 3):
            hurt[at] = rng.integers(256)
        path.write_bytes(bytes(hurt))
        with contextlib.suppress(BillfishError):
            Statistics.load(path)


def test_a_file_of_something_else_is_refused(tmp_path):
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(bf.DataError, match=r"not statistics.*`billfish calibrate`"):
        Statistics.load(tmp_path / "model.safetensors")
    write_imatrix(tmp_path / "model.gguf", {"w": np.ones(3, np.float32)}, "model")
    with pytest.raises(bf.DataError, match=r"imatrix file.*general\.type is 'model'"):
        Statistics.load(tmp_path / "model.gguf")
    write_imatrix(tmp_path / "i.gguf", {f"{NAMES[0]}.in_sum2": np.ones((1, 3), np.float32)})
    with pytest.raises(bf.DataError, match="sums without counts"):
        Statistics.load(tmp_path / "i.gguf")
    (tmp_path / "huge.dat").write_bytes(struct.pack("<iii", 2**31 - 1, 2**31 - 1, 1))
    with pytest.raises(bf.DataError, match="not an imatrix file"):
        Statistics.load(tmp_path / "huge.dat")


# ---- of another model ---------------------------------------------------------------------------------------------


def test_statistics_of_another_model_are_refused_by_name():
    statistics = small_statistics()
    with pytest.raises(bf.DataError, match=r"blk\.0\.attn_q\.weight.*\(8, 24\)"):
        statistics.settings("quantize", NAMES[0], (9, 24), "mse")
    with pytest.raises(bf.DataError, match=r"blk\.0\.ffn_up\.weight: there are none"):
        statistics.settings("quantize", "blk.0.ffn_up.weight", (9, 24), "mse")
    with pytest.raises(bf.DataError, match=r"'llama'.*'qwen2'"):
        statistics.check_model("quantize", "qwen2", ["blk.0.attn_q.weight"])
    with pytest.raises(bf.DataError, match=r"blk\.0\.attn_q\.weight.*layers"):
        statistics.check_model("quantize", "llama", ["blk.7.attn_q.weight"])
    with pytest.raises(bf.DataError, match=r"no X\^T X, only mean squares.*--hessian"):
        statistics.settings("quantize", NAMES[0], (8, 24), "gptq")


def test_experts_of_a_folder_may_be_apart():
    stack = "model.layers.0.mlp.experts.down_proj.weight"
    statistics = Statistics({stack: expert_statistics()})
    for expert, importance in enumerate([[1, 2], [2, 1.5], [3, 1]]):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        method, settings = statistics.settings("quantize", name, (8, 2), "mse")
        assert method == "mse"
        np.testing.assert_array_equal(settings["importance"], importance)
    with pytest.raises(bf.DataError, match=r"experts\.3\.down_proj\.weight.*3 experts"):
        statistics.settings("quantize", "model.layers.0.mlp.experts.3.down_proj.weight", (8, 2), "mse")
    with pytest.raises(bf.DataError, match=r"experts\.down_proj\.weight.*2 inputs"):
        statistics.settings("quantize", "model.layers.0.mlp.experts.0.down_proj.weight", (8, 4), "mse")


def test_embeddings_may_be_missing():
    assert small_statistics().settings("quantize", "token_embd.weight", (99, 24), "gptq") == ("mse", {})
