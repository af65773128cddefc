"""Generator of the TypeScript client's types: messages from their structs, limits and errors from
their tables in docs/protocol.md, and parameters from their schema.

The generated reader of a result adds the fields that the daemon omits, and makes handles of
numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from inferd.ipc import messages as w
from tools.documented_fields import STRUCTS, Field, fields_of
from tools.protocol_page import PAGE, tables

__all__ = ("sources",)

HEADER = "// `make docs` writes this file from {}; do not edit it.\n"
NAMES = {"tensor": "Tensor", "limits": "Limits", "tool call": "ToolCallPart", "infill": "Infill"}
MAPS = {
    "metadata": "Metadata", "model": "ModelInfo", "shown": "ShownModel", "file_info": "FileInfo",
    "session": "SessionInfo", "task": "TaskInfo", "stats": "Stats", "error": "ErrorFields",
}  # fmt: skip
HELLOS = {"client hello": "ClientHello", "daemon hello": "ServerHello"}
HANDLES = {"graph": "Graph", "context": "Context", "contexts": "Context"}
NAMED = {
    "options": {"map": "ModelParameters"}, "messages": {"array of map": "Message[]"},
    "metadata": {"map": "Metadata"}, "stats": {"map": "Stats"}, "file_info": {"map": "FileInfo"},
    "tasks": {"array of map": "TaskInfo[]"}, "sessions": {"array of map": "SessionInfo[]"},
    "models": {"array of map": "ModelInfo[]"}, "answers": {"array of map": "AnswerFields[]"},
    "priority": {"str": "Priority"}, "effective_priority": {"str": "Priority"},
}  # fmt: skip
"""More exact types than those in the page's column, by the field's name and the column's type."""
SCALARS = {
    "int": "number", "float": "number", "bool": "boolean", "str": "string", "nil": "null",
    "bin": "Uint8Array", "map": "Fields",
}  # fmt: skip


