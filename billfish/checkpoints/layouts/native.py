"""Our own layout, which holds every format as it is: the storage arrays of a format under the module's name.

    M.packed, M.scales, ...     or M.blocks: the arrays of docs/format-bits.md; 32-bit words as I32 or U32. Of a stack
                                of E matrices each has a leading axis E
    M.permutation               i32 [K], only with act-order
    M.about                     u8, in files of layers: the format and the group size of M, see core/format_tag.py
    M.weight                    u8 [0], a marker: a loader that does not know this layout looks for a matrix so named
                                and refuses the file by its shape, instead of making up the weights

Where there is no M.about, config.json says which format it is,

    "quantization_config": {"quant_method": "billfish", "format": "fp4", "group_size": 128,
                            "modules": {"lm_head": {"format": "q8_0", "group_size": 32}}}

(a module with "bare": true stands for a tensor of that very name, not for its `.weight`) or, for a file alone, the same
object as JSON in the metadata under "billfish". MarlinLinear's state dicts have these keys.

Files of earlier versions have a stack as one matrix [E * N, K], and its module has "shape": [E, N, K].
"""

from __future__ import annotations

import json
import math
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.entry import Entry, MatrixEntry
from billfish.checkpoints.safetensors_files import CALL, Stored
from billfish.checkpoints.write.target import Item, Spec, Target, storage_specs
from billfish.core.errors import CheckpointError, FormatError, bad_argument, failure
from billfish.core.format import FORMATS, Format
from billfish.core.format_tag import ABOUT, About
from billfish.core.storage import Array, Storage
from billfish.models.fields import section

MARKER = "weight"
BESIDE = ("permutation", ABOUT, MARKER)  # parts of a module that are in no format's storage
MARKER_SPEC: Spec = (np.dtype(np.uint8), (0,))

# ---- reading ---------------------------------------------------------------------------------------------------------


def parts() -> tuple[str, ...]:
    """The names of all arrays that a module may have."""
    return (*dict.fromkeys(name for format in FORMATS.values() for name in format.storage_names), *BESIDE)


def first_parts() -> set[str]:
    """The names of the arrays by which a module is recognised."""
    return {format.storage_names[0] for format in FORMATS.values()}


class NativeMatrix(MatrixEntry):
    layout = "billfish"

    def __init__(self, name: str, parts: dict[str, Stored], format: Format, shape: tuple[int, ...], group: int) -> None:
        self.arrays = {part: stored for part, stored in parts.items() if part not in BESIDE}
        self.order = parts.get("permutation")
        weights = [stored for part, stored in parts.items() if part not in (ABOUT, MARKER)]
        super().__init__(name, format.name, shape, group, weights, self.order is not None)
        self.parts |= {stored.name for stored in parts.values()}
        self.group = group

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        specs = self.format.storage_spec(self.n, self.k, self.group)
        storage = {part: specs[part].cut(self._array(part), rows, columns) for part in self.arrays}
        return self.format, storage, self._group_size()

    def stack(self, experts: slice, columns: slice) -> tuple[Format, Storage, int]:
        if len(self.arrays[self.format.storage_names[0]].shape) == 2:
            return super().stack(experts, columns)
        specs = self.format.storage_spec(self.description.shape[1], self.k, self.group)
        storage = {part: specs[part].cut(self._array(part)[experts], None, columns) for part in self.arrays}
        return self.format, storage, self._group_size()

    def _array(self, part: str) -> Array:
        array = self.arrays[part].array()
        return array.view(np.uint32) if array.dtype == np.int32 else array

    def _group_size(self) -> int:
        return -1 if self.group == self.k and self.format.whole_row_groups else self.group

    def permutation(self) -> NDArray[np.int64] | None:
        if self.order is None:
            return None
        order = self.order.array().astype(np.int64)
        if not np.array_equal(np.sort(order), np.arange(self.k)):
            raise CheckpointError(failure(CALL, f"{self.order.name} is not a permutation of {self.k} columns"))
        return order


