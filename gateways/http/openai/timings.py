"""The times of an answer and the progress of its prompt, in llama-server's form."""

from __future__ import annotations

from typing import Any

import msgspec

from ..turns import Answer, TurnProgress

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
