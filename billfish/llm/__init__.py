"""A small decoder for language models in GGUF files, all of its matrix work on billfish's kernels.

    model = bf.llm.load("model.gguf")
    for text in model.generate("What is the capital of France?"):
        print(text, end="")
"""

