"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ....backends.errors import InferdError, NotFound, UnsupportedOperation
from ....ipc.client import Piece, QueueEvent, ToolCall
from ....ipc.names import Priority
from ..callers import Caller
from ..exchange import Exchange, chosen_model, collect_answers, render_prompt, stream_turn
from ..exchange.streaming import EVENT_STREAM
from ..fields import field_error
from ..media import RequestMedia
from ..turns import (
    Answer,
    EventId,
    Rest,
    TurnProgress,
    TurnRequest,
    WholeCalls,
    schema_options,
)
from .chat_fields import (
    CHAT,
    CONTROL,
    INPUT_TOKENS,
    ChatRequest,
    Effort,
    ResponseFormat,
    ServiceTier,
    read_messages,
    reasoning_bounds,
    thinking_arguments,
)
from .forms import Timings, chat_logprobs, error_body, prompt_logprobs, usage_of, with_fields

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


async def answer_chat(exchange: Exchange) -> None:
    """Answer a chat completion, whole or streamed."""
    chat, options = exchange.read_fields(CHAT)
    chat.model = await chosen_model(exchange, chat.model)
    request = turn_of(chat, options, exchange.caller)
    frame = ChatFrame(chat, request)
    request = replace(request, answer_id=frame.common["id"])
    try:
        if chat.stream:
            form = ChatStream(frame)
            if request.session_id is not None and request.answers == 1:
                request = replace(request, on_turn=form.number_events)
            await stream_turn(exchange, request, form)
        else:
            answers = await collect_answers(exchange, request)
            await exchange.send_json(frame.whole(answers))
    except InferdError as exc:
        raise CHAT.name_field(exc) from None


async def count_chat_tokens(exchange: Exchange) -> None:
    """Answer with the number of a chat's tokens, as llama-server does."""
    chat, options = exchange.read_fields(INPUT_TOKENS)
    chat.model = await chosen_model(exchange, chat.model)
    try:
        rendered = await render_prompt(exchange, turn_of(chat, options, exchange.caller))
    except InferdError as exc:
        raise INPUT_TOKENS.name_field(exc) from None
    await exchange.send_json({"object": "response.input_tokens", "input_tokens": rendered.tokens})


async def control_chat(exchange: Exchange) -> None:
    """End the reasoning of the caller's completions with an id, as llama-server does.

    :raises NotFound: the caller has no such running completion.
    """
    control, _ = exchange.read_fields(CONTROL)
    results = await exchange.turns.end_reasoning(exchange.caller, control.id)
    if not results:
        raise NotFound(
            f"there is no running completion {control.id!r}",
            hint="send the id of a chat completion that is being generated",
            data={"param": "id"},
        )
    reason = "" if any(r.ended for r in results) else results[0].reason
    body = {"id": control.id, "action": control.action, "success": not reason, "reason": reason}
    await exchange.send_json(body)


def turn_of(
    chat: ChatRequest, options: dict[str, Any], caller: Caller, *, shows_prompt: bool = False
) -> TurnRequest:
    """Return the turn of a request, or of one that only shows its prompt.

    :raises InvalidArgument: the request contradicts itself.
    :raises UnsupportedOperation: the request has parts that are not supported.
    """
    options = {**options, "reasoning-format": "deepseek"}
    tokens_max = chat.max_completion_tokens
    if tokens_max is None:
        tokens_max = chat.max_tokens
    if tokens_max is not None:
        options["n-predict"] = tokens_max
    if chat.top_logprobs and not chat.logprobs:
        raise field_error("top_logprobs", "top_logprobs: logprobs is not true")
    if chat.logprobs:
        options["n-probs"] = max(1, chat.top_logprobs)
    if not (chat.add_generation_prompt or chat.continue_final_message or shows_prompt):
        raise UnsupportedOperation(
            "add_generation_prompt: prompts end where an answer begins",
            hint="leave it out, or set continue_final_message",
            data={"param": "add_generation_prompt"},
        )
    check_prompt_logprobs(chat.prompt_logprobs, stream=chat.stream)
    if chat.prompt_logprobs is not None:
        options["prompt-logprobs"] = chat.prompt_logprobs
    if chat.prediction is not None:
        options["prediction"] = chat.prediction.text
    if chat.logit_bias:
        options["logit-bias"] = bias_pairs(chat.logit_bias)
    if chat.response_format is not None:
        options.update(format_options(chat.response_format))
    effort = effort_arguments(chat.reasoning_effort)
    thinking = thinking_arguments(chat.think, chat.enable_thinking, chat.thinking)
    options.update(reasoning_bounds(chat.reasoning_effort, chat.think, chat.thinking))
    if kwargs := {**effort, **thinking, **chat.chat_template_kwargs}:
        options["chat-template-kwargs"] = kwargs
    if chat.continue_final_message:
        options["continue-final-message"] = True
    media = RequestMedia()
    messages, chat.messages = read_messages(chat.messages, media), []  # its base64 is freed
    return TurnRequest(
        model=chat.model,
        prompt=messages,
        media=media,
        options=options,
        answers=chat.n,
        priority=priority_of(chat.priority, chat.service_tier, caller),
        keeps_priority=chat.priority is None and chat.service_tier in ("auto", "default"),
        session_id=chat.session_id,
        progress=chat.stream and (chat.return_progress or chat.timings_per_token),
    )


