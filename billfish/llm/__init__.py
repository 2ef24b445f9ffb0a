"""Run language models from GGUF files and folders, with all matmuls on billfish's kernels.

model = bf.llm.load("model.gguf")  # or a folder
print(model.generate("What is the capital of France?").text)
for piece in model.stream("Why is the sky blue?"):
    print(piece, end="", flush=True)
"""

from billfish.llm.chat_answer import ChatAnswer
from billfish.llm.detokenizer import Alternative, Token
from billfish.llm.evaluation import Evaluation, evaluate
from billfish.llm.generation import Generation
from billfish.llm.kv_cache import Cache
from billfish.llm.model import Model, default_model, load

__all__ = [
    "Alternative",
    "Cache",
    "ChatAnswer",
    "Evaluation",
    "Generation",
    "Model",
    "Token",
    "default_model",
    "evaluate",
    "load",
]
