"""The socket that the C client finds for a user without a runtime folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.private_folder import OWN, SQUATTER, DaemonOfUser, folder_of, listening

from .build import ADDRESS, build
from .conftest import MODELS

SCENARIO = "computes_a_turn_and_closes_everything"


@pytest.fixture
def program() -> Iterator[Path]:
    """The C program, in a folder that other users reach."""
    folder = Path(tempfile.mkdtemp(prefix="inferd-"))
    folder.chmod(0o711)
    yield Path(shutil.copy(build(ADDRESS) / "client_host", folder))
    shutil.rmtree(folder)


def run(program: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a turn as `OWN`, without variables that name a socket."""
    names = ("INFERD_SOCKET", "XDG_RUNTIME_DIR")
    own = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [str(program), SCENARIO],
        env=own | environment,
        cwd="/",
        user=OWN,
        group=OWN,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_own_daemon_is_found_in_the_private_folder(program: Path) -> None:
    assert not Path("/run/inferd").exists(), "an installed service comes first"
    with folder_of(OWN), DaemonOfUser(MODELS):
        for environment in ({}, {"XDG_RUNTIME_DIR": "/none"}):
            done = run(program, **environment)
            assert done.returncode == 0, done.stderr


def test_a_squatter_gets_no_connection(program: Path) -> None:
    with folder_of(SQUATTER, 0o755) as folder, listening(folder / "inferd.sock", SQUATTER) as sock:
        for environment in ({}, {"INFERD_SOCKET": f"{folder}/inferd.sock"}):
            done = run(program, **environment)
            assert f"PermissionDenied: {folder} belongs to another user" in done.stderr
        elsewhere = run(program, XDG_RUNTIME_DIR="/none").stderr
        assert "ConnectionLost: cannot connect to /none/inferd/inferd.sock" in elsewhere
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.accept()


def test_a_program_of_another_user_in_the_own_folder_gets_no_hello(program: Path) -> None:
    with folder_of(OWN) as folder, listening(folder / "inferd.sock", SQUATTER) as listener:
        done = run(program)
        with listener.accept()[0] as accepted:
            assert accepted.recv(1) == b"", "the client has sent nothing"
    assert "PermissionDenied: the program that listens in the private folder" in done.stderr


def test_a_folder_that_others_can_change_and_a_link_are_refused(program: Path) -> None:
    with folder_of(OWN, 0o711) as folder, listening(folder / "inferd.sock", OWN):
        assert f"PermissionDenied: {folder} is open to other users" in run(program).stderr
        link = folder.rename(f"{folder}-elsewhere")
        try:
            link.chmod(0o700)
            folder.symlink_to(link)
            assert f"PermissionDenied: {folder} is not a folder" in run(program).stderr
        finally:
            folder.unlink(missing_ok=True)
            link.rename(folder)


def test_without_the_folder_no_daemon_answers(program: Path) -> None:
    assert f"ConnectionLost: no daemon answers in /tmp/inferd-{OWN}: " in run(program).stderr
