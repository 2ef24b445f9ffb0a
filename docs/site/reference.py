"""Two directives: `{public-names}`, tables of every public name, and `{reference} GROUP`, the names of one group."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any, get_origin

from docstrings import to_rest
from docutils import nodes
from docutils.statemachine import StringList
from public_names import GROUPS, ORDER, PublicName, field_comments, first_names, in_group, parameters_of
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class ReferenceDirective(SphinxDirective):
    """What both have in common: they write reStructuredText and let Sphinx read it."""

    def read(self, lines: list[str]) -> list[nodes.Node]:
        content = StringList([".. py:currentmodule:: billfish", "", *lines], source="public names")
        return self.parse_text_to_nodes("```{eval-rst}\n" + "\n".join(content) + "\n```", allow_section_headings=True)


class PublicNames(ReferenceDirective):
    """A table of the names to start with, then one for each group: name, linked, and summary."""

    def run(self) -> list[nodes.Node]:
        groups = {f":doc:`{GROUPS[group][0]} <api/{group}>`": in_group(group) for group in ORDER}
        lines: list[str] = []
        for title, names in {"Start here": first_names(), **groups}.items():
            lines += [f".. rubric:: {title}", "", ".. list-table::"]
            lines += ["   :class: public-names", "   :widths: 34 66", "", *map(self.row, names), ""]
        return self.read("\n".join(lines).splitlines())

    def row(self, public: PublicName) -> str:
        kind = "mod" if isinstance(public.value, ModuleType) else "obj"
        shown = (
            public.path.replace("billfish", "bf", 1) if public.module in ("billfish", "billfish.llm") else public.path
        )
        summary = " ".join(to_rest([public.summary], [])).strip()
        return f"   * - :py:{kind}:`{shown} <{public.path}>`\n     - {summary}"


class Reference(ReferenceDirective):
    """Signature, types and docstring of each name of a group, and of the documented members of classes."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.read([line for public in in_group(self.arguments[0]) for line in self.entry(public)])

    def entry(self, public: PublicName) -> list[str]:
        if inspect.isclass(public.value):
            bases = ["   :show-inheritance:"] if public.value.__bases__ != (object,) else []
            return [f".. autoclass:: {public.path}", "   :members:", *bases, ""]
        if public.is_callable:
            return [f".. autofunction:: {public.path}", ""]
        kind = "module" if isinstance(public.value, ModuleType) else "data"
        text = to_rest(public.documentation.splitlines(), [])
        if kind == "module":
            return [f".. py:module:: {public.path}", "", f".. rubric:: {public.path}", "", *text, ""]
        head = [f".. py:data:: {public.name}", f"   :module: {public.module}", ""]
        return [*head, *(f"   {line}" for line in text), ""]


def process_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Autodoc's event: the docstring as reStructuredText, in place. Comments beside fields are those of parameters."""
    said = "\n".join(lines)
    comments = [f"{name}: {text}" for name, text in field_comments(value).items() if f"{name}: " not in said]
    lines[:] = to_rest([*lines, "", *comments], parameters_of(value))


def process_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Autodoc's event: arrays as the code has them, NDArray[float32]."""
    module = r"~?(?:\w+\.)*"
    written = re.compile(rf"{module}ndarray\[{module}tuple\[{module}Any, \.\.\.\], {module}dtype\[(.*?)\]\]")
    short, result = (text and written.sub(r"NDArray[\1]", text) for text in (signature, returns))
    return short, result


def process_bases(app: Sphinx, name: str, value: Any, options: Any, bases: list[Any]) -> None:
    """Autodoc's event: Mapping, not Mapping[str, ...]."""
    bases[:] = [get_origin(base) or base for base in bases]


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("reference", Reference)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("autodoc-process-bases", process_bases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
