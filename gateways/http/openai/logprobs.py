"""Logprobs in OpenAI's form, from llama-server's form."""

from __future__ import annotations

from typing import Any

LOGPROB_MIN = -9999.0
"""The logprob of a token that cannot occur, because JSON has no infinity."""


def chat_logprobs(probabilities: list[dict[str, Any]], top: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice, with *top* alternatives of each token."""
    return {"content": [_token(each, top) for each in probabilities], "refusal": None}


def _token(each: dict[str, Any], top: int) -> dict[str, Any]:
    others = each.get("top_logprobs", [])[:top]
    return {**_entry(each), "top_logprobs": [_entry(other) for other in others]}


def _entry(each: dict[str, Any]) -> dict[str, Any]:
    logprob = each.get("logprob", LOGPROB_MIN)
    return {
        "token": each["token"],
        "bytes": each.get("bytes"),
        "logprob": max(logprob, LOGPROB_MIN),
    }


class CompletionLogprobs:
    """The `logprobs` of an answer of `/v1/completions`, in parts.

    *offset* is the number of characters before the answer.
    """

    def __init__(self, top: int, offset: int = 0):
        self._top, self._offset = top, offset

    def add(self, probabilities: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part for the next tokens."""
        entries = [_entry(each) for each in probabilities]
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [self._alternatives(each) for each in probabilities],
            "text_offset": offsets,
        }

    def _alternatives(self, each: dict[str, Any]) -> dict[str, float]:
        others = [_entry(other) for other in each.get("top_logprobs", [])[: self._top]]
        return {other["token"]: other["logprob"] for other in others}
