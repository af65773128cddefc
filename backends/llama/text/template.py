"""The chat template of a model, run in a bounded sandbox: it is Jinja code from the model's file.

The environment is that of transformers (`utils/chat_template_utils.py`), the target of templates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...base import PLAIN_RENDERING, Message, Rendering
from ...errors import InvalidArgument, LoadFailed, TooLarge
from ...model_spec import ModelSpec

SOURCE_BYTES_MAX = 1 << 20
OUTPUT_CHARACTERS_MAX = 1 << 24
RENDER_S_MAX = 2.0
INTEGER_BITS_MAX = 4096
_BIT = OUTPUT_CHARACTERS_MAX // INTEGER_BITS_MAX


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on operators that make large values from small ones."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _size(operator, left, right) > OUTPUT_CHARACTERS_MAX:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is past the limit")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> float:
    """Estimate the size of the result: bits of a number, items of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return (bits * right if operator == "**" else bits + right.bit_length()) * _BIT
    if isinstance(right, int) and hasattr(left, "__len__"):
        return len(left) * right
    if isinstance(left, int) and hasattr(right, "__len__"):
        return left * len(right)
    return 0


def _environment() -> _Environment:
    extensions = ["jinja2.ext.loopcontrols"]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return *value* as JSON without HTML escapes, which Jinja's own filter adds."""
    allowed = {k: v for k, v in options.items() if k in ("indent", "separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, **allowed)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """The template of one model, compiled at its first use."""

    def __init__(self, source: str, *, bos: str, eos: str, strip_bos: bool):
        self._source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._bos_stripped = bos if strip_bos else ""
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the prompt without the BOS token, which tokenizing adds; see `Model.render`."""
        try:
            text = self._render([dict(m) for m in messages], rendering)
        except (InvalidArgument, TooLarge):
            raise
        except Exception as exc:  # a template can raise any exception
            raise InvalidArgument(
                f"the chat template refuses the messages: {str(exc) or type(exc).__name__}",
                hint="send roles in the order that the model's template expects, or use raw text",
            ) from exc
        return text.removeprefix(self._bos_stripped)

    def _render(self, messages: list[dict[str, Any]], rendering: Rendering) -> str:
        if self._template is None:
            self._template = _environment().from_string(self._source)
        parts: list[str] = []
        characters, deadline = 0, time.monotonic() + RENDER_S_MAX
        values = {
            **rendering.arguments,
            **self._names,
            "messages": messages,
            "tools": rendering.tools or None,
            "add_generation_prompt": rendering.add_generation_prompt,
        }
        for part in self._template.generate(values):
            parts.append(part)
            characters += len(part)
            if characters > OUTPUT_CHARACTERS_MAX:
                most = OUTPUT_CHARACTERS_MAX
                raise TooLarge(f"the chat template made more than {most} characters")
            if time.monotonic() > deadline:
                raise InvalidArgument(f"the chat template ran for more than {RENDER_S_MAX:g} s")
        return "".join(parts)


def configured_source(spec: ModelSpec) -> str | None:
    """Return the template that the configuration sets; None: the model file's own is used."""
    if spec.chat_template and spec.chat_template_file:
        raise _unusable("chat-template and chat-template-file are both set", "keep one of them")
    source, origin = spec.chat_template, "chat-template"
    if spec.chat_template_file:
        source, origin = _read(spec.chat_template_file), spec.chat_template_file
    if not source:
        return None
    try:
        _environment().from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise _unusable(f"{origin}, line {exc.lineno}: {exc.message}", "correct it") from None
    except Exception as exc:  # the compiler evaluates constant expressions
        raise _unusable(f"{origin}: {exc}", "correct it") from None
    return source


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
