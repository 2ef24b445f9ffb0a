"""Our docstrings as reStructuredText, which is what Sphinx's autodoc takes.

They are plain text: `code` in single backticks, a line "name: text" for a parameter, indented lines for code. All else
stands for itself, such as the * of x * y and the | of a | b, and must not become markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What keeps its markup: roles, code in two backticks or one, and bold words.
MARKUP = re.compile(r"(:[\w:]+:`[^`]+`|``[^`]+``|`[^`]+`|\*\*\w[^*]*\*\*)")
FIELD = re.compile(r"(\w+(?:, \w+)*): (.*)")


def to_rest(lines: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """The lines of a docstring as reStructuredText; "name: text" is a field where `parameters` has the name."""
    known = set(parameters)
    out: list[str] = []
    for block in _blocks(lines):
        if block[0].startswith(" "):
            out += ["::", "", *(f"   {line}" for line in block), ""]
        else:
            out += [*_paragraph(block, known), ""]
    return out


def _blocks(lines: Iterable[str]) -> list[list[str]]:
    """Paragraphs, and runs of indented lines, in which an empty line may stand."""
    blocks: list[list[str]] = []
    after_empty = True
    for line in lines:
        if line.strip():
            indented = line.startswith(" ")
            if blocks and indented and blocks[-1][0].startswith(" "):
                blocks[-1] += [""] * after_empty + [line]
            elif after_empty or indented != blocks[-1][0].startswith(" "):
                blocks.append([line])
            else:
                blocks[-1].append(line)
        after_empty = not line.strip()
    return blocks


def _paragraph(block: list[str], known: set[str]) -> list[str]:
    """Text, then fields: each goes on to the next, or to the end of the block. Names before one text share it."""
    text: list[str] = []
    fields: list[tuple[list[str], list[str]]] = []
    for line in block:
        field = FIELD.fullmatch(line)
        if field and known.issuperset(field[1].split(", ")):
            fields.append((field[1].split(", "), [_inline(field[2])]))
        else:
            (fields[-1][1] if fields else text).append(_inline(line))
    written = [f":param {name}: " + "\n   ".join(lines) for names, lines in fields for name in names]
    return [*text, *[""][: bool(text and fields)], *"\n".join(written).splitlines()]


def _inline(text: str) -> str:
    parts = MARKUP.split(text)
    parts[::2] = [re.sub(r"([\\*|`])|(?<=\w)_(?=\W|$)", lambda found: "\\" + found[0], part) for part in parts[::2]]
    parts[1::2] = [_code(part) for part in parts[1::2]]
    for i in range(1, len(parts), 2):
        if parts[i + 1][:1].isalnum():
            parts[i] += "\\ "  # else markup would not end before a letter
    return "".join(parts)


def _code(part: str) -> str:
    """`name` becomes a reference, which is code where there is nothing to refer to; other code stays code."""
    if part.startswith((":", "*", "``")):
        return part
    code = part.strip("`")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", code):
        return f"``{code}``"
    return f":py:obj:`{code} <billfish.{code[3:]}>`" if code.startswith("bf.") else f":py:obj:`{code}`"
