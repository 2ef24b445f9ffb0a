"""LoRA by peft on MarlinLinear. peft knows the layer by itself (billfish.nn.torch.peft_registration).

    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))

Adapters are peft's own, in float32, beside weights that stay as they are. Merging makes plain layers of the decoded
weights and the adapters, since a sum would have to be rounded to the format again; unmerging brings the quantized
layers back.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from billfish.core.errors import FormatError, bad_argument, failure
from billfish.core.extras import missing
from billfish.nn.torch.linear import MarlinLinear

try:
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.lora.layer import dispatch_default
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
except ImportError as error:
    raise missing("peft", "peft", error) from error

__all__ = ["MarlinLoraLinear"]

QUANTIZED = "_quantized"  # the quantized layer while its adapters are merged; no submodule, as it is not in use


class MarlinLoraLinear(LoraLinear):
    """A MarlinLinear with LoRA adapters: y = x @ W.T + bias + scaling * x @ A.T @ B.T. peft makes it.

    base_layer: the MarlinLinear. adapter_name, config, settings: peft's.

        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32))
        >>> report = bf.quantize_model(model, "q8_0", progress=False)
        >>> tuned = get_peft_model(model, LoraConfig(target_modules=["0"], r=4))
        >>> type(tuned.base_model.model[0]).__name__
        'MarlinLoraLinear'
    """

    base_layer: torch.nn.Module

    def __init__(self, base_layer: Any, adapter_name: str, config: LoraConfig, **settings: Any) -> None:
        check_config(config)
        with warnings.catch_warnings():  # peft does not know the layer by name, but reads its sizes
            warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)
            super().__init__(base_layer, adapter_name, config, **settings)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Into a plain float32 layer with the decoded weights, in the place of the quantized one."""
        if not check_adapters_to_merge(self, adapter_names):
            return
        quantized = self.base_layer
        if isinstance(quantized, MarlinLinear):
            self.__dict__[QUANTIZED] = quantized
            self.base_layer = quantized.to_linear()
        try:
            super().merge(safe_merge, adapter_names)
        except ValueError:  # peft found NaN
            if not self.merged:
                self.unmerge_base()
            raise

    def unmerge(self) -> None:
        """The quantized layer as it was, bit for bit."""
        self.unmerge_base()
        self.merged_adapters.clear()

    def unmerge_base(self) -> None:
        """The quantized layer in the place of a plain one."""
        quantized = self.__dict__.pop(QUANTIZED, None)
        if quantized is not None:
            self.base_layer = quantized

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y of x's type, as quantized layers give it, also where a plain float32 layer has taken their place."""
        if not self.merged or torch.is_autocast_enabled(x.device.type):
            return super().forward(x, *args, **kwargs)
        return super().forward(x.float(), *args, **kwargs).to(x.dtype)


def check_config(config: LoraConfig) -> None:
    """Raise FormatError for options of peft that need unquantized weights."""
    variants = ("use_dora", "use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens", "velora_config")
    for name in variants:
        if getattr(config, name, None):
            raise FormatError(failure("LoraConfig", f"{name} is not supported on quantized layers", "Use plain LoRA."))
    if config.init_lora_weights not in (True, False, "gaussian"):
        expected = "True, False or 'gaussian' on quantized layers"
        raise FormatError(bad_argument("LoraConfig", "init_lora_weights", repr(config.init_lora_weights), expected))


def dispatch_marlin(target: Any, adapter_name: str, config: LoraConfig, **settings: Any) -> Any:
    """peft asks its dispatchers, one after the other, for a layer with adapters. This takes the place of the last."""
    base_layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base_layer, MarlinLinear):
        return MarlinLoraLinear(target, adapter_name, config, **settings)
    return dispatch_default(target, adapter_name, config, **settings)
