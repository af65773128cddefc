"""GGUF files, read without llama.cpp: their headers, and the facts in them."""

MAGIC = b"GGUF"
"""The first bytes of each file."""
