"""One attack: its name, its title, and the program that attacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """The daemon under attack, as the attacking program sees it."""

    socket: str
    model: str
    """Name of the model that the victim streams from."""
    folder: Path
    """A folder of the attacker's, removed at the end."""
    ends_at_s: float
    """End of the attack on the monotonic clock."""

    def is_over(self) -> bool:
        """Return whether the attack is to end."""
        return time.monotonic() >= self.ends_at_s


@dataclass(frozen=True)
class Attack:
    """A program that attacks until its target `is_over`; errors of the daemon do not end it."""

    name: str
    title: str
    program: Callable[[Target], None]
    streams: int = 0
    """Streams that the attacker holds. The victim is compared with a victim beside an ordinary
    program with as many streams.
    """
    pace_least: float = 0.8
    """Least ratio of the victim's pace under attack to its pace beside the ordinary program."""