def recognise(module: str, parts: dict[str, Stored], config: dict[str, Any]) -> Entry:
    """The entry for `module`, whose arrays are `parts`."""
    # What lies beside the arrays cannot be about other ones. A chain, as copies of `config` for each module add up.
    beside = _read_about(parts[ABOUT]) if ABOUT in parts else {}
    settings = ChainMap(beside, section(section(config, "modules"), module), config)
    format, group = FORMATS.get(str(settings.get("format"))), settings.get("group_size")
    if format is None:
        problem = f"quantization_config has the unknown format {settings.get('format')!r} for {module}"
        raise CheckpointError(failure(CALL, problem, "`billfish formats` lists all."))
    first = format.parts({})[0]
    main = parts.get(first.name)
    odd = parts.keys() - {*format.storage_names, *BESIDE}
    if main is None or odd:
        problem = f"{module} has the arrays {sorted(parts)}"
        raise CheckpointError(failure(CALL, problem, f"{format.name} has {', '.join(format.storage_names)}."))
    *experts, _, _ = main.shape if len(main.shape) in (2, 3) else (0, 0, 0)
    if 0 in (*experts, *main.shape) or any(
        part.shape[: len(experts)] != (*experts,) for name, part in parts.items() if name not in (ABOUT, MARKER)
    ):
        problem = f"{module} has the shapes {', '.join(f'{name} {part.shape}' for name, part in parts.items())}"
        raise CheckpointError(failure(CALL, problem, "Expected a matrix, or a stack with the axis E in each array."))
    n, along_k = (main.shape[len(experts) + first.axes.index(axis)] for axis in "nk")
    shape = (n, along_k // first.items * first.run)
    if group in (-1, shape[1]) and format.whole_row_groups:
        group = shape[1]
    if group not in format.group_sizes and group != shape[1]:
        sizes = f"one of {format.group_sizes}"
        raise CheckpointError(bad_argument(CALL, f"group_size of {module}", repr(group), sizes))
    order = parts.get("permutation")
    if order is not None and (order.kind not in ("I32", "I64") or order.shape != (shape[1],)):
        raise CheckpointError(bad_argument(CALL, order.name, f"{order.kind} {order.shape}", f"I32 ({shape[1]},)"))
    name = module if settings.get("bare") else f"{module}.weight".removeprefix(".")
    stack = (*experts, *shape) if experts else _stack(module, shape, settings.get("shape"))
    return NativeMatrix(name, parts, format, stack, int(group))


def _read_about(stored: Stored) -> dict[str, Any]:
    try:
        return About.read(CALL, stored.array())._asdict()
    except FormatError as error:
        raise CheckpointError(failure(CALL, f"{stored.name}: {str(error).removeprefix(f'{CALL}: ')}")) from None


def _stack(module: str, shape: tuple[int, int], declared: Any) -> tuple[int, ...]:
    """The shape of a stack that is stored as one matrix."""
    if declared is None:
        return shape
    whole = isinstance(declared, list) and all(isinstance(size, int) and size > 0 for size in declared)
    if not whole or len(declared) < 2 or (math.prod(declared[:-1]), declared[-1]) != shape:
        argument = f"shape of {module} in quantization_config"
        raise CheckpointError(bad_argument(CALL, argument, repr(declared), f"{shape}"))
    return tuple(declared)


# ---- writing ---------------------------------------------------------------------------------------------------------


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
        if _is_marked(item):
            specs[item.name] = MARKER_SPEC
        return specs

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        arrays = {f"{item.module}.{part}": array for part, array in storage.items()}
        if item.act_order:
            order = item.order()
            arrays[f"{item.module}.permutation"] = np.arange(item.k) if order is None else order
        if _is_marked(item):
            arrays[item.name] = np.zeros(MARKER_SPEC[1], MARKER_SPEC[0])
        return arrays


def _is_marked(item: Item) -> bool:
    """Whether other loaders would look for a matrix of this name: they have other names for stacks of experts."""
    return item.name.endswith(".weight") and len(item.shape) == 2


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
