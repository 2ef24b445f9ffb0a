"""What pages show works: their Python runs, their command lines are ones that we have, and they stay short."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_folders import write_folder
from llm_models import Small, write_model
from pages import PAGES, page

import billfish as bf
from benchmarks.pages import MARKED
from billfish.cli.main import COMMANDS, main, parser_of

LONGEST = 1800  # words, without tables that are generated
ELSEWHERE = {
    "README.md",
    "docs/add-a-model.md",
    "docs/cpu.md",
    "docs/emulator.md",
    "docs/serving.md",
    "docs/serving-api.md",
}  # tests of their own run them
DEVICES = {"docs/metal.md", "docs/first-hour-on-a-mac.md"}  # which need a Mac


def quantized_file(folder: Path) -> None:
    write_model(folder / "model.gguf", Small(context=1024))


def float_file(folder: Path) -> None:
    write_model(folder / "model.gguf", Small(quantization="F32"))
    (folder / "text.txt").write_text("ab abba, what is this? " * 20)


def folders(folder: Path) -> None:
    write_folder(folder / "model", "plain")
    write_folder(folder / "gptq-folder", "gptq", act_order=True)


FILES: dict[str, Callable[[Path], None]] = {
    "docs/calibration.md": float_file,
    "docs/checkpoints.md": quantized_file,
    "docs/llm.md": quantized_file,
    "docs/rotate.md": float_file,
    "docs/tune.md": float_file,
}


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)


def test_the_architecture_that_a_page_adds_is_the_one_there_is():
    """docs/add-a-model.md shows a class of the package."""
    source = (Path(bf.__file__).parent / "models" / "olmo.py").read_text()
    [block] = [block for block in blocks("docs/add-a-model.md") if block.startswith("class ")]
    assert block.strip() in source


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", [name for name in PAGES if name not in ELSEWHERE | DEVICES and blocks(name)])
def test_the_python_of_a_page_runs(tmp_path, monkeypatch, name):
    """The blocks of a page in their order, each in a module of its own, in a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    FILES.get(name, folders)(tmp_path)
    formats = {*bf.FORMATS}
    try:
        for block in blocks(name):
            exec(compile(block, name, "exec"), {})
    finally:
        for added in {*bf.FORMATS} - formats:  # docs/add-a-format.md
            del bf.FORMATS[added]


def test_the_python_of_the_server_s_pages_runs(capsys):
    pytest.importorskip("starlette", reason="needs billfish[serve]")
    from serving_http import serving

    with serving(bf.llm.default_model()) as server:
        for name in ("docs/serving.md", "docs/serving-api.md"):
            for block in blocks(name):
                names: dict[str, object] = {}
                exec(compile(block.replace("http://127.0.0.1:8080", server.url), name, "exec"), names)
    assert names["answer"].choices[0].message.parsed.country


@pytest.mark.parametrize("name", PAGES)
def test_every_command_line_is_one_that_we_have(name):
    text = page(name)
    shown = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    shown += "".join(re.findall(r"^    .*\n", text, re.MULTILINE))
    for line in re.findall(r"^(?: {4})?(?:cat .*? \| )?billfish (.*)$", shown, re.MULTILINE):
        command, *words = shlex.split(line, comments=True)
        assert command in COMMANDS, line
        parser_of(command).parse_args(words)


def test_the_page_shows_what_quantize_and_verify_print(tmp_path, monkeypatch, capsys):
    """The model is a small one of random numbers, so that anybody can have it."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", "plain")
    shown = re.findall(r"^    \$ billfish (.*)\n((?:    .*\n)+)", page("docs/quantize.md"), re.MULTILINE)
    assert [line.split()[0] for line, _ in shown] == ["quantize", "verify"]
    for line, text in shown:
        assert main(shlex.split(line)) == line.startswith("verify")  # which finds differences
        printed = capsys.readouterr().out
        if line.startswith("verify"):  # of which the page has the end
            printed = printed[printed.index("\n\n") + 2 :]
        assert textwrap.indent(printed, "    ") == text


@pytest.mark.parametrize("name", [name for name in PAGES if "/notes/" not in name and name != "CHANGELOG.md"])
def test_a_page_is_short(name):
    assert len(MARKED.sub("", page(name)).split()) <= LONGEST
