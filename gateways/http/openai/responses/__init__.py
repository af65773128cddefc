"""OpenAI's `/v1/responses`: input and output as items, and the previous response as a session."""

from __future__ import annotations

from .answering import answer_response, delete_response
from .fields import RESPONSES

__all__ = ("RESPONSES", "answer_response", "delete_response")
