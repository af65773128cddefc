"""Declarations of configuration keys.

A field of a dataclass declares a key: its type, default, bounds and description, and when a change
takes effect. The conversion, the JSON schema, the page and the command line are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ...backends.params import as_whole, nearest
from ...backends.texts import choice_of, plain_number, shorten

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
REQUIRED: Any = MISSING
"""The default of a setting without one, or of one whose default depends on the machine."""
BYTES_MAX = 10**15
"""The largest size that a setting may have."""


class Applies(StrEnum):
    """The time at which a change takes effect after the file was read again."""

    AT_ONCE = "at once"
    NEXT_LOAD = "at a model's next load"
    RESTART = "after a restart"


class ErrorList(msgspec.Struct, frozen=True):
    """Errors in one place of the configuration; all places share `lines` and `notes`."""

    place: str = ""
    lines: list[str] = []
    notes: list[str] = []
    """Keys without an effect, which are not errors."""

    def add(self, error: str) -> None:
        """Add an error in this place; an empty hint after its semicolon is cut off."""
        self.lines.append(f"{self.place}{error}".removesuffix("; "))

    def at(self, place: str) -> ErrorList:
        """Return the list for a place within this one."""
        return ErrorList(self.place + place, self.lines, self.notes)

    def note(self, text: str) -> None:
        """Add a note in this place."""
        self.notes.append(f"{self.place}{text}")

    def raise_errors(self) -> None:
        """Raise a ValueError with one line for each error, if there are errors."""
        if self.lines:
            raise ValueError("\n".join(self.lines))


class Form(msgspec.Struct, frozen=True):
    """A syntax of values. `parse` raises ValueError with one line for each error."""

    parse: Callable[[Any], Any]
    schema: Schema


class Setting(msgspec.Struct, frozen=True):
    """One key of a table; `low` and `high` are inclusive."""

    default: Any
    doc: str = ""
    low: float | None = None
    high: float | None = None
    applies: Applies = Applies.RESTART
    form: Form | None = None
    default_doc: str = ""
    field: str = ""
    kind: Any = None

    @classmethod
    def of_annotation(cls, name: str, annotation: Any, default: Any) -> Setting:
        """Return the key of a struct's field, whose `msgspec.Meta` holds the bounds."""
        if get_origin(annotation) is not Annotated:
            return cls(default=default, field=name, kind=annotation)
        kind, meta = get_args(annotation)
        return cls(default=default, low=meta.ge, high=meta.le, field=name, kind=kind)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a key that has a fixed set of words."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def convert(self, value: Any, *, strict: bool = False) -> Any:
        """Return the value in the declared type; without *strict*, numbers may be given as text.

        :raises ValueError: the value is invalid; each line of the message is one error.
        """
        if self.form is not None:
            return self.form.parse(as_whole(value))
        if self.choices:
            return one_of(value, self.choices)
        if self.kind is bool and not strict and isinstance(value, str):
            value = _BOOLEANS.get(value.strip().lower(), value)
        strict = strict or isinstance(value, float)  # otherwise 1.0 would be true
        try:
            found = msgspec.convert(as_whole(value), self.kind, strict=strict)
        except msgspec.ValidationError:
            expected = _EXPECTED.get(self.kind, "not a value of this option")
            raise ValueError(f"{shorten(value)} is {expected}") from None
        if self.low is not None and self.high is not None and not self.low <= found <= self.high:
            raise ValueError(
                f"{value} is outside {plain_number(self.low)} … {plain_number(self.high)}"
            )
        return found

    def json_schema(self) -> Schema:
        """Return the schema of the value, with its description and default."""
        schema: Schema = {"enum": list(self.choices)}
        if self.form is not None:
            schema = self.form.schema
        elif not self.choices:
            schema = msgspec.json.schema(self.kind)
        bounds = {"minimum": self.low, "maximum": self.high} if self.low is not None else {}
        schema = schema | bounds | ({"description": self.doc} if self.doc else {})
        if isinstance(self.default, str | int | float):
            schema["default"] = self.default if self.form is None else str(self.default)
        return schema


