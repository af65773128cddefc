"""The chat template of a model: Jinja from its file, so run in a sandbox and bounded.

Set up as transformers does it (`utils/chat_template_utils.py`), for which templates are written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..base import Message
from ..errors import InvalidArgument, TooLarge

__all__ = ("ChatTemplate",)

OUTPUT_CHARACTERS_MAX = 1 << 24
RENDER_S_MAX = 2.0
INTEGER_BITS_MAX = 4096
_BIT = OUTPUT_CHARACTERS_MAX // INTEGER_BITS_MAX


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on the operators that make large values out of small ones."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _size(operator, left, right) > OUTPUT_CHARACTERS_MAX:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is past the limit")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> float:
    """Return about how large the result will be: bits of a number, items of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return (bits * right if operator == "**" else bits + right.bit_length()) * _BIT
    if isinstance(right, int) and hasattr(left, "__len__"):
        return len(left) * right
    if isinstance(left, int) and hasattr(right, "__len__"):
        return left * len(right)
    return 0


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as it is: Jinja's own filter escapes HTML."""
    allowed = {k: v for k, v in options.items() if k in ("indent", "separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, **allowed)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """One model's template, compiled at its first use."""

    def __init__(self, source: str, *, bos: str, eos: str, strip_bos: bool):
        self._source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        self._bos_stripped = bos if strip_bos else ""
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt for an answer to *messages*, without the BOS that tokenizing adds.

        :raises InvalidArgument: the template refuses the messages, or fails.
        :raises TooLarge: the prompt is longer than `OUTPUT_CHARACTERS_MAX`.
        """
        try:
            text = self._render([dict(m) for m in messages])
        except (InvalidArgument, TooLarge):
            raise
        except Exception as exc:  # a template can raise what any Python expression can
            raise InvalidArgument(
                f"the chat template refuses the messages: {str(exc) or type(exc).__name__}",
                hint="send roles in the order that the model's template wants, or use raw text",
            ) from exc
        return text.removeprefix(self._bos_stripped)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            self._template = _environment().from_string(self._source)
        parts: list[str] = []
        characters, deadline = 0, time.monotonic() + RENDER_S_MAX
        for part in self._template.generate(
            messages=messages, add_generation_prompt=True, tools=None, **self._names
        ):
            parts.append(part)
            characters += len(part)
            if characters > OUTPUT_CHARACTERS_MAX:
                raise TooLarge(
                    f"the chat template made more than {OUTPUT_CHARACTERS_MAX} characters"
                )
            if time.monotonic() > deadline:
                raise InvalidArgument(f"the chat template ran for more than {RENDER_S_MAX:g} s")
        return "".join(parts)
