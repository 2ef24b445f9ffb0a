"""The table of docs/formats.md: how much squared error method="mse" leaves, against plain rounding and against ggml.

    python -m benchmarks.quantization_error [--json FILE]

ggml's figures are those of its C code, recorded in tests/support/vectors/ggml.json on the same matrices.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np

import billfish as bf

VECTORS = Path(__file__).parent.parent / "tests" / "support" / "vectors"
sys.path.insert(0, str(VECTORS))
from make_ggml_vectors import reference_matrices  # noqa: E402


def mean_squared_error(w: np.ndarray, tensor: bf.QuantizedTensor) -> float:
    return float(np.mean((w - bf.dequantize(tensor)).astype(np.float64) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the records there")
    arguments = parser.parse_args()
    recorded = json.loads((VECTORS / "ggml.json").read_text())["formats"]
    records = []
    print("| format | gaussian: mse/rtn | mse/ggml | Student t, 4: mse/rtn | mse/ggml | seconds for 64M weights |")
    print("|---|---|---|---|---|---|")
    for name in bf.FORMATS:
        record: dict[str, object] = {"format": name}
        cells = []
        seconds, weights = 0.0, 0
        for label, w in reference_matrices().items():
            started = time.perf_counter()
            tensor = bf.quantize(w, name, method="mse")
            seconds += time.perf_counter() - started
            weights += w.size
            searched, plain = mean_squared_error(w, tensor), mean_squared_error(w, bf.quantize(w, name, method="rtn"))
            ggml = recorded.get(name, {}).get("mean_squared_error", {}).get(label)
            record[label] = {"mse": searched, "rtn": plain, "ggml": ggml}
            cells += [f"{searched / plain:.3f}", f"{searched / ggml:.3f}" if ggml else ""]
        record["seconds_64m"] = seconds / weights * 64e6
        records.append(record)
        print(f"| {name} | " + " | ".join(cells) + f" | {record['seconds_64m']:.0f} |", flush=True)
    if arguments.json:
        about = {"machine": platform.machine(), "numpy": np.__version__, "billfish": bf.__version__, "ggml": "0.25.3"}
        partial = Path(arguments.json).with_suffix(".partial")
        partial.write_text(json.dumps({"about": about, "records": records}, indent=1) + "\n")
        partial.rename(arguments.json)


if __name__ == "__main__":
    main()