def check_prompt_logprobs(top: int | None, *, stream: bool) -> None:
    """Refuse `prompt_logprobs` of a stream, as vLLM does.

    :raises InvalidArgument: a stream has it.
    """
    if stream and top is not None:
        raise field_error(
            "prompt_logprobs",
            "prompt_logprobs: a stream has none",
            hint="leave out stream; in /v1/completions, echo with logprobs streams them",
        )


def bias_pairs(bias: dict[str, float]) -> list[tuple[int, float]]:
    """Return the pairs of token ids and numbers in a `logit_bias`.

    :raises InvalidArgument: a key is not a token's id.
    """
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise field_error("logit_bias", f"logit_bias: {key[:40]!r} is not the id of a token")
    return [(int(key), number) for key, number in bias.items()]


def format_options(form: ResponseFormat) -> dict[str, Any]:
    """Return the parameters of a `response_format`.

    :raises InvalidArgument: the schema is missing.
    """
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json-schema": {"type": "object"}}
    if form.json_schema is None:
        raise field_error("response_format.json_schema", "response_format.json_schema is missing")
    return schema_options(form.json_schema.schema_, strict=bool(form.json_schema.strict))


def effort_arguments(effort: Effort | None) -> dict[str, Any]:
    """Return the arguments of the chat template for a `reasoning_effort`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def priority_of(priority: Priority | None, tier: ServiceTier, caller: Caller) -> Priority:
    """Return a request's priority class. A tier's class is lowered to the caller's highest; a
    *priority* is not.
    """
    wanted: dict[ServiceTier, Priority] = {"flex": "low", "priority": "high", "fast": "high"}
    return caller.class_of(priority, wanted.get(tier, "normal"))


def tier_of(priority: Priority) -> str:
    """Return the tier in which a request of a class was answered."""
    return {"low": "flex", "normal": "default"}.get(priority, "priority")


class ChatFrame:
    """The parts that all objects of one completion share."""

    def __init__(self, chat: ChatRequest, request: TurnRequest):
        self.chat = chat
        self.timings = Timings(per_token=chat.timings_per_token, progress=chat.return_progress)
        self.common: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": chat.model,
            "service_tier": tier_of(request.priority),
        }

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """Return the whole completion."""
        top, scored = self.chat.prompt_logprobs, answers[0].metadata.get("prompt_logprobs", [])
        return {
            **self.common,
            **({} if top is None else {"prompt_logprobs": prompt_logprobs(scored, top)}),
            "object": "chat.completion",
            "system_fingerprint": answers[0].metadata.get("fingerprint"),
            "choices": [self._choice(number, answer) for number, answer in enumerate(answers)],
            "usage": usage_of(answers),
            **self.timings.of_end(answers[0]),
        }

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        calls = [_call(call) for call in answer.tool_calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not answer.text else answer.text,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self.chat.logprobs:
            logprobs = chat_logprobs(answer.probabilities, self.chat.top_logprobs)
        return {
            "index": number,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            **answer.adjusted,
        }


class ChatStream:
    """A completion as chunks."""

    content_type = EVENT_STREAM
    shows_waiting = True

    def __init__(self, frame: ChatFrame):
        self._chat = frame.chat
        fields = {**frame.common, "object": "chat.completion.chunk"}
        self._head = b"data: " + _encode(fields)[:-1] + b',"choices":['
        usage = b',"usage":null' if frame.chat.stream_options.include_usage else b""
        self._tail = b"]" + usage + b"}\n\n"
        # Most pieces have only text, and differ from each other in their text alone.
        self._text_heads = [
            self._head + b'{"index":%d,"delta":{"content":' % number
            for number in range(frame.chat.n)
        ]
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._timings = frame.timings
        self._calls = [WholeCalls() for _ in range(frame.chat.n)]
        self._ended: list[Answer] = []
        self._id: EventId | None = None
        """The id of the last event, if the events have ids."""

    def number_events(self, turn: int) -> None:
        """Give the events ids: they belong to the session's turn of this number."""
        self._id = EventId(turn)

    def continue_after(self, last: EventId) -> None:
        """Give the events ids after that of the *last* one, which a reader has."""
        self._id = last

    def _next_id(self, piece: Piece | None = None, calls: int = 0) -> bytes:
        """Return the line of the id after a piece and tool calls, if the events have ids."""
        if self._id is None:
            return b""
        if piece is not None:
            self._id = self._id.after(str(piece).encode(), piece.reasoning.encode(), calls)
        elif calls:
            self._id = self._id.after(b"", calls=calls)
        return self._id.line

    def begin(self) -> bytes:
        """Return the chunks with the role of each answer."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        chunks = b"".join(self._chunk(number, delta) for number in range(self._chat.n))
        return self._next_id() + chunks

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return a comment with the place in the queue."""
        return waiting_comment(place)

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return the chunk of a prompt's progress, if it is wanted."""
        more = self._timings.of_prompt(answer, progress)
        delta = {"role": "assistant", "content": None}
        return self._chunk(answer, delta, more=more) if more else b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the chunk of a piece."""
        more = self._timings.of_piece(answer)
        if piece and not (piece.reasoning or piece.tool_calls or probabilities or more):
            text = self._text_heads[answer] + _encode(str(piece)) + self._text_tail
            return text if self._id is None else self._next_id(piece) + text
        delta: dict[str, Any] = {}
        if piece:
            delta["content"] = str(piece)
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.tool_calls:
            self._add_calls(delta, answer, self._calls[answer].add_parts(piece.tool_calls))
        if not (delta or probabilities):
            return b""
        calls = len(delta.get("tool_calls", ()))
        return self._next_id(piece, calls) + self._chunk(answer, delta, probabilities, more=more)

    def rest(self, rest: Rest) -> bytes:
        """Return the chunk of a part of the answer, for a reader who continues."""
        delta: dict[str, Any] = {}
        if rest.text:
            delta["content"] = rest.text
        if rest.reasoning:
            delta["reasoning_content"] = rest.reasoning
        if rest.calls:
            first = rest.id.calls - len(rest.calls)
            delta["tool_calls"] = _numbered_calls(rest.calls, first)
        self._id = rest.id
        return self._id.line + self._chunk(0, delta)

    def _add_calls(self, delta: dict[str, Any], answer: int, calls: list[ToolCall]) -> None:
        if calls:
            delta["tool_calls"] = _numbered_calls(calls, self._calls[answer].calls - len(calls))

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the last chunks of an answer."""
        self._ended.append(end)
        delta: dict[str, Any] = {}
        self._add_calls(delta, answer, self._calls[answer].finish())
        rest = b""
        if delta or end.probabilities:
            rest = self._next_id(calls=len(delta.get("tool_calls", ())))
            rest += self._chunk(answer, delta, end.probabilities)
        more = self._timings.of_end(end)
        if self._id is not None:
            self._id = self._id._replace(ended=True)
        return rest + self._next_id() + self._chunk(answer, {}, end=end, more=more)

    def _chunk(
        self,
        answer: int,
        delta: dict[str, Any],
        probabilities: list[dict[str, Any]] | None = None,
        end: Answer | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = None
        if probabilities:
            logprobs = chat_logprobs(probabilities, self._chat.top_logprobs)
        choice = {
            "index": answer,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
            **({} if end is None else end.adjusted),
        }
        return self._head + _encode(choice) + with_fields(self._tail, more or {})

    def error(self, error: InferdError, status: int) -> bytes:
        """Return an error, which OpenAI's clients raise."""
        return b"data: " + _encode(error_body(CHAT.name_field(error), status)) + b"\n\n"

    def finish(self) -> bytes:
        """Return the usage, if it is wanted, and the end of the stream."""
        if not self._chat.stream_options.include_usage:
            return DONE
        usage = {"usage": usage_of(self._ended), **self._timings.of_end(self._ended[0])}
        return self._head + with_fields(b"]}\n\n", usage) + DONE


def waiting_comment(place: QueueEvent | None) -> bytes:
    """Return a comment of an event stream with a place in the queue."""
    if place is None:
        return b": waiting\n\n"
    starts = "" if place.starts_in_s is None else f", starts in {place.starts_in_s:.1f} s"
    return f": waiting, place {place.position} of {place.waiting}{starts}\n\n".encode()


def _numbered_calls(calls: Sequence[ToolCall], first: int) -> list[dict[str, Any]]:
    return [{"index": number, **_call(call)} for number, call in enumerate(calls, first)]


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
