"""The program that renders one chat template: `python -m inferd.backends.llama.text.sandbox`.

A template is Jinja code from the model's file. Its environment is that of transformers
(`utils/chat_template_utils.py`), for which templates are written, and as in llama.cpp a template
may change its own lists. A single call of a filter can allocate gigabytes or compute for hours, so
the kernel enforces the limits of `exchange.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ...sandbox import serve_requests
from .renderer import CHARACTERS_MAX, CPU_S_MAX, MEMORY_BYTES_MAX, Limit, RenderReply

INTEGER_BITS_MAX = 4096
REFUSAL_CHARACTERS_MAX = 1000
_BIT = CHARACTERS_MAX // INTEGER_BITS_MAX


class _Generation(Extension):
    """The tag `generation`, which marks answers for training. Its content is rendered as it is."""

    tags = frozenset(("generation",))  # type: ignore[assignment]  # Jinja only asks `in`

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Undefined(jinja2.ChainableUndefined):
    """A missing value: its keys are missing too, and beside a text it is an empty text. As in
    llama.cpp: some templates read keys of schemas that few schemas have.
    """

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


class _Environment(SandboxedEnvironment):
    """The sandbox, with a bound on operators that make large values from small ones."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if _size(operator, left, right) > CHARACTERS_MAX:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is past the limit")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"a template may not read the attribute {attribute!r}")


def _size(operator: str, left: Any, right: Any) -> float:
    """Estimate the size of the result: scaled bits of a number, or items of a text or list."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        return (bits * right if operator == "**" else bits + right.bit_length()) * _BIT
    if isinstance(right, int) and hasattr(left, "__len__"):
        return len(left) * right
    if isinstance(left, int) and hasattr(right, "__len__"):
        return left * len(right)
    return 0


def _compile(source: str) -> jinja2.Template:
    """Compile a template, which also evaluates its constant expressions."""
    extensions: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=extensions,
        undefined=_Undefined,
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return *value* as JSON without HTML escapes, which Jinja's own filter adds."""
    allowed = {k: v for k, v in options.items() if k in ("indent", "separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_as_list, **allowed)


def _as_list(value: Any) -> list[Any]:
    """Return the items of a generator, which filters such as `map` return."""
    if not isinstance(value, Iterator):
        raise TypeError(f"a value of the type {type(value).__name__} has no form in JSON")
    return list(value)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _TooLong(Exception):
    """The output has too many characters."""


class _Sandbox:
    """The template, once compiled."""

    def __init__(self) -> None:
        self._template: jinja2.Template | None = None

    def handle(self, request: bytes) -> str:
        """Compile the first request, the template's source; render the values of all others."""
        if self._template is None:
            self._template = _compile(request.decode())
            return ""
        parts: list[str] = []
        characters = 0
        for part in self._template.generate(msgspec.msgpack.decode(request)):
            parts.append(part)
            characters += len(part)
            if characters > CHARACTERS_MAX:
                raise _TooLong
        return "".join(parts)

    def reply(self, request: bytes) -> bytes:
        """Return the packed reply to a request."""
        try:
            return msgspec.msgpack.encode(RenderReply(text=self.handle(request)))
        except MemoryError:
            reply = RenderReply(limit=Limit.MEMORY_BYTES)
        except _TooLong:
            reply = RenderReply(limit=Limit.CHARACTERS)
        except jinja2.TemplateSyntaxError as exc:
            reply = RenderReply(refusal=f"line {exc.lineno}: {exc.message}")
        except Exception as exc:  # a template can raise any exception
            reply = RenderReply(refusal=str(exc) or type(exc).__name__)
        reply.refusal = reply.refusal[:REFUSAL_CHARACTERS_MAX].encode(errors="replace").decode()
        return msgspec.msgpack.encode(reply)


if __name__ == "__main__":
    serve_requests(_Sandbox().reply, CPU_S_MAX, MEMORY_BYTES_MAX)
