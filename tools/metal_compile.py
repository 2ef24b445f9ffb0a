"""Compile every Metal kernel with Apple's compiler. It needs Xcode and no GPU, which virtual machines lack.

    python -m tools.metal_compile --standard metal3.1

The texts are those that `billfish doctor` would run, behind what MLX and what torch put before them. Kernels of Metal 4
are compiled from metal4.0 on.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from billfish.backends.metal.kernels import Kernels
from billfish.backends.metal.mps import PRELUDE
from billfish.backends.metal.signature import write
from billfish.cli import metal_checks
from billfish.core.format import FORMATS

MLX_PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
COMPILER = "xcrun -sdk macosx metal"
METAL_4 = "<metal_tensor>"


def texts(formats: Iterable[str]) -> dict[str, str]:
    """Every text that Metal gets, by a name."""
    found: dict[str, str] = {}

    def recorder(**arguments: Any) -> Any:
        def launch(**call: Any) -> list[Any]:
            made = write(
                arguments["name"],
                arguments["input_names"],
                call["inputs"],
                arguments["output_names"],
                call["output_dtypes"],
                call.get("template", []),
                arguments.get("header", ""),
                arguments["source"],
                atomic_outputs=False,
            )
            found[made.name] = made.text
            return [
                np.zeros(shape, dtype)
                for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
            ]

        return launch

    kernels = Kernels(recorder)
    kernels.without_units = ""
    device = metal_checks.Device(kernels, np.array, np.asarray)
    for record in metal_checks.checks("metal", formats, device):
        assert "Error" not in record["verdict"], record  # what is computed here is zero, and wrong
    return found


def compile_all(formats: Iterable[str], standard: str, compiler: str = COMPILER) -> list[str]:
    """What the compiler says of each text that it refuses."""
    spec = importlib.util.find_spec("mlx")
    assert spec is not None
    assert spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "include"
    jobs = [
        (f"{name} ({whose})", prelude + text)
        for name, text in texts(formats).items()
        for whose, prelude in (("MLX", MLX_PRELUDE), ("torch", PRELUDE))
        if METAL_4 not in text or (standard >= "metal4.0" and whose == "MLX")
    ]

    def refused(job: tuple[str, str]) -> str:
        name, text = job
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.metal"
            file.write_text(text)
            command = [*compiler.split(), f"-std={standard}", "-I", str(include), "-c", str(file), "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True)
        return f"{name}:\n{done.stderr}" if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [message for message in pool.map(refused, jobs) if message]
    print(f"{len(jobs)} kernels in {standard}, {len(failures)} refused.")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every Metal kernel with Apple's compiler.")
    parser.add_argument("--standard", default="metal3.1", help="language version (default: metal3.1, that of macOS 14)")
    parser.add_argument("--compiler", default=COMPILER, help=f"command of the compiler (default: {COMPILER})")
    arguments = parser.parse_args()
    failures = compile_all(FORMATS, arguments.standard, arguments.compiler)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
