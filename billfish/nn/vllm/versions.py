"""The name of the quantization method, and the versions of vLLM that it runs in."""

from __future__ import annotations

import re

from billfish.core.errors import BackendUnavailable, bad_argument

METHOD = "billfish"
OLDEST = (0, 32)  # the first vLLM that this was run with
TRIED = "0.32"  # the last one


def is_old(version: str) -> bool:
    """Whether vLLM's layers were others then. A build without a number, such as "dev", is taken for a new one."""
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))
    return numbers != () and numbers < OLDEST


def check_version(version: str) -> None:
    """Raises for a vLLM that is too old."""
    if is_old(version):
        expected = f"{'.'.join(map(str, OLDEST))} or newer"
        raise BackendUnavailable(bad_argument("billfish.nn.vllm", "version of vllm", version, expected))
