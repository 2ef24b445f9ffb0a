"""A quantized matrix as what torch trains: its scales and minimums.

A scale s becomes s exp(a), a minimum m becomes m + b s, and a minimum at two levels m exp(b); a and b begin at zero.
Scales that the format holds in a byte are those of the nearest byte in the forward pass, too, and have the gradients of
what they were rounded from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from billfish.core.elements import Element
from billfish.core.format import Format, Planes
from billfish.core.tensor import QuantizedTensor

COARSE = 1.9  # neighbouring scales of this ratio, such as powers of two, are too far apart for small steps


class TrainedMatrix:
    """A matrix [N, K] that :func:`why_fixed` has nothing against."""

    def __init__(self, tensor: QuantizedTensor, device: torch.device) -> None:
        self._tensor, self._format, self._size = tensor, tensor.format, tensor.group_size
        known = torch.from_numpy(np.array(tensor.format.unpack_codes(tensor.storage), order="C")).to(device)
        self._planes = tensor.format.unpack_scales(tensor.storage)  # which are small
        groups = tensor.format.group_values(self._planes)
        self._scale = _on(groups.scale, device)
        self._zero = None if groups.zero is None else _on(groups.zero, device)
        self._minimum = None if groups.minimum is None else _on(groups.minimum, device)
        self._bytes = _scales_of_bytes(tensor.format, self._planes)
        self._grid = None if self._bytes is None else _on(self._bytes[1], device)
        trained = ["scale"] if self._minimum is None else ["scale", "minimum"]
        self.parameters = [torch.zeros(self._planes[name].shape, device=device, requires_grad=True) for name in trained]
        factors = self.in_groups(_on(tensor.format.element.values, device)[known.int()])
        factors = factors if self._zero is None else factors - self._zero[..., None]
        half = factors.half()
        self._factors = half if bool((half == factors).all()) else factors

    def weights(self) -> Tensor:
        """W [N, K]."""
        scale = self._scale * self._spread(self.parameters[0], self._scale).exp()
        if self._grid is not None:
            scale = scale + (self._grid[_nearest(self._grid, scale.detach())] - scale).detach()
        w: Tensor = _Weights.apply(scale, self._moved_minimum(), self)  # type: ignore[no-untyped-call]
        return w

    def factors(self) -> Tensor:
        """What scales are multiplied with [N, groups, group size]."""
        return self._factors.to(torch.float32, copy=True)

    def in_groups(self, w: Tensor) -> Tensor:
        """[N, K] as [N, groups, group size]. A last group that is shorter ends with zeros."""
        n, k = w.shape
        return pad(w, (0, self._scale.shape[1] * self._size - k)).view(n, -1, self._size)

    def in_rows(self, w: Tensor) -> Tensor:
        """The way back."""
        return w.view(len(w), -1)[:, : self._tensor.shape[1]]

    def _moved_minimum(self) -> Tensor | None:
        if self._minimum is None:
            return None
        change = self.parameters[1]
        if change.shape == self._minimum.shape:
            return self._minimum + self._scale * change
        return self._minimum * self._spread(change, self._minimum).exp()

    @staticmethod
    def _spread(change: Tensor, groups: Tensor) -> Tensor:
        """For each group what its block has."""
        n, blocks = change.shape
        return change[..., None].expand(n, blocks, groups.shape[1] // blocks).reshape(n, -1)

    def tensor(self) -> QuantizedTensor:
        """The trained matrix, in the same format."""
        changes = [parameter.detach().cpu().numpy() for parameter in self.parameters]
        planes, scale = dict(self._format.unpack(self._tensor.storage)), self._planes["scale"]
        if self._bytes is None:
            planes["scale"] = _rounded(scale.astype(np.float32) * np.exp(changes[0]), scale)
        else:
            codes, grid = self._bytes
            wanted = torch.from_numpy(self._format.group_values(self._planes).scale * np.exp(changes[0]))
            planes["scale"] = codes[_nearest(torch.from_numpy(grid), wanted).numpy()]
        if self._minimum is not None:
            minimum = planes["minimum"].astype(np.float32)
            if changes[1].shape == tuple(self._minimum.shape):
                moved = minimum + scale.astype(np.float32) * changes[1]
            else:
                moved = minimum * np.exp(changes[1])
            planes["minimum"] = _rounded(moved, planes["minimum"])
        tensor, storage = self._tensor, self._format.pack(planes)
        return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, storage)


class _Weights(torch.autograd.Function):
    """factors scale + minimum [N, K], of scales and minimums [N, groups]. Nothing as large as W is kept for the
    backward pass."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, minimum: Tensor | None, matrix: TrainedMatrix) -> Tensor:
        ctx.matrix = matrix
        w = matrix.factors().mul_(scale[..., None])
        return matrix.in_rows(w if minimum is None else w.add_(minimum[..., None]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        each = ctx.matrix.in_groups(gradient)
        of_minimum = each.sum(-1) if ctx.needs_input_grad[1] else None
        return (each * ctx.matrix.factors()).sum(-1), of_minimum, None


def why_fixed(tensor: QuantizedTensor) -> str:
    """Why a matrix cannot be trained; "" where it can."""
    format = tensor.format
    if type(format).decode is not Format.decode or type(format.element).decode is not Element.decode:
        return f"{format.name} is decoded in a way of its own"
    if tensor.permutation is not None:
        return "its columns are in another order (act-order)"
    scales = _scales_of_bytes(format, format.unpack_scales(tensor.storage))
    if scales is not None and (scales[1][1:] / scales[1][:-1]).min() > COARSE:
        return f"the scales of {format.name} are powers of two, which have no near neighbours"
    return ""


ScaleBytes = tuple[NDArray[np.uint8], NDArray[np.float32]]


def _scales_of_bytes(format: Format, planes: Planes) -> ScaleBytes | None:
    """The bytes of positive scales and what they mean, in increasing order; None for scales that are numbers."""
    if planes["scale"].dtype != np.uint8:
        return None
    every = np.arange(256, dtype=np.uint8)
    with np.errstate(all="ignore"):
        means = format.group_values({**planes, "scale": every[None]}).scale[0]
    valid = np.flatnonzero(np.isfinite(means) & (means > 0))
    valid = valid[np.argsort(means[valid], kind="stable")]
    valid = valid[np.concatenate([[True], np.diff(means[valid]) > 0])]
    return every[valid], means[valid]


def _nearest(grid: Tensor, values: Tensor) -> Tensor:
    """For each value the index of the nearest number of an increasing grid."""
    return torch.bucketize(values, (grid[1:] + grid[:-1]) / 2)


def _rounded(values: NDArray[np.float32], like: NDArray[np.generic]) -> NDArray[np.generic]:
    """In the type of a plane; what would overflow there stays as it was."""
    with np.errstate(over="ignore"):
        cast = values.astype(like.dtype)
    return np.where(np.isfinite(cast.astype(np.float32)), cast, like)


def _on(array: NDArray[np.floating], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32, order="C")).to(device)
