"""The number of tokens of a request, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..turns import Answer


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the usage of answers to one prompt, whose tokens count once."""
    prompt = max((answer.input_tokens for answer in answers), default=0)
    completion = sum(answer.output_tokens for answer in answers)
    cached = min((answer.cached_tokens for answer in answers), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def add_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the usages of several prompts."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
    }
