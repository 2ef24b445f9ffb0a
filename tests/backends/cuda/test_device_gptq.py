"""GPTQ in torch, on the CPU: what NumPy's solver gives, up to rounding. The kernel runs on the CPU, too (fibers.h)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import diagonal, first
from common import gaussian
from cuda_compiled import ADA, resources
from cuda_fibers import FiberLauncher

import billfish as bf
from billfish.backends.cuda.device_gptq import PATCH, THREADS, Columns, quantize_gptq_there
from billfish.backends.cuda.driver import OutOfMemory, signature
from billfish.core.device_array import DeviceArray
from billfish.core.format import Format
from billfish.core.gptq_solver import quantize_gptq
from billfish.ops import quantization

FORMATS = ["q4_0", "q4_1", "u4b8", "u4", "fp4", "nvfp4", "mxfp4", "iq4_nl", "q8_0", "q4_k", "q6_k", "nf4"]


def inputs(tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs, and the same with errors that depend on them; a column that is always zero."""
    rng = np.random.default_rng(1)
    y = rng.standard_normal((tokens, k)) @ (np.eye(k) + 0.3 * rng.standard_normal((k, k)) / k**0.5)
    y[:, 7] = 0
    return y, 0.9 * y + 0.1 * np.roll(y, 1, axis=1) + 0.05 * rng.standard_normal((tokens, k)) * (np.arange(k) != 7)


def both(format: Format, w: np.ndarray, size: int, hessian: np.ndarray, cross: np.ndarray | None) -> list[dict]:
    """Planes of NumPy's solver, and of torch's."""
    options = format.check_options("quantize", {})
    ours = quantize_gptq("quantize", format, w, size, hessian, None, options, cross)
    beside = None if cross is None else torch.from_numpy(cross)
    there = quantize_gptq_there("quantize", format, w, size, torch.from_numpy(hessian), None, options, beside)
    return [ours, {name: p.numpy() if isinstance(p, DeviceArray) else p for name, p in there.items()}]


@pytest.mark.parametrize(("name", "crossed"), diagonal(2, FORMATS, [False, True]))
def test_the_weights_are_the_solvers(name, crossed):
    format, w, (y, x) = bf.get_format(name), gaussian((40, 512)), inputs(900, 512)
    hessian, cross = (x.T @ x).astype(np.float32), (x.T @ y).astype(np.float32) if crossed else None
    size = format.check_group_size("test", None, 512)
    ours, theirs = (format.decode(planes, size) for planes in both(format, w, size, hessian, cross))
    assert (ours == theirs).mean() > 0.95  # a sum that rounds the other way moves those behind it, too

    def error(v: np.ndarray) -> float:
        return float(np.square(y @ w.T - x @ v.T).sum() if crossed else np.square(x @ (w - v).T).sum())

    assert error(theirs) == pytest.approx(error(ours), rel=3e-3)
    assert error(theirs) < 0.9 * error(bf.dequantize(bf.quantize(w, name, importance=np.diagonal(hessian))))


def test_a_group_of_all_columns_and_a_last_patch_that_is_not_whole():
    format, w, (_, x) = bf.get_format("u4b8"), gaussian((5, 2 * PATCH + 8)), inputs(300, 2 * PATCH + 8)
    ours, theirs = both(format, w, w.shape[1], x.T @ x, None)
    assert (ours["codes"] == theirs["codes"]).mean() > 0.98


@pytest.fixture
def there(monkeypatch):
    """Tensors of the CPU are taken for those of a GPU."""
    monkeypatch.setattr(quantization, "_is_on_gpu", lambda array: isinstance(array, torch.Tensor))


CHANGED = {
    "not positive": torch.full((64, 64), 5.0).fill_diagonal_(1),
    "below 0": torch.eye(64) - 2 * torch.diag(torch.arange(64) == 3).float(),
    "not symmetric": torch.eye(64) + torch.triu(torch.full((64, 64), 0.1), 1),
    "not finite": torch.full((64, 64), torch.nan),
    "of 16 bits": torch.eye(64, dtype=torch.float16),
    "of integers": torch.eye(64, dtype=torch.int64),
    "of another size": torch.eye(32),
}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("argument", ["hessian", "cross"])
def test_what_is_no_hessian_is_refused_as_on_the_cpu(there, argument, name):
    """In the same words."""
    if argument == "cross" and name in ("not positive", "below 0", "not symmetric"):
        pytest.skip("X^T Y may be so")
    w, known, told = gaussian((4, 64)), {"hessian": torch.eye(64), argument: CHANGED[name]}, list[str]()
    for given in (known, {name: tensor.numpy() for name, tensor in known.items()}):
        with pytest.raises(bf.BillfishError, match=argument) as error:
            bf.quantize(w, "q4_0", method="gptq", **given)
        told.append(f"{type(error.value).__name__}: {error.value}")
    assert told[0] == told[1]


