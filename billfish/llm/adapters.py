"""LoRA adapters in peft's layout: what they add to the products of a decoder's layers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.names.gguf_names import gguf_name
from billfish.core.errors import ModelError, bad_argument, failure
from billfish.core.files import read_json
from billfish.llm.kv_cache import Floats
from billfish.llm.model_weights import ModelTensors
from billfish.models import of_gguf
from billfish.models.description import Attention, Dense, Matrix
from billfish.models.fields import Fields

CALL = "llm.load_adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# Settings that change what is computed, and the values that do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
}


class AdaptedMatrix(NamedTuple):
    """scale up^T (down x) is added to a product of layer `layer`. which: of q, k, v, output, gate, up and down, in this
    order. down: [rank, k]. up: [rank, n]."""

    layer: int
    which: int
    down: Floats
    up: Floats
    scale: float


def read_adapter(folder: Path, tensors: ModelTensors) -> list[AdaptedMatrix]:
    """The adapter of a folder, for a model. Raises ModelError for one that is not for this model, and for parts that
    are not computed: embeddings, the LM head, experts, recurrent layers."""
    config = read_json(folder / CONFIG)
    _check(folder, config)
    pairs = dict[str, dict[str, Floats]]()
    checkpoint = Checkpoint(folder / WEIGHTS)
    for name in checkpoint:
        found = NAME.fullmatch(name)
        if found is None:
            raise ModelError(failure(CALL, f"{folder / WEIGHTS} has {name!r}, which is no lora_A or lora_B of a layer"))
        pairs.setdefault(found[1], {})[found[2]] = np.array(checkpoint[name], np.float32)
    adapted = [part for module, pair in pairs.items() for part in _parts(folder, config, module, pair, tensors)]
    if not adapted:
        raise ModelError(failure(CALL, f"{folder / WEIGHTS} has no tensors"))
    return adapted


def _check(folder: Path, config: Mapping[str, Any]) -> None:
    if not config:
        raise ModelError(failure(CALL, f"{folder} has no {CONFIG}", "Pass a folder that peft's save_pretrained wrote."))
    if config.get("peft_type") != "LORA":
        raise ModelError(bad_argument(CALL, f"peft_type of {folder / CONFIG}", repr(config.get("peft_type")), "'LORA'"))
    for name, values in PLAIN.items():
        if config.get(name) not in values:
            takes = " or ".join(json.dumps(value) for value in values)
            raise ModelError(bad_argument(CALL, f"{name} of {folder / CONFIG}", repr(config[name]), takes))


def _parts(
    folder: Path, config: Mapping[str, Any], module: str, pair: dict[str, Floats], tensors: ModelTensors
) -> list[AdaptedMatrix]:
    """What an adapter of one module adds: to several matrices, where a file has them as one."""
    fields = tensors.source.fields
    architecture = of_gguf(fields)
    assert architecture is not None  # the model runs
    known = gguf_name(f"{module}.weight", architecture.gguf)
    name = "" if known is None else known.removesuffix(".weight")
    targets = [(i, which, part) for i, which, part in _matrices(tensors) if part.name == name]
    if not targets or any(name.endswith(joined) for group in architecture.joined for joined in group):
        takes = "products of attention and of dense feed-forward parts"
        raise ModelError(bad_argument(CALL, f"{folder / WEIGHTS}", f"an adapter of {module!r}", takes))
    n, k = targets[0][2].shape
    down, up = pair.get("A"), pair.get("B")
    if down is None or up is None or down.ndim != 2 or down.shape[1] != k or up.shape != (n, down.shape[0]):
        shapes = {key: array.shape for key, array in pair.items()}
        raise ModelError(bad_argument(CALL, f"shapes of {module!r}", shapes, f"A [rank, {k}] and B [{n}, rank]"))
    within = re.sub(r"^blk\.\d+\.", "", f"{name}.weight")
    difference = architecture.difference(Fields(fields, architecture.gguf), within, (n, k))
    up = up if difference.rows is None else up[difference.rows]
    down = down if difference.columns is None else down[:, difference.columns]
    scale = _scale(config, module, len(down))
    parts = []
    for layer, which, matrix in targets:
        rows = list(matrix.chosen) or slice(matrix.first, matrix.first + matrix.rows)
        own = up[rows] if matrix.joined else up
        parts.append(AdaptedMatrix(layer, which, np.ascontiguousarray(down), np.ascontiguousarray(own.T), scale))
    return parts


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    own = next((value for key, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?{key}", module)), None)
    alpha = config.get("lora_alpha", 8) if own is None else own
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha) or rank < 1:
        raise ModelError(bad_argument(CALL, "lora_alpha", repr(alpha), "a number"))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matrices(tensors: ModelTensors) -> list[tuple[int, int, Matrix]]:
    """What can be adapted: the layer, and which of its matrices."""
    found = list[tuple[int, int, Matrix | None]]()
    for i, block in enumerate(tensors.config.blocks):
        mixer, part = block.mixer, block.feed_forward
        if isinstance(mixer, Attention):
            found += [(i, at, each) for at, each in enumerate((mixer.q, mixer.k, mixer.v, mixer.output))]
        if isinstance(part, Dense):
            found += [(i, at, each) for at, each in enumerate((part.gate, part.up, part.down), start=4)]
    return [(layer, which, matrix) for layer, which, matrix in found if matrix is not None]
