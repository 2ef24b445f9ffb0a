"""`billfish info`: what it finds, and that it imports nothing heavy for it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import billfish as bf
from billfish.cli import info
from billfish.cli.main import main

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(capsys, *options):
    assert main(["info", *options]) == 0
    return capsys.readouterr().out


def test_info_says_what_was_found_and_chosen(capsys):
    facts = json.loads(told(capsys, "--json"))
    assert list(facts["backends"]) == list(bf.BACKENDS)
    assert facts["levels"][-1] == "portable"
    assert facts["backends"]["cpu"]["about"].split()[0] == bf.BACKENDS["cpu"].level
    assert facts["chosen"] == "cpu"
    assert facts["threads"]["used"] >= 1
    assert facts["threads"]["cores"] == os.cpu_count()
    assert facts["memory"]["total"] >= facts["memory"].get("available", 0) > 0
    assert facts["packages"]["numpy"] == np.__version__
    text = told(capsys)
    lines = dict(line.strip().split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
    assert lines["chosen"] == "cpu, for NumPy arrays"
    for name, answer in facts["backends"].items():
        assert lines[name].split(":")[0] in (["yes", "by name only"] if answer["usable"] else ["no"])
        assert answer["about"] in text
    for name, version in facts["packages"].items():
        assert lines[name].startswith(version or "-")


def test_info_says_why_a_backend_is_not_usable(capsys, monkeypatch):
    class Broken(type(bf.BACKENDS["reference"])):
        def usable(self):
            return False, "it is broken"

    monkeypatch.setitem(bf.BACKENDS._made, "reference", Broken())
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    monkeypatch.setattr(sys, "platform", "linux")
    text = told(capsys)
    assert re.search(r"^  reference +no: it is broken$", text, re.MULTILINE)
    assert re.search(r"^  metal +no: Metal needs macOS$", text, re.MULTILINE)
    assert re.search(r"^  tokenizers +-   pip install '\.\[llm\]'", text, re.MULTILINE)
    assert re.search(r"^  torch +-$", text, re.MULTILINE)


def test_info_works_where_the_environment_does_not(capsys, monkeypatch):
    monkeypatch.setenv("BILLFISH_ISA", "abacus")
    monkeypatch.setattr(bf.BACKENDS, "_made", {})
    text = told(capsys)
    assert "environment         BILLFISH_ISA=abacus" in text
    assert re.search(r"^  cpu +no: .*BILLFISH_ISA.*'abacus'", text, re.MULTILINE)
    monkeypatch.setenv("BILLFISH_ISA", "portable")
    monkeypatch.setattr(bf.BACKENDS, "_made", {})
    assert "yes: portable kernels, as BILLFISH_ISA says" in told(capsys)


@pytest.mark.parametrize(
    ("variable", "used", "allowed", "quota", "why"),
    [
        ("3", 3, 8, 0, "OMP_NUM_THREADS"),
        (None, 2, 8, 2, "the CPU quota of this process"),
        (None, 4, 8, 0, "hyperthreads of a core count once"),
        (None, 4, 8, 6, "hyperthreads of a core count once"),
        (None, 4, 4, 0, "the cores that this process may use"),
        (None, 8, 8, 0, "all cores"),
    ],
)
def test_why_so_many_threads(monkeypatch, variable, used, allowed, quota, why):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(info, "_cpu", SimpleNamespace(threads=lambda: used, quota_cores=lambda _: quota))
    assert info.threads() == {"used": used, "cores": 8, "allowed_cores": allowed, "why": why}


def test_memory_where_the_system_says_less(tmp_path):
    assert info.memory(tmp_path / "none").keys() == {"total"}
    (tmp_path / "some").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    assert info.memory(tmp_path / "some") == {"total": 2 << 20, "available": 1 << 20}


def test_info_fits_a_terminal_and_imports_nothing_heavy(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    info.print_info(terminal)
    assert max(map(len, terminal.getvalue().splitlines())) <= 60
    code = "import sys; from billfish.cli.main import main; main(['info']); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf", "tokenizers", "matplotlib"}.intersection(ran.stderr.split())


def test_extras_bring_what_info_says():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in info.PACKAGES.items():
        if extra:
            assert any(re.match(rf"{package}\b", each) for each in extras[extra]), package
