"""The texts of errors, as users read them: no call and no setting answers in Python's words.

A table of wrong values goes into every field of every call, every parameter, every setting and the
commands. `INFERD_ERRORS=FILE` writes the texts to a file, to be read as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import ERRORS_BY_NAME, InferdError
from inferd.backends.params import PARAMETERS
from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.names import NAME_KEYS
from inferd.daemon.config.settings import SETTINGS
from inferd.daemon.config.sources import ConfigError, load_config
from inferd.ipc import messages as w
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd as command
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = echo_model("slow", step_ms=5) + '[models.absent]\nfile = "absent.gguf"\n'
WRONG: list[Any] = [
    *(None, True, False, -1, 0, 2**63, 2**64 - 1, 1.5, 1e300, float("nan"), float("-inf")),
    *("", "x", "-1", "\0", "x" * 2000, "\U0001f40d", "[", "{}", "()", b"", b"\xff" * 99),
    *([], [None], [True, {}], ["x", ""], [[]], [["x", None]], {}, {"a": None}, {"": [1.5]}),
]
PYTHON = re.compile(
    r"\b(None|True|False|NaN|dict|tuple|NoneType|TypeError|ValueError|KeyError|Traceback|codec"
    r"|recursion|Value error|list index|object at|not subscriptable|not iterable|invalid literal"
    r"|PosixPath|datetime)\b|<class |\\x[0-9a-f]{2}\\x|(…|nearest:) \S*e\+|\bb'|'utf-8'"
)
"""Words of Python, and bounds in its notation of numbers."""
LIBRARY = re.compile(r"(?<!`)--[a-z]")
"""Flags of commands, which a program cannot give; in backquotes they name a command."""
UNDONE = {"drain", "log_level"}
CLOSING = (
    *("finalize_execution_context", "close_execution_context", "unload", "deinit_backend"),
    "delete_session",
)

Texts = dict[str, InferdError]


def rights_of(client: RawClient) -> dict[str, Any]:
    client.call("deinit_backend")
    graph = client.call("load_by_name", name="echo")["graph"]
    context = client.call("init_execution_context", graph=graph)["context"]
    client.set_input(context, b"hello")
    return {
        **{"graph": graph, "context": context, "name": "echo", "index": 0, "session_id": "s"},
        **{"tensor": {"data": b"hello"}, "tokens": [1], "text": "hello", "texts": ["hello"]},
        **{"messages": [{"role": "user", "content": "hello"}], "turns": 1, "prompt": "hello"},
        **{"builders": [b"echo"], "to": "echo", "adapter": "a", "file": "a.gguf", "n": 1},
    }


def ask(client: RawClient, texts: Texts, call: str, /, **params: Any) -> bool:
    """Make a call and return whether it succeeded; keep its error under the call."""
    try:
        client.call(call, **params)
    except InferdError as exc:
        texts.setdefault(f"{call}: {exc.message}", exc)
        return False
    return True


def errors_of_call(client: RawClient, texts: Texts, call: str) -> None:
    """Make a call with a wrong value in each field; the others are right."""
    right = rights_of(client)
    fields = [f.name for f in msgspec.structs.fields(w.CALLS[call].params)]
    for field in fields:
        for value in WRONG:
            given = {name: right[name] for name in fields if name in right}
            if ask(client, texts, call, **given | {field: value}) and call in CLOSING:
                right = rights_of(client)


def errors_of_calls(client: RawClient, texts: Texts) -> None:
    for call in w.CALLS:
        if call not in UNDONE:
            errors_of_call(client, texts, call)
    context = rights_of(client)["context"]
    for parameter in PARAMETERS:
        wrong = {parameter.name: {"": [1.5]}}  # `chat` reads its options as `set_options` does
        ask(client, texts, "chat", context=context, prompt="x", options=wrong)
        for value in WRONG:
            options = {parameter.name: value}
            if ask(client, texts, "set_options", context=context, options=options):
                before = {parameter.name: parameter.default}
                client.call("set_options", context=context, options=before)
    for message in ({}, {"role": "user"}, {"role": "user", "content": 1}, {"role": 1}):
        ask(client, texts, "chat", context=context, messages=[message])


def errors_of_states(client: RawClient, texts: Texts) -> None:
    """Add the errors of right values at the wrong time."""
    right = rights_of(client)
    graph, context = right["graph"], right["context"]
    empty = client.call("init_execution_context", graph=graph)["context"]
    for call in ("compute", "compute_single", "stream", "chat", "answers", "resume"):
        ask(client, texts, call, context=empty)
    for name in ("absent", "echo2"):
        for call in ("load_by_name", "load_by_name", "show", "pin", "unload_model"):
            ask(client, texts, call, name=name)
    ask(client, texts, "unload_model", name="echo")
    ask(client, texts, "swap", name="echo", to="absent")
    ask(client, texts, "rewind", context=context, turns=9)
    ask(client, texts, "rewind", context=context, turns=1, tokens=1)
    ask(client, texts, "fork_session", context=context, n=2, session_ids=["a"])
    running = client.context("slow")
    number = client.begin_stream(running, "x" * 1000)
    for call in ("chat", "reset", "compute"):
        ask(client, texts, call, context=running, **({"prompt": "x"} if call == "chat" else {}))
    client.call("cancel", request=number)
    client.call("unload", graph=graph)
    for call in ("chat", "compute", "reset", "set_options"):
        ask(client, texts, call, context=context, **({"prompt": "x"} if call == "chat" else {}))


def errors_of_settings(folder: Path) -> Iterator[str]:
    """Yield the errors of the configuration's keys; those of a file come all at once."""
    file = folder / "config.toml"
    values = ["true", "-1", "1.5", "1e300", "nan", '""', '"x"', "[]", "[1]", "{}", "1979-05-27"]
    tables = {
        "daemon": SETTINGS,
        "defaults": [p.name for p in PARAMETERS],
        "models.m": [p.name for p in PARAMETERS] + ["file", "backend", "adapters"],
        "models.n": [p.name for p in PARAMETERS] + [*NAME_KEYS, "file"],
        "access.a": ACCESS_KEYS,
    }
    for table, keys in tables.items():
        for value in values:
            lines = [f"[{table}]", *(f"{key} = {value}" for key in keys)]
            file.write_text("\n".join(lines))
            yield from errors_in(file)
    for text in ("[daemon", "daemon = 1", "models = 1", "[models]\na = 1", "[x]", "a = 1", "\xff"):
        file.write_bytes(text.encode("latin-1"))
        yield from errors_in(file)


