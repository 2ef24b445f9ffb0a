"""Sampling settings that a model's files recommend: generation_config.json of a folder, general.sampling.* of GGUF."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from billfish.checkpoints.layouts.gguf import Metadata
from billfish.llm.text_model import TextModel

USUAL = {"temperature": 0.8, "top_p": 0.95}  # where the files say nothing
GGUF = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
BOUNDS = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.001, 1000.0),
}


def sampling_defaults(model: TextModel) -> dict[str, float]:
    """Settings of :class:`billfish.llm.sampler.Sampling` for whoever asks for none. Values out of range are left out.

    A model that is said to decode greedily has temperature 0. One that says nothing has 0.8 and top_p 0.95.
    """
    fields = model.source.fields
    if isinstance(fields, Metadata):
        said = {name: fields.get(key) for name, key in GGUF.items()}
    else:
        said = _generation_config(model)
    found = dict[str, float]()
    for name, (least, most) in BOUNDS.items():
        value = said.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            value = 0 if name == "top_k" and value < 0 else value
            if least <= value <= most:
                found[name] = int(value) if name == "top_k" else float(value)
    return found or dict(USUAL)


def with_defaults(defaults: Mapping[str, float], given: Mapping[str, float | None]) -> dict[str, float]:
    """The settings that are given, and a model's defaults for those that are None.

    Where the files recommend nothing, temperature and top_p are usual values that belong together: whoever sets one of
    them gets the other as it is without a limit.
    """
    if defaults == USUAL and (given.get("temperature") is not None or given.get("top_p") is not None):
        defaults = {"temperature": 1.0}
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def _generation_config(model: TextModel) -> dict[str, Any]:
    folder = model.path if model.path.is_dir() else model.path.parent
    try:
        read = json.loads((folder / "generation_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(read, dict):
        return {}
    return {"temperature": 0.0} if read.get("do_sample") is False and "temperature" not in read else read
