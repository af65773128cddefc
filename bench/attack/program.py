"""`python -m bench.attack.program`: one attack, or an ordinary program, as a process of a user."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.daemon import options
from inferd import Client, InferdError

from .attack import Target
from .attacks import ATTACKS
from .users import ATTACKER, connecting_as
from .victim import PROMPT

ORDINARY = "ordinary"
ALL = "all"
TOKENS = 256


def stream_often(target: Target) -> None:
    """Stream one answer after another, as an ordinary program does."""
    while not target.is_over():
        try:
            with Client(target.socket) as client, client.session(target.model, raw=True) as session:
                for _ in session.stream(PROMPT, options=options(TOKENS)):
                    if target.is_over():
                        return
        except InferdError:
            time.sleep(0.1)


def run_program(name: str, target: Target) -> None:
    """Run an attack by its name, `ordinary:N` for N streams, or `all` for all attacks at once."""
    if name.startswith(ORDINARY):
        count = int(name.partition(":")[2])
        programs: list[Callable[[Target], None]] = [stream_often] * count
    elif name == ALL:
        programs = [attack.program for attack in ATTACKS.values()]
    else:
        programs = [ATTACKS[name].program]
    threads = [threading.Thread(target=p, args=(target,), daemon=True) for p in programs]
    for thread in threads:
        thread.start()
    while not target.is_over():
        time.sleep(0.05)


def main() -> None:
    """Read NAME SOCKET MODEL SECONDS, run the program, and exit without waiting for threads."""
    name, socket, model, seconds = sys.argv[1:5]
    with tempfile.TemporaryDirectory(prefix="inferd-attack-") as folder:
        target = Target(socket, model, Path(folder), time.monotonic() + float(seconds))
        with connecting_as(ATTACKER):
            run_program(name, target)


if __name__ == "__main__":
    main()
