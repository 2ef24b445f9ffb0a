"""Which of its element's values each weight of a matrix has, as what torch trains: a rounding gate.

A weight is at a place among the sorted values, and has the value at the nearest whole place. The gate trains how far
the place is from where it was, in steps against the sign of the loss's gradient for the weight, averaged over some
steps of the training. So a weight moves to the next value where the gradients of many windows agree that it should.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MEMORY = 0.9  # of the mean gradient: how much of it remains in a step
START = 0.4  # how far from a whole place a weight may begin: at 0.5 it would have another value
FARTHEST = 1.0


class RoundingGate:
    """Of codes [N, K] that mean `values`, without a scale.

    target: what the weights should be, in units of the values [N, K]; they begin on the side where it is. None begins
    in the middle.
    rate: how far a step goes.
    """

    def __init__(self, codes: Tensor, values: NDArray[np.float32], target: Tensor | None) -> None:
        levels = np.unique(values[np.isfinite(values)])
        self._values, self._levels = values, levels
        self._numbers = torch.from_numpy(levels).to(codes.device)
        places = np.searchsorted(levels, values).clip(max=len(levels) - 1).astype(np.uint8)
        self._first = torch.from_numpy(places).to(codes.device)[codes.int()]
        self.rate = 0.0
        self.offset = torch.zeros(codes.shape, device=codes.device)
        self.mean = torch.zeros(codes.shape, device=codes.device, dtype=torch.bfloat16)
        if target is not None:
            self.offset += (self._place(target) - self._first).clamp_(-START, START).nan_to_num_(0)

    def _place(self, target: Tensor) -> Tensor:
        """Where numbers are among the sorted values: between two of them, in proportion."""
        above = torch.bucketize(target, self._numbers).clamp_(1, len(self._numbers) - 1)
        low, high = self._numbers[above - 1], self._numbers[above]
        return above - 1 + (target - low) / (high - low)

    def _places(self) -> Tensor:
        return (self._first + self.offset.round()).clamp_(0, len(self._numbers) - 1).int()

    def numbers(self) -> Tensor:
        """The value that each weight has by now [N, K]."""
        return self._numbers[self._places()]

    def move(self, gradient: Tensor) -> None:
        """A step against the gradient of the loss for the values [N, K]."""
        mean = self.mean.float().lerp_(gradient, 1 - MEMORY)
        self.mean.copy_(mean)
        self.offset.sub_(mean.sign_(), alpha=self.rate).clamp_(-FARTHEST, FARTHEST)

    def codes(self, before: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The codes [N, K]. A weight with the value that it had `before` keeps its code, of several with that value."""
        places, order = self._places().cpu().numpy(), np.argsort(self._values, kind="stable")
        codes = order[np.searchsorted(self._values[order], self._levels)].astype(np.uint8)
        return np.where(self._levels[places] == self._values[before], before, codes[places])
