"""The check of turns by all that is known before their session is open.

A stream that waits for its model begins before the daemon has seen its turn. Nothing may then be
wrong with the request that can be known without the model: the parameters, the messages, the
grammar, and the chat template's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from ....backends import Rendering
from ....backends.answer_form import PLAIN_ANSWERS, AnswerForm
from ....backends.errors import (
    InferdError,
    InvalidArgument,
    PromptTooLong,
    TooLarge,
    UnsupportedOperation,
)
from ....backends.grammars.checking import GrammarCheck
from ....backends.media import media_parts
from ....backends.media_types import check_content
from ....backends.params import (
    SamplingParams,
    adjust_parameters,
    check_turn_level,
    read_options,
    sampling_params,
    tool_choice_of,
)
from ....backends.tool_formats import marked_form
from ....ipc.chat_messages import checked_messages
from ....ipc.client import AsyncClient, Audio, Image, Infill
from ....ipc.payloads import turn_input
from ..callers import Caller
from ..limits import CLOSE_S_MAX
from .answers import TurnRequest
from .pool import ConnectionPool

_REFUSALS = (InvalidArgument, PromptTooLong, TooLarge, UnsupportedOperation)
_REFUSE_LONG = (None, "auto", "error")
"""Values of `overflow` with which a prompt that begins a session must fit into the context."""
_CALL_S_MAX = 10.0
_MARK = "<__media__>"
Values = Mapping[str, Any]


class TurnPrecheck:
    """Checks one turn at a time. Lives on the event loop."""

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        self._lock = anyio.Lock()
        self._grammars = GrammarCheck()

    async def check(self, caller: Caller, request: TurnRequest) -> None:
        """Check a turn. Other failures than refusals of the turn are ignored.

        :raises InferdError: the daemon would refuse the turn.
        """
        async with self._lock:
            try:
                values = await anyio.to_thread.run_sync(self._check_alone, request)
                async with self._pool.lease(caller) as client:
                    info = await client.show(request.model, timeout=_CALL_S_MAX)
                    _check_reads(request, info)
                    if info.get("info"):
                        await _check_size(client, request, values, info)
                await anyio.to_thread.run_sync(self._check_template, request, values, info)
            except _REFUSALS:
                raise
            except InferdError:
                return

    async def check_parameters(self, options: Mapping[str, Any]) -> None:
        """Check parameters that a session is to have, with their grammar.

        :raises InferdError: no turn could have them.
        """
        async with self._lock:
            await anyio.to_thread.run_sync(self._check_values, options)

    def _check_values(self, options: Mapping[str, Any]) -> None:
        adjusted, _ = adjust_parameters(read_options(options, strict=True).values)
        self._check_grammar(sampling_params(adjusted, 0))

    def _check_alone(self, request: TurnRequest) -> Values:
        """Check a turn by itself, and return the values of its parameters."""
        values = read_options(request.options, strict=True).values
        check_turn_level(values)
        adjusted, _ = adjust_parameters(values)
        if not request.raw:
            _check_contents(_messages_of(request))
        self._check_grammar(sampling_params(adjusted, 0))
        return values

    def _check_grammar(self, params: SamplingParams) -> None:
        with suppress(ModuleNotFoundError):  # llguidance belongs to the extra `llama`
            self._grammars.check(params)

    def _check_template(
        self, request: TurnRequest, values: Values, info: Mapping[str, Any]
    ) -> None:
        """Check the functions of a turn and, if the model is not loaded, the rendering of its
        messages.
        """
        source = _template_of(info)
        self._check_functions(values, _answer_form_of(info, source))
        if not source or info.get("info") or request.raw or request.session_id is not None:
            return
        from ....backends.llama.text.renderer import Renderer
        from ....backends.llama.text.template import ChatTemplate

        template = ChatTemplate(Renderer(source), bos="", eos="", strip_bos=False)
        try:
            template.render(_without_media(_messages_of(request)), _rendering_of(values))
        finally:
            template.close()

    def _check_functions(self, values: Values, form: AnswerForm) -> None:
        """Check the schemas of functions that calls in an answer have to follow. Without a mark
        before calls, `strict` alone makes no grammar.
        """
        marked = bool(form.calls) and not form.calls[0].whole
        choice = tool_choice_of(values.get("tool-choice", "auto"))
        for function in (tool["function"] for tool in values.get("tools", ())):
            if choice.mode == "none" or (choice.names and function["name"] not in choice.names):
                continue
            strict = function.get("strict") is True and marked
            if strict or choice.mode == "required":
                schema = {"type": "object", **(function.get("parameters") or {})}
                text = msgspec.json.encode(schema).decode()
                try:
                    self._check_grammar(SamplingParams(json_schema=text))
                except InferdError as exc:
                    exc.data["param"] = "tools"
                    raise

    def close(self) -> None:
        """End the process that compiles grammars."""
        self._grammars.close()


def _template_of(info: Mapping[str, Any]) -> str:
    """Return the chat template of a model, or empty if it is not known."""
    options, file = info.get("options") or {}, info.get("file_info") or {}
    if options.get("chat-template-file"):
        return ""
    return str(options.get("chat-template") or file.get("chat_template") or "")


def _answer_form_of(info: Mapping[str, Any], source: str) -> AnswerForm:
    """Return the form of answers of a loaded model, or as far as its template names it. Daemons of
    earlier versions have none.
    """
    found = (info.get("info") or {}).get("answer_form")
    if found is not None:
        return msgspec.convert(found, AnswerForm)
    known = marked_form(source)
    return PLAIN_ANSWERS if known is None else known.form


def _messages_of(request: TurnRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat, with a text as the user's message."""
    fields = turn_input(request.prompt)
    messages = fields.get("messages", [{"role": "user", "content": fields.get("prompt")}])
    return checked_messages(messages)