def sources(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated files by name; *parameters* is the schema of the parameters."""
    page = PAGE.read_text()
    return {
        "protocol.ts": _protocol(page),
        "errors.ts": _errors(page),
        "parameters.ts": _parameters(parameters),
    }


class _Writer:
    """Writes the types and readers of structs, each once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._interfaces: set[str] = set()
        self._messages: dict[type, str] = {}

    def message(self, name: str, struct: type, *, given: bool = False) -> str:
        """Write the type of a call's message, or its other *name* if another call has the same.
        Return the name under which it was written, which is empty if the message has no fields.
        """
        if struct is w.Empty:
            return ""
        if struct not in self._messages:
            self._messages[struct] = name
            fields = fields_of(struct)
            self.interface(name, fields, given=given)
            if not given:
                self.reader(name, fields)
        elif self._messages[struct] != name:
            self.lines.append(f"\nexport type {name} = {self._messages[struct]};")
        return self._messages[struct]

    def interface(
        self, name: str, fields: list[Field], *, given: bool = False, base: str = ""
    ) -> None:
        """Write an interface. If it is *given* by clients, its optional fields may be omitted."""
        if name in self._interfaces:
            return
        self._interfaces.add(name)
        self.lines.append(f"\nexport interface {name}{base and f' extends {base}'} {{")
        for field in fields:
            optional = given if _is_sent_as_default(field) else field.optional
            self.lines += _comment(field.doc, "  ")
            kind = type_of(field, given=given) + (" | undefined" if optional else "")
            self.lines.append(f"  {field.name}{'?' if optional else ''}: {kind};")
        self.lines.append("}")

    def reader(self, name: str, fields: list[Field]) -> None:
        """Write the function that makes a *name* of the fields that the daemon sent."""
        if f"read{name}" in self._interfaces:
            return
        self._interfaces.add(f"read{name}")
        converted = {f.name: f"{f.name}: {made}" for f in fields if (made := _conversion(f))}
        defaults = [
            f"{f.name}: {_default(f)}"
            for f in fields
            if _is_sent_as_default(f) and f.name not in converted
        ]
        parts = ", ".join([*defaults, "...fields", *converted.values()])
        self.lines.append(f"\nexport function read{name}(fields: Fields): {name} {{")
        self.lines.append(f"  return {{ {parts} }} as unknown as {name};\n}}")


def _is_sent_as_default(field: Field) -> bool:
    """Return whether a field may be omitted, because it then has its default."""
    return field.default not in (None, "required")


def _comment(doc: str, indent: str) -> list[str]:
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", doc).replace("\\|", "|").replace("*/", "* /")
    return [f"{indent}/** {text} */"] if text else []


def type_of(field: Field, *, given: bool = False) -> str:
    """Return a field's type in TypeScript. A *given* field is one that clients send."""
    if field.name in HANDLES and "int" in field.type:
        handles = field.type.replace("array of int", "int[]").replace("int", HANDLES[field.name])
        return handles.replace(" or nil", " | null")
    for plain, named in NAMED.get(field.name, {}).items():
        if field.type.removesuffix(" or nil") == plain:
            extra = ' | ""' if named == "Priority" and given else ""
            return named + extra + (" | null" if field.type.endswith("nil") else "")
    return " | ".join(_plain_type(part) for part in field.type.split(" or "))


def _plain_type(text: str) -> str:
    if text.startswith("array of "):
        return f"{_plain_type(text.removeprefix('array of '))}[]"
    if text.startswith("("):
        return f"[{', '.join(_plain_type(p) for p in text.strip('()').split(', '))}]"
    return NAMES.get(text) or SCALARS[text]


def _default(field: Field) -> str:
    default = field.default or "nil"
    return {"empty": "new Uint8Array()", "nil": "null"}.get(default, default)


def _conversion(field: Field) -> str:
    """Return the expression that converts a field of the daemon, or an empty text."""
    value, handle = f"fields.{field.name}", HANDLES.get(field.name)
    if handle and "int" in field.type:
        if field.type.startswith("array"):
            return f"list({value}).map((item) => toHandle<{handle}>(item))"
        made = f"toHandle<{handle}>({value})"
        return f"{value} == null ? null : {made}" if field.type.endswith("nil") else made
    if field.name in ("tasks", "sessions") and field.type == "array of map":
        return f"list({value}).map((item) => read{type_of(field)[:-2]}(item as Fields))"
    if field.type == "array of tool call":
        return f"list({value}).map((item) => readToolCallPart(item as Fields))"
    return ""


def _protocol(page: str) -> str:
    writer = _Writer()
    version = re.search(r"Version (\d+)\.(\d+)", page)
    assert version, "the page states the protocol's version"
    [table] = [t for t in tables(page) if t.columns[0] == "limit"]
    limits = [f"  {name}: {value}," for name, value, _ in table.rows]
    writer.lines += [
        'import { list, toHandle } from "../types.js";',
        'import type { AnswerFields, Context, Fields } from "../types.js";',
        'import type { Graph, Message, Priority } from "../types.js";',
        'import type { ModelParameters } from "./parameters.js";',
        f"\nexport const PROTOCOL_VERSION: [number, number] = [{version[1]}, {version[2]}];",
        "\nexport const LIMITS = {",
        *limits,
        "} as const;",
    ]
    writer.interface("ClientHello", fields_of(STRUCTS["client hello"]), given=True)
    writer.interface("Tensor", fields_of(STRUCTS["tensor"]), given=True)
    writer.interface("Infill", fields_of(STRUCTS["infill"]), given=True)
    for column, name in ({"daemon hello": "ServerHello"} | NAMES).items():
        writer.interface(name, fields_of(STRUCTS[column]))
    for column, name in (("tool call", "ToolCallPart"), ("daemon hello", "ServerHello")):
        writer.reader(name, fields_of(STRUCTS[column]))
    for column, name in MAPS.items():
        base = "ModelInfo" if name == "ShownModel" else ""
        fields = fields_of(STRUCTS[column])
        if name == "Metadata":  # some keys are absent, and before a turn's end all
            fields = [f._replace(default="nil") for f in fields]
        writer.interface(name, fields, given=name == "Metadata", base=base)
        if any(_conversion(field) for field in fields):
            writer.reader(name, fields)
    _write_calls(writer)
    return HEADER.format("the structs of the protocol's messages") + "\n".join(writer.lines) + "\n"


def _write_calls(writer: _Writer) -> None:
    """Write the messages of all calls, and the table of calls."""
    rows, readers = [], []
    for call, row in w.CALLS.items():
        name = "".join(word.capitalize() for word in call.split("_"))
        params = writer.message(f"{name}Params", row.params, given=True) or "Empty"
        result = writer.message("ModelsResult" if call == "show" else f"{name}Result", row.result)
        events = [
            writer.message("QueueEvent" if event is w.QueueEvent else f"{name}Event", event)
            for event in row.events
        ]
        result_reader = f"read{result}" if result else "() => ({})"
        if call == "show":
            result, result_reader = (
                "ShowResult",
                f"{result_reader} as unknown as (fields: Fields) => ShowResult",
            )
        event_reader = f"read{events[0]}" if events else "null"
        if len(events) > 1:
            event_reader = "readTurnEvent"
        event = " | ".join(events) or "never"
        rows.append(
            f"  {call}: {{ params: {params}; result: {result or 'Empty'}; event: {event} }};"
        )
        readers.append(f"  {call}: {{ result: {result_reader}, event: {event_reader} }},")
    writer.lines += [
        "\n/** Events of the queue have the field `waiting`. */",
        "export function readTurnEvent(fields: Fields): StreamEvent | QueueEvent {",
        '  return "waiting" in fields ? readQueueEvent(fields) : readStreamEvent(fields);\n}',
        "\nexport type Empty = Record<string, never>;",
        "\nexport interface ShowResult {\n  models: ShownModel[];\n}",
        "\n/** Every call of the protocol with its messages. */\nexport interface Calls {",
        *rows,
        "}\n\nexport type CallName = keyof Calls;",
        "\ntype Readers = {",
        "  [N in CallName]: {",
        '    result: (fields: Fields) => Calls[N]["result"];',
        '    event: ((fields: Fields) => Calls[N]["event"]) | null;',
        "  };\n};",
        "\n/** The functions that read the results and events of each call. */",
        "export const READERS: Readers = {",
        *readers,
        "};",
    ]


def _errors(page: str) -> str:
    [table] = [t for t in tables(page) if t.columns[:3] == ("name", "number", "wasi")]
    lines = ['import { InferdError } from "../inferd-error.js";']
    for name, number, wasi, retryable, when in table.rows:
        lines += ["", *_comment(when, ""), f"export class {name} extends InferdError {{"]
        values = {"number": number, "wasi": wasi, "retryable": str(retryable == "yes").lower()}
        lines.append(
            f'  static override readonly wire = {{ name: "{name}", '
            + ", ".join(f"{key}: {value}" for key, value in values.items())
            + " };\n}"
        )
    names = ", ".join(row[0] for row in table.rows)
    lines.append(f"\n/** Every error by its name. */\nexport const ERRORS = {{ {names} }};")
    return HEADER.format("the table of errors in docs/protocol.md") + "\n".join(lines) + "\n"


def _parameters(schema: Mapping[str, Any]) -> str:
    lines = [
        "/** The parameters of models, contexts and turns; docs/parameters.md describes them. */"
    ]
    lines.append("export interface ModelParameters {")
    for name, parameter in schema["properties"].items():
        default = json.dumps(parameter["default"], ensure_ascii=False)
        lines += _comment(f"{parameter['description']} (default: {default})", "  ")
        lines.append(f'  "{name}"?: {_schema_type(parameter)} | undefined;')
    lines.append("}")
    return HEADER.format("docs/parameters.schema.json") + "\n".join(lines) + "\n"


def _schema_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    kinds = schema.get("type", "object")
    return " | ".join(
        _schema_kind(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    )


def _schema_kind(kind: str, schema: Mapping[str, Any]) -> str:
    if kind == "array":
        items = schema.get("items")
        return f"({_schema_type(items)})[]" if items else "unknown[]"
    return {"integer": "number", "object": "object"}.get(kind, kind)
