"""The fields of the structs in results of calls, with their documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import operator
import textwrap
import types
import typing
from typing import Any, NamedTuple

import msgspec

from inferd.backends.errors import ErrorFields
from inferd.backends.gguf import FileFacts
from inferd.ipc.messages import results
from inferd.wire.metadata import Metadata

__all__ = ("RESULTS", "Field", "fields_of")

RESULTS: dict[str, type] = {
    "error": ErrorFields,
    "metadata": Metadata,
    "file_info": FileFacts,
    "model": results.ModelInfo,
    "shown": results.ShownModel,
    "session": results.SessionInfo,
    "task": results.TaskInfo,
    "parameter": results.ParameterInfo,
    "deletion": results.DeletionInfo,
    "state": results.StateInfo,
    "stats": results.Stats,
}
"""The structs by the first column of their tables in docs/protocol.md."""
_TYPES: dict[Any, str] = {
    int: "int", str: "str", bytes: "bin", bool: "bool", float: "float", dict: "map",
    types.NoneType: "nil", Any: "any",
}  # fmt: skip


class Field(NamedTuple):
    """A field of a map. *type* is the page's name of its type, and *kind* the type without
    `UnsetType`, which an *optional* field has. *doc* is its documentation as a sentence.
    """

    name: str
    type: str
    kind: Any
    optional: bool
    doc: str


def fields_of(struct: type) -> list[Field]:
    """Return the fields that a struct or typed map has beyond those of its base."""
    docs = _docs(struct)
    hints = typing.get_type_hints(struct, include_extras=True)
    return [_field(name, hints[name], doc) for name, doc in docs.items()]


def _field(name: str, hint: Any, doc: str) -> Field:
    parts = _alternatives(hint)
    kept = [part for part in parts if part is not msgspec.UnsetType]
    kind: Any = functools.reduce(operator.or_, kept)
    return Field(name, _type_text(kind), kind, len(kept) < len(parts), doc)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type. An annotation has a more exact type."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if union else (hint,)
    return tuple(getattr(part, "__metadata__", (part,))[0] for part in parts)


def _docs(struct: type) -> dict[str, str]:
    """Return the docstrings of a class's own attributes."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(definition, ast.ClassDef)
    body, found = definition.body, {}
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            name = field.target.id
            assert isinstance(doc, ast.Expr), f"{struct.__name__}.{name} has no docstring"
            found[name] = " ".join(ast.literal_eval(doc.value).split())
    return found


def _type_text(kind: Any) -> str:
    """Return the page's name of a type."""
    parts = _alternatives(kind)
    if len(parts) > 1:
        return " or ".join(map(_type_text, parts))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"array of {_type_text(arguments[0])}"
    if origin is typing.Literal:
        return _TYPES[type(arguments[0])]
    if typing.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "map"
    return _TYPES[origin or kind]
