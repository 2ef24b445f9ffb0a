"""A quantized matrix as what torch trains: its scales and minimums, and its codes where they are asked for.

A scale s becomes s exp(a), a minimum m becomes m + b s, and a minimum at two levels m exp(b); a and b begin at zero.
Scales that the format holds in a byte are those of the nearest byte in the forward pass, too, and have the gradients of
what they were rounded from. Codes are trained by a :class:`RoundingGate`.
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
from billfish.quantizing.rounding_gate import RoundingGate

COARSE = 1.9  # neighbouring scales of this ratio, such as powers of two, are too far apart for small steps


class TrainedMatrix:
    """A matrix [N, K] that :func:`why_fixed` has nothing against.

    codes: whether codes are trained, too. target: W [N, K] that they should be near; None is W of the tensor.
    """

    def __init__(
        self, tensor: QuantizedTensor, device: torch.device, codes: bool = False, target: NDArray[Any] | None = None
    ) -> None:
        self._tensor, self._format, self._size = tensor, tensor.format, tensor.group_size
        known = torch.from_numpy(np.array(tensor.format.unpack_codes(tensor.storage), order="C")).to(device)
        self._planes = tensor.format.unpack_scales(tensor.storage)  # which are small
        groups = tensor.format.group_values(self._planes)
        self._scale = _on(groups.scale, device)
        self._zero = None if groups.zero is None else _on(groups.zero, device)
        self._minimum = None if groups.minimum is None else _on(groups.minimum, device)
        self._bytes = _scales_of_bytes(tensor.format, self._planes)
        self._grid = None if self._bytes is None else _on(self._bytes[1], device)
        self.parameters: list[Tensor] = []
        if not _coarse(self._bytes):
            self.parameters.append(torch.zeros(self._planes["scale"].shape, device=device, requires_grad=True))
            if self._minimum is not None:
                self.parameters.append(torch.zeros(self._planes["minimum"].shape, device=device, requires_grad=True))
        self.gate: RoundingGate | None = None
        numbers = tensor.format.element.values
        if codes:
            wanted = None if target is None else self._unscaled(_on(target, device))
            self.gate = RoundingGate(known, numbers, wanted)
        else:
            factors = self._factors(_on(numbers, device)[known.int()])
            half = factors.half()
            self._fixed = half if bool((half == factors).all()) else factors

    @property
    def state(self) -> list[Tensor]:
        """All that the training changes."""
        return self.parameters + ([] if self.gate is None else [self.gate.offset, self.gate.mean])

    def weights(self) -> Tensor:
        """W [N, K]."""
        scale, minimum = self._scale, self._minimum
        if self.parameters:
            scale = scale * self._spread(self.parameters[0], scale).exp()
            minimum = self._moved_minimum()
        if self._grid is not None:
            scale = scale + (self._grid[_nearest(self._grid, scale.detach())] - scale).detach()
        if self.gate is not None and not self.parameters:
            scale = scale.clone().requires_grad_()  # so that there is a backward pass, which moves the gate
        w: Tensor = _Weights.apply(scale, minimum, self)  # type: ignore[no-untyped-call]
        return w

    def factors(self) -> Tensor:
        """What scales are multiplied with [N, groups, group size]."""
        return self._fixed.to(torch.float32, copy=True) if self.gate is None else self._factors(self.gate.numbers())

    def _factors(self, numbers: Tensor) -> Tensor:
        factors = self.in_groups(numbers)
        return factors if self._zero is None else factors - self._zero[..., None]

    def in_groups(self, w: Tensor) -> Tensor:
        """[N, K] as [N, groups, group size]. A last group that is shorter ends with zeros."""
        n, k = w.shape
        return pad(w, (0, self._scale.shape[1] * self._size - k)).view(n, -1, self._size)

    def in_rows(self, w: Tensor) -> Tensor:
        """The way back."""
        return w.view(len(w), -1)[:, : self._tensor.shape[1]]

    def _unscaled(self, target: Tensor) -> Tensor:
        """W [N, K] in units of the element's values."""
        numbers = self.in_groups(target)
        if self._minimum is not None:
            numbers = numbers - self._minimum[..., None]
        numbers = numbers / self._scale[..., None]
        return self.in_rows(numbers if self._zero is None else numbers + self._zero[..., None])

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
        if self._bytes is None and changes:
            planes["scale"] = _rounded(scale.astype(np.float32) * np.exp(changes[0]), scale)
        elif self._bytes is not None and changes:
            codes, grid = self._bytes
            wanted = torch.from_numpy(self._format.group_values(self._planes).scale * np.exp(changes[0]))
            planes["scale"] = codes[_nearest(torch.from_numpy(grid), wanted).numpy()]
        if self._minimum is not None and changes:
            minimum = planes["minimum"].astype(np.float32)
            if changes[1].shape == tuple(self._minimum.shape):
                moved = minimum + scale.astype(np.float32) * changes[1]
            else:
                moved = minimum * np.exp(changes[1])
            planes["minimum"] = _rounded(moved, planes["minimum"])
        if self.gate is not None:
            planes = dict(self._format.with_codes(planes, self.gate.codes(planes["codes"])))
        tensor, storage = self._tensor, self._format.pack(planes)
        return QuantizedTensor.owning(tensor.format, tensor.shape, tensor.group_size, storage)


class _Weights(torch.autograd.Function):
    """factors scale + minimum [N, K], of scales and minimums [N, groups]. Nothing as large as W is kept for the
    backward pass, and the gradient of W moves the gate as soon as it is there."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, minimum: Tensor | None, matrix: TrainedMatrix) -> Tensor:
        ctx.matrix = matrix
        ctx.save_for_backward(scale)
        w = matrix.factors().mul_(scale[..., None])
        return matrix.in_rows(w if minimum is None else w.add_(minimum[..., None]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        matrix, (scale,) = ctx.matrix, ctx.saved_tensors
        each = matrix.in_groups(gradient)
        of_scale = (each * matrix.factors()).sum(-1)
        of_minimum = each.sum(-1) if ctx.needs_input_grad[1] else None
        if matrix.gate is not None:
            matrix.gate.move(matrix.in_rows(each * scale[..., None]))
        return of_scale, of_minimum, None


def why_fixed(tensor: QuantizedTensor, codes: bool = False) -> str:
    """Why a matrix cannot be trained; "" where it can. codes: whether codes are, too."""
    format = tensor.format
    if type(format).decode is not Format.decode or type(format.element).decode is not Element.decode:
        return f"{format.name} is decoded in a way of its own"
    if tensor.permutation is not None:
        return "its columns are in another order (act-order)"
    if not codes and _coarse(_scales_of_bytes(format, format.unpack_scales(tensor.storage))):
        return f"the scales of {format.name} are powers of two, which have no near neighbours"
    return ""


ScaleBytes = tuple[NDArray[np.uint8], NDArray[np.float32]]


def _coarse(scales: ScaleBytes | None) -> bool:
    """Whether the scales of bytes are too far apart to be trained."""
    return scales is not None and bool((scales[1][1:] / scales[1][:-1]).min() > COARSE)


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
