"""GGUF files, read without llama.cpp: their headers, and the facts in them."""
