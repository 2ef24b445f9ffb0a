"""What models and their tensors are called: GGUF's names, Hugging Face's names, and hyperparameters."""
