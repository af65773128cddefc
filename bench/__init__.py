"""The bench: inferd beside llama-server and a bare llama.cpp loop, built from one source."""
