"""OpenVINO GenAI for `llm_speed.py`. It reads GGUF, and compiles its kernels for the machine when it loads a model."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

# In a process of its own: beside its threads, others take twice as long, and it resets the AMX registers of llama.cpp.
WORKER = """
import json, sys
import numpy as np, openvino, openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
for line in sys.stdin:
    tokens, count = json.loads(line)
    ids = np.array([tokens], np.int64)
    prompt = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    found = pipeline.generate(prompt, max_new_tokens=count, ignore_eos=True).perf_metrics
    print(json.dumps([found.get_num_generated_tokens(), found.get_ttft().mean, found.get_tpot().mean]), flush=True)
"""


class OpenVino:
    """Its public interface gives whole answers, and says how long they took."""

    name, install = "OpenVINO GenAI", "openvino-genai"

    def __init__(self, path: Path, threads: int) -> None:
        try:
            self.version = f"{self.install} {importlib.metadata.version(self.install)}"
        except importlib.metadata.PackageNotFoundError as error:
            raise ImportError(f"No package {self.install}") from error
        words = [sys.executable, "-c", WORKER, str(path), str(threads)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._prompts = 0

    def answer(self, tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds to the first token of an answer, and for each of the `count` that follow."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._prompts += 1  # and each begins with another token: it remembers the beginnings of earlier prompts
        print(json.dumps([[100 + self._prompts, *tokens[1:]], 1 + count]), file=self._process.stdin, flush=True)
        made, first, each = json.loads(self._process.stdout.readline())
        assert made == 1 + count, self.version
        return first / 1e3, each / 1e3
