"""The chat template of a model: where it comes from, and the prompts that it makes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ...answer_form import PLAIN_ANSWERS, AnswerForm
from ...base import PLAIN_RENDERING, Message, Rendering
from ...errors import InferdError, InvalidArgument, LoadFailed, TooLarge
from ...gguf.facts import uses_tools
from ...model_spec import ModelSpec
from ...tool_formats import marked_form, with_name
from .answer_probes import derive_answer_form
from .renderer import Renderer, TemplateRefusal
from .template_form import TemplateForm, derive_form, form_values

SOURCE_BYTES_MAX = 1 << 20
PROBES_S_MAX = 1.0
"""Time for all probe conversations with one template. One takes less than a millisecond."""
CHATML_BEGIN = "<|im_start|>"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As llama.cpp writes chats without a template (`common/chat.cpp`)."""
_ROLES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Models write a space before the first word of an answer, so the prompt ends without one."""
_TURN = (
    "{% set ns = namespace(turn='', answered=false) %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content | trim }} "
    "{% elif m.role == 'assistant' %}{% set ns.answered = true %}"
    "{% else %}"
    "{% if ns.answered %}{% set ns.turn = '' %}{% set ns.answered = false %}{% endif %}"
    "{% set ns.turn = ns.turn ~ (' ' if ns.turn else '') ~ (m.content | trim) %}"
    "{% endif %}"
    "{% endfor %}"
    "{{ ns.turn }}"
)
"""For encoder-decoders: the system messages, which name the task, and the text of the last turn."""


class ChatTemplate:
    """The template of one model; it renders one text at a time. *with_tools* is the template that
    the model's file has for chats with tools, if it is another one.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        bos: str,
        eos: str,
        strip_bos: bool,
        with_tools: ChatTemplate | None = None,
    ):
        self._renderer, self._with_tools = renderer, with_tools
        source = renderer.source if with_tools is None else with_tools._renderer.source
        self.uses_tools = uses_tools(source)
        self._names = {"bos_token": bos, "eos_token": eos}
        self._bos_stripped = bos if strip_bos else ""
        self._form: TemplateForm | None = None
        known = marked_form(source)
        self.answer_form = PLAIN_ANSWERS if known is None else known.form
        """The form of answers: by marks in the source until `prepare` derives it."""
        self._probes_until = 0.0

    def close(self) -> None:
        """End the processes; the next rendering starts another one."""
        self._renderer.close()
        if self._with_tools is not None:
            self._with_tools.close()

    def prepare(self) -> dict[str, str]:
        """Compile the template, and find the form in which it takes messages. Return notes on
        messages that it gets in another form than they were sent, by key, for clients.

        :raises TemplateRefusal: the template cannot be compiled.
        """
        if self._form is None:
            try:
                self._renderer.compile()
                self._probes_until = time.monotonic() + PROBES_S_MAX
                self._form = derive_form(self._render_probe)
                self.answer_form = self._derived_answer_form(self._form)
            except InferdError:  # too slow or too large even for a probe; the first request says so
                self._form = self._form or TemplateForm()
        return self._form.notes

    def _derived_answer_form(self, form: TemplateForm) -> AnswerForm:
        if self._with_tools is not None:
            self._with_tools.prepare()
            return self._with_tools.answer_form
        return with_name(derive_answer_form(self._render_probe, form, self._renderer.source))

    def _render_probe(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        names: Mapping[str, Any],
    ) -> str:
        if time.monotonic() > self._probes_until:
            raise TooLarge("the chat template is too slow for probe conversations")
        try:
            return self._render(messages, tools, names, PLAIN_RENDERING)
        except TemplateRefusal as exc:
            raise ValueError(str(exc)) from None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        names: Mapping[str, Any],
        rendering: Rendering,
    ) -> str:
        values = {
            **names,
            **rendering.arguments,
            **self._names,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": names.get(
                "add_generation_prompt", rendering.add_generation_prompt
            ),
        }
        return self._renderer.render(values)

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the prompt without the BOS token, which tokenizing adds."""
        if rendering.tools and self._with_tools is not None:
            return self._with_tools.render(messages, rendering)
        try:
            self.prepare()
        except TemplateRefusal as exc:
            raise InvalidArgument(
                f"the model's chat template cannot be used: {exc}",
                hint="set chat-template-file for this model to a template that works, or send raw"
                " text",
            ) from None
        assert self._form is not None, "`prepare` has found it"
        try:
            text = self._render(*form_values(self._form, messages, rendering.tools), rendering)
        except TemplateRefusal as exc:
            raise InvalidArgument(
                f"the chat template refuses the messages: {exc}",
                hint="send roles in the order that the model's template expects, or use raw text",
            ) from None
        return text.removeprefix(self._bos_stripped)


def fallback_source(*, chatml: bool, encodes: bool) -> tuple[str, str]:
    """Return the template for a model that has none, and a note on it. *chatml* means that the
    model's vocabulary has the token that begins messages in ChatML, *encodes* that it is an
    encoder-decoder.
    """
    if encodes:
        return _TURN, (
            "the model has no chat template and encodes each prompt by itself: the text of the"
            " system messages and of the last turn is the prompt, and earlier turns are not read"
        )
    if chatml:
        return _CHATML, "the model has no chat template: its messages are written in ChatML"
    return _ROLES, (
        "the model has no chat template: each message is written as `role: text`, and `stop` may"
        " name the text that begins the next one"
    )


def configured_renderer(spec: ModelSpec) -> Renderer:
    """Return the renderer of a model. If the configuration sets a template, it is compiled already.

    :raises LoadFailed: that template cannot be used.
    """
    if spec.chat_template and spec.chat_template_file:
        raise _unusable("chat-template and chat-template-file are both set", "keep one of them")
    source, origin = spec.chat_template, "chat-template"
    if spec.chat_template_file:
        source, origin = _read(spec.chat_template_file), spec.chat_template_file
    with ExitStack() as undo:
        renderer = Renderer(source)
        undo.callback(renderer.close)
        if source:
            _compile(renderer, origin)
        undo.pop_all()
    return renderer


def _compile(renderer: Renderer, origin: str) -> None:
    try:
        renderer.compile()
    except TemplateRefusal as exc:
        raise _unusable(f"{origin}, {exc}", "correct it") from None
    except TooLarge as exc:
        raise _unusable(f"{origin}: {exc.message}", "correct it") from None


def _read(path: str) -> str:
    hint = "set chat-template-file to a text file in UTF-8 that the daemon may read"
    try:
        with open(path, "rb") as file:
            data = file.read(SOURCE_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, ValueError) as exc:
        cause = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise _unusable(f"{path}: {cause}", hint) from None
    if len(data) > SOURCE_BYTES_MAX:
        raise _unusable(f"{path}: more than {SOURCE_BYTES_MAX} bytes", hint)
    if not text.strip():
        raise _unusable(f"{path}: it is empty", hint)
    return text


def _unusable(cause: str, hint: str) -> LoadFailed:
    return LoadFailed(f"the chat template cannot be used: {cause}", hint=hint)
