"""peft gets to know MarlinLinear whenever it is imported, before billfish or after it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

MODULE = "peft.tuners.lora.model"  # its `dispatch_default` makes the layer with adapters for a module


def register_with_peft() -> None:
    """Registers with a peft that is imported, or will be."""
    if MODULE in sys.modules:
        sys.modules[MODULE].dispatch_default = _dispatch  # type: ignore[attr-defined]
    elif not any(isinstance(finder, _PeftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftFinder())


def _dispatch(*arguments: Any, **settings: Any) -> Any:
    """In the place of peft's own: billfish.nn.peft is imported with the first layer that gets adapters."""
    return importlib.import_module("billfish.nn.peft").dispatch_marlin(*arguments, **settings)


class _PeftFinder(MetaPathFinder):
    """Waits for peft."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.dispatch_default = _dispatch

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
