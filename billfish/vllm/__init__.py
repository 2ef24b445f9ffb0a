"""billfish in vLLM: the quantization method `billfish`, which vLLM finds by the entry point `vllm.general_plugins`.

vllm serve FOLDER                             # a folder that billfish wrote
vllm serve FOLDER --quantization billfish     # GPTQ, AWQ, compressed-tensors and every other layout of bf.load

folder.py    the quantized matrices of a folder, from headers
shares.py    which rows and columns of them a rank has
config.py    which method a layer of vLLM's gets
linear.py    linear layers, embeddings and heads
experts.py   mixtures of experts
threads.py   the kernels' threads on the cores that vLLM gives a worker
"""

from __future__ import annotations

import re

from billfish.core.errors import BackendUnavailable, complaint

__all__ = ["register"]

METHOD = "billfish"
OLDEST = (0, 32)  # the first vLLM that this was run with


def register() -> None:
    """Tell vLLM about the quantization method. vLLM calls this in each of its processes, perhaps more than once."""
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    if is_old(vllm.__version__):
        from billfish.vllm.refusal import Refusal as Config
    else:
        from billfish.vllm.quantization_config import BillfishConfig as Config
    register_quantization_config(METHOD)(Config)


def is_old(version: str) -> bool:
    """Whether vLLM's layers were others then. A build without a number, such as "dev", is taken for a new one."""
    numbers = tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:2]))
    return numbers != () and numbers < OLDEST


def check_version(version: str) -> None:
    """Raises for a vLLM that is too old."""
    if is_old(version):
        takes = f"{'.'.join(map(str, OLDEST))} or newer"
        raise BackendUnavailable(complaint("billfish.vllm", "the version of vllm", version, takes))
