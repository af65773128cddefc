"""Connections of other users, made by this process while its effective user is one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inferd.ipc.peer import Peer
from inferd.scheduler import Owner
from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient

__all__ = ("ADA", "BOB", "Stranger", "as_user", "client_of", "daemon_for_all")

ADA, BOB = 54321, 54322
"""Users and groups without a name."""


class Stranger:
    """A stand-in for the connection of another user."""

    def __init__(self, uid: int, groups: Sequence[int] = ()):
        self.peer, self.uid = Peer(1, uid, uid, frozenset(groups)), uid
        self.owner = Owner(uid)
        self.number = 1


@contextmanager
def as_user(uid: int, groups: Sequence[int] = ()) -> Iterator[None]:
    """Run as *uid*, in the group of the same number and in *groups*; only root can do this."""
    # No skip: a run without these tests would look like a passed one.
    assert os.geteuid() == 0, "tests with several users run as root, in a container for example"
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def client_of(daemon: RunningDaemon, uid: int, groups: Sequence[int] = ()) -> RawClient:
    """Return a connection of another user."""
    with as_user(uid, groups):
        return RawClient(daemon.socket)


@contextmanager
def daemon_for_all(config: str = "", mode: str = "0666") -> Iterator[RunningDaemon]:
    """Run a daemon to which other users can connect."""
    head = f"[daemon]\nsocket-mode = '{mode}'\n"
    with running_daemon(head + config) as daemon:
        os.chmod(daemon.directory, 0o711)
        yield daemon
