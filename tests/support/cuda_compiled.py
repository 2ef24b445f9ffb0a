"""What tests of products share with others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from build_cache import kept
from cuda_support import all_kinds

from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.compile import compile_fresh, kernel_name
from billfish.backends.cuda.driver import Device

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448 - 1024)


ADA = Device(0, "NVIDIA L4", (8, 9), 58, 101376 - 1024)


def resources(source: str, macros: dict[str, str], arch: str) -> int:
    """Registers of a kernel, which must not spill; nor may its wgmmas wait for each other.

    gemm_small has plans for 8-bit weights that fill a quarter of all registers exactly: NVRTC 13.0 and 13.4 spill up to
    16 bytes of them.
    """
    allowed = 16 if source == "gemm_small.cu" and macros["ELEMENT"] == "Int8" else 0

    def compile_to(path: Path) -> None:
        code, log = compile_fresh(source, macros, arch, verbose=True)
        assert code[:4] == b"\x7fELF"
        path.write_text(log)

    name = kernel_name(source, macros, arch)
    log = kept(f"{name}.log", name, compile_to).read_text()
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled is not None, log
    assert int(spilled[1]) <= allowed, log
    assert "serialized" not in log, log
    found = re.search(r"Used (\d+) registers", log)
    assert found is not None, log
    return int(found[1])


def name_of(kind: Kind) -> str:
    return f"{kind.element}-{kind.scale}-{kind.offset}-{kind.groups}"


def case(*values: object, often: bool) -> object:
    """Values of a test that `make test` runs, or only `make test-full`."""
    names = (name_of(value) if isinstance(value, Kind) else str(value) for value in values)
    return pytest.param(*values, marks=() if often else pytest.mark.full, id="-".join(names))


KINDS = all_kinds()


# One for each element, scale and offset: the number of groups only changes how often the same is done.
SAMPLES = list({(kind.element, kind.scale, kind.offset): kind for kind in KINDS}.values())
