"""The table of a path's request fields, by which bodies are read and docs/gateway.md is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from ....backends.errors import InferdError, InvalidArgument, UnsupportedOperation

S = TypeVar("S", bound=msgspec.Struct)
_INT_END = 1 << 63
_SHOWN_CHARACTERS = 200
QUERY_FIELDS_MAX = 16
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class Use(StrEnum):
    """The effect of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request. With *option*, its value sets this parameter of docs/parameters.md, or
    is passed on under this name, which the daemon reads as another form of a parameter.

    A refused field may have one of the values *permitted*, which have no effect.
    """

    name: str
    use: Use
    note: str = ""
    option: str = ""
    permitted: tuple[Any, ...] = ()
    sets: str = ""
    """The parameter that the API's own code makes of it, which the daemon's errors name."""


def honoured(name: str, note: str = "", *, sets: str = "") -> Field:
    """Return a field that the API's own code reads, and of which it may make a parameter."""
    return Field(name, Use.HONOURED, note, sets=sets)


def parameter(name: str, option: str = "", note: str = "") -> Field:
    """Return a field whose value is a parameter, by default of the same name."""
    return Field(name, Use.HONOURED, note, option or name)


def ignored(name: str, note: str) -> Field:
    """Return a field without effect."""
    return Field(name, Use.IGNORED, note)


def refused(name: str, note: str, *permitted: Any) -> Field:
    """Return a field that is refused by name, except with a value in *permitted*."""
    return Field(name, Use.REFUSED, note, permitted=permitted)


PRIORITY_FIELD = honoured("priority", "extension: `low`, `normal`, `high` or `urgent`")
"""The class of a request's turn, which is the same field on all paths that start turns."""


class FieldTable(Generic[S]):
    """The fields of the requests of one path.

    With *parameters*, a field that is not in the table is passed on as a parameter of
    docs/parameters.md, and the daemon refuses unknown ones by name. Without *parameters*, such a
    field is refused here. *kind* has the types of the honoured fields. The fields of a table for
    the *method* GET are those of the query.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[Field],
        *,
        kind: type[S],
        parameters: bool = False,
        method: str = "POST",
    ):
        self.path, self.fields, self.parameters = path, tuple(fields), parameters
        self.kind, self.method = kind, method
        self._by_name = {field.name: field for field in fields}
        self._by_option = {field.option or field.sets: field.name for field in fields}

    def read(self, body: bytes) -> tuple[S, dict[str, Any]]:
        """Return a request's own fields and its parameters. A null counts as absent.

        :raises InvalidArgument: *body* is not a JSON object, or a field has another type or is
            unknown.
        :raises UnsupportedOperation: the request has a field that is refused.
        """
        own, options = self._split(_decode_object(body))
        return _convert(own, self.kind), options

    def read_query(self, query: str) -> S:
        """Return the fields of a request in its query, such as ``limit=10&after=a``.

        :raises InvalidArgument: a field has another type or is unknown.
        """
        own, _ = self._split(_decode_query(query))
        return _convert(own, self.kind, strict=False)

    def _split(self, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a request's own fields and its parameters."""
        own: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None:
                continue
            if isinstance(value, int) and not -_INT_END <= value < _INT_END:
                raise field_error(name[:100], f"{name[:100]}: the number is out of range")
            field = self._by_name.get(name)
            if field is None:
                if not self.parameters:
                    raise field_error(name[:100], f"unknown field {name[:100]!r}")
                options[name] = value
            elif field.use is Use.REFUSED and value not in field.permitted:
                raise UnsupportedOperation(
                    f"{name}: {field.note}", hint="leave it out", data={"param": name}
                )
            elif field.option:
                options[field.option] = value
            elif field.use is Use.HONOURED:
                own[name] = value
        return own, options

    def name_field(self, error: InferdError) -> InferdError:
        """Return *error*, whose `data.param` then names the field that it is about, if known."""
        lines = error.data.get("errors") or [error.message]
        option = str(lines[0]).partition(":")[0].strip()
        unknown = re.match(r"unknown key '([^']*)'", str(lines[0]))
        name = unknown[1] if unknown else self._by_option.get(option, option)
        if unknown or name in self._by_name or re.fullmatch(r"[a-z0-9_-]{1,40}", name):
            error.data.setdefault("param", name)
        return error


def field_error(name: str, message: str, hint: str = "") -> InvalidArgument:
    """Return the error for a field's value."""
    return InvalidArgument(
        message, hint=hint or "docs/gateway.md lists the fields", data={"param": name}
    )


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as exc:
        problem = "has a number that is out of range" if "range" in str(exc) else "is not an object"
        raise InvalidArgument(f"the request {problem}", hint="send a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(
            f"the request is not JSON: {exc}", hint="send a JSON object"
        ) from None


def _decode_query(query: str) -> dict[str, Any]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX))
    except ValueError:
        raise InvalidArgument(
            f"the query has more than {QUERY_FIELDS_MAX} fields", hint="send fewer"
        ) from None


def _convert(fields: dict[str, Any], kind: type[S], *, strict: bool = True) -> S:
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as exc:
        raise _conversion_error(exc) from None


def _conversion_error(exc: msgspec.ValidationError) -> InvalidArgument:
    text = str(exc)
    place = _PATH.search(text)
    name = place[1] if place else ""
    if missing := re.search(r"missing required field `([^`]*)`", text):
        name = f"{name}.{missing[1]}" if name else missing[1]
    message = _shortened(_PATH.sub("", text))
    return field_error(name, f"{name}: {message}" if name else message)


def _shortened(message: str) -> str:
    """Return a message with the middle of a long value left out."""
    if len(message) <= _SHOWN_CHARACTERS:
        return message
    half = _SHOWN_CHARACTERS // 2
    return f"{message[:half]} … {message[-half:]}"
