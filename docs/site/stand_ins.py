"""Stand-ins for what the site documents but does not run: torch, transformers, MLX and the compiled CPU kernels.

`make site` needs neither them nor a compiler. Import this module before billfish.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext

from sphinx.ext.autodoc.mock import MockFinder

if "billfish" not in sys.modules:
    sys.meta_path.insert(0, MockFinder(["torch", "transformers", "mlx", "billfish.backends.cpu._cpu"]))

    # Mocks would hide the class that is registered, and its signature.
    importlib.import_module("transformers.quantizers.auto").register_quantization_config = lambda name: lambda cls: cls
    base = type("QuantizationConfigMixin", (), {})
    importlib.import_module("transformers.utils.quantization_config").QuantizationConfigMixin = base

    from billfish.backends.cpu import backend  # noqa: F401  (it asks the kernels for what `provide` replaces)
    from billfish.core.machine import provide

    provide(nullcontext, lambda: 1)
