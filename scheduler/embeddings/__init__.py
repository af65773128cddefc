"""Texts that wait for their embeddings."""
