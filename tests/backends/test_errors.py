"""The outcome that each error declares, by which metrics count calls and turns."""

from __future__ import annotations

import pytest

from inferd.backends.errors import (
    ERRORS_BY_NAME,
    InferdError,
    InvalidArgument,
    Outcome,
    Timeout,
    error_from_wire,
)

OUTCOMES = {
    Outcome.OK: {"EndOfSequence"},
    Outcome.CANCELLED: {"Cancelled"},
    Outcome.TIMEOUT: {"Timeout", "ReaderTimeout"},
    Outcome.REFUSED: {
        *("InvalidArgument", "ProtocolError", "InvalidEncoding", "TooLarge", "PromptTooLong"),
        *("ContextFull", "NotFound", "ModelNotFound", "SessionExpired", "PermissionDenied"),
        *("Busy", "SessionBusy", "ShuttingDown", "QuotaExceeded"),
        *("UnsupportedOperation", "VersionMismatch"),
    },
    Outcome.FAILED: {
        *("Unknown", "RuntimeError", "KvFull", "WorkerCrashed", "LoadFailed", "MissingMemory"),
        *("ConnectionLost", "InvalidAnswer"),
    },
}


def test_each_error_has_the_outcome_that_its_class_declares() -> None:
    for outcome, names in OUTCOMES.items():
        found = {name for name, cls in ERRORS_BY_NAME.items() if cls("x").outcome is outcome}
        assert found == names
    assert set(ERRORS_BY_NAME) == set.union(*OUTCOMES.values())


def test_an_error_cannot_be_declared_without_its_outcome() -> None:
    with pytest.raises(TypeError, match="outcome"):
        type("Undecided", (InvalidArgument,), {})


@pytest.mark.parametrize("bound", ["queue", "total", "sampling", "reader"])
def test_a_timeout_that_depends_on_the_client_is_not_a_failure(bound: str) -> None:
    error = Timeout("it has passed", data={"timeout": bound})
    assert error_from_wire(error.to_wire()).outcome is Outcome.TIMEOUT


def test_a_machine_that_is_too_slow_to_render_a_chat_is_a_failure() -> None:
    error: InferdError = Timeout("it was not rendered", data={"timeout": "template"})
    assert error_from_wire(error.to_wire()).outcome is Outcome.FAILED
