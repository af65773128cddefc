"""docs/protocol.md matches the code: every call, field, error, number and limit, and no others."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import inferd.daemon.calls
import inferd.ipc
import inferd.sessions
import inferd.wire
from inferd.backends.errors import ERRORS_BY_NAME
from inferd.backends.tensors import TENSOR_TYPES
from inferd.daemon.config.settings import Config
from inferd.ipc import messages as w
from inferd.scheduler import Owner
from inferd.sessions import (
    AdmissionBounds,
    Ledger,
    ModelSource,
    Parameters,
    Session,
    SessionSettings,
    WorkerClient,
)
from inferd.sessions.worker_client import NO_CEILINGS, Comparison, NameCeilings, Similarity
from inferd.testing import running_daemon
from tests.raw import RawClient

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
CLIENT_MODULES = ("client", "handles", "media_parts", "paths", "payloads", "traceparent")
TYPES: dict[Any, str] = {
    int: "int", str: "str", bytes: "bin", bool: "bool", float: "float", dict: "map",
    type(None): "nil", w.Tensor: "tensor", w.Limits: "limits", w.ToolCallPart: "tool call",
    w.Infill: "infill",
}  # fmt: skip
Row = tuple[str, ...]


class Table(typing.NamedTuple):
    """A table of the page: the headings above it, its columns, its rows without backquotes."""

    heading: str
    columns: Row
    rows: list[Row]

    def column(self, name: str) -> list[str]:
        return [row[self.columns.index(name)] for row in self.rows]


def cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def tables() -> Iterator[Table]:
    heading, lines = "", PAGE.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|---"):
            rows = []
            for row in lines[i + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            yield Table(heading, cells(lines[i - 1]), rows)


TABLES = list(tables())


def only(column: str) -> Table:
    """Return the one table whose first column is called *column*."""
    [table] = [t for t in TABLES if t.columns[0] == column]
    return table


def code(cell: str) -> str:
    return cell.strip("`")


def type_text(annotation: Any) -> str:
    """Return the page's name of a type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_text(a) for a in arguments)
    if origin is typing.Annotated:  # of any value: the daemon's struct
        return "map" if arguments[0] is Any else type_text(arguments[0])
    if origin is tuple:
        return f"({', '.join(type_text(a) for a in arguments)})"
    if origin is list:
        return f"array of {type_text(arguments[0])}"
    if origin is typing.Literal:
        return type_text(type(arguments[0]))
    assert origin is dict, annotation
    return "map"


def default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    factory = field.default_factory
    default = field.default if factory is msgspec.NODEFAULT else factory()
    if default == b"":
        return "`empty`"
    text = "nil" if default is None else json.dumps(default)
    return f"`{text}`"


def fields(struct: Any) -> list[Row]:
    return [
        (f"`{f.name}`", type_text(f.type), default_text(f)) for f in msgspec.structs.fields(struct)
    ]


def sections() -> dict[str, str]:
    """Return the text of each call's section, by the call's name."""
    parts = re.split(r"^#### (.*)\n", PAGE, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        for name in re.findall(r"`(\w+)`", heading):
            assert name not in found, f"{name} occurs twice"
            found[name] = re.split(r"^##", text, flags=re.MULTILINE)[0]
    return found


SECTIONS = sections()


def test_every_call_has_a_section_and_every_section_a_call() -> None:
    assert set(SECTIONS) == set(w.CALLS)


def table_in(call: str, column: str, like: dict[str, str]) -> list[Row] | None:
    """Return the rows of a call's table, or of the call whose table it shares."""
    here = [t for t in TABLES if f"`{call}`" in t.heading and t.columns[0] == column]
    if here:
        return [row[:3] for row in here[0].rows]
    return table_in(like[call], column, like) if call in like else None


def shared() -> dict[str, str]:
    """Return the call to which another call's section refers: "Result … as `load`"."""
    found = {}
    for call, text in SECTIONS.items():
        match = re.search(r"^(?:Result|Params)[^.\n]*? as `(\w+)`", text, flags=re.MULTILINE)
        if match:
            found[call] = match[1]
    return found


def events_of(entry: w.Call) -> dict[str, Any]:
    """Return a call's events by the first column of their tables."""
    return {"queue event" if e is w.QueueEvent else "event": e for e in entry.events}


@pytest.mark.parametrize("call", w.CALLS)
def test_the_tables_of_a_call_have_exactly_its_fields(call: str) -> None:
    entry, like = w.CALLS[call], shared()
    assert (table_in(call, "params", like) or []) == fields(entry.params)
    assert (table_in(call, "result", like) or []) == fields(entry.result)
    for column, events in events_of(entry).items():
        assert table_in(call, column, like) == fields(events)
    if not entry.events:
        assert not [t for t in TABLES if f"`{call}`" in t.heading and "event" in t.columns[0]]
    if not fields(entry.params):
        assert re.search(r"No\s+params", SECTIONS[call])
    if not fields(entry.result):
        assert "Result: an empty map" in SECTIONS[call]


def test_the_kinds_are_those_of_the_code() -> None:
    assert [int(k) for k in only("kind").column("kind")] == list(w.Kind)


@pytest.mark.parametrize(
    ("column", "names"),
    [("encoding", w.ENCODINGS), ("target", w.TARGETS), ("tensor type", TENSOR_TYPES)],
)
def test_the_enums_are_those_of_the_code(column: str, names: dict[str, int]) -> None:
    assert {code(n): int(v) for n, v in only(column).rows} == names


def test_the_errors_are_those_of_the_code() -> None:
    [table] = [t for t in TABLES if t.columns[:3] == ("name", "number", "wasi")]
    rows = {tuple(row[:4]) for row in table.rows}
    assert len(rows) == len(table.rows)
    assert rows == {
        (f"`{e.name}`", str(e.number), str(e.wasi_number), "yes" if e.retryable else "no")
        for e in ERRORS_BY_NAME.values()
    }


def limits_of_the_code() -> dict[str, float]:
    """Return the daemon's public bounds: what ends in MAX, and the rest that the page names.
    docs/metrics.md has those of HTTP.
    """
    found: dict[str, float] = {}
    others = tuple(f"inferd.ipc.{name}" for name in (*CLIENT_MODULES, "metrics"))
    for package in (inferd.ipc, inferd.wire, inferd.sessions, inferd.daemon.calls):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith(others):
                found |= constants(importlib.import_module(module.name))
    for name in ("core", "graph_table", "models.transfers"):
        found |= constants(importlib.import_module(f"inferd.daemon.{name}"))
    return found


def constants(module: types.ModuleType) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(module).items()
        if re.fullmatch(r"[A-Z][A-Z_]+", name)
        and isinstance(value, int | float)
        and not isinstance(value, Enum)
    }


