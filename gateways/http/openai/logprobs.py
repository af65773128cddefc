"""Logprobs in OpenAI's form, from llama-server's form."""

from __future__ import annotations

from typing import Any

LOGPROB_MIN = -9999.0
"""JSON has no infinity: the logprob of a token that cannot occur."""


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
