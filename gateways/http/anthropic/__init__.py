"""Anthropic's API: messages, the count of their tokens, and models.

`api` lists the endpoints, `fields` the fields of their requests.
"""

from __future__ import annotations

from .api import ANTHROPIC

__all__ = ("ANTHROPIC",)
