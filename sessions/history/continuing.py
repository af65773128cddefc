"""Answers that continue the last message of a chat, which is the assistant's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...backends.answer_form import AnswerForm
from ...backends.errors import InvalidArgument, UnsupportedOperation
from ..worker_client import TextClient

Messages = Sequence[dict[str, Any]]
_LINE = b"\n"


def split_final(messages: Messages) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages before the last one, and the last one, which is to be continued.

    :raises InvalidArgument: it cannot be continued.
    """
    *before, last = messages
    if last.get("role") != "assistant":
        raise _refusal(f"the last message is of the role {last.get('role')!r}")
    if last.get("tool_calls"):
        raise _refusal("the last message calls tools")
    if not isinstance(last.get("content") or "", str):
        raise _refusal("the last message is not a text")
    if not before:
        raise _refusal("no message precedes the last one")
    return before, last


def _refusal(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"continue_final_message: {why}",
        hint="end the messages with the beginning of the answer, a text of the role assistant that"
        " follows the user's message",
    )


def answer_beginning(message: Mapping[str, Any], form: AnswerForm, opened: str) -> str:
    """Return the text of *message* as a model that answers in *form* begins to write it, behind a
    prompt that ends with the mark *opened* of the answer. Reasoning without a text behind it is
    continued.

    :raises UnsupportedOperation: the form has no marks for its reasoning.
    """
    text, reasoning = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    blocks = [block for block in form.reasoning if block.end.strip()]
    begins = {block.begin.strip(): block for block in blocks}
    block = begins.get(opened.strip()) if opened.strip() or "" in begins else None
    found = ""
    if block is None and reasoning:
        if not blocks:
            raise UnsupportedOperation(
                "the model's answers have no marks for the reasoning of the last message",
                hint="leave its reasoning out",
            )
        block = blocks[0]
        found = block.begin
    if block is not None:
        found += reasoning
        if text or not reasoning:
            found += block.end
    contents = [each.begin for each in form.content if each.begin.strip()]
    if text and contents and opened.strip() not in [mark.strip() for mark in contents]:
        found += contents[0]
    return found + text


def check_place(text: str, ended: str, whole: str, message: Mapping[str, Any]) -> None:
    """Check that a template's *text* ends where an answer begins. *ended* is its text without the
    generation prompt, and *whole* the text with the *message* that begins the answer.

    :raises UnsupportedOperation: it does not.
    """
    if text != ended:
        return
    content = str(message.get("content") or "").strip()
    if not (whole.startswith(text) and whole[len(text) :].lstrip().startswith(content)):
        raise UnsupportedOperation(
            "the model's chat template does not show where an answer begins, so that none can be"
            " continued",
            hint="send the text before the answer with raw, or set chat-template-file for this"
            " model to a template with a generation prompt",
        )


async def tokens_within(client: TextClient, text: str) -> list[int]:
    """Return the tokens of *text* behind other text, where no space is added before it."""
    mark = await client.tokenize(_LINE, special=True, bos=False)
    tokens = await client.tokenize(_LINE + text.encode(), special=True, bos=False, turn=True)
    if tokens[: len(mark)] == mark:
        return tokens[len(mark) :]
    return await client.tokenize(text.encode(), special=True, bos=False)
