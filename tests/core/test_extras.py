"""What an error says of a package that is not installed."""

from __future__ import annotations

import pytest

from billfish.core import extras
from billfish.core.errors import MissingPackage


def test_a_checkout_is_named_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    assert extras.how_to_install("llm") == "pip install 'billfish[llm]'"  # a wheel: no folder to install from
    (tmp_path / "pyproject.toml").touch()
    assert extras.how_to_install("llm").startswith("pip install '.[llm]' in a checkout")


def test_a_module_that_is_missing():
    with pytest.raises(MissingPackage, match=r"no_such_module is not installed.*\[llm\]"):
        extras.require("no_such_module", "llm")


def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "module_with_a_need.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match=r"module_with_a_need cannot be imported .*no_such_module.*\[llm\]"):
        extras.require("module_with_a_need", "llm")
