"""Write what README and docs take from records and code, and the pictures: `python -m benchmarks.pages`.

A page says where by a pair of comments, and everything between them is written anew:

    <!-- generated: llm-neoverse -->
    <!-- end -->

Names are those of benchmarks.tables.TABLES (`python -m benchmarks.tables` prints them all) and of CODE below. A name of
words instead of a table goes into a sentence: `<!-- generated: packing-neoverse --><!-- end -->`.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import code_tables, records
from benchmarks.pictures import PICTURES
from benchmarks.promises import PROMISES
from benchmarks.tables import TABLES, table
from billfish.cli.main import COMMANDS, parser_of
from billfish.models import Architecture
from billfish.models.bert import TextEncoder
from billfish.models.olmo import Olmo2

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
    """Every type of model: its architecture in GGUF, its docstring, and the models of the tests."""
    tested = (ROOT / "tests" / "support" / "llm_architectures.py").read_text()
    rows = [["architecture", "`model_type`", "models", "beside a Llama's parts", "checked by"]]
    for own in Architecture.known:
        of_type = rf'^    "([\w-]+)": \((?:  #.*)?\s*"{own.gguf}",\s*"{own.model_type}"'
        names = re.findall(of_type, tested, re.MULTILINE) or ["tests/llm/test_folders.py"]
        models, _, parts = inspect.cleandoc(own.__doc__ or "").replace("\n", " ").rstrip(".").partition(": ")
        checked = ", ".join(f"`{name}`" for name in names)
        rows.append([f"`{own.gguf}`", f"`{own.model_type}`", models, parts or "none", checked])
    return table(rows)


def count(encoders: bool) -> str:
    """Words: how many architectures there are, by their names in GGUF."""
    return str(len({own.gguf for own in Architecture.known if isinstance(own, TextEncoder) == encoders}))


def tokenizers() -> str:
    """Every family of tokenizers that the tests know: its kind, and the tokens that end an answer."""
    path = ROOT / "tests" / "support" / "tokenizer_families.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    rows = [["models", "`tokenizer.ggml.pre`", "begins with", "ends"]]
    for name, family in module.FAMILIES.items():
        pre = {"spm": "none: SentencePiece (`llama`)", "gemma4": "none: SentencePiece with merges (`gemma4`)"}
        first = f"`{family.control[family.bos]}` {family.bos}" if family.starts else "nothing"
        ends = ", ".join(f"`{family.control[end]}` {end}".replace("|", "\\|") for end in sorted(family.ends))
        rows.append([name, pre.get(family.pre, f"`{family.pre}`"), first.replace("|", "\\|"), ends])
    return table(rows)


CODE: dict[str, Callable[[], str]] = {
    **code_tables.CODE,
    **PROMISES,
    "architectures": architectures,
    "decoder-count": lambda: count(encoders=False),
    "encoder-count": lambda: count(encoders=True),
    "tokenizers": tokenizers,
    "code-olmo2": lambda: f"```python\n{inspect.getsource(Olmo2)}```",
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
