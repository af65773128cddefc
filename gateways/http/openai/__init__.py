"""OpenAI's API: models and chat completions."""

from __future__ import annotations

from .api import OPENAI

__all__ = ("OPENAI",)
