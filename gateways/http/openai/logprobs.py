"""Logprobs in OpenAI's and vLLM's forms, from llama-server's form."""

from __future__ import annotations

import codecs
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
