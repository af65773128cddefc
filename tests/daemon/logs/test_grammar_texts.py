"""No log has texts of grammars and JSON schemas, whether they are refused, fail or are followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import InferdError, InvalidArgument
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.log_events import JSON, events
from tests.tiny_gguf import write_tiny

SECRET = "zebra7f3a"
DEBUG = f"{JSON}log-level = 'debug'\n"
OVERFLOW = "".join(f"{SECRET}{n} ::= {SECRET}{n + 1}\n" for n in range(2000))
PATTERNS = [{"pattern": f"{SECRET}{n}.{{{n}}}b"} for n in range(24)]


def named(schema: Any) -> dict[str, Any]:
    properties = {"properties": {SECRET: schema}, "required": [SECRET]}
    return {"json-schema": json.dumps({"type": "object"} | properties)}


REFUSED: dict[str, tuple[dict[str, Any], type[InferdError]]] = {
    "a keyword": (named({"not": {"const": SECRET}}), InvalidArgument),
    "a type": (named({"type": SECRET}), InvalidArgument),
    "a pattern": (named({"type": "string", "pattern": f"{SECRET}("}), InvalidArgument),
    "a reference": (named({"$ref": f"#/$defs/{SECRET}"}), InvalidArgument),
    "a remote reference": (named({"$ref": f"https://example.org/{SECRET}"}), InvalidArgument),
    "a value": (named({"type": "integer", "const": SECRET}), InvalidArgument),
    "no JSON": ({"json-schema": '{"' + SECRET}, InvalidArgument),
    "a choice": ({**named({}), "json-whitespace": SECRET}, InvalidArgument),
    "too many constraints": (
        named({"allOf": [{"not": {"const": SECRET}}] * 200}) | {"schema-lenient": True},
        InvalidArgument,
    ),
    "time": (named({"type": "integer", "multipleOf": 9999991}), InferdError),
    "memory": (named({"type": "string", "allOf": PATTERNS}), InferdError),
    "a grammar": ({"grammar": f'root ::= "{SECRET}" {SECRET}'}, InvalidArgument),
    "a grammar's characters": ({"grammar": f'root ::= "{SECRET}'}, InvalidArgument),
    "a long grammar": ({"grammar": f"root ::= {SECRET}0\n{OVERFLOW}"}, InferdError),
}
BOMBS = ("time", "memory")
"""A process of the same program refuses them for each model, after seconds: one model is enough."""
ACCEPTED = {
    "a schema": named({"const": SECRET}),
    "a lenient schema": named({"not": {"const": SECRET}}) | {"schema-lenient": True},
    "a grammar": {"grammar": f'root ::= "{SECRET}"'},
}


@pytest.mark.parametrize("model", ["echo", "tiny"])
def test_no_log_has_texts_of_grammars(tmp_path: Path, model: str) -> None:
    write_tiny("llama", tmp_path).rename(tmp_path / "tiny.gguf")
    with running_daemon(DEBUG, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        for name, (options, error) in REFUSED.items():
            if model == "echo" and name in BOMBS:
                continue
            with pytest.raises(error):
                client.chat(model, "x", options=options)
                pytest.fail(f"{name} was accepted")
        for options in ACCEPTED.values():
            layout = {"json-whitespace": "compact"}  # the tiny model has no token for a space
            client.chat(model, "x", raw=True, options=options | layout | {"n-predict": 40})
        daemon.stop()
        check_log(daemon)


def check_log(daemon: RunningDaemon) -> None:
    found = {event["event"] for event in events(daemon)}
    assert {"task.queued", "task.finished", "task.failed", "call.refused"} <= found
    assert SECRET not in daemon.log and SECRET[1:] not in daemon.log
