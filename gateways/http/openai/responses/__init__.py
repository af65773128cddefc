"""OpenAI's `/v1/responses`: input and output as items, and the previous response as a session."""

from __future__ import annotations

from .answering import (
    answer_input_items,
    answer_response,
    answer_stored,
    cancel_response,
    compact,
    count_input_tokens,
    delete_response,
)
from .fields import INPUT_ITEMS, INPUT_TOKENS, RESPONSES, RETRIEVE

__all__ = (
    "INPUT_ITEMS",
    "INPUT_TOKENS",
    "RESPONSES",
    "RETRIEVE",
    "answer_input_items",
    "answer_response",
    "answer_stored",
    "cancel_response",
    "compact",
    "count_input_tokens",
    "delete_response",
)
