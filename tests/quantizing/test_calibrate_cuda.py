"""Statistics of a model on a fake GPU, whose kernels NumPy computes, beside the CPU's; on a GPU, if there is one."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import numpy as np
import pytest
from cases import first
from cuda_numpy import NumpyGpu
from cuda_routing import clear_text
from llm_architectures import write_model
from llm_models import Small
from llm_models import write_model as write_small

import billfish as bf
from billfish.backends.cuda import driver
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.input_sums import DeviceSums
from billfish.checkpoints.write.selection import Quantization
from billfish.cli.main import main
from billfish.llm import load
from billfish.llm.cuda_layers import CudaSums, LayerSteps
from billfish.quantizing import calibrate_checkpoint, quantize_checkpoint
from billfish.quantizing.calibrate_checkpoint import Calibration
from billfish.statistics import Statistics

TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 6
OF_NORM = 1e-3  # what float16 between products may change of X^T X,
OF_FEW = 4e-3  # and of few tokens in a model whose random weights are large: errors of tokens do not cancel out
TRAINED = {"initializer_range": 0.02}  # numbers as transformers begins to train with


class NoMemory(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


def has_gpu() -> bool:
    try:
        driver.device()
    except bf.BackendUnavailable:
        return False
    return True


@pytest.fixture
def gpu(monkeypatch, request):
    """A fake one, unless there is one. All that was taken of it is given back."""
    if has_gpu():
        yield None
        return
    fake = NumpyGpu(monkeypatch)
    yield fake
    request.node.funcargs.clear()
    gc.collect()
    assert not fake.live
    monkeypatch.undo()
    fake.forget()


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def on(device: str, model: Path, text: Path, **options) -> Statistics:
    out = model.parent / f"{device}-{model.name}.safetensors"
    settings = {"text": text, "tokens": 150, "window": 40, "hessian": True, "progress": False, **options}
    return bf.calibrate_checkpoint(model, out, device=device, **settings)


def assert_alike(found: Statistics, expected: Statistics, most: float = OF_NORM) -> None:
    assert [*found] == [*expected]
    for name, known in expected.items():
        np.testing.assert_array_equal(found[name].counts, known.counts)
        for what in ("outer", "squares", "cross"):
            ours, theirs = getattr(found[name], what), getattr(known, what)
            if theirs is None:
                assert ours is None
            else:
                assert np.linalg.norm(ours - theirs) <= most * np.linalg.norm(theirs), name


def windows(monkeypatch: pytest.MonkeyPatch, count: int, length: int, vocabulary: range) -> list[list[int]]:
    """Random ones, in the place of a text's."""
    rng = np.random.default_rng(1)
    found = [rng.choice(vocabulary, length).tolist() for _ in range(count)]
    monkeypatch.setattr(calibrate_checkpoint, "windows_of", lambda *_: found)
    return found


@pytest.mark.parametrize("small", [Small(), Small("qwen2", quantization="F32"), Small("gemma", tied=True)])
def test_sums_are_the_cpus(gpu, tmp_path, text, small):
    model = tmp_path / "model.gguf"
    write_small(model, small)
    assert_alike(on("cuda", model, text), on("cpu", model, text), OF_FEW)


@pytest.mark.full
@pytest.mark.parametrize("small", [Small(), Small("qwen2", quantization="F32"), Small("gemma", tied=True)])
def test_errors_of_many_tokens_cancel_out(gpu, tmp_path, text, small, monkeypatch):
    """Those of X^T X fall with the root of their number: of 640, they are twice those of 3,200."""
    model = tmp_path / "model.gguf"
    write_small(model, small)
    windows(monkeypatch, 80, 40, range(4, 250))
    assert_alike(on("cuda", model, text), on("cpu", model, text))


@pytest.mark.parametrize("name", ["gemma2", "olmo3", "qwen35", "granitehybrid", "lfm2"])
def test_sums_of_other_layers_are_the_cpus(gpu, tmp_path, text, name, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, name, max_position_embeddings=256, **TRAINED)
    windows(monkeypatch, 10, 40, range(4, 64))
    assert_alike(on("cuda", model, text), on("cpu", model, text))


