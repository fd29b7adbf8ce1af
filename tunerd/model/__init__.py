"""A GGUF file: its facts, and the memory that serving it takes."""
