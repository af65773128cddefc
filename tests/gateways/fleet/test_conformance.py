"""An entry with one node speaks the protocol as its page says."""

from __future__ import annotations

import json
from pathlib import Path

from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.members import running_fleet

CASES = [
    f"{family}.*"
    for family in (
        *("cancellation", "compatibility", "contexts", "exchanges", "frames", "greeting"),
        *("handles", "malformed", "media", "streams", "turns"),
    )
]
"""All but those of limits, errors and tensors, which take long."""
EXCEPTIONS = {
    # A fleet itself moves and copies sessions between its nodes, and copies models.
    "contexts.an_exported_session_is_imported_again",
    "contexts.a_copy_becomes_the_session",
    "contexts.a_changed_session_is_sent_before_the_reply",
    "contexts.an_imported_file_needs_its_hash",
    # Files of models are added to a node, by its own socket.
    "contexts.a_query_without_a_descriptor_adds_nothing",
}


def test_an_entry_conforms_to_the_protocol(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, echo_model("echo-media", media=True), "a") as fleet,
        inferd_process("conformance", "--json", *CASES, socket=fleet.socket) as process,
    ):
        output, _ = process.communicate()
    cases = json.loads(output)["cases"]
    failed = {case["name"] for case in cases if case["outcome"] == "failed"}
    assert failed == EXCEPTIONS
    assert sum(case["outcome"] == "passed" for case in cases) > 120
