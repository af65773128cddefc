"""Generator of the TypeScript client's types, from the tables of docs/protocol.md and the schema of
the parameters.

The generated reader of a result adds the fields that the daemon omits, and makes handles of
numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tools.protocol_page import PAGE, Field, Table, sections, tables

__all__ = ("sources",)

HEADER = "// `make docs` writes this file from {}; do not edit it.\n"
STRUCTS = {"tensor": "Tensor", "limits": "Limits", "tool call": "ToolCallPart"}
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
KINDS = ("params", "result", "event", "queue event")


def sources(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated files by name; *parameters* is the schema of the parameters."""
    page = PAGE.read_text()
    return {
        "protocol.ts": _protocol(page),
        "errors.ts": _errors(page),
        "parameters.ts": _parameters(parameters),
    }


class _Writer:
    """Writes the types and readers of one page, each once."""

    def __init__(self, page: str):
        self.tables = list(tables(page))
        self.lines: list[str] = []
        self._interfaces: set[str] = set()

    def only(self, column: str) -> Table:
        """Return the one table whose first column is called *column*."""
        [table] = [t for t in self.tables if t.columns[0] == column]
        return table

    def interface(
        self, name: str, fields: list[Field], *, given: bool = False, base: str = ""
    ) -> None:
        """Write an interface. If it is *given* by clients, its optional fields may be omitted."""
        if name in self._interfaces:
            return
        self._interfaces.add(name)
        self.lines.append(f"\nexport interface {name}{base and f' extends {base}'} {{")
        for field in fields:
            optional = (
                given and field.default != "required"
            ) or "otherwise absent" in field.meaning
            self.lines += _comment(field.meaning, "  ")
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
            if f.default != "required" and f.name not in converted
        ]
        parts = ", ".join([*defaults, "...fields", *converted.values()])
        self.lines.append(f"\nexport function read{name}(fields: Fields): {name} {{")
        self.lines.append(f"  return {{ {parts} }} as unknown as {name};\n}}")


def _comment(meaning: str, indent: str) -> list[str]:
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", meaning).replace("\\|", "|").replace("*/", "* /")
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
    return STRUCTS.get(text) or SCALARS[text]


def _default(field: Field) -> str:
    return {"empty": "new Uint8Array()", "nil": "null"}.get(field.default, field.default)


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
    writer = _Writer(page)
    version = re.search(r"Version (\d+)\.(\d+)", page)
    assert version, "the page states the protocol's version"
    limits = [f"  {name}: {value}," for name, value, _ in writer.only("limit").rows]
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
    writer.interface("ClientHello", writer.only("client hello").fields(), given=True)
    writer.interface("Tensor", writer.only("tensor").fields(), given=True)
    for column, name in ({"daemon hello": "ServerHello"} | STRUCTS).items():
        writer.interface(name, writer.only(column).fields())
    for column, name in (("tool call", "ToolCallPart"), ("daemon hello", "ServerHello")):
        writer.reader(name, writer.only(column).fields())
    for column, name in MAPS.items():
        base = "ModelInfo" if name == "ShownModel" else ""
        fields = writer.only(column).fields()
        if name == "Metadata":  # some keys are absent, and before a turn's end all
            fields = [f._replace(default="nil") for f in fields]
        writer.interface(name, fields, given=name == "Metadata", base=base)
        if any(_conversion(field) for field in fields):
            writer.reader(name, fields)
    _write_calls(writer, page)
    return HEADER.format("the tables of docs/protocol.md") + "\n".join(writer.lines) + "\n"


def _write_calls(writer: _Writer, page: str) -> None:
    """Write the messages of all calls, and the table of calls."""
    texts = sections(page)
    rows, readers = [], []
    for call, text in texts.items():
        names = {kind: _message_name(writer, texts, call, kind) for kind in KINDS}
        if "events are those of the queue" in " ".join(text.split()):
            names["queue event"] = "QueueEvent"
        events = [name for kind in KINDS[2:] if (name := names[kind])]
        event = " | ".join(events) or "never"
        params, result = names["params"] or "Empty", names["result"] or "Empty"
        result_reader = f"read{result}" if names["result"] else "() => ({})"
        if call == "show":
            result, result_reader = (
                "ShowResult",
                f"{result_reader} as unknown as (fields: Fields) => ShowResult",
            )
        event_reader = f"read{events[0]}" if events else "null"
        if len(events) > 1:
            event_reader = "readTurnEvent"
        rows.append(f"  {call}: {{ params: {params}; result: {result}; event: {event} }};")
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


def _message_name(writer: _Writer, texts: Mapping[str, str], call: str, kind: str) -> str | None:
    """Return the type of a call's message, or None if it has none; write it if it is new."""
    for table in writer.tables:
        calls = re.findall(r"`(\w+)`", table.heading)
        if call in calls and table.columns[0] == kind:
            suffix = {"queue event": "event"}.get(kind, kind).capitalize()
            owner = "queue" if kind == "queue event" else calls[0]
            name = "".join(word.capitalize() for word in owner.split("_")) + suffix
            writer.interface(name, table.fields(), given=kind == "params")
            if kind != "params":
                writer.reader(name, table.fields())
            return name
    shared = re.search(r"^((?:Params|Result)[\w ,]*) as `(\w+)`", texts[call], re.MULTILINE)
    if shared and kind.split()[-1] in shared[1].lower():
        return _message_name(writer, texts, shared[2], kind)
    return None


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
