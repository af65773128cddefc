"""Ollama's API: chats, completions, embeddings and the lists of models.

`api` lists the endpoints, `fields` the fields of their requests.
"""

from __future__ import annotations

from .api import OLLAMA

__all__ = ("OLLAMA",)
