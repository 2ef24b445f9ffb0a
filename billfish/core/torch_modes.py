"""Whether somebody watches what torch computes. Whoever does sees operators; whoever does not waits for none.

It is asked at each call of a layer. So torch's functions are global names here, found in one step.
"""

from __future__ import annotations

from torch import Tensor
from torch import is_grad_enabled as _is_grad_enabled
from torch._C import _autograd, _functorch, _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack
from torch.autograd import forward_ad

_transforms, _profiled = _functorch.peek_interpreter_stack, _autograd._profiler_enabled


def is_watched() -> bool:
    """Whether somebody traces, transforms or profiles."""
    return bool(
        _len_torch_dispatch_stack()
        or _transforms()
        or _get_tracing_state()
        or _profiled()
        or forward_ad._current_level >= 0
    )


def wants_gradient(x: Tensor, bias: Tensor | None) -> bool:
    """Whether a product has to say how it was made."""
    return _is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def wants_numbers_alone(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nobody watches, casts or differentiates a product: y is all that is wanted of it."""
    return type(x) is Tensor and not _is_any_autocast_enabled() and not wants_gradient(x, bias) and not is_watched()
