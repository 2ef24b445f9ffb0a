"""Every public name, with its group and its documentation: the tables and the reference are made from this."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer

# Where public names are; the first module that has a name is the one to import it from.
MODULES = (
    "billfish",
    "billfish.statistics",
    "billfish.checkpoints",
    "billfish.nn",
    "billfish.nn.transformers",
    "billfish.llm",
)

# Group, its title, and where its names are defined. The first group that fits has the name.
GROUPS = {
    "errors": ("Errors", r"billfish\.core\.errors\."),
    "models": ("Language models", r"billfish\.llm\b"),
    "calibration": ("Calibration", r"billfish\.(statistics\b|nn\.torch\.calibration|quantizing\.calibration)"),
    "checkpoints": ("Checkpoints", r"billfish\.(checkpoints|quantizing)\b"),
    "layers": ("Layers", r"billfish\.nn\b"),
    "matmul": (
        "Matrix multiplication",
        r"billfish\.(ops\.matmul\.(quantized_linears?|gemm_\w+)$|ops\.expert_linear|backends(?!\.cpu\.(packed|experts)))",
    ),
    "formats": ("Formats", r"billfish\.core\.(format|formats|elements|scales|storage)\."),
    "weights": ("Weights", r"billfish\.(ops|core|backends\.cpu\.(packed|experts))\."),
}
# What the README shows comes first, in the tables and on each page.
FIRST = (
    "billfish.llm.load",
    "billfish.open_checkpoint",
    "billfish.quantize_checkpoint",
    "billfish.convert",
    "billfish.verify",
    "billfish.quantize",
    "billfish.quantized_linear",
    "billfish.dequantize",
    "billfish.quantize_model",
    "billfish.nn.transformers.BillfishConfig",
)
ORDER = ("weights", "matmul", "formats", "layers", "calibration", "checkpoints", "models", "errors")


class UngroupedName(Exception):
    """A public name that fits no group of GROUPS."""


@dataclass(frozen=True)
class PublicName:
    """One name that users import."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """As users write it, without `bf`."""
        return f"{self.module}.{self.name}"

    @property
    def home(self) -> str:
        """Where it is defined: module and name."""
        if isinstance(self.value, ModuleType):
            return self.value.__name__
        if self.is_callable:
            return f"{self.value.__module__}.{self.value.__qualname__}"
        return _home_of_data(self.module, self.name)

    @property
    def is_callable(self) -> bool:
        """Whether it is a class or a function; else it is a module or data."""
        return inspect.isclass(self.value) or inspect.isroutine(self.value)

    @property
    def group(self) -> str:
        """The key in GROUPS."""
        for group, (_, pattern) in GROUPS.items():
            if re.match(pattern, self.home):
                return group
        raise UngroupedName(f"{self.path}, defined as {self.home}: give it a place in GROUPS of {Path(__file__).name}")

    @property
    def documentation(self) -> str:
        """The docstring, or, of data, the text behind its definition; empty where there is none."""
        if self.is_callable or isinstance(self.value, ModuleType):
            own = self.value.__doc__
            return inspect.cleandoc(own) if own else ""
        module, _, name = self.home.rpartition(".")
        return "\n".join(ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name), [])).strip()

    @property
    def summary(self) -> str:
        """The first sentence, on one line."""
        first = " ".join(self.documentation.split("\n\n")[0].split())
        return re.split(r"(?<=\.) (?=[A-Z`])", first)[0].rstrip(".:")

    @property
    def parameters(self) -> list[str]:
        """The names of what it takes, without self."""
        return parameters_of(self.value) if self.is_callable else []


def parameters_of(value: Any) -> list[str]:
    """The names of what a function or class takes, without self; nothing where Python cannot say."""
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


def field_comments(value: Any) -> dict[str, str]:
    """The comments beside the fields of a dataclass, by field."""
    if not dataclasses.is_dataclass(value):
        return {}
    lines = inspect.getsource(value if inspect.isclass(value) else type(value)).splitlines()
    found = (re.match(r"    (\w+): [^#]*?  # (.*)", line) for line in lines)
    names = {field.name for field in dataclasses.fields(value) if field.init}
    return {field[1]: field[2] for field in found if field and field[1] in names}


@cache
def public_names() -> list[PublicName]:
    """All of them, each once, the modules among them."""
    found: dict[str, PublicName] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        if "." in path:
            parent, _, name = path.rpartition(".")
            found[path] = PublicName(parent, name, module)
        for name in module.__all__:
            public = PublicName(path, name, getattr(module, name))
            found.setdefault(public.home, public)
    return list(found.values())


def in_group(group: str) -> list[PublicName]:
    """Those of one group: FIRST, then modules and data, classes and functions, each in order of the alphabet."""

    def place(public: PublicName) -> tuple[int, bool, bool, str, str]:
        known = FIRST.index(public.path) if public.path in FIRST else len(FIRST)
        return known, public.is_callable, not inspect.isclass(public.value), public.module, public.name.lower()

    return sorted((public for public in public_names() if public.group == group), key=place)


def first_names() -> list[PublicName]:
    """Those of FIRST, in its order."""
    found = {public.path: public for public in public_names()}
    return [found[path] for path in FIRST]


def _home_of_data(module: str, name: str) -> str:
    """Data does not know its module: follow the imports of its name."""
    origin = _imports_of(module).get(name)
    return f"{module}.{name}" if origin is None else _home_of_data(origin, name)


@cache
def _imports_of(module: str) -> dict[str, str]:
    """The names that a module imports from others, and from which."""
    nodes = ast.walk(ast.parse(inspect.getsource(importlib.import_module(module))))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in reversed(found) for alias in node.names}
