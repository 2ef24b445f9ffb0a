"""A lint for what the emulator cannot see, because it runs on a CPU.

    python -m billfish.backends.emulator.lint FILE...

FILE is Metal: a whole file, or the text that MLX prints for a kernel with `verbose=True`. Several are read as one text,
one behind the other. The rules:

address-space   a pointer into one address space is used as one into another, or has none at all
vector-cast     `(half4)x`: in Metal a conversion, in clang a look at the same bits; write half4(x)
matrix-array    an array of simdgroup matrices goes to a function that is not forced inline: real compilers get it wrong
mlx-name        a name that MLX's own prelude, which stands before every custom kernel, has taken
compile         it does not compile at all

`check_text` and `check_kernel` do the same from Python.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from billfish.backends.emulator import translate
from billfish.backends.emulator.compiler import check_syntax
from billfish.backends.emulator.faults import CompileError
from billfish.backends.emulator.kernel import metal_kernel

RULES = ("address-space", "vector-cast", "matrix-array", "mlx-name", "compile")

_SCALARS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat"
_NAMED = r"u?int(?:8|16|32|64)_t|size_t|float16_t|bfloat16_t|packed_\w+"
_STRING = re.compile(r"\"(?:\\.|[^\"\\\n])*\"")
_VECTOR_CAST = re.compile(rf"(?<![\w\]>])\(\s*(?:const\s+)?(?:(?:{_SCALARS})[234]|vec<[^<>()]*>)\s*\)\s*(?=[\w(.])")
_POINTER = re.compile(
    rf"\b(?:(?:{_SCALARS})[234]?|{_NAMED}|T)\s*(?:const\s*)?[*&]\s*(?:const\s+|restrict\s+)*\w+\s*(?=[,;)=\[])"
)
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread|threadgroup_imageblock|ray_data|object_data)\b")
_FUNCTION = re.compile(r"(?P<before>[^;{}()]*?)\b(?P<name>\w+)\s*\((?P<parameters>[^;{}]*)\)(?:\s|const|thread)*\{")
_MATRIX = re.compile(r"\bsimdgroup_(?:matrix<[^<>]*>|(?:half|float|bfloat)8x8)[^,]*(?:\[|\*)")
_INLINED = re.compile(r"\bMETAL_FUNC\b|\balways_inline\b")
_DEFINED = (
    re.compile(r"\b(?:struct|class|enum|union)\s+(\w+)"),
    re.compile(r"\btypedef\b[^;]*?\b(\w+)\s*;"),
    re.compile(r"\busing\s+(\w+)\s*="),
    re.compile(r"(?:^|\n)[ \t]*#define[ \t]+(\w+)"),
    re.compile(r"\b(\w+)\s*\([^;(){}]*(?:\([^()]*\)[^;(){}]*)*\)\s*\{"),  # a function
    re.compile(r"\b(?:constant|constexpr)\b[^;(){}=]*?\b(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=|\{|;)"),
)
_DIAGNOSTIC = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?P<level>error|note|warning): (?P<message>.*)$")
# Allowed in Metal, where objects can be copied from any address space and parameters that are arrays are pointers.
_NO_FAULT = ("copy constructor", "copy assignment", "parameter may not be qualified")


@dataclass(frozen=True)
class Finding:
    """One complaint."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def _blank(text: str) -> str:
    """Without comments and strings; all other characters stay where they are."""
    return _STRING.sub(lambda found: " " * len(found[0]), translate.without_comments(text))


def _top_level(text: str) -> str:
    """What is outside of all braces. The braces themselves stay."""
    out, depth = [], 0
    for character in text:
        depth -= character == "}"
        out.append(character if depth <= 0 or character == "\n" else " ")
        depth += character == "{"
    return "".join(out)


def _lines(text: str, label: str) -> list[tuple[str, int]]:
    """File and line of each line of a text with #line directives."""
    file, line, out = label, 1, []
    for content in text.split("\n"):
        out.append((file, line))
        line += 1
        if found := re.match(r'\s*#line\s+(\d+)(?:\s+"([^"]*)")?', content):
            line, file = int(found[1]), found[2] or file
    return out


@cache
def _names_in(folder: Path, headers: frozenset[str]) -> frozenset[str]:
    names: set[str] = set()
    for header in headers:
        text = _top_level(_blank((folder / header).read_text("utf-8")))
        for pattern in _DEFINED:
            names.update(pattern.findall(text))
    return frozenset(names)


def mlx_names() -> frozenset[str]:
    """What MLX's prelude defines, read from the headers of the installed MLX; empty without one."""
    folder = translate.mlx_headers()
    return frozenset() if folder is None else _names_in(folder, translate.prelude()[1])


