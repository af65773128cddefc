"""The machine's service, as `inferd install-service` leaves it on a machine that was booted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from inferd import Client

from .machine import BootedMachine, Ended

__all__ = ("SOCKET", "UNIT", "BootedService", "Entry")

UNIT = "inferd.service"
SOCKET = "/run/inferd/inferd.sock"
WAIT_S_MAX = 40.0
POLL_S = 0.05
Entry = dict[str, Any]


class BootedService:
    """Access to the service by the manager and the journal of *machine*."""

    def __init__(self, machine: BootedMachine):
        self.machine = machine
        self._cursor = ""

    @property
    def socket(self) -> str:
        """Its socket, as it is reached from here."""
        return f"{self.machine.root}{SOCKET}"

    def client(self) -> Client:
        """Return a connection of root's, which begins on entering."""
        return Client(self.socket, connect_timeout=WAIT_S_MAX)

    def inferd(self, *words: str, user: str = "", check: bool = True) -> Ended:
        """Run a command of inferd's there."""
        return self.machine.run("inferd", *words, user=user, check=check)

    def systemctl(self, *words: str, check: bool = True) -> Ended:
        """Run systemctl there."""
        return self.machine.run("systemctl", *words, check=check)

    def configure(self, text: str) -> None:
        """Write the configuration's file."""
        (self.machine.root / "etc/inferd/config.toml").write_text(text)

    def reset(self) -> None:
        """Stop it, forget what it has kept and what is configured, and open its socket."""
        self.systemctl("stop", "inferd.socket", UNIT)
        self.systemctl("reset-failed", check=False)
        self.configure("")
        self.machine.run("sh", "-c", "find /var/lib/inferd -type f -delete")
        self.systemctl("start", "inferd.socket")

    def show(self, *names: str) -> dict[str, str]:
        """Return properties of the unit, as the manager has them."""
        printed = self.systemctl("show", UNIT, f"--property={','.join(names)}").stdout
        return dict(line.split("=", 1) for line in printed.splitlines())

    def until(self, name: str, fits: Callable[[str], bool]) -> str:
        """Wait until a property of the unit *fits*; return it."""
        end = time.monotonic() + WAIT_S_MAX
        while not fits(value := self.show(name)[name]):
            assert time.monotonic() < end, f"{name} stayed {value!r}"
            time.sleep(POLL_S)
        return value

    @contextmanager
    def override(self, *directives: str) -> Iterator[None]:
        """Say something else than the unit in a drop-in, as `systemctl edit --runtime` does."""
        drop_in = self.machine.root / f"run/systemd/system/{UNIT}.d/override.conf"
        drop_in.parent.mkdir(parents=True, exist_ok=True)
        drop_in.write_text("\n".join(("[Service]", *directives, "")))
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            drop_in.unlink()
            self.systemctl("daemon-reload")

    def mark(self) -> None:
        """Let `entries` begin here."""
        self.machine.run("journalctl", "--sync")
        last = self.machine.run("journalctl", "--lines=1", "--output=json").stdout
        self._cursor = msgspec.json.decode(last)["__CURSOR"]

    def entries(self) -> list[Entry]:
        """Return what the journal has of the unit since the mark."""
        self.machine.run("journalctl", "--sync")
        words = ("--unit=inferd", "--all", "--output=json", f"--after-cursor={self._cursor}")
        printed = self.machine.run("journalctl", *words).stdout
        return [msgspec.json.decode(line) for line in printed.splitlines()]
