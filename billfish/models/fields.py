"""Hyperparameters, checked as they are read: the fields of a GGUF file, and the settings of a config.json."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from billfish.core.errors import CheckpointError, ModelError, bad_argument, failure

CALL, CONFIG_CALL = "llm.load", "load"
LARGEST = 1e300  # of numbers: larger ones, and those that are none, are refused


class Fields:
    """The fields of one architecture in the metadata of a GGUF file. A field may be a list with a value per layer.

    tensors: their names in the file; None: not known.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str, tensors: Container[str] | None = None) -> None:
        self.metadata, self.architecture, self.tensors = metadata, architecture, tensors

    def has(self, tensor: str, default: bool = True) -> bool:
        """Whether the file has a tensor; `default` where that is not known."""
        return default if self.tensors is None else tensor in self.tensors

    def get(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None, layer: int | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise ModelError(failure(CALL, f"the model has no field {self.architecture}.{name}"))
        if layer is not None and isinstance(value, (list, tuple)):
            refuse(layer >= len(value), name, f"{len(value)} layers", f"one number, or one for each layer ({layer})")
            value = value[layer]
        good = isinstance(value, (int, float)) and -LARGEST < value < LARGEST  # a NaN is neither
        refuse(not good, name, repr(value), "a number")
        return value

    def size(self, name: str, default: float | None = None, layer: int | None = None) -> int:
        return int(self.number(name, default, layer))

    def positive(self, name: str, default: float | None = None) -> float:
        value = float(self.number(name, default))
        refuse(value <= 0, name, value, "a positive number")
        return value

    def cap(self, name: str, default: float) -> float:
        """c of what becomes c tanh(s / c); 0 for none."""
        value = float(self.number(name, default))
        refuse(value < 0, name, value, "a positive number, or 0 for none")
        return value


def refuse(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise ModelError for a field, if the condition holds."""
    if condition:
        raise ModelError(bad_argument(CALL, name, value, expected))


def number(name: str, value: Any) -> int | float:
    """A setting that a field can hold. Numbers that are wrong for a model are refused where it is run."""
    if not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
        raise CheckpointError(bad_argument(CONFIG_CALL, name, repr(value), "a number"))
    return value


def positive(name: str, value: Any) -> float:
    """A setting as it is; raises unless it is positive, and a float can hold it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
        raise CheckpointError(bad_argument(CONFIG_CALL, name, repr(value), "a positive number"))
    return value


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a configuration that is itself an object; {} if it is missing or something else."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}
