"""billfish in vLLM: the quantization method `billfish`, which vLLM finds by the entry point `vllm.general_plugins`.

vllm serve FOLDER                             # a folder that billfish wrote
vllm serve FOLDER --quantization billfish     # GPTQ, AWQ, compressed-tensors and every other layout

checkpoint_folder.py      the quantized matrices of a folder, from headers
shares.py                 which rows and columns of them a rank has
quantization_config.py    which method a layer of vLLM's gets
linear_method.py          linear layers, embeddings and heads
expert_method.py          mixtures of experts
thread_count.py           the kernels' threads on the cores that vLLM gives a worker
"""

from __future__ import annotations

from billfish.nn.vllm.versions import METHOD, is_old

__all__ = ["register"]


def register() -> None:
    """Tell vLLM about the quantization method. vLLM calls this in each of its processes, perhaps more than once."""
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    try:
        if is_old(vllm.__version__):
            raise ImportError
        from billfish.nn.vllm.quantization_config import BillfishConfig as Config
    except ImportError as error:  # also of a newer vLLM, whose layers are elsewhere
        from billfish.nn.vllm.refusal import Refusal as Config

        Config.reason = str(error)
    register_quantization_config(METHOD)(Config)
