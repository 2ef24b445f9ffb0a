"""Where compiled kernels are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from billfish.core.machine import cache_folder


def test_kernels_are_kept_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("BILLFISH_CACHE", str(tmp_path))
    assert cache_folder("cuda") == tmp_path / "cuda"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has a folder of its own")
def test_kernels_are_kept_in_the_cache_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("BILLFISH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("cuda") == tmp_path / "billfish" / "cuda"


@pytest.mark.parametrize("base", ["", ".", "here"])
def test_no_kernel_is_loaded_from_the_current_folder(monkeypatch, base):
    monkeypatch.setenv("BILLFISH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder("metal-emulator").is_relative_to(Path.home())
