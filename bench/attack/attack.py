"""One attack: its name and program, the modes in which it is measured, and its bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inferd import Priority

Guarantee = Literal["share", "gap", "calls", "memory", "places"]


@dataclass(frozen=True, kw_only=True)
class Service:
    """A daemon, and the HTTP gateway before it, as one user reaches them."""

    socket: str
    model: str
    """Name of the model that the victim streams from."""
    priority: Priority = "normal"
    """Class of the user's turns."""
    gateway: str = ""
    """Base URL of the gateway; empty if there is none."""
    gateway_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Target(Service):
    """The service under attack, as an attacking program sees it.

    An attack that also exists over HTTP uses `gateway` with `gateway_key` if there is a gateway,
    else the socket. Attacks that only exist on the socket ignore the gateway.
    """

    folder: Path
    """A folder of the attacker's, removed at the end."""
    ends_at_s: float
    """End of the attack on the monotonic clock."""
    number: int = 0
    """Number of the attacking user, below the attack's `users`."""

    def is_over(self) -> bool:
        """Return whether the attack is to end."""
        return time.monotonic() >= self.ends_at_s


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The classes of attacker and victim, and the way in which the victim reaches the daemon."""

    title: str
    attacker: Priority = "normal"
    victim: Priority = "normal"
    has_gateway: bool = False


MODES = {
    "equal": Mode(title="equal class"),
    "lower": Mode(title="victim of a lower class", attacker="high"),
    "gateway": Mode(title="over the HTTP gateway, equal class", has_gateway=True),
}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on a victim's figures under attack. Those on errors are the same for all: none."""

    share_least: float = 0.8
    """Least ratio of the stream's pace to the pace alone, beside processes as busy as the
    attacker's own.
    """
    gap_s_max: float = 0.35
    call_ms_max: float = 50.0
    """Maximum of the 99th percentile of the cheap calls."""
    mb_more_max: float = 100.0
    """Maximum growth of the daemon's memory, and the gateway's, during the attack."""
    mb_left_max: float = 50.0
    """Maximum of the growth that is left after the attack."""


COMPUTING = Bounds(share_least=0.45)
"""Bounds beside prompts and embeddings of one user: half of the time, less a tenth."""
STREAMING = Bounds(share_least=0.35)
"""Bounds beside streams of one user, which share steps with the victim's."""
LOWER = Bounds(share_least=0.22, gap_s_max=0.7)
"""Bounds if the attacker's class is higher: a quarter of the time, less a tenth."""


@dataclass(frozen=True)
class Attack:
    """A program that attacks until its target `is_over`; errors of the daemon do not end it."""

    name: str
    title: str
    program: Callable[[Target], None]
    shows: tuple[Guarantee, ...] = ("share", "gap", "calls")
    """The guarantees that this attack tests. All figures are measured and checked."""
    bounds: Bounds = Bounds()
    bounds_lower: Bounds | None = None
    """Bounds if the victim has a lower class, where they differ."""
    modes: tuple[str, ...] = tuple(MODES)
    users: int = 1
    """Number of attacking users; each one runs the program in a process of its own."""

    def bounds_in(self, mode: str) -> Bounds:
        """Return the bounds in a mode."""
        lower = MODES[mode].attacker != MODES[mode].victim
        return self.bounds_lower if lower and self.bounds_lower else self.bounds


def run_at_once(target: Target, programs: Iterable[Callable[[Target], None]]) -> None:
    """Run programs in threads until they end."""
    threads = [threading.Thread(target=p, args=(target,), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
