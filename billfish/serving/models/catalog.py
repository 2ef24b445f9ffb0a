"""The models that a server may load: their names, files and adapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from billfish.checkpoints.hub import NO_MODEL, SPLIT
from billfish.core.errors import DataError, bad_argument, failure, readable
from billfish.llm.quantize_on_load import Quantizer
from billfish.llm.text_model import TextModel
from billfish.models.description import Attention
from billfish.serving.engine.engine_settings import EngineSettings

CALL = "serve"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Named:
    """A model. name: what requests call it. adapters: folders of LoRA adapters by their names."""

    name: str
    path: Path
    adapters: dict[str, str] = field(default_factory=dict)


def name_of(path: Path) -> str:
    """The usual name of a model: that of its folder, or of its file without the extension."""
    return path.stem if path.is_file() else path.name


def models_in(folder: str) -> list[Path]:
    """The GGUF files and model folders in a folder, by name. Of a file in parts, the first."""
    top = Path(folder)
    if not top.is_dir():
        raise DataError(bad_argument(CALL, "--models", repr(folder), "a folder with GGUF files and model folders"))
    found = list[Path]()
    for path in sorted(top.iterdir()):
        if path.is_dir():
            inside = [each for each in sorted(path.glob("*.gguf")) if _is_model(each)]
            found += [path] if (path / "config.json").is_file() else inside
        elif path.suffix == ".gguf" and _is_model(path):
            found.append(path)
    if not found:
        raise DataError(failure(CALL, f"--models {readable(folder)} has no GGUF file and no folder with config.json"))
    return found


def _is_model(path: Path) -> bool:
    part = SPLIT.search(path.name)
    return not NO_MODEL.search(path.name) and (part is None or int(part[1]) == 1)


def catalog_of(paths: Sequence[Path], aliases: Sequence[str], adapters: Sequence[tuple[str, str]]) -> list[Named]:
    """aliases: none, or one for each path. adapters: NAME@MODEL and folder. Raises for names that occur twice."""
    if aliases and len(aliases) != len(paths):
        problem = f"--alias is given {len(aliases)} times for {len(paths)} models"
        raise DataError(failure(CALL, problem, "Pass one for each model, in their order, or none."))
    names = list(aliases) or [name_of(path) for path in paths]
    made = {name: Named(name, path) for name, path in zip(names, paths, strict=True)}
    for target, folder in adapters:
        name, _, model = target.rpartition("@")
        if not name or model not in made:
            known = ", ".join(map(readable, made))
            raise DataError(bad_argument(CALL, "--lora", repr(target), f"NAME@MODEL=FOLDER, where MODEL is of {known}"))
        made[model].adapters[name] = folder
    every = [*names, *(name for model in made.values() for name in model.adapters)]
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise DataError(
            failure(CALL, f"two models or adapters are called {readable(twice)}", "Rename one with --alias.")
        )
    return list(made.values())


def memory_of(given: str, total: int) -> int:
    """The bytes of `--memory`: 24GB, 24GiB or 80%, of so many bytes that the device has."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(%)|([kmgt]i?|)b?)", given.strip().lower())
    size = 0 if found is None else int(float(found[1]) * (total / 100 if found[2] else UNITS[found[3]]))
    if size < 1:
        raise DataError(bad_argument(CALL, "--memory", repr(given), "a size such as 24GB, or a share such as 80%"))
    return size


def in_words(nbytes: int) -> str:
    """A size with its unit."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def bytes_needed(model: TextModel, settings: EngineSettings, *, on_gpu: bool) -> int:
    """About what a model takes: its files, with float weights as they are quantized to, and the KV cache of all
    streams. What it took is known when it is loaded."""
    context = settings.context or model.config.context
    sizes = {"float32": 4.0, "float16": 2.0, "int8": 1.125, "fp8": 1.0625}  # with scales
    per_number = sizes.get(settings.cache_type or "", 2.0 if on_gpu else 4.0)
    numbers = sum(
        2 * mixer.kv_heads * mixer.head_size * min(context, mixer.window or context)
        for mixer in (block.mixer for block in model.config.blocks)
        if isinstance(mixer, Attention) and mixer.shares is None
    )
    sequences = (
        settings.streams if settings.cache_tokens is None else min(settings.streams, settings.cache_tokens / context)
    )
    weights = sum(file.size for file in model.source.tensors.files)
    if settings.quantize is not None:
        weights -= Quantizer(settings.quantize, model.path).saves(model.source.tensors)
    return weights + int(numbers * sequences * per_number)