@pytest.mark.parametrize("cross", [False, True])
def test_a_hessian_there_is_one_here(there, cross):
    w, (y, x) = gaussian((20, 128)), inputs(300, 128)
    known = {"hessian": (x.T @ x).astype(np.float32)} | ({"cross": (x.T @ y).astype(np.float32)} if cross else {})
    ours = bf.quantize(w, "q4_0", method="gptq", **known)
    sent = bf.quantize(w, "q4_0", method="gptq", **{name: torch.from_numpy(a) for name, a in known.items()})
    mixed = bf.quantize(w, "q4_0", method="gptq", **{**known, "hessian": torch.from_numpy(known["hessian"])})
    assert (bf.dequantize(ours) == bf.dequantize(sent)).mean() > 0.98
    assert np.array_equal(bf.dequantize(sent), bf.dequantize(mixed))


ERRORS = {
    "torch's": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "cuBLAS's": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "ours": OutOfMemory("cuda: allocating 5 bytes failed: CUDA_ERROR_OUT_OF_MEMORY."),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", ["upload", "check", "work"])
def test_a_gpu_without_memory(there, monkeypatch, kind, where):
    """Whoever finds out, and when."""

    def fail(*_, **__):
        raise ERRORS[kind]

    name = {"upload": "to", "check": "isfinite", "work": "argsort"}[where]
    monkeypatch.setattr(torch.Tensor if where == "upload" else torch, name, fail)
    with pytest.raises(bf.BackendUnavailable, match=r"no memory for GPTQ.*64.*device cpu"):
        bf.quantize(gaussian((4, 64)), "q4_0", method="gptq", hessian=torch.eye(64))


@pytest.mark.parametrize("kind", ERRORS)
def test_sums_that_do_not_fit_on_the_gpu(monkeypatch, kind):
    def fail(*_, **__):
        raise ERRORS[kind]

    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(bf.BackendUnavailable, match=r"^quantize: .*no memory for GPTQ"):
        quantization.sent_for_gptq("quantize", np.eye(64, dtype=np.float32), "cuda:0")


def test_other_errors_are_told_as_they_are(there, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "argsort", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bf.quantize(gaussian((4, 64)), "q4_0", method="gptq", hessian=torch.eye(64))


@pytest.mark.parametrize("name", ["q4_0", "u4", "q4_1", "iq4_nl", "q8_0"])
def test_the_kernel_rounds_columns_as_torch_does(name):
    """A patch that begins in the middle, with fewer columns than it may have."""
    format, rng = bf.get_format(name), np.random.default_rng(2)
    n, k, start, count = 130, 128, 32, 40
    size = format.check_group_size("test", None, k)
    planes = format.quantize(gaussian((n, k)), size, "mse", **format.check_options("quantize", {}))
    there = {name: DeviceArray(torch.from_numpy(plane.copy())) for name, plane in planes.items()}
    columns = Columns(format, there, size, torch.from_numpy(rng.permutation(k)))
    factors = torch.from_numpy(np.tril(0.1 * rng.standard_normal((count, count)), -1))
    targets, exact, before = (torch.from_numpy(rng.standard_normal((rows, n))) for rows in (count, k, k))
    expected, found = before.clone(), before.clone()
    levels, made = torch.zeros(k, n), torch.zeros(k, n)
    columns.round(start, factors, targets, exact, expected, levels)
    optional = [0 if each is None else each.data_ptr() for each in (columns.zero, columns.minimum)]
    arguments = (
        factors.data_ptr(), count, targets.data_ptr(), *(t[start:].data_ptr() for t in (exact, found, made)),
        columns.groups[start:].data_ptr(), columns.scale.data_ptr(), columns.inverse.data_ptr(), *optional,
        columns.table.data_ptr(), len(columns.table), count, n,
    )  # fmt: skip
    FiberLauncher(1e-5, ADA).launch(0, "round_columns", {}, (-(-n // THREADS),), THREADS, *arguments)
    assert (made == levels).float().mean() > 0.999
    same = made == levels
    assert torch.allclose(found[same], expected[same], atol=1e-6)
    assert torch.equal(found[:start], before[:start])
    assert torch.equal(found[start + count :], before[start + count :])


@pytest.mark.parametrize("arch", first(1, ["sm_90a", "sm_80"]))
def test_the_kernel_compiles_without_spills(arch):
    resources("round_columns.cu", {}, arch)
    assert signature("round_columns.cu", "marlin_round_columns") == "pippppppppppiii"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu(name):
    """`quantize` runs where the Hessian is; the result is that of the CPU."""
    w, (y, x) = gaussian((200, 512)), inputs(900, 512)
    hessian, cross = (x.T @ x).astype(np.float32), (x.T @ y).astype(np.float32)
    there = {"hessian": torch.from_numpy(hessian).cuda(), "cross": torch.from_numpy(cross).cuda()}
    ours = bf.quantize(w, name, method="gptq", hessian=hessian, cross=cross)
    for given in (w, torch.from_numpy(w).cuda()):
        theirs = bf.quantize(given, name, method="gptq", **there)
        assert (bf.dequantize(ours) == bf.dequantize(theirs)).mean() > 0.98
