"""What sentence-transformers' files beside a model say about vectors of texts: pooling and normalization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument
from billfish.core.files import read_json, read_json_list
from billfish.models.architecture import NORMALIZED_VECTORS, Field

MODULES = "modules.json"
SETTING = "billfish_embedding"  # in the config.json of our folders, which have no folders inside
KINDS = ("Transformer", "Pooling", "Normalize")  # of modules that are computed
RANK = 4  # GGUF's number for scores
# GGUF's numbers, by the settings of 1_Pooling/config.json and by the word of newer files.
MODES = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
WORDS = {"mean": 1, "cls": 2, "lasttoken": 3}


def sentence_fields(folder: Path | None, config: Mapping[str, Any], architecture: str) -> dict[str, Field]:
    """GGUF's fields; none where there are no such files. Raises for a module that is not computed, or another pooling:
    vectors without it would be others."""
    said = config.get(SETTING)
    if isinstance(said, Mapping) and said.get("pooling") in WORDS:
        normalized = bool(said.get("normalized", True))
        return {f"{architecture}.pooling_type": WORDS[said["pooling"]], NORMALIZED_VECTORS: normalized}
    modules = read_json_list(folder / MODULES) if folder is not None else []
    if folder is None or not modules:
        return {}
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, Mapping)]
    odd = next((kind for kind in kinds if kind not in KINDS), None)
    if odd is not None:
        raise CheckpointError(bad_argument(CALL, f"type of {MODULES}", repr(odd), f"one of {', '.join(KINDS)}"))
    fields: dict[str, Field] = {NORMALIZED_VECTORS: "Normalize" in kinds}
    if "Pooling" in kinds:
        path = modules[kinds.index("Pooling")].get("path", "")
        if not isinstance(path, str) or Path(path).name != path:
            raise CheckpointError(bad_argument(CALL, f"path of {MODULES}", repr(path), "a folder beside it"))
        fields[f"{architecture}.pooling_type"] = _pooling(folder / path / "config.json")
    return fields


def _pooling(file: Path) -> int:
    settings = read_json(file)
    chosen = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
    found = [MODES[name] for name in chosen if name in MODES]
    if settings.get("pooling_mode") in WORDS:
        found, chosen = [WORDS[settings["pooling_mode"]]], chosen[:1]
    if len(found) != 1 or len(chosen) > 1:
        expected = f"one of {', '.join(WORDS)}"
        raise CheckpointError(bad_argument(CALL, f"pooling of {file}", repr(chosen or settings), expected))
    return found[0]


def sentence_settings(fields: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What our folders have in config.json instead of such files; {} where the fields say nothing."""
    word = next((word for word, number in WORDS.items() if number == fields.get(f"{architecture}.pooling_type")), None)
    return {} if word is None else {SETTING: {"pooling": word, "normalized": fields.get(NORMALIZED_VECTORS, True)}}
