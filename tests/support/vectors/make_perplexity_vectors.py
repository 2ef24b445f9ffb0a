"""Records the perplexity that llama.cpp gives for the files of quantized_files.py.

    pip install llama-cpp-python==0.3.36
    python tests/support/vectors/make_perplexity_vectors.py

Twice for each: as it loads the file, with activations of 8 bits, and after its own quantizer decoded it to float32.
Prints ours beside them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from quantized_files import FILES, TEXT, TOKENS, WINDOW, write_file

from benchmarks.in_llama_cpp import measured
from billfish.llm import load


def main() -> None:
    found = {}
    for format, method in FILES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_file(Path(folder), format, method)
            tokens = load(path, device="cpu", progress=False).tokenizer.encode(TEXT, special=False)[:TOKENS]
            record = measured(path, tokens, WINDOW)
        print(format, method, record, flush=True)
        found[f"{format}, {method}"] = {name: record[name] for name in ("llama_cpp_floats", "llama_cpp")}
    content = {"made_by": "llama-cpp-python 0.3.36", "perplexity": found}
    Path(__file__).with_name("perplexity.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
