"""Write what README and docs take from records and code, and the pictures: `python -m benchmarks.pages`.

A page says where by a pair of comments, and everything between them is written anew:

    <!-- generated: llm-neoverse -->
    <!-- end -->

Names are those of benchmarks.tables.TABLES (`python -m benchmarks.tables` prints them all) and of CODE below. A name of
words instead of a table goes into a sentence: `<!-- generated: packing-neoverse --><!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import code_tables, records
from benchmarks.pictures import PICTURES
from benchmarks.tables import TABLES, table
from billfish.checkpoints.names.hyperparameters import ARCHITECTURE_OF
from billfish.cli.main import COMMANDS, parser_of
from billfish.llm.architectures import ARCHITECTURES, ATTENTION, Architecture

ROOT = records.RESULTS.parents[1]
MARKED = re.compile(r"(<!-- generated: ([\w ,-]+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


# ---- tables of the code -----------------------------------------------------------------------------------------


def options(command: str) -> str:
    """The options of `billfish COMMAND`."""
    rows = [["option", "meaning"]]
    for action in parser_of(command)._actions:
        if action.help in (None, argparse.SUPPRESS) or action.dest == "help":
            continue
        value = f" {action.metavar or '|'.join(map(str, action.choices or ())) or action.dest}"
        value = {0: "", "?": f" [{value[1:]}]"}.get(action.nargs, value)
        name = ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
        rows.append([cell.replace("|", "\\|") for cell in (name, str(action.help) % vars(action))])
    return table(rows)


def architectures() -> str:
    """Every architecture: the `model_type`s of its folders, its parts beside a Llama's, and the models of the tests."""
    tested = (ROOT / "tests" / "support" / "llm_architectures.py").read_text()
    rows = [["architecture", "`model_type`", "beside a Llama's parts", "checked by"]]
    for name, own in ARCHITECTURES.items():
        types = [f"`{kind}`" for kind, architecture in ARCHITECTURE_OF.items() if architecture == name]
        models = re.findall(rf'^    "([\w-]+)": \(\s*"{name}",', tested, re.MULTILINE)
        models = models or ["tests/llm/test_folders.py"]
        rows.append([f"`{name}`", ", ".join(types), ", ".join(parts(own)), ", ".join(f"`{each}`" for each in models)])
    return table(rows)


ORDINALS = {2: "second", 4: "fourth", 6: "sixth"}


def parts(own: Architecture) -> list[str]:
    """What an architecture has beside a Llama's parts."""
    found = {
        "QKV biases": own.biases == ATTENTION,
        "biases everywhere": len(own.biases) > len(ATTENTION),
        "QK norm": own.head_norms == "each",
        "QK norm over all heads": own.head_norms == "all",
        "GeGLU": own.gate == "gelu",
        "clamped SwiGLU": own.gate == "clamped_silu",
        "scaled embedding": own.scaled_embedding,
        "post-norms": own.post_norms,
        "attention sinks": own.sinks,
        "fused QKV and gate_up": own.joined,
        "logit soft-capping": any(own.caps),
    }
    words = [name for name, there in found.items() if there]
    if own.windows is not None:
        step = own.windows.step
        words.append(f"sliding window, global in every {ORDINALS[step]} layer" if step else "sliding window")
        words += ["RoPE base of its own in windows"] if own.windows.local_base else []
    if own.unrotated:
        words.append(f"no RoPE in every {ORDINALS[own.unrotated]} layer")
    if own.routing is not None:
        words.append("MoE" if own.routing.required else "MoE or dense")
        words += [] if own.routing.renormalized else ["routing weights not renormalized"]
        words += ["shared expert"] if own.routing.shared else []
    return words or ["none"]


CODE: dict[str, Callable[[], str]] = {
    **code_tables.CODE,
    "architectures": architectures,
    **{f"options-{command}": lambda command=command: options(command) for command in COMMANDS},
}


# ---- pages ------------------------------------------------------------------------------------------------------


def pages() -> Iterator[Path]:
    """README and its like, and docs/."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def text_of(name: str) -> str:
    return TABLES[name].text() if name in TABLES else CODE[name]()


def rewritten(page: str) -> str:
    """The page with everything between markers as records and code have it."""

    def passage(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        text = text_of(name).strip()
        return f"{begin}\n\n{text}\n\n{end}" if "\n" in text else begin + text + end

    return MARKED.sub(passage, page)


def main() -> None:
    for path in pages():
        text = path.read_text()
        if text != (again := rewritten(text)):
            path.write_text(again)
            print(path.relative_to(ROOT))
    for name, draw in PICTURES.items():
        path, text = ROOT / "docs" / "pictures" / f"{name}.svg", str(draw())
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
