"""Declarations of configuration keys.

A field of a dataclass declares a key: its type, default, bounds and description, and when a change
takes effect. The conversion, the JSON schema, the page and the command line are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from enum import StrEnum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from ...backends.params import nearest

Schema = dict[str, Any]
REQUIRED: Any = MISSING
"""The default of a setting that has none, or whose default depends on the machine."""
REPR_CHARACTERS_MAX = 50


class Applies(StrEnum):
    """When a change in the file takes effect, once the file is read again."""

    AT_ONCE = "at once"
    NEXT_LOAD = "at a model's next load"
    RESTART = "after a restart"


class ErrorList(msgspec.Struct, frozen=True):
    """The errors of one place of the configuration; all places share `lines`."""

    place: str = ""
    lines: list[str] = []

    def add(self, error: str) -> None:
        """Add an error of this place; a hint that is empty goes."""
        self.lines.append(f"{self.place}{error}".removesuffix("; "))

    def at(self, place: str) -> ErrorList:
        """Return the list for a place within this one."""
        return ErrorList(self.place + place, self.lines)


class Form(msgspec.Struct, frozen=True):
    """A kind of value with its own syntax; `parse` raises ValueError, a line for each error."""

    parse: Callable[[Any], Any]
    schema: Schema


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a table, as its field declares it; `low` and `high` are inclusive."""

    default: Any
    doc: str
    low: float | None
    high: float | None
    applies: Applies
    form: Form | None
    default_doc: str
    field: str = ""
    kind: Any = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the key takes, if it takes no others."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def convert(self, value: Any, *, strict: bool = False) -> Any:
        """Return the value in the declared type; texts of numbers are read unless *strict*.

        :raises ValueError: the value is wrong; each line of the message is one error.
        """
        if self.form is not None:
            return self.form.parse(value)
        strict = strict or isinstance(value, float)  # else 2.0 would pass for a whole number
        try:
            found = msgspec.convert(value, self.kind, strict=strict)
        except msgspec.ValidationError:
            if self.choices:
                expected = f"none of {', '.join(self.choices)}"
            else:
                expected = _EXPECTED[self.kind]
            raise ValueError(f"{short(value)} is {expected}") from None
        if self.low is not None and self.high is not None and not self.low <= found <= self.high:
            raise ValueError(f"{value} is outside {self.low:.10g} … {self.high:.10g}")
        return found

    def json_schema(self) -> Schema:
        """Return the schema of the value, with its description and default."""
        schema: Schema = {"enum": list(self.choices)}
        if self.form is not None:
            schema = self.form.schema
        elif not self.choices:
            schema = msgspec.json.schema(self.kind)
        bounds = {"minimum": self.low, "maximum": self.high} if self.low is not None else {}
        schema = schema | bounds | {"description": self.doc}
        if isinstance(self.default, str | int | float):
            schema["default"] = self.default if self.form is None else str(self.default)
        return schema


_EXPECTED = {int: "no whole number", float: "no number", bool: "neither true nor false"}


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

    :param form: the syntax of a value that is not just a number, a truth value or a choice
    :param default_doc: words for a default that depends on the machine, or that there is not
    """
    declared = Setting(
        default=default,
        doc=doc,
        low=low,
        high=high,
        applies=applies,
        form=form,
        default_doc=default_doc,
    )
    metadata = {"setting": declared}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(table: type[Any]) -> dict[str, Setting]:
    """Return the keys that a dataclass declares, by their names in the file."""
    kinds = get_type_hints(table)
    return {
        hyphens(f.name): msgspec.structs.replace(
            f.metadata["setting"], field=f.name, kind=_without_none(kinds[f.name])
        )
        for f in fields(table)
        if f.metadata
    }


def _without_none(kind: Any) -> Any:
    """Return the type of a value that is given: None is a default alone."""
    return get_args(kind)[0] if get_origin(kind) in (UnionType, Union) else kind


def read_table(
    table: Mapping[str, Any], known: Mapping[str, Setting], errors: ErrorList
) -> dict[str, Any]:
    """Return a table's values by the fields that its keys name."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        found = known.get(hyphens(key))
        if found is None:
            errors.add(f"unknown key {key!r}; {nearest(hyphens(key), known)}")
        elif found.field in values:
            errors.add(f"{key}: given twice, in two spellings")
        else:
            read_value(found, value, values, errors.at(f"{key}: "), strict=True)
    return values


def read_value(
    found: Setting, value: Any, values: dict[str, Any], errors: ErrorList, *, strict: bool = False
) -> None:
    """Put a converted value into *values*, by the name of its field."""
    try:
        values[found.field] = found.convert(value, strict=strict)
    except ValueError as exc:
        for line in str(exc).split("\n"):
            errors.add(line)


def table_of(document: Mapping[str, Any], key: str, errors: ErrorList) -> dict[str, Any]:
    """Return the table *key* of *document*, an empty one if there is none."""
    table = document.get(key, {})
    if isinstance(table, dict):
        return table
    errors.add(f"{key} is {table!r}, not a table: write [{key}]")
    return {}


def short(value: Any) -> str:
    """Return a value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= REPR_CHARACTERS_MAX else f"{text[:REPR_CHARACTERS_MAX]}…"


def hyphens(key: str) -> str:
    """Return *key* as the declarations spell it."""
    return key.replace("_", "-")
