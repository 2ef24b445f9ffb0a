"""OpenVINO GenAI for `llm_speed.py`. It reads GGUF, and compiles its kernels for the machine when it loads a model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


class OpenVino:
    """Its public interface gives whole answers, and says how long they took."""

    name, install = "OpenVINO GenAI", "openvino-genai"

    def __init__(self, path: Path, threads: int) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        self.version = f"{self.install} {importlib.metadata.version(self.install)}"
        self._numpy, self._openvino, self._genai = np, openvino, openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(self, tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds to the first token of an answer, and for each of the `count` that follow."""
        ids = self._numpy.array([tokens], self._numpy.int64)
        tensors = (self._openvino.Tensor(each) for each in (ids, self._numpy.ones_like(ids)))
        prompt = self._genai.TokenizedInputs(*tensors)
        metrics = self._pipeline.generate(prompt, max_new_tokens=1 + count, ignore_eos=True).perf_metrics
        assert metrics.get_num_generated_tokens() == 1 + count, self.version
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3