def test_the_limits_are_those_of_the_code() -> None:
    known = limits_of_the_code()
    stated = {code(name): float(value) for name, value, _ in only("limit").rows}
    assert stated == {name: known[name] for name in stated}
    assert {name for name in known if name.endswith("_MAX")} <= set(stated)


def test_the_settings_have_the_defaults_of_the_configuration() -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(Config)}
    for name, value, _ in only("setting").rows:
        assert float(value) == defaults[code(name)], name


class NoModel(ModelSource):
    """A model that no test uses."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def base(self) -> str:
        return "none"

    @property
    def ceilings(self) -> NameCeilings:
        return NO_CEILINGS

    @property
    def held(self) -> bool:
        return False

    async def released(self) -> None:
        raise AssertionError

    @property
    def loaded(self) -> None:
        return None

    def predecessor(self, vocabulary: str) -> None:
        return None

    async def ready(self) -> WorkerClient:
        raise AssertionError

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        raise AssertionError


def keys(column: str) -> set[str]:
    """Return the keys of a map that no fleet adds."""
    fleet = "otherwise absent"
    return {code(name) for name, *_, meaning in only(column).rows if fleet not in meaning}


def map_types(column: str) -> dict[str, str]:
    """Return the types of a map's keys."""
    table = only(column)
    return dict(zip(map(code, table.column(column)), table.column("type"), strict=True))


VALUES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "map": (dict,),
    "nil": (type(None),), "array of map": (list,), "array of str": (list,),
}  # fmt: skip


def wrong_types(value: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Return the items of a map that are not of the page's type."""
    return {
        key: item
        for key, item in value.items()
        if not any(type(item) in VALUES[name] for name in columns[key].split(" or "))
    }


def new_session() -> Session:
    settings = SessionSettings(Parameters({}))
    return Session(1, Owner(0), NoModel(), Ledger(AdmissionBounds(1, 1)), settings)


def test_maps_have_the_keys_of_the_page() -> None:
    of_turns = {"parks", "completion_probabilities", "end_token", "prompt_logprobs", "error"}
    of_media = {"media_tokens", "media_cached", "encode_s"}
    of_turns |= of_media | {"reasoning_tokens"}
    assert keys("metadata") - of_turns == set(msgspec.to_builtins(new_session().metadata()))
    config = '[models.slow]\nbackend = "echo"\n[models.slow.echo]\nstep_ms = 50'
    with running_daemon(config) as daemon, RawClient(daemon.socket) as client:
        context = client.context("slow")
        options = {"n-probs": 1, "prompt-logprobs": 1}
        client.call("chat", context=context, prompt="x", options=options)
        metadata = client.metadata(context)
        assert set(metadata) == keys("metadata") - {"error"} - of_media
        assert not wrong_types(metadata, map_types("metadata"))
        found = client.call("parameters", context=context)["parameters"]
        assert all(set(parameter) == keys("parameter") for parameter in found)
        client.start_request("stream", context=context, prompt="slowly", credit=1)
        assert client.read_message()[0] == w.Kind.EVENT
        [task] = client.call("queue")["tasks"]
        assert set(task) == keys("task") and not wrong_types(task, map_types("task"))
        [session] = client.call("sessions")["sessions"]
        assert set(session) == keys("session")
        assert not wrong_types(session, map_types("session"))
        models = client.call("models")["models"]
        assert all(set(model) == keys("model") for model in models)
        [shown] = client.call("show", name="slow")["models"]
        assert set(shown) == keys("model") | keys("shown")
        assert not wrong_types(shown, map_types("model") | map_types("shown"))
        stats = client.call("stats")["stats"]
        assert set(stats) == keys("stats") and not wrong_types(stats, map_types("stats"))


def test_the_exchange_is_that_of_the_vectors() -> None:
    vectors = json.loads((ROOT / "docs" / "protocol-vectors.json").read_text())
    written = PAGE.split("## An exchange in hex")[1]
    frames: list[tuple[str, str]] = []
    for line in written.splitlines():
        if re.match(r"    [CD]  ", line):
            frames.append(({"C": "client", "D": "daemon"}[line[4]], ""))
        elif line.startswith("       "):
            side, data = frames.pop()
            frames.append((side, data + line.strip()))
    assert frames == [(f["from"], f["hex"]) for f in vectors["exchanges"][0]["frames"]]


def test_no_other_name_is_written_as_a_call_or_an_error() -> None:
    """Names in the page's text that look like an error's are errors."""
    words = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", PAGE))
    assert words <= set(ERRORS_BY_NAME)
