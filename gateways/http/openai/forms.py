"""Parts of answers in OpenAI's shape: errors, parts of lists, the tokens and times of a request,
and logprobs; in the forms of llama-server and vLLM too.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from ....backends import errors as e
from ....backends.errors import InferdError
from ..exchange.exchange import HttpRefusal
from ..turns import Answer, TurnProgress

_CODES: tuple[tuple[type[InferdError], str], ...] = (
    (e.ModelNotFound, "model_not_found"),
    (e.PromptTooLong, "context_length_exceeded"),
    (e.ContextFull, "context_length_exceeded"),
    (e.QuotaExceeded, "rate_limit_exceeded"),
    (e.SessionBusy, "session_busy"),
    (e.UnsupportedOperation, "unsupported"),
    (e.PermissionDenied, "permission_denied"),
    (e.NotFound, "not_found"),
    (e.InvalidArgument, "invalid_argument"),
    (e.LoadFailed, "load_failed"),
    (e.OutOfMemory, "out_of_memory"),
    (e.Cancelled, "cancelled"),
    (e.ConnectionLost, "connection_lost"),
    (e.ShuttingDown, "shutting_down"),
    (e.WorkerCrashed, "worker_crashed"),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES_BY_STATUS = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "too_large",
    415: "unsupported_media_type",
    503: "overloaded",
    504: "timeout",
}

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response, and of an error in a stream."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = next((code for cls, code in _CODES if isinstance(error, cls)), None)
    param = error.data.get("param")
    if isinstance(error, e.ModelNotFound):
        param = "model"
    return {
        "error": {
            "message": error.text_for_people,
            "type": kind,
            "param": param,
            "code": code or _CODES_BY_STATUS.get(status),
        }
    }


def list_page(
    entries: Sequence[dict[str, Any]], after: str | None, limit: int, kind: str
) -> dict[str, Any]:
    """Return the part of a list behind the id *after*; *kind* is what an entry is called.

    :raises HttpRefusal: no entry has this id.
    """
    first = 0
    if after is not None:
        ids = [entry["id"] for entry in entries]
        if after not in ids:
            raise HttpRefusal(404, f"there is no {kind} {after[:100]!r}", param="after")
        first = ids.index(after) + 1
    data = entries[first : first + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(entries) > first + limit,
    }


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the usage of answers to one prompt, whose tokens count once."""
    prompt = max((answer.input_tokens for answer in answers), default=0)
    completion = sum(answer.output_tokens for answer in answers)
    cached = min((answer.cached_tokens for answer in answers), default=0)
    drafted = sum(answer.metadata.get("drafted_tokens", 0) for answer in answers)
    accepted = sum(answer.metadata.get("accepted_tokens", 0) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **_draft_details(accepted, drafted - accepted),
    }


def _draft_details(accepted: int, rejected: int) -> dict[str, Any]:
    """Return the field with the drafts of an answer, if it had any: those of a `prediction`, and
    those from the conversation.
    """
    if not accepted + rejected:
        return {}
    counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {"completion_tokens_details": counts}


def add_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the usages of several prompts."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    drafts = [usage.get("completion_tokens_details", {}) for usage in usages]
    accepted, rejected = (
        sum(counts.get(f"{kind}_prediction_tokens", 0) for counts in drafts)
        for kind in ("accepted", "rejected")
    )
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
        **_draft_details(accepted, rejected),
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


LOGPROB_MIN = -9999.0
"""The logprob of a token that cannot occur, because JSON has no infinity."""


def chat_logprobs(probabilities: list[dict[str, Any]], top: int) -> dict[str, Any]:
    """Return the `logprobs` of a choice, with *top* alternatives of each token."""
    return {"content": [_token(each, top) for each in probabilities], "refusal": None}


def _token(each: dict[str, Any], top: int) -> dict[str, Any]:
    others = each.get("top_logprobs", [])[:top]
    return {**_entry(each), "top_logprobs": [_entry(other) for other in others]}


def _entry(each: dict[str, Any]) -> dict[str, Any]:
    return {"token": each["token"], "bytes": each.get("bytes"), "logprob": _logprob(each)}


def _logprob(each: dict[str, Any]) -> float:
    return max(float(each.get("logprob", LOGPROB_MIN)), LOGPROB_MIN)


def prompt_logprobs(scored: list[dict[str, Any]], top: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt a map of ids, with that of the
    token itself and of *top* others. The first token has none.
    """
    return [
        None
        if each["logprob"] is None
        else {
            str(one["id"]): {
                "logprob": _logprob(one),
                "rank": one.get("rank", number),
                "decoded_token": one["token"],
            }
            for number, one in enumerate([each, *each["top_logprobs"][:top]])
        }
        for each in scored
    ]


class CompletionLogprobs:
    """The `logprobs` of an answer of `/v1/completions`, in parts, with *top* alternatives of each
    token.

    The offset of a token is the number of characters before the one with which it begins, in the
    answer, or in the prompt and the answer if the prompt is echoed.
    """

    def __init__(self, top: int):
        self._top, self._offset = top, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, scored: list[dict[str, Any]], prompt: str) -> dict[str, Any]:
        """Return the part for the tokens of the echoed *prompt*. The first one has no logprob.

        A tokenizer may add tokens or a space that the prompt does not have.
        """
        text, at = prompt.encode(errors="replace"), 0
        consumed = []
        for each in scored:
            piece = bytes(each["bytes"])
            if not text.startswith(piece, at):
                piece = piece[1:] if piece[:1] == b" " and text.startswith(piece[1:], at) else b""
            consumed.append(piece)
            at += len(piece)
        part = self._part(scored, consumed)
        self._offset = len(prompt)
        self._decoder.reset()
        return part

    def add(self, probabilities: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part for the next tokens of the answer."""
        return self._part(probabilities, [bytes(each["bytes"]) for each in probabilities])

    def _part(self, found: list[dict[str, Any]], pieces: list[bytes]) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(piece))
        return {
            "tokens": [_text(each) for each in found],
            "token_logprobs": [_logprob_or_none(each) for each in found],
            "top_logprobs": [self._alternatives(each) for each in found],
            "text_offset": offsets,
        }

    def _alternatives(self, each: dict[str, Any]) -> dict[str, float] | None:
        """Return the logprobs of the top tokens and of the token itself, by their texts. Of several
        tokens with the same text, this is the most probable one.
        """
        if _logprob_or_none(each) is None:
            return None
        found: dict[str, float] = {}
        for one in (*each.get("top_logprobs", [])[: self._top], each):
            found.setdefault(_text(one), _logprob(one))
        return found


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the `logprobs` that *parts* make together."""
    return {key: [each for part in parts for each in part[key]] for key in parts[0]}


def _logprob_or_none(each: dict[str, Any]) -> float | None:
    return None if each.get("logprob", LOGPROB_MIN) is None else _logprob(each)


def _text(each: dict[str, Any]) -> str:
    """Return the text of a token. OpenAI writes a token with a part of a character so, too."""
    piece = bytes(each["bytes"])
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
