"""OpenAI's `/v1/responses`: items in and out, and the response before as a session."""

from __future__ import annotations

from .answering import answer_response, delete_response
from .fields import RESPONSES

__all__ = ("RESPONSES", "answer_response", "delete_response")
