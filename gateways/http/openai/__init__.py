"""OpenAI's API: models, chats, completions, embeddings and responses."""

from __future__ import annotations

from .api import OPENAI

__all__ = ("OPENAI",)
