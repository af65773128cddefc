"""llama-server's own paths: text between two others, tokens of texts, and the
prompt of a chat.

`api` lists the endpoints, `fields` the fields of their requests.
"""

from __future__ import annotations

from .api import LLAMA_SERVER

__all__ = ("LLAMA_SERVER",)
