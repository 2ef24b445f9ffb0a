"""billfish's own layout, billfish.checkpoints.layouts.native, which holds every format."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from billfish.checkpoints.write.target import Item, Spec, Target, storage_specs
from billfish.core.format import FORMATS, Format
from billfish.core.storage import Array, Storage


class NativeTarget(Target):
    name = "billfish"
    suffixes = ("", ".safetensors")

    def __init__(self) -> None:
        self.formats = tuple(FORMATS)  # and whatever was registered since this was imported

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        return None  # nothing that does not fit

    def config(self, items: Sequence[Item]) -> dict[str, Any]:
        return {"quantization_config": quantization_config(items)}

    def metadata(self, items: Sequence[Item]) -> dict[str, str]:
        return {"format": "pt", "billfish": json.dumps(quantization_config(items))}

    def specs(self, item: Item) -> dict[str, Spec]:
        specs = {f"{item.module}.{part}": spec for part, spec in storage_specs(item).items()}
        if item.act_order:
            specs[f"{item.module}.permutation"] = (np.dtype(np.int32), (item.k,))
        return specs

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        arrays = {f"{item.module}.{part}": array for part, array in storage.items()}
        if item.act_order:
            order = item.order()
            arrays[f"{item.module}.permutation"] = np.arange(item.k) if order is None else order
        return arrays


def quantization_config(items: Iterable[Item]) -> dict[str, Any]:
    """What most modules have, and the exceptions."""
    quantized = [item for item in items if item.format is not None]
    common = Counter((item.format.name, item.group_size) for item in quantized if item.format).most_common(1)
    config: dict[str, Any] = {"quant_method": "billfish"}
    if common:
        config |= {"format": common[0][0][0], "group_size": common[0][0][1]}
    modules: dict[str, Mapping[str, Any]] = {}
    for item in quantized:
        assert item.format is not None
        about: dict[str, Any] = {"format": item.format.name, "group_size": item.group_size}
        extra: dict[str, Any] = {} if item.name.endswith(".weight") else {"bare": True}
        if extra or any(config[key] != value for key, value in about.items()):
            modules[item.module] = {**about, **extra}
    return {**config, "modules": modules} if modules else config