def errors_in(file: Path) -> list[str]:
    try:
        load_config({"config": file}, {})
    except ConfigError as exc:
        return [line.removeprefix(f"{file}: ") for line in exc.lines]
    return []


COMMANDS = [
    *(["serve", "--cores", "x"], ["serve", "--set", "cores=x"], ["serve", "--set", "foo=1"]),
    *(["config", "check", "--set", "foo=1"], ["config", "show", "--set", "sesions-max=1"]),
    *(["run", "echo2", "x"], ["run", "echo", "x", "-o"]),
    *(["run", "echo", "x", "-o", "top-k=x"], ["run", "echo", "x", "--priority", "x"]),
    *(["load", "absent"], ["unload", "echo2"], ["show", "echo2"]),
    *(["pin", "echo2"], ["swap", "echo"], ["swap", "echo", "--to", "absent"], ["embed", "echo"]),
    *(["cancel", "99"], ["cancel", "x"], ["park", "99"], ["rm", "echo"], ["log-level", "x=1"]),
    *(["add-adapter", "echo", "a", "no.gguf"], ["rm-adapter", "echo", "a"], ["pull", "x"]),
    *(["template", "echo", "--messages", "/absent"], ["logs", "--since", "x"], ["nonsense"]),
]


@pytest.fixture(scope="module")
def texts(daemon: RunningDaemon) -> Texts:
    found: Texts = {}
    with RawClient(daemon.socket) as client:
        errors_of_calls(client, found)
        errors_of_states(client, found)
    write("errors of calls", [f"{key}\n    ({error.hint})" for key, error in found.items()])
    return found


def write(title: str, lines: list[str]) -> None:
    if path := os.environ.get("INFERD_ERRORS"):
        with open(path, "a") as file:
            file.write(f"\n== {title}\n" + "\n".join(sorted(set(lines))) + "\n")


def python_words(text: str) -> str:
    found = PYTHON.search(text)
    return f"{found.group()!r} in {text}" if found else ""


def test_no_error_of_a_call_is_in_pythons_words(texts: Texts) -> None:
    assert len(texts) > 500
    said = [python_words(f"{error.message} ({error.hint})") for error in texts.values()]
    assert [line for line in said if line] == []


def test_no_error_of_a_call_names_a_flag_of_a_command(texts: Texts) -> None:
    said = [f"{error.message} ({error.hint})" for error in texts.values()]
    assert [text for text in said if LIBRARY.search(text)] == []


def test_every_error_has_a_hint_of_its_kind(texts: Texts) -> None:
    for key, error in texts.items():
        assert error.hint and type(error) in ERRORS_BY_NAME.values(), key
        for parameter in re.findall(r"^[\w-]+: (\S+): .*outside", key):
            assert "`inferd parameters NAME`" in error.hint, parameter
        if key.startswith(("chat", "stream", "answers")):
            assert "set_input" not in error.hint, key


def test_bounds_contain_the_nearest_value_that_is_offered(texts: Texts) -> None:
    offered = [
        re.search(r"outside (\S+) … (\S+); nearest: (\S+?)(?:;|$)", error.message)
        for error in texts.values()
    ]
    found = [list(map(float, match.groups())) for match in offered if match]
    assert len(found) > 100
    assert [bounds for bounds in found if not bounds[0] <= bounds[2] <= bounds[1]] == []


def test_no_error_of_a_setting_is_in_pythons_words(tmp_path: Path) -> None:
    lines = list(errors_of_settings(tmp_path))
    write("errors of settings", lines)
    assert len(lines) > 500
    assert [said for said in map(python_words, lines) if said] == []


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_reports_wrong_usage_in_plain_words(
    daemon: RunningDaemon, arguments: list[str]
) -> None:
    done = command(*arguments, socket=daemon.socket)
    write("errors of commands", [f"$ inferd {' '.join(arguments)}\n{done.stderr.strip()}"])
    assert done.exit_code in (1, 2) and done.stderr.strip(), done.stdout
    assert python_words(done.stderr) == ""
    given = " ".join(arguments)
    for flag in re.findall(r"^\S*?(--[a-z-]+)[: ]", done.stderr.removeprefix("inferd: ")):
        assert flag in given, done.stderr
