"""Paths of models: a missing one gets the command that downloads it."""

from __future__ import annotations

import os
import re

from billfish.core.errors import CheckpointError, readable

REPOSITORY = re.compile(r"(?:https?://huggingface\.co/)?([\w.-]+/[\w.-]+)(/.*)?")


def check_path(call: str, path: str) -> str:
    """Raises for a path at which nothing is, with what to do. Returns the path."""
    try:
        missing = not os.path.lexists(path)
    except ValueError:  # a zero byte
        missing = True
    if missing:
        found = REPOSITORY.fullmatch(path)
        repository = found[1] if found and not path.endswith((".gguf", ".safetensors")) else "ORG/NAME"
        download = f"billfish downloads nothing. Run: hf download {repository} --local-dir DIR"
        prompt = " (The first argument is the model, the second the prompt.)" if call == "run" and " " in path else ""
        raise CheckpointError(f"{call}: No such file or folder: {readable(path)}.{prompt} {download}")
    return path