def _check_contents(messages: list[dict[str, Any]]) -> None:
    """Check that images and sounds are what they are said to be.

    :raises InvalidArgument: one is something else.
    """
    for item, part in enumerate(media_parts(messages)):
        try:
            check_content(part["data"], part["type"])
        except InvalidArgument as exc:
            exc.data["item"] = item
            raise


def _check_reads(request: TurnRequest, info: Mapping[str, Any]) -> None:
    """Check that a model reads the images and sounds of a turn.

    :raises UnsupportedOperation: it does not.
    """
    reads = info.get("reads")
    for item, part in enumerate(media_parts(request.prompt)):
        if reads is not None and part["type"] not in reads:
            noun = "images" if part["type"] == "image" else "sounds"
            raise UnsupportedOperation(
                f"the model {request.model!r} reads no {noun}",
                hint="use a model with a projector, which its operator puts beside its file",
                data={"item": item},
            )


def _without_media(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose images and sounds are marks in their texts, as templates get them."""
    return [
        {**each, "content": "\n".join(part.get("text", _MARK) for part in each["content"])}
        if isinstance(each["content"], list)
        else each
        for each in messages
    ]


def _rendering_of(values: Values) -> Rendering:
    return Rendering(
        tools=list(values.get("tools", ())), arguments=dict(values.get("chat-template-kwargs", {}))
    )


async def _check_size(
    client: AsyncClient, request: TurnRequest, values: Values, info: Mapping[str, Any]
) -> None:
    """Check that the context of a loaded model holds a prompt that begins a session.

    :raises PromptTooLong: it does not.
    """
    ctx_size = (info.get("info") or {})["ctx_size"]
    ctx_size = min(values.get("ctx-size") or ctx_size, ctx_size)
    settings = {**(info.get("options") or {}), **values}
    shortens = settings.get("ctx-shift") or settings.get("overflow") not in _REFUSE_LONG
    if request.session_id is not None or shortens:
        return
    graph = await client.load_by_name(request.model, timeout=_CALL_S_MAX)
    try:
        if request.raw and isinstance(request.prompt, str):
            text, seconds = request.prompt, _CALL_S_MAX
            ids = await client.tokenize(graph, text, special=True, bos=True, timeout=seconds)
            tokens = len(ids)
        elif isinstance(request.prompt, Infill):
            tokens = 0  # it is cut to fit
        elif request.raw and not isinstance(request.prompt, Image | Audio):
            tokens = len(request.prompt)
        else:
            rendering = _rendering_of(values)
            rendered = await client.apply_template(
                graph,
                _messages_of(request),
                tools=rendering.tools,
                arguments=rendering.arguments,
                timeout=_CALL_S_MAX,
            )
            tokens = rendered.tokens
    finally:
        if client.connected:
            with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
                await client.unload(graph, keep=True)
    if tokens >= ctx_size:
        raise PromptTooLong(
            f"the prompt has {tokens} tokens; the context holds {ctx_size - 1} and one for the"
            " answer",
            data={"prompt_tokens": tokens, "ctx_size": ctx_size},
        )
