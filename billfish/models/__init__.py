"""Models as data: a file for each architecture, and the description that every device executes.

`describe` makes the description of a GGUF file; `of_gguf` and `of_config` find the architecture of a file. Every module
of this package is imported here, so that a new file needs no entry anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil

from billfish.models.architecture import Architecture as Architecture
from billfish.models.architecture import UnknownModel as UnknownModel
from billfish.models.architecture import describe as describe
from billfish.models.architecture import of_config as of_config
from billfish.models.architecture import of_gguf as of_gguf

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")

ARCHITECTURES = tuple(dict.fromkeys(each.gguf for each in Architecture.known))  # names in GGUF
MODEL_TYPES = {each.model_type: each.gguf for each in Architecture.known}  # names in transformers
