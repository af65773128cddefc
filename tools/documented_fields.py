"""The fields of the protocol's structs, with their types, defaults and documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import operator
import types
import typing
from typing import Any, NamedTuple

import msgspec

from inferd.backends.errors import ErrorFields
from inferd.backends.gguf import FileFacts
from inferd.ipc import messages as w
from inferd.wire.metadata import Metadata

__all__ = ("RESULTS", "STRUCTS", "Field", "docs_of", "fields_of")

RESULTS: dict[str, type] = {
    "error": ErrorFields,
    "metadata": Metadata,
    "file_info": FileFacts,
    "model": w.ModelInfo,
    "shown": w.ShownModel,
    "session": w.SessionInfo,
    "task": w.TaskInfo,
    "parameter": w.ParameterInfo,
    "deletion": w.DeletionInfo,
    "state": w.StateInfo,
    "file": w.JobFileInfo,
    "job": w.JobInfo,
    "usage": w.UsageInfo,
    "stats": w.Stats,
}
"""The maps in results by the first column of their tables in docs/protocol.md."""
STRUCTS: dict[str, type] = RESULTS | {
    "client hello": w.ClientHello,
    "daemon hello": w.ServerHello,
    "limits": w.Limits,
    "tensor": w.Tensor,
    "tool call": w.ToolCallPart,
    "infill": w.Infill,
    "change": w.CopiedChange,
}
"""The structs by the first column of their tables, except the messages of calls."""
_TYPES: dict[Any, str] = {
    int: "int", str: "str", bytes: "bin", bool: "bool", float: "float", dict: "map",
    types.NoneType: "nil", Any: "any", w.Tensor: "tensor", w.Limits: "limits",
    w.ToolCallPart: "tool call", w.Infill: "infill",
}  # fmt: skip


class Field(NamedTuple):
    """A field of a map. *type* is the page's name of its type, *kind* the type without `UnsetType`,
    which an *optional* field has. *default* is as the page writes it, None where all keys are sent.
    *doc* is its documentation as a sentence.
    """

    name: str
    type: str
    kind: Any
    optional: bool
    default: str | None
    doc: str


def fields_of(struct: type) -> list[Field]:
    """Return the fields of a struct or typed map, without those of another map that it extends."""
    bases = [base for base in struct.__mro__[1:] if base in RESULTS.values()]
    others = {name for base in bases for name in docs_of(base)}
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        docs |= docs_of(base)
    hints = typing.get_type_hints(struct, include_extras=True)
    defaults = _defaults(struct)
    names = [name for name in defaults or hints if name not in others]
    missing = [name for name in names if name not in docs]
    assert not missing, f"fields of {struct.__name__} without documentation: {missing}"
    return [_field(name, hints[name], defaults.get(name), docs[name]) for name in names]


def _field(name: str, hint: Any, default: str | None, doc: str) -> Field:
    parts = _alternatives(hint)
    kept = [part for part in parts if part is not msgspec.UnsetType]
    kind: Any = functools.reduce(operator.or_, kept)
    return Field(name, _type_text(kind), kind, len(kept) < len(parts), default, doc)


def _defaults(struct: type) -> dict[str, str]:
    """Return the defaults of a message's fields."""
    if not issubclass(struct, w.Map):
        return {}
    return {field.name: _default_text(field) for field in msgspec.structs.fields(struct)}


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    factory = field.default_factory
    default = field.default if factory is msgspec.NODEFAULT else factory()
    return "empty" if default == b"" else "nil" if default is None else json.dumps(default)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    hint = _described(hint)
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return tuple(map(_described, typing.get_args(hint))) if union else (hint,)


def _described(hint: Any) -> Any:
    """Return the more exact type that an annotation has, or else the type without it."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint
    note = hint.__metadata__[0]
    return hint.__origin__ if isinstance(note, msgspec.Meta) else note


def docs_of(struct: type) -> dict[str, str]:
    """Return the docstrings of a class's own attributes."""
    if not vars(struct).get("__annotations__"):
        return {}
    [definition] = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, doc in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(doc.value).split())
    return found


def _type_text(kind: Any) -> str:
    """Return the page's name of a type."""
    parts = _alternatives(kind)
    if len(parts) > 1:
        return " or ".join(map(_type_text, parts))
    kind, origin, arguments = parts[0], typing.get_origin(parts[0]), typing.get_args(parts[0])
    if kind in _TYPES:
        return _TYPES[kind]
    if origin is list:
        return f"array of {_type_text(arguments[0])}"
    if origin is tuple:
        return f"({', '.join(map(_type_text, arguments))})"
    if origin is typing.Literal:
        return _TYPES[type(arguments[0])]
    if typing.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "map"
    return _TYPES[origin]
