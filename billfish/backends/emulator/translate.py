"""Metal to C++: the little that macros and the shim's headers cannot do.

Lines keep their numbers, so that a report names the line of the kernel's author.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from billfish.backends.emulator.faults import CompileError
from billfish.backends.metal.signature import Argument, Signature

SHIM = Path(__file__).parent / "shim"

# What a kernel may ask about its threads, and how the emulator answers.
ANSWERS = {
    "dispatch_quadgroups_per_threadgroup": "(emulator::dispatch.threads + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "emulator::dispatch.simdgroups",
    "dispatch_threads_per_threadgroup": "emulator_uint3(emulator::dispatch.threads_per_threadgroup)",
    "grid_origin": "uint3(0, 0, 0)",
    "grid_size": "emulator_uint3(emulator::dispatch.grid)",
    "quadgroup_index_in_threadgroup": "emulator::position->index / 4",
    "quadgroups_per_threadgroup": "(emulator::dispatch.threads + 3) / 4",
    "simdgroup_index_in_threadgroup": "emulator::position->simdgroup",
    "simdgroups_per_threadgroup": "emulator::dispatch.simdgroups",
    "thread_execution_width": "emulator::simd_width",
    "thread_index_in_quadgroup": "emulator::position->lane % 4",
    "thread_index_in_simdgroup": "emulator::position->lane",
    "thread_index_in_threadgroup": "emulator::position->index",
    "thread_position_in_grid": "emulator_uint3(emulator::position->in_grid)",
    "thread_position_in_threadgroup": "emulator_uint3(emulator::position->in_threadgroup)",
    "threadgroup_position_in_grid": "emulator_uint3(emulator::dispatch.threadgroup_position)",
    "threadgroups_per_grid": "emulator_uint3(emulator::dispatch.threadgroups)",
    "threads_per_grid": "emulator_uint3(emulator::dispatch.grid)",
    "threads_per_simdgroup": "emulator::simd_width",
    "threads_per_threadgroup": "emulator_uint3(emulator::dispatch.threads_per_threadgroup)",
}

_COMMENT = re.compile(r"(?P<kept>\"(?:\\.|[^\"\\\n])*\")|//[^\n]*|/\*.*?\*/", re.DOTALL)
# `template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;` makes an instance and gives it a name.
_INSTANTIATION = re.compile(
    r"template\s*\[\[host_name\([^\]]*\)\]\]\s*\[\[kernel\]\]\s*decltype\((?P<instance>[^;]*)\)\s+(?P=instance)\s*;"
)
_KERNEL_MACRO = re.compile(r"#define instantiate_kernel\((?:.*\\\n)*.*\n")
# 1.0h and 1.0bf, which C++ has not, and 1.0, which is float in Metal: it has no double.
_HALF_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(h|H|bf|BF)\b")
_FLOAT_LITERAL = re.compile(
    r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|0[xX][\da-fA-F.]+[pP][+-]?\d+)(?![\w.])"
)
# A constructor such as `vec<T, 4>(x)`. Those of named types, `half4(x)`, are macros.
_VECTOR = re.compile(r"(?<!operator )\b(?:metal::)?(vec<[^<>;(){}]*>)\s*\(")
# A variable with a constructor, `short2 at(x, y);`. It is not the declaration of a function: no type begins the list.
_TYPE = r"(?:bool|u?(?:char|short|int|long)|half|b?float)"
_CONSTRUCTED = re.compile(
    rf"\b({_TYPE}[234])\s+([A-Za-z_]\w*)(?=\(\s*(?!(?:const|thread|device|constant|threadgroup|{_TYPE}[234]?)\s)[^;{{}}]+\)\s*;)"
)
# A constant that Metal would be given when it makes the pipeline; MLX gives none to custom kernels. It is zero here.
_FUNCTION_CONSTANT = re.compile(r"\[\[\s*function_constant\([^\]]*\)\s*\]\]\s*;")
_THREADGROUP_ARGUMENT = re.compile(r"\[\[\s*threadgroup\([^\]]*\)\s*\]\]")
# The head of a declaration such as `threadgroup half tile[64][32]`, where statements can begin.
_VARIABLE = re.compile(
    r"(?P<before>(?:(?<=[;{}])|^)\s*)"
    r"(?:alignas\([^()]*\)\s*)?threadgroup\s+(?:alignas\([^()]*\)\s*)?"  # Storage is aligned for all of Metal's types
    r"(?P<type>(?:(?:const|volatile|unsigned|signed|long|struct)\s+)*[A-Za-z_][\w:]*(?:<[^;{}()]*?>)?(?:::\w+)?)\s+"
    r"(?=[A-Za-z_]\w*\s*[\[;,])",
    re.MULTILINE,
)
# Any other statement that looks like one, which would silently become a variable of each thread.
_LEFT_OVER = re.compile(r"(?:(?<=[;{}])|^)\s*threadgroup\s[^*&();{}]*;", re.MULTILINE)
_DECLARATOR = re.compile(r"\s*([A-Za-z_]\w*)\s*((?:\[[^\[\]]*\]\s*)*)([,;])")
# A cast of a pointer, with what it is cast into.
_POINTER_CAST = re.compile(
    r"(?P<deref>(?<=[^\w)\]\s])\s*\*\s*|(?<=return)\s+\*\s*)?"
    r"\(\s*(?P<type>(?:const\s+|volatile\s+)*(?:device|constant|threadgroup|thread)\b[^()]*\*(?:\s*const)?)\s*\)\s*(?=[\w(&*])"
)
_INCLUDE = re.compile(r'^[ \t]*#include\s+"(mlx/[^"]+)"[^\n]*$', re.MULTILINE)


def without_comments(text: str) -> str:
    """Comments become spaces; all other characters stay where they are."""
    return _COMMENT.sub(lambda found: found["kept"] or re.sub(r"[^\n]", " ", found[0]), text)


def threadgroup_variables(text: str) -> str:
    """Gives variables in threadgroup memory a place of their own; parameters and pointers are left as they are."""
    out, position = [], 0
    for head in _VARIABLE.finditer(text):
        at, statements, last = head.end(), [], ""
        while last != ";" and (found := _DECLARATOR.match(text, at)):
            name, dimensions, last = found.groups()
            statements.append(f"EMULATOR_THREADGROUP({name}, {head['type']}{dimensions.strip()});")
            at = found.end()
        if last == ";":
            lines = "\n" * text.count("\n", head.end(), at)
            out += [text[position : head.start()], head["before"], *statements, lines]
            position = at
    text = "".join([*out, text[position:]])
    if left := _LEFT_OVER.search(text):
        raise CompileError(f"the emulator does not understand this declaration: {left[0].strip()}")
    return text


def rewrite(text: str) -> str:
    """One piece of Metal as C++."""
    text = without_comments(text)
    text = _KERNEL_MACRO.sub(
        lambda found: "#define instantiate_kernel(...)\n" + "\n" * (found[0].count("\n") - 1), text
    )
    text = _INSTANTIATION.sub(r"template decltype(\g<instance>) \g<instance>;", text)
    text = _THREADGROUP_ARGUMENT.sub("", _FUNCTION_CONSTANT.sub(" = {};", text))
    text = _FLOAT_LITERAL.sub(r"\1f", text)
    text = _HALF_LITERAL.sub(lambda found: f"(({'half' if found[2] in 'hH' else 'bfloat'})({found[1]}))", text)
    text = _CONSTRUCTED.sub(r"\1 \2 = \1", text)
    text = _VECTOR.sub(r"metal::make<\1>(", text)
    return threadgroup_variables(text)


def checked_casts(text: str) -> str:
    """For the lint: casts of pointers as an operator that knows address spaces, see shim/lint.h."""

    def replaced(found: re.Match[str]) -> str:
        form = "Deref" if found["deref"] else "Cast"
        return f"{(found['deref'] or '').replace('*', ' ')}emulator::{form}<{found['type']}>{{}} ->* "

    return _POINTER_CAST.sub(replaced, text)


def mlx_headers() -> Path | None:
    """The folder with MLX's own Metal headers, if MLX is installed."""
    spec = importlib.util.find_spec("mlx")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "include" / "mlx").is_dir():
            return Path(place) / "include"
    return None


