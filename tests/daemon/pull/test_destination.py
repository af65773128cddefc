"""The folder for a pulled model, and the reason where the daemon does not offer it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.backends.errors import (
    ConnectionLost,
    InferdError,
    PermissionDenied,
    UnsupportedOperation,
)
from inferd.daemon.pull.target import Answer, Caller, Destination, choose_destination
from inferd.ipc.messages import AddModelResult

SOCKET = Path("/run/inferd/inferd.sock")
ADA = Caller(1001, Path("/home/ada/models"), Path("/home/ada/.cache/inferd"))
THERE = AddModelResult(file="/var/lib/inferd/models/m.gguf")


def test_the_folder_of_the_own_daemon_is_written_directly() -> None:
    found = AddModelResult(file="/home/ada/models/m.gguf", size_bytes=7)
    assert choose_destination(ADA, Answer(SOCKET, found)) == Destination(ADA.models_dir)


def test_the_daemon_s_own_user_writes_to_its_folder() -> None:
    answer = Answer(SOCKET, THERE, owner=ADA.uid)
    assert choose_destination(ADA, answer) == Destination(Path("/var/lib/inferd/models"))


@pytest.mark.parametrize("owner", [None, 0, 998])
def test_another_daemon_that_the_user_manages_gets_the_file(owner: int | None) -> None:
    answer = Answer(SOCKET, THERE, owner=owner)
    assert choose_destination(ADA, answer) == Destination(ADA.cache, is_handed_over=True)
    existing = Answer(SOCKET, AddModelResult(file=THERE.file, size_bytes=7), owner=owner)
    assert choose_destination(ADA, existing).exists


def test_without_a_daemon_or_service_the_file_goes_to_the_own_folder() -> None:
    answer = Answer(SOCKET, ConnectionLost("none"), is_connected=False)
    assert choose_destination(ADA, answer) == Destination(ADA.models_dir)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            Answer(SOCKET, ConnectionLost("none"), False, start="systemctl start inferd.socket"),
            "`systemctl start inferd.socket` starts it",
        ),
        (Answer(SOCKET, PermissionDenied("x")), "the right `manage`"),
        (Answer(SOCKET, PermissionDenied("x"), False), "its socket is not open to you"),
        (Answer(SOCKET, UnsupportedOperation("there is no call")), "it takes no files"),
    ],
)
def test_a_daemon_that_will_not_offer_the_file_is_named_with_the_reason(
    answer: Answer, reason: str
) -> None:
    found = choose_destination(ADA, answer)
    assert found.folder == ADA.models_dir and not found.is_handed_over
    assert str(SOCKET) in found.note and str(ADA.models_dir) in found.note
    assert reason in found.note


def test_every_error_has_a_reason() -> None:
    own = [e for e in InferdError.__subclasses__() if e.__module__ == InferdError.__module__]
    kinds: list[type[InferdError]] = [InferdError, *own]
    for kind in kinds:
        note = choose_destination(ADA, Answer(SOCKET, kind("it is so"))).note
        assert note or kind is ConnectionLost
