"""Statistics of any model of torch: batches run through it, and hooks see what its Linear layers multiply.

Stacks of experts, as transformers has them (`gate_up_proj` [E, 2 I, H], `down_proj` [E, H, I]), are seen as well: by
the tokens that were routed to each expert.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from billfish.checkpoints.names.gguf_names import is_of_images
from billfish.core.errors import DataError, DTypeError, bad_argument, failure, type_of
from billfish.core.progress import Progress
from billfish.models import MODEL_TYPES
from billfish.statistics.inputs import CALL, InputStatistics, Sums
from billfish.statistics.statistics import Statistics


def calibrate(model: Any, batches: Iterable[Any], *, hessian: bool = False, progress: bool = True) -> Statistics:
    """Collect statistics of the inputs of every Linear layer of a torch model, by the names of their weights.

    model: a torch.nn.Module.
    batches: what the model is called with: a mapping by keywords, a tuple or a list one after the other, all else as
    the one argument. Where a batch has an `attention_mask` [batch, tokens], tokens that it hides do not count.
    hessian: whether to keep X^T X [K, K] of each layer, too. All of them are in memory, where the inputs are.
    progress: whether to draw a bar on terminals, where `batches` has a length.

    Returns Statistics, which :func:`billfish.quantize_model` and :func:`billfish.quantize_checkpoint` take. Raises
    DataError for batches without tokens.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> known = bf.calibrate(model, [torch.ones(4, 64)], progress=False)
        >>> int(known["0.weight"].counts)
        4
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        expected = "a torch.nn.Module. For files, use bf.calibrate_checkpoint"
        raise DTypeError(bad_argument(CALL, "model", type_of(model), expected))
    watch = Watch(model, hessian)
    total = len(batches) if isinstance(batches, Sized) else 0
    with Progress(total, "batches", enabled=progress and total > 0) as bar, watch, torch.no_grad():
        for batch in batches:
            watch.mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, (tuple, list)):
                model(*batch)
            else:
                model(batch)
            bar.advance(1)
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config  # of models that take images, too
    kind = str(getattr(config, "model_type", ""))
    return Statistics(watch.found(), architecture=MODEL_TYPES.get(kind, kind), shapes=watch.shapes, texts=("batches",))


class DeviceSums:
    """As Sums, of rows on a GPU, where they stay."""

    def __init__(self, shape: Sequence[int], outer: bool, device: Any) -> None:
        torch = sys.modules["torch"]
        self.counts = np.zeros(tuple(shape[:-1]), np.int64)
        # What float32 rounds away is summed beside it: not every GPU has float64.
        self.squares, self.rest = (torch.zeros(*shape, dtype=torch.float32, device=device) for _ in range(2))
        self.outer = torch.zeros(*shape, shape[-1], dtype=torch.float32, device=device) if outer else None

    def add(self, rows: Any, expert: int | None = None) -> None:
        at = () if expert is None else expert
        self.counts[at] += len(rows)
        before, more = self.squares[at].clone(), rows.square().sum(dim=0)
        after = before + more
        rounded = after - before
        self.squares[at] = after
        self.rest[at] += (before - (after - rounded)) + (more - rounded)
        if self.outer is not None:
            self.outer[at].addmm_(rows.T, rows)

    def finish(self, name: str) -> InputStatistics:
        outer = None if self.outer is None else self.outer.cpu().numpy()
        squares = sum(part.cpu().double() for part in (self.squares, self.rest)).numpy()
        known = InputStatistics(squares, self.counts, outer)
        known.check(name)
        return known