def include_mlx(text: str, label: str, seen: set[str]) -> str:
    """Puts MLX's headers in the place of their #include lines, each once. The shim's, where it has one, come first."""
    folder = mlx_headers()
    places = [SHIM] if folder is None else [SHIM, folder]

    def included(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen:
            return ""
        seen.add(name)
        for place in places:
            if (place / name).is_file():
                inner = include_mlx((place / name).read_text("utf-8"), name, seen)
                next_line = text.count("\n", 0, found.end()) + 2
                return f'#line 1 "{name}"\n{inner}\n#line {next_line} "{label}"'
        return found[0]

    return _INCLUDE.sub(included, text)


@lru_cache
def prelude() -> tuple[str, frozenset[str]]:
    """What MLX puts before every custom kernel, and the headers in it: its utils.h, or without MLX the names that
    signatures use."""
    if mlx_headers() is None:
        return "using namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n", frozenset()
    seen: set[str] = set()
    text = rewrite(include_mlx('#include "mlx/backend/metal/kernels/utils.h"\n', "prelude", seen))
    return text, frozenset(seen)


def marked(signature: Signature, label: str) -> str:
    """The text for Metal with #line directives, so that the author's lines keep their numbers."""
    # Where the header's last line is open, what follows is part of it, for us as for Metal.
    open_line = signature.header and not signature.header.endswith("\n")
    return (
        f'#line 1 "{label} header"\n'
        + signature.header
        + ("" if open_line else f'#line 1 "{label} signature"\n')
        + signature.opening
        + f'#line 1 "{label}"\n'
        + signature.source
        + signature.ending
    )


def unit(text: str, label: str) -> str:
    """A text of Metal, behind MLX's prelude, as C++."""
    before, headers = prelude()
    return f'#include <metal_stdlib>\n{before}\n#line 1 "{label}"\n' + rewrite(include_mlx(text, label, set(headers)))


def translate(signature: Signature, label: str) -> str:
    """A whole translation unit: the kernel, and a function that calls it with an array of pointers."""
    passed = [_passed(argument, i) for i, argument in enumerate(signature.arguments)]
    passed += [ANSWERS[attribute] for attribute in signature.attributes]
    return unit(marked(signature, label), f"{label} header") + entry(signature.instance, passed)


def _passed(argument: Argument, position: int) -> str:
    pointer = f"({'' if argument.kind == 'output' else 'const '}{argument.type}*)arguments[{position}]"
    return f"*{pointer}" if argument.by_reference else pointer


def entry(instance: str, passed: Sequence[str]) -> str:
    """The function that calls a kernel with these arguments."""
    return (
        '\n#line 1 "entry"\n#include "entry.h"\n'
        'extern "C" EMULATOR_UNSEEN void emulator_kernel(void** arguments) {\n'
        f"  {instance}({', '.join(passed)});\n}}\n"
    )
