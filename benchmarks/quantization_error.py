"""The table of docs/quality.md: how much squared error method="mse" leaves, against plain rounding and against ggml.

ggml's figures are those of its C code, recorded in tests/support/vectors/ggml.json on the same matrices.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import command, machine, records, tables

VECTORS = Path(__file__).parent.parent / "tests" / "support" / "vectors"
sys.path.insert(0, str(VECTORS))
from make_ggml_vectors import reference_matrices  # noqa: E402


def mean_squared_error(w: np.ndarray, tensor: bf.QuantizedTensor) -> float:
    return float(np.mean((w - bf.dequantize(tensor)).astype(np.float64) ** 2))


def main() -> None:
    flags = command.parser(__spec__, __doc__).parse_args()
    recorded = json.loads((VECTORS / "ggml.json").read_text())["formats"]
    found = []
    for name in bf.FORMATS:
        record: dict[str, Any] = {"format": name}
        seconds, weights = 0.0, 0
        for label, w in reference_matrices().items():
            started = time.perf_counter()
            tensor = bf.quantize(w, name, method="mse")
            seconds += time.perf_counter() - started
            weights += w.size
            searched, plain = mean_squared_error(w, tensor), mean_squared_error(w, bf.quantize(w, name, method="rtn"))
            ggml = recorded.get(name, {}).get("mean_squared_error", {}).get(label)
            record[label] = {"mse": searched, "rtn": plain, "ggml": ggml}
        record["seconds_64m"] = seconds / weights * 64e6
        found.append(record)
        print(name, flush=True)
    about = {"machine": platform.machine()} | machine.versions("numpy") | {"ggml": "0.25.3"}
    results = {"about": about, "records": found}
    print(tables.search(results))
    records.write(flags.json, results)


if __name__ == "__main__":
    main()
