"""The few calls in which torch and MLX differ, so that tests of layers can be the same for both."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import torch
from common import gaussian
from mlx.utils import tree_flatten

import billfish.nn.mlx.linear
import billfish.nn.torch.linear
from billfish.backends import BACKENDS
from billfish.core.arrays import MlxArrays, TorchArrays


@dataclass
class Framework:
    """One of the two libraries."""

    name: str
    ours: ModuleType
    core: Any
    linear: Any
    arrays: Any

    def array(self, values: np.ndarray, dtype: str = "float32") -> Any:
        made = self.arrays.from_numpy(values)
        return made.to(getattr(torch, dtype)) if self.core is torch else made.astype(getattr(mx, dtype))

    def numpy(self, array: Any) -> np.ndarray:
        array = array.detach().float() if self.core is torch else array.astype(mx.float32)
        return self.arrays.to_numpy(array)

    def make_linear(self, n: int, k: int, bias: bool = True, dtype: str = "float32") -> Any:
        layer = self.linear(k, n, bias=bias)
        values = {"weight": self.array(gaussian((n, k)), dtype)}
        if bias:
            values["bias"] = self.array(gaussian((n,), 1), dtype)
        if self.core is torch:
            layer.to(getattr(torch, dtype)).load_state_dict(values)
        else:
            layer.update(values)
        return layer

    def parameters(self, layer: Any) -> dict[str, Any]:
        return dict(layer.state_dict()) if self.core is torch else dict(tree_flatten(layer.parameters()))


def count_packs(monkeypatch: Any) -> list[Any]:
    """The matrices that the CPU packs from now on."""
    cpu, packs = BACKENDS["cpu"], []
    pack = cpu.pack

    def counting(tensor: Any, place: str = "cpu") -> Any:
        packs.append(tensor)
        return pack(tensor, place)

    monkeypatch.setattr(cpu, "pack", counting)
    return packs


TORCH = Framework("torch", billfish.nn.torch.linear, torch, torch.nn.Linear, TorchArrays())
MLX = Framework("mlx", billfish.nn.mlx.linear, mx, mlx.nn.Linear, MlxArrays())
