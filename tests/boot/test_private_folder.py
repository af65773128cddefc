"""Daemons of users without a runtime folder, as in containers and cron jobs."""

from __future__ import annotations

from .machine import BootedMachine, Ended

SOCKET = "/tmp/inferd-1001/inferd.sock"


def as_ada(machine: BootedMachine, *words: str) -> Ended:
    """Run a command of inferd's as a user with a home."""
    own = ("env", "HOME=/home/ada", "inferd")
    return machine.run(*own, *words, user="ada", check=False)


def test_a_user_without_a_runtime_folder_has_a_daemon_of_their_own(
    fresh_machine: BootedMachine,
) -> None:
    machine = fresh_machine
    machine.run("install", "--directory", "--owner=ada", "/home/ada")
    # Another user has been there first.
    machine.run("mkdir", "--mode=0777", "/tmp/inferd-1001", user="bob")
    for words in (("run", "echo", "hello"), ("start",), ("ps",)):
        refused = as_ada(machine, *words)
        assert refused.returncode == 1, refused
        assert "/tmp/inferd-1001 belongs to user 1002" in refused.stderr
    assert machine.run("find", "/tmp/inferd-1001", "-mindepth", "1").stdout == ""
    machine.run("rmdir", "/tmp/inferd-1001")
    try:
        answer = as_ada(machine, "run", "echo", "hello")
        assert answer.stdout == "hello\n" and "started a daemon" in answer.stderr
        found = machine.run("stat", "--format=%U %a", "/tmp/inferd-1001").stdout
        assert found == "ada 700\n"
        assert f"already runs at {SOCKET}" in as_ada(machine, "start").stdout
        # Root's commands do not follow there, nor do other users'.
        assert "no daemon answers at /run/inferd/inferd.sock" in (
            machine.run("inferd", "ps", check=False).stderr
        )
    finally:
        ended = as_ada(machine, "stop")
    assert f"the daemon at {SOCKET} has ended" in ended.stderr
    # An installed service comes first, for users as for root.
    machine.run("inferd", "install-service", "--apply")
    refused = as_ada(machine, "run", "echo", "hello")
    assert "/run/inferd/inferd.sock is not open to this user" in refused.stderr
    machine.run("usermod", "--append", "--groups=inferd", "ada")
    assert as_ada(machine, "run", "echo", "hello").stdout == "hello\n"
