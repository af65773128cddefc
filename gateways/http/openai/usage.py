"""The tokens and times of a request, in the forms of OpenAI and llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..turns import Answer, TurnProgress


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


_encode = msgspec.json.encode


class Timings:
    """The fields of a request's chunks, or of its whole answer, that have times. Fields that the
    request does not want are absent.
    """

    def __init__(self, *, per_token: bool, progress: bool):
        self._per_token, self._shows_progress = per_token, progress
        self._progress: dict[int, TurnProgress] = {}

    def of_prompt(self, answer: int, progress: TurnProgress) -> dict[str, Any]:
        """Note the progress of an answer's prompt, and return its fields."""
        self._progress[answer] = progress
        if not self._shows_progress:
            return {}
        return {
            "prompt_progress": {
                "total": progress.total,
                "cache": progress.cached,
                "processed": progress.processed,
                "time_ms": int(progress.prompt_ms),
            }
        }

    def of_piece(self, answer: int) -> dict[str, Any]:
        """Return the fields of an answer's next piece."""
        progress = self._progress.get(answer) if self._per_token else None
        if progress is None:
            return {}
        return _timings(
            cached=progress.cached,
            computed=progress.processed - progress.cached,
            prompt_ms=progress.prompt_ms,
            predicted=progress.output_tokens,
            predicted_ms=progress.predicted_ms,
        )

    def of_end(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of an answer that has ended."""
        if not self._per_token:
            return {}
        return _timings(
            cached=answer.cached_tokens,
            computed=answer.input_tokens - answer.cached_tokens,
            prompt_ms=answer.metadata.get("prompt_ms", 0.0),
            predicted=answer.output_tokens,
            predicted_ms=answer.metadata.get("predicted_ms", 0.0),
        )


def with_fields(end: bytes, fields: dict[str, Any]) -> bytes:
    """Return the *end* of a chunk, which begins with the bracket behind its choices, with more
    fields.
    """
    return b"]," + _encode(fields)[1:-1] + end[1:] if fields else end


def _timings(
    *, cached: int, computed: int, prompt_ms: float, predicted: int, predicted_ms: float
) -> dict[str, Any]:
    steps = max(0, predicted - 1)  # the first token comes from the logits of the prompt
    found = {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, computed),
        "prompt_per_second": _ratio(1000 * computed, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, steps),
        "predicted_per_second": _ratio(1000 * steps, predicted_ms),
    }
    return {"timings": found}


def _ratio(number: float, divisor: float) -> float:
    return number / divisor if divisor else 0.0