def clear_windows(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """Random ones, where no token is near a tie between experts, which rounding could break otherwise."""
    found, loaded = windows(monkeypatch, 3, 24, range(4, 64)), load(model, device="cuda")
    found[:] = [clear_text(loaded, window, range(4, 64)) for window in found]


EXACT = ("qwen2moe", "gpt-oss", "glm4moe", "mixtral")  # 72 tokens are enough, with small weights
WEIGHTS: dict[str, dict[str, float]] = {"gemma4-moe": {}, "qwen35moe": TRAINED}  # of others


@pytest.mark.parametrize("name", first(3, ("qwen2moe", "gemma4-moe", "gpt-oss", "glm4moe", "mixtral", "qwen35moe")))
def test_sums_of_each_expert_are_the_cpus(gpu, tmp_path, text, name, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, name, max_position_embeddings=256, **WEIGHTS.get(name, {"initializer_range": 0.1}))
    clear_windows(monkeypatch, model)
    ours, theirs = on("cuda", model, text), on("cpu", model, text)
    assert_alike(ours, theirs, OF_NORM if name in EXACT else OF_FEW)
    stacks = [known for known in ours.values() if known.counts.ndim]
    assert len(stacks) > 2
    assert all((known.counts > 0).sum() > 1 for known in stacks)


def test_rows_that_fill_up_a_step_are_of_no_expert(gpu, tmp_path, text, monkeypatch):
    """Each token counts once for each expert that it takes: of 5 in a window, which has 8 rows, and of two pieces."""
    if gpu is None:
        pytest.skip("a GPU's pieces are as long as they are")
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "mixtral", max_position_embeddings=256)
    windows(monkeypatch, 3, 29, range(4, 64))
    monkeypatch.setattr("billfish.llm.cuda_layers.CHUNK", 24)
    for known in on("cuda", model, text, hessian=False).values():
        assert known.counts.sum() == 3 * 29 * (3 if known.counts.ndim else 1)


def test_gptq_of_experts_in_order_on_the_gpu(gpu, tmp_path, text, monkeypatch):
    """The matrices of a layer are quantized, then its experts see what they give."""
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "qwen2moe", max_position_embeddings=256, **TRAINED)
    clear_windows(monkeypatch, model)
    known = []
    for device in ("cuda", "cpu"):
        how = Quantization(bf.get_format("q8_0"), 32, "gptq")
        sequential = Calibration.of(model, text, True, 150, 24, device).sequential(how, False)
        out = tmp_path / f"{device}.safetensors"
        sequential.write(out, False, overwrite=True)
        known.append(Statistics.load(out))
    assert_alike(*known, most=OF_FEW)  # some codes are others


def test_a_window_longer_than_a_step(gpu, tmp_path, text, monkeypatch):
    """Its pieces see each other, and without X^T X the squares are the same."""
    write_small(tmp_path / "model.gguf", Small())
    monkeypatch.setattr("billfish.llm.cuda_layers.CHUNK", 24)
    found = on("cuda", tmp_path / "model.gguf", text, window=100)
    assert_alike(found, on("cpu", tmp_path / "model.gguf", text, window=100), OF_FEW)
    squares = bf.calibrate_checkpoint(
        tmp_path / "model.gguf", tmp_path / "squares.safetensors", text=text, tokens=150, window=100, device="cuda",
        progress=False,
    )  # fmt: skip
    for name, known in squares.items():
        assert known.outer is None
        assert np.array_equal(known.squares, found[name].squares)