def one_of(value: Any, choices: Sequence[str]) -> str:
    """Return the one of *choices* that *value* spells; see `choice_of`.

    :raises ValueError: there is none.
    """
    choice = choice_of(value, choices)
    if choice is None:
        raise ValueError(f"{shorten(value)} is not one of {', '.join(choices)}")
    return choice


_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
"""Texts of flags and variables, beside `true`, `false`, `1` and `0`."""
_EXPECTED = {
    int: "not a whole number",
    float: "not a number",
    bool: "neither true nor false",
    str: "not a text",
}


def setting(
    default: Any,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    applies: Applies = Applies.RESTART,
    *,
    form: Form | None = None,
    default_doc: str = "",
) -> Any:
    """Return the field of a dataclass that declares a key.

    :param form: the syntax of a value that is not a number, a boolean or a choice
    :param default_doc: description of a default that depends on the machine or is absent
    """
    metadata = {"setting": Setting(default, doc, low, high, applies, form, default_doc)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(table: type[Any]) -> dict[str, Setting]:
    """Return the keys that a dataclass declares, by their names in the file."""
    kinds = get_type_hints(table)
    found = {}
    for f in (f for f in fields(table) if f.metadata):
        kind = kinds[f.name]
        if get_origin(kind) in (UnionType, Union):  # None is only a default
            kind = get_args(kind)[0]
        found[hyphens(f.name)] = msgspec.structs.replace(
            f.metadata["setting"], field=f.name, kind=kind
        )
    return found


def read_table(
    table: Mapping[str, Any], known: Mapping[str, Setting], errors: ErrorList
) -> dict[str, Any]:
    """Return the values of a table, by the names of their fields."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        declared = known.get(hyphens(key))
        if declared is None:
            errors.add(f"unknown key {key!r}; {nearest(hyphens(key), known)}")
        elif declared.field in values:
            errors.add(f"{key}: given twice, in two spellings")
        else:
            read_value(declared, value, values, errors.at(f"{key}: "), strict=True)
    return values


def read_value(
    key: Setting, value: Any, values: dict[str, Any], errors: ErrorList, *, strict: bool = False
) -> None:
    """Convert a value and store it in *values* by the name of its field."""
    try:
        values[key.field] = key.convert(value, strict=strict)
    except ValueError as exc:
        for line in str(exc).split("\n"):
            errors.add(line)


def table_of(document: Mapping[str, Any], key: str, errors: ErrorList) -> dict[str, Any]:
    """Return the table *key* of *document*, or an empty table if there is none."""
    table = document.get(key, {})
    if isinstance(table, dict):
        return table
    errors.add(f"{key} is {shorten(table)}, not a table: write [{key}]")
    return {}


def table_schema(
    keys: Mapping[str, Setting] | Schema, aliases: Mapping[str, Sequence[str]] | None = None
) -> Schema:
    """Return the schema of a table that allows only *keys*, each in one of its spellings.

    A key is a property in its first spelling, for the completion of editors. All other spellings,
    *aliases* and underscores, are patterns. A table that has one spelling may have no other.
    """
    properties = {n: k.json_schema() if isinstance(k, Setting) else k for n, k in keys.items()}
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    patterns = schema["patternProperties"] = {}
    dependent = schema["dependentSchemas"] = {}
    for name, value in properties.items():
        names = (name, *(aliases or {}).get(name, ()))
        spellings = list(dict.fromkeys(s for n in names for s in (n, n.replace("-", "_"))))
        if others := spellings[1:]:
            patterns[f"^({'|'.join(others)})$"] = value
        for index, spelling in enumerate(others, 1):
            dependent[spelling] = {"properties": dict.fromkeys(spellings[:index], False)}
    return schema


def hyphens(key: str) -> str:
    """Return *key* as the declarations spell it."""
    return key.replace("_", "-")