class _Text:
    """A text under inspection."""

    def __init__(self, text: str, label: str) -> None:
        self.plain = _blank(text)
        self.places = _lines(text, label)

    def finding(self, at: int, rule: str, message: str) -> Finding:
        file, line = self.places[self.plain.count("\n", 0, at)]
        return Finding(file, line, rule, message)

    def vector_casts(self) -> Iterator[Finding]:
        for found in _VECTOR_CAST.finditer(self.plain):
            # After a name it is a call or a parameter list, such as sizeof(half4).
            before = re.search(r"(\w+|[)\]])?\s*$", self.plain[: found.start()])
            if before is None or before[1] in (None, "return"):
                cast = found[0].strip()
                message = f"{cast} is a cast of C; write {cast[1:-1].strip()}(...), which converts"
                yield self.finding(found.start(), "vector-cast", message)

    def pointers(self) -> Iterator[Finding]:
        for found in _POINTER.finditer(self.plain):
            start = max(self.plain.rfind(character, 0, found.start()) for character in ";{}(,<")
            before = self.plain[start + 1 : found.start()]
            declares = re.fullmatch(r"\s*(?:(?:const|static|volatile|inline|return)\s+)*", before)
            if declares and "return" not in before and not _SPACE.search(before):
                yield self.finding(found.start(), "address-space", f"`{found[0].strip()}` names no address space")

    def matrix_arrays(self) -> Iterator[Finding]:
        for found in _FUNCTION.finditer(self.plain):
            if _MATRIX.search(found["parameters"]) and not _INLINED.search(found["before"]):
                message = f"{found['name']} takes an array of simdgroup matrices and is not METAL_FUNC"
                yield self.finding(found.start("name"), "matrix-array", message)

    def names(self) -> Iterator[Finding]:
        outside, taken = _top_level(self.plain), mlx_names()
        for pattern in _DEFINED:
            for found in pattern.finditer(outside):
                if found[1] in taken:
                    message = f"{found[1]} is a name of MLX's prelude; use another, or a namespace"
                    yield self.finding(found.start(1), "mlx-name", message)


def _diagnostics(output: str) -> Iterator[tuple[str, int, str, str]]:
    """Each error: file, line, message, and the message with its notes."""
    groups: list[list[re.Match[str]]] = []
    for found in map(_DIAGNOSTIC.match, output.splitlines()):
        if found and found["level"] == "error":
            groups.append([found])
        elif found and groups:
            groups[-1].append(found)
    for group in groups:
        error = group[0]
        yield error["file"], int(error["line"]), error["message"], "\n".join(found["message"] for found in group)


def _readable(message: str) -> str:
    for number, space in enumerate(("device", "constant", "threadgroup"), 1):
        message = message.replace(f"__attribute__((address_space({number})))", space)
        message = message.replace(f"address space '{number}'", f"the {space} address space")
    message = message.replace("_Float16", "half").replace("__bf16", "bfloat")
    return message.replace(
        "right hand operand to ->* has non-pointer-to-member type", "cast into another address space of"
    )


def _compiled(text: str, label: str, places: set[str]) -> Iterator[Finding]:
    """What clang says: first without address spaces, as the emulator compiles it, then with them."""
    try:
        plain, spaced = translate.unit(text, label), translate.unit(translate.checked_casts(text), label)
    except CompileError as error:
        yield Finding(label, 1, "compile", str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = list(_diagnostics(check_syntax(plain, Path(folder), address_spaces=False)))
        for file, line, message, _ in found:
            yield Finding(file, line, "compile", _readable(message))
        if found:
            return
        for file, line, message, whole in _diagnostics(check_syntax(spaced, Path(folder), address_spaces=True)):
            # The headers of MLX and the shim are not what is asked about.
            if file in places and not any(phrase in whole for phrase in _NO_FAULT):
                yield Finding(file, line, "address-space", _readable(message))


def check_text(text: str, label: str = "kernel") -> list[Finding]:
    """All findings in a text of Metal. Templates are checked as far as it instantiates them."""
    inspected = _Text(text, label)
    findings = [
        *inspected.vector_casts(),
        *inspected.pointers(),
        *inspected.matrix_arrays(),
        *inspected.names(),
        *_compiled(text, label, {file for file, _ in inspected.places}),
    ]
    return sorted(set(findings), key=lambda finding: (finding.file, finding.line, RULES.index(finding.rule)))


def check_kernel(
    kernel: metal_kernel,
    inputs: Sequence[Any],
    output_dtypes: Sequence[Any],
    template: Sequence[tuple[str, Any]] | None = None,
) -> list[Finding]:
    """All findings in a kernel as it would be called with these arguments."""
    signature = kernel.signature(inputs, output_dtypes, template)
    return check_text(translate.marked(signature, kernel.name), kernel.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lint", description="Finds in Metal kernels what the emulator cannot see.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="Metal; several are read as one text")
    files = parser.parse_args(arguments).files
    text = "".join(f'#line 1 "{file}"\n{file.read_text("utf-8")}\n' for file in files)
    findings = check_text(text, str(files[0]))
    for finding in findings:
        print(finding)
    if translate.mlx_headers() is None:
        print("note: MLX is not installed, so names were not compared with its prelude", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