class Watch:
    """Hooks on a model while it lives as a context; `found` has what they saw."""

    def __init__(self, model: Any, outer: bool) -> None:
        self.mask: Any = None  # of the batch that runs: which tokens count
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._outer, self._model = outer, model
        self._sums: dict[str, Sums | DeviceSums] = {}  # of matrices and stacks that rows came to
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        for module in self._model.modules():
            self._hooks.callback(setattr, module, "training", module.training)
        self._model.eval()
        for path, module in self._model.named_modules():
            if _is_linear(module):
                self.shapes[_join(path, "weight")] = (module.out_features, module.in_features)
                self._hook(module, self._see_linear(_join(path, "weight")))
            elif _is_stack(module):
                for part in ("gate_up_proj", "down_proj"):
                    experts, n, k = getattr(module, part).shape
                    swapped = getattr(module, "is_transposed", False)
                    self.shapes[_join(path, part)] = (experts, k, n) if swapped else (experts, n, k)
                self._hook(module, self._see_experts(path))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _hook(self, module: Any, see: Callable[[Any, Any, Any], None]) -> None:
        self._hooks.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)

    def found(self) -> dict[str, InputStatistics]:
        """The statistics of all matrices; raises for one that no batch came to, unless it is of images or sound."""
        if not self.shapes:
            raise DataError(bad_argument(CALL, "model", type_of(self._model), "a model with Linear layers"))
        seen = [name for name in self.shapes if name in self._sums or not is_of_images(name)]
        missing = next((name for name in seen if name not in self._sums), None)
        if missing is not None:
            raise DataError(failure(CALL, f"no batch reached the layer {missing}", "Pass batches that reach it."))
        return {name: self._sums[name].finish(name) for name in seen}

    # ---- hooks --------------------------------------------------------------------------------------------------

    def _see_linear(self, name: str) -> Callable[[Any, Any, Any], None]:
        def see(module: Any, arguments: Any, keywords: Any) -> None:
            x = arguments[0] if arguments else next(iter(keywords.values()))
            self._add(name, None, self._counted(x))

        return see

    def _see_experts(self, path: str) -> Callable[[Any, Any, Any], None]:
        def see(module: Any, arguments: Any, keywords: Any) -> None:
            x, chosen = [*arguments, *keywords.values()][:2]
            if chosen.shape[0] != x.shape[0]:
                raise DataError(bad_argument(CALL, f"shape of experts of {path}", tuple(chosen.shape), "[tokens, k]"))
            x, chosen = self._counted(x), self._counted(chosen)
            for expert in range(module.gate_up_proj.shape[0]):
                rows = x[(chosen == expert).any(dim=-1)]
                if len(rows):
                    self._add(_join(path, "gate_up_proj"), expert, rows)
                    self._add(_join(path, "down_proj"), expert, _opened(module, expert, rows))

        return see

    def _counted(self, x: Any) -> Any:
        """The rows [tokens, K] of x [batch, tokens, K] or [batch * tokens, K] that the batch's mask does not hide."""
        mask, rows = self.mask, x.reshape(-1, x.shape[-1])
        if mask is not None and mask.ndim == 2 and mask.numel() == len(rows):
            return rows[mask.to(x.device).bool().reshape(-1)]
        return rows

    def _add(self, name: str, expert: int | None, rows: Any) -> None:
        if not len(rows):
            return
        rows = rows.detach().float().contiguous()
        on_cpu = rows.device.type == "cpu"
        if name not in self._sums:
            *experts, _, k = self.shapes[name]
            shape = (*experts, k)
            self._sums[name] = Sums(shape, self._outer) if on_cpu else DeviceSums(shape, self._outer, rows.device)
        self._sums[name].add(rows.numpy() if on_cpu else rows, expert)


def _opened(module: Any, expert: int, rows: Any) -> Any:
    """What an expert's `down_proj` multiplies."""
    weight = module.gate_up_proj[expert]
    both = rows @ (weight if getattr(module, "is_transposed", False) else weight.T)
    if getattr(module, "has_bias", False):
        both = both + module.gate_up_proj_bias[expert]
    return module._apply_gate(both)


def _is_linear(module: Any) -> bool:
    torch, ours = sys.modules["torch"], sys.modules.get("billfish.nn.torch.linear")
    return isinstance(module, torch.nn.Linear) or (ours is not None and isinstance(module, ours.MarlinLinear))


def _is_stack(module: Any) -> bool:
    """Whether a module is a stack of gated experts, as transformers has them."""
    stacks = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
    return all(getattr(stack, "ndim", 0) == 3 for stack in stacks) and hasattr(module, "_apply_gate")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