def test_an_interrupted_run_goes_on_to_the_same_bits(gpu, tmp_path, text, monkeypatch):
    model = tmp_path / "model.gguf"
    write_small(model, Small(layers=3))
    on("cuda", model, text)
    passed, leaving = [], LayerSteps.leaving

    def stopping(self, *arguments):
        passed.append(self)
        if len(passed) == 6:  # in the second layer
            raise KeyboardInterrupt
        return leaving(self, *arguments)

    whole = (tmp_path / "cuda-model.gguf.safetensors").rename(tmp_path / "whole.safetensors")
    monkeypatch.setattr(LayerSteps, "leaving", stopping)
    with pytest.raises(KeyboardInterrupt):
        on("cuda", model, text)
    monkeypatch.setattr(LayerSteps, "leaving", leaving)
    passed.clear()
    on("cuda", model, text)
    assert whole.read_bytes() == (tmp_path / "cuda-model.gguf.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sequential_gptq_sees_what_it_sees_on_the_cpu(gpu, tmp_path, text, name):
    """All matrices quantized, and those of one role alone."""
    model = tmp_path / "model.gguf"
    if name == "llama":
        write_small(model, Small(layers=3, quantization="F32"))
    else:
        (tmp_path / "folder").mkdir()
        write_model(tmp_path / "folder", name, max_position_embeddings=256)
        bf.convert(tmp_path / "folder", model, "gguf", dtype="float32", progress=False)
    for only in ((), (re.compile(r"attn_(q|output)"),), (re.compile("ffn_up"),)):
        found = []
        for device in ("cuda", "cpu"):
            how = Quantization(bf.get_format("q8_0"), None, "gptq", only=only)
            sequential = Calibration.of(model, text, True, 150, 40, device).sequential(how, False)
            assert sequential is not None
            assert sequential.device.startswith(device)
            out = tmp_path / f"{device}.safetensors"
            sequential.write(out, False, overwrite=True)
            found.append(Statistics.load(out))
        assert_alike(*found, most=8 * OF_FEW)  # some codes are others
        first, later = found[0]["blk.0.attn_q.weight"], found[0]["blk.2.ffn_down.weight"]
        np.testing.assert_array_equal(first.cross, first.outer)
        assert not np.array_equal(later.cross, later.outer)


def test_an_interrupted_sequential_run_goes_on_to_the_same_bytes(gpu, tmp_path, text, monkeypatch):
    model, whole, cut = (tmp_path / f"{name}.gguf" for name in ("model", "whole", "cut"))
    write_small(model, Small(layers=3, quantization="F32"))
    settings = {"method": "gptq", "calibrate": text, "device": "cuda", "progress": False}
    bf.quantize_checkpoint(model, whole, "q4_0", **settings)
    passed, leaving = [], LayerSteps.leaving

    def stopping(self, *arguments):
        passed.append(self)
        if len(passed) == 25:
            raise KeyboardInterrupt
        return leaving(self, *arguments)

    monkeypatch.setattr(LayerSteps, "leaving", stopping)
    with pytest.raises(KeyboardInterrupt):
        bf.quantize_checkpoint(model, cut, "q4_0", **settings)
    monkeypatch.setattr(LayerSteps, "leaving", leaving)
    passed.clear()
    assert not cut.exists()
    bf.quantize_checkpoint(model, cut, "q4_0", **settings)
    assert whole.read_bytes() == cut.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "whole.gguf", "cut.gguf", "text.txt"}


def test_gptq_on_the_gpu_leaves_its_sums_there(gpu, tmp_path, text, monkeypatch):
    """Where it runs beside the sums, and the output takes what it has quantized: to the same bytes."""
    if gpu is None:
        pytest.skip("GPTQ runs on a real GPU in other tests")
    write_small(tmp_path / "model.gguf", Small(layers=2, quantization="F32"))
    gptq, fetched, outer = [], [], DeviceSums.outer

    def here(self) -> dict:  # as there is no torch for the fake GPU
        known = self.finish("", products=True)
        gptq.append(self._sums.k)
        return {"hessian": known.hessian(""), "cross": known.mean_cross("")}

    monkeypatch.setattr(CudaSums, "for_gptq", here)
    monkeypatch.setattr(DeviceSums, "outer", lambda self, stream: fetched.append(self.k) or outer(self, stream))
    for place in ("cpu", "cuda:0"):
        monkeypatch.setattr(quantize_checkpoint, "_gptq_place", lambda _, place=place: place)
        how = {"method": "gptq", "calibrate": text, "device": "cuda", "progress": False}
        bf.quantize_checkpoint(tmp_path / "model.gguf", tmp_path / f"{place[:3]}.gguf", "q4_0", **how)
    assert (tmp_path / "cpu.gguf").read_bytes() == (tmp_path / "cud.gguf").read_bytes()
    head = 2  # whose sums the file has
    assert len(gptq) == 8
    assert len(fetched) == 8 + len(gptq) + head


