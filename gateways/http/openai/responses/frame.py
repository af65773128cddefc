"""The object of a response, from its request and its answer."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from .....backends.errors import InferdError
from .....ipc.client import ToolCall
from ...turns import Answer, FinishReason, TurnRequest
from ..chat import tier_of
from ..errors import error_body
from ..logprobs import chat_logprobs
from .fields import LOGPROBS, ResponseRequest
from .items import namespaces_of


class ResponseFrame:
    """The parts of a response that do not depend on its answer."""

    def __init__(self, request: ResponseRequest, response_id: str, turn: TurnRequest):
        self.request = request
        self._whole: dict[str, Any] | None = None
        self._namespaces = namespaces_of(request.tools)
        self.logprobs = LOGPROBS in request.include or request.top_logprobs > 0
        self._fields: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "parallel_tool_calls": request.parallel_tool_calls,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": tier_of(turn.priority),
            "store": request.store,
            "temperature": turn.options.get("temperature"),
            "top_p": turn.options.get("top_p"),
            "text": {"format": _format(request)},
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "truncation": request.truncation,
            "error": None,
            "incomplete_details": None,
        }

    def begun(self) -> dict[str, Any]:
        """Return the response before its answer."""
        return {**self._fields, "status": "in_progress", "output": [], "usage": None}

    def ended(self, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response with the items of its answer."""
        fields = {**self._fields, "status": status_of_end(answer), "output": output}
        if fields["status"] == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**fields, **answer.adjusted, "usage": _usage(answer)}

    def failed(self, error: InferdError, status: int) -> dict[str, Any]:
        """Return the response with the error by which it failed."""
        body = error_body(error, status)["error"]
        shown = {"code": body["code"] or "server_error", "message": body["message"]}
        return {**self._fields, "status": "failed", "output": [], "error": shown, "usage": None}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole response, the same at each call."""
        self._whole = self._whole or self._with_items(answer)
        return self._whole

    def _with_items(self, answer: Answer) -> dict[str, Any]:
        calls = [self.call_item(call) for call in answer.tool_calls]
        output: list[dict[str, Any]] = []
        if answer.reasoning:
            output.append(reasoning_item(answer.reasoning))
        if answer.text or not (calls or output):
            logprobs = self.shown_logprobs(answer.probabilities)
            output.append(message_item(new_item_id("msg"), answer.text, logprobs))
        if not calls:
            output[-1]["status"] = status_of_end(answer)
        return self.ended(answer, output + calls)

    def call_item(self, call: ToolCall) -> dict[str, Any]:
        """Return the item of a call."""
        space = self._namespaces.get(call.name)
        return {
            "id": new_item_id("fc"),
            "type": "function_call",
            "status": "completed" if _is_whole(call) else "incomplete",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            **({} if space is None else {"namespace": space}),
        }

    def shown_logprobs(self, probabilities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logprobs of tokens, if they are wanted."""
        if not self.logprobs:
            return []
        found = chat_logprobs(probabilities, self.request.top_logprobs)["content"]
        assert isinstance(found, list), "chat_logprobs returns them as a list"
        return found


def status_of_end(answer: Answer) -> str:
    """Return the status of a response, and of the item with which its answer ends: a reasoning or a
    message.
    """
    return "incomplete" if answer.finish_reason is FinishReason.LENGTH else "completed"


def _is_whole(call: ToolCall) -> bool:
    """Return whether the arguments of a call are an object; those of one that was cut are not."""
    try:
        msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return False
    return True


def new_item_id(kind: str) -> str:
    """Return the id of an item."""
    return f"{kind}_{secrets.token_hex(12)}"


def message_item(
    item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    """Return the item of a text."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(text: str, item_id: str = "", status: str = "completed") -> dict[str, Any]:
    """Return the item of a reasoning."""
    return {
        "id": item_id or new_item_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.input_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.input_tokens + answer.output_tokens,
    }


def _format(request: ResponseRequest) -> dict[str, Any]:
    form = request.text.format
    if form.type != "json_schema":
        return {"type": form.type}
    shown: dict[str, Any] = msgspec.to_builtins(form)
    return {name: value for name, value in shown.items() if value is not None}
