"""Tokenizers, as GGUF files and folders carry them."""