def test_nothing_of_the_model_stays_on_the_gpu(gpu, tmp_path, text):
    """Though nobody looks for garbage: what is quantized next needs the memory."""
    if gpu is None:
        pytest.skip("a real GPU is not asked what is left")
    write_small(tmp_path / "model.gguf", Small(quantization="F32"))
    how = Quantization(bf.get_format("q8_0"), None, "gptq")
    sequential = Calibration.of(tmp_path / "model.gguf", text, True, 150, 40, "cuda").sequential(how, False)
    gc.collect()
    gc.disable()
    try:
        sequential.write(tmp_path / "known.safetensors", False)
        assert not gpu.live
    finally:
        gc.enable()


def test_torch_gives_back_what_gptq_took_before_weights_are_packed(gpu, tmp_path, text, monkeypatch):
    """Its cache is no memory for our buffers."""
    torch = pytest.importorskip("torch")
    write_small(tmp_path / "model.gguf", Small(layers=1, quantization="F32"))
    what, quantize, pack = list[str](), calibrate_checkpoint.quantize, DeviceWeights.pack

    def quantized(*given, **known):
        what.append("quantize")
        return quantize(*given, **known)

    def packed(*given):
        what.append("pack")
        return pack(*given)

    monkeypatch.setattr(calibrate_checkpoint, "quantize", quantized)
    monkeypatch.setattr(DeviceWeights, "pack", packed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: what.append("empty"))
    how = Quantization(bf.get_format("q8_0"), None, "gptq")
    sequential = Calibration.of(tmp_path / "model.gguf", text, True, 150, 40, "cuda").sequential(how, False)
    sequential.write(tmp_path / "known.safetensors", False)
    assert what.count("quantize") == 7
    assert "pack" in what
    following = [next(b for b in what[i + 1 :] if b != "quantize") for i, a in enumerate(what) if a == "quantize"]
    assert set(following) == {"empty"}
    assert what[-1] == "empty"  # what the last Hessian took


def test_gptq_without_torch_on_the_gpu_says_so(gpu, tmp_path, text, monkeypatch, caplog):
    monkeypatch.setattr(quantize_checkpoint, "gptq_device", lambda device: "cpu")
    quantize_checkpoint._gptq_place.cache_clear()
    write_small(tmp_path / "model.gguf", Small(layers=1, quantization="F32"))
    for out in ("a.gguf", "b.gguf"):
        how = {"method": "gptq", "calibrate": text, "sequential": False, "device": "cuda", "progress": False}
        bf.quantize_checkpoint(tmp_path / "model.gguf", tmp_path / out, "q4_0", **how)
    assert [record.message for record in caplog.records if "GPTQ runs on the CPU" in record.message] == [
        "GPTQ runs on the CPU: on cuda:0 it needs torch with CUDA, which is not installed."
    ]
    quantize_checkpoint._gptq_place.cache_clear()


def test_what_only_the_cpu_can(gpu, tmp_path, text, capsys):
    """`auto` takes the CPU then; a GPU that is asked for is an error."""
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "gemma4", max_position_embeddings=256)
    with pytest.raises(bf.BackendUnavailable, match=r"cuda:0 cannot calibrate models with embeddings per layer.*cpu"):
        on("cuda", model, text)
    assert_alike(on("auto", model, text), on("cpu", model, text))
    with pytest.raises(bf.DataError, match="'gpu'"):
        on("gpu", model, text)


def test_no_memory_on_the_gpu(gpu, tmp_path, text, monkeypatch):
    if gpu is None:
        pytest.skip("this machine has a GPU, and it has memory")
    write_small(tmp_path / "model.gguf", Small())
    allocate = gpu.cuMemAlloc
    monkeypatch.setattr(
        gpu, "cuMemAlloc", lambda nbytes: (NoMemory(2), 0) if nbytes == 4 * 96 * 96 else allocate(nbytes)
    )
    with pytest.raises(bf.BackendUnavailable, match=r"no memory.*device cpu"):
        on("cuda", tmp_path / "model.gguf", text)


def test_the_command_without_a_gpu(tmp_path, text, capsys):
    if has_gpu():
        pytest.skip("this machine has a GPU")
    write_small(tmp_path / "model.gguf", Small())
    command = ["calibrate", str(tmp_path / "model.gguf"), "--text", str(text), "-o", str(tmp_path / "s.safetensors")]
    assert main([*command, "--device", "cuda"]) == 2
    assert "cuda" in capsys.readouterr().err
    assert main([*command, "--tokens", "60"]) == 0
