"""A small decoder for language models in GGUF files and folders, all of its matrix work on billfish's kernels.

model = bf.llm.load("model.gguf")  # or a folder
for text in model.generate("What is the capital of France?"):
    print(text, end="")
"""

from billfish.llm.evaluation import Evaluation, evaluate
from billfish.llm.generation import Generation
from billfish.llm.kv_cache import Cache
from billfish.llm.model import Model, default_model, load

__all__ = ["Cache", "Evaluation", "Generation", "Model", "default_model", "evaluate", "load"]
